"""The training loop: steps, learning rates, evaluation; runs depend on their seed alone, as CUDA graphs too."""

import contextlib
import copy
from dataclasses import replace
from unittest import mock

import pytest
import torch
from helpers import assert_close, assert_same_gradients
from training import loop, run
from training.cuda_graph import WARM_UP_STEPS, CudaGraphBackward, can_be_cuda_graph
from training.data import Images, load
from training.data.augment import transform_for
from training.distributed import DistributedContext
from training.loop import Trainer, TrainingPosition, batches
from training.options import parse
from training.recipes import one_cycle, step

from efficient_densenet import DenseNet

SINGLE = DistributedContext(0, 1, torch.device("cpu"))


def _few(number: int = 64) -> Images:
    return load(None).train[:number]


def _trainer(engine: str = "plain", layers=(1, 1), growth_rate: int = 4, double: bool = True, **given) -> Trainer:
    torch.manual_seed(0)
    model = DenseNet(growth_rate, layers, in_channels=1, efficient=engine, drop_rate=given.get("drop_rate", 0.0))
    options = parse({"batch_size": 16, "n_epochs": 2, **given}, "best")
    return Trainer(model.double() if double else model, transform_for(_few(), False), options, SINGLE)


def _losses(trainer: Trainer, epochs: int = 2) -> torch.Tensor:
    losses = []
    for epoch in range(1, epochs + 1):
        position = TrainingPosition(epoch)
        for _ in trainer.steps(_few(), position):
            losses.append(position.loss)
    return torch.tensor(losses, dtype=torch.double)


def test_same_seed_same_run_exactly():
    runs = [_trainer("shared", drop_rate=0.3, double=False) for _ in range(2)]
    losses = [_losses(runs[0])]
    torch.rand(3)  # other use of the global generator does not matter
    losses.append(_losses(runs[1]))
    assert torch.equal(*losses)
    assert not torch.equal(losses[0], _losses(_trainer("shared", drop_rate=0.3, double=False, seed=1)))
    for ours, theirs in zip(runs[0].model.state_dict().values(), runs[1].model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_an_epoch_takes_every_image_once_in_full_batches():
    order = batches(70, 16, seed=3, epoch=1)
    assert [len(index) for index in order] == [16] * 4
    assert len(set(torch.cat(order).tolist())) == 64
    assert not torch.equal(torch.cat(order), torch.cat(batches(70, 16, seed=3, epoch=2)))
    assert [len(index) for index in batches(5, 16, 0, 1)] == [5]


def test_micro_batches_bound_the_batch_of_a_forward_and_accumulate_to_the_whole_batch():
    """With frozen norms: in training mode each micro-batch would have its own batch statistics."""
    whole, parts, seen = _trainer("shared"), _trainer("shared", micro_batch_size=5), []
    parts.model.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    for trainer in (whole, parts):
        for module in trainer.model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.train = lambda mode=True, norm=module: norm
                module.training = False
    images, labels = _few(14).images, _few(14).labels
    sums = [trainer.step(images, labels, 14, 0.1, (0, 1, 0)) for trainer in (whole, parts)]
    assert (sum(seen), max(seen)) == (14, 5)
    assert_close(torch.tensor(sums[1]), torch.tensor(sums[0]), 1e-12)
    assert_same_gradients(parts.model, whole.model)
    for ours, theirs in zip(parts.model.parameters(), whole.model.parameters(), strict=True):
        assert_close(ours, theirs, 1e-12)


@pytest.mark.parametrize(
    ("batch_size", "world_size", "micro_batch_size", "count"), [(9, 2, 4, 2), (5, 2, 1, 2), (8, 2, 4, 1), (3, 1, 2, 2)]
)
def test_the_largest_local_batch_is_within_micro_batches(batch_size, world_size, micro_batch_size, count):
    """Unless a rank with one image fewer would have an empty micro-batch."""
    trainer = _trainer(micro_batch_size=micro_batch_size)
    trainer.context = DistributedContext(0, world_size, torch.device("cpu"))
    assert trainer._num_micro_batches(batch_size) == count


@pytest.mark.parametrize("given", [{"amp": "bf16"}, {"channels_last": True}, {"amp": "fp16"}])
@pytest.mark.filterwarnings("ignore:falling back")
def test_other_precisions_and_memory_formats_train_alike(given):
    expected = _losses(_trainer("checkpoint", double=False), 1)
    actual = _losses(_trainer("checkpoint", double=False, **given), 1)
    assert ((actual - expected).abs() / expected).max() < 0.05
    assert torch.isfinite(actual).all()


def test_evaluation_is_the_mean_over_all_images_whatever_the_batch_size():
    few, trainer = _few(50), _trainer(batch_size=7)
    with torch.no_grad():
        outputs = trainer.model.eval()(trainer.transform.normalize(few.images, torch.double))
    loss = torch.nn.functional.cross_entropy(outputs, few.labels)
    error = (outputs.argmax(1) != few.labels).double().mean()
    assert_close(torch.tensor(trainer.evaluate(few), dtype=torch.double), torch.stack([loss, error]), 1e-12)


def test_the_recipes():
    rates = [step(0.1, epoch, 300, 0.5) for epoch in (1, 150, 151, 225, 226, 300)]
    assert rates == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
    rates = [one_cycle(0.1, 1 + i // 10, 10, i % 10 / 10) for i in range(100)]
    assert (rates[0], max(rates), rates.index(max(rates))) == (pytest.approx(0.004), pytest.approx(0.1), 30)
    assert rates[30:] == sorted(rates[30:], reverse=True)
    assert rates[-1] < 1e-4


# Steps as a CUDA graph. Without a GPU a stub plays it: its capture undoes what the step has done, and a replay does


class StubGraph:
    """A CUDA graph of one trainer's backward."""

    trainer: Trainer
    num_replays = 0

    def replay(self) -> None:
        graphs, self.num_replays = self.trainer.backward, self.num_replays + 1
        assert isinstance(graphs, CudaGraphBackward)
        assert graphs.graph is self
        for parameter in graphs.parameters:
            parameter.grad = None
        graphs.result.copy_(graphs.backward(graphs.images, graphs.labels, 1 / len(graphs.labels)))
        for parameter, grad in zip(graphs.parameters, graphs.grads, strict=True):
            assert grad is not None
            grad.copy_(parameter.grad)
            parameter.grad = None


@pytest.fixture
def graphed(monkeypatch):
    """A function that makes a trainer with `--cuda_graph`, whose graphs the stub plays."""
    captures = []

    @contextlib.contextmanager
    def graph(graph, stream, capture_error_mode):
        state, rng_state = copy.deepcopy(StubGraph.trainer.model.state_dict()), torch.get_rng_state()
        assert all(parameter.grad is None for parameter in StubGraph.trainer.model.parameters())
        captures.append(graph)
        yield
        StubGraph.trainer.model.load_state_dict(state)
        torch.set_rng_state(rng_state)
        for parameter in StubGraph.trainer.model.parameters():
            parameter.grad.fill_(torch.nan)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", StubGraph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "Stream", mock.Mock())
    monkeypatch.setattr(torch.cuda, "current_stream", mock.Mock())
    for name in ("stream", "device"):
        monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())

    def make(*args, **given) -> Trainer:
        StubGraph.trainer = _trainer(*args, cuda_graph=True, **given)
        return StubGraph.trainer

    make.captures = captures
    return make


def _sums(trainer: Trainer, *batch_sizes: int) -> torch.Tensor:
    """The loss and the number of wrong predictions in each of some steps."""
    pixels, labels = next(iter(_few().fetch([torch.arange(16)])))
    pixels, labels = pixels[..., 8:24, 8:24].to(trainer.context.device), labels.to(trainer.context.device)
    return torch.tensor(
        [
            trainer.step(pixels[:size], labels[:size], size, 0.1, (0, 0, number))
            for number, size in enumerate(batch_sizes)
        ]
    )


def test_training_is_the_same(graphed):
    eager, trainer = (make("shared", drop_rate=0.3, channels_last=True) for make in (_trainer, graphed))
    assert torch.equal(_sums(trainer, *[16] * 6), _sums(eager, *[16] * 6))
    for ours, theirs in zip(trainer.model.state_dict().values(), eager.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    (graph,) = graphed.captures
    assert graph.num_replays == 6 - WARM_UP_STEPS


@pytest.mark.parametrize(
    ("given", "device", "world_size", "message"),
    [
        ({}, "cuda:0", 2, "2 processes exchange their gradients"),
        ({}, "cuda", 1, r"3 GPUs, while a CUDA graph is of one \(give --device cuda:0\): leave"),
        ({"micro_batch_size": 4}, "cuda:0", 1, "and --micro_batch_size, .*: leave --cuda"),
        ({"engine": "official"}, "cuda:0", 1, "the engine official, .* --engine shared"),
    ],
)
def test_refusals(given, device, world_size, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    context = replace(SINGLE, device=torch.device(device), world_size=world_size)
    assert not can_be_cuda_graph(parse(given, "best"), context)
    with pytest.raises(ValueError, match=f"found --cuda_graph, .*{message}"):
        can_be_cuda_graph(parse({"cuda_graph": True, **given}, "best"), context)


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({}, True),
        pytest.param({"cuda_graph": False}, False, marks=pytest.mark.exhaustive),
        pytest.param({"compile": True}, False, marks=pytest.mark.exhaustive),
        ({"micro_batch_size": 350}, False),
    ],
)
def test_a_run_that_can_be_a_graph_is_one_and_says_so(given, chosen, tmp_path, monkeypatch, capsys):
    def on_a_gpu(options, context):
        return can_be_cuda_graph(options, replace(context, device=torch.device("cuda", 0)))

    made = []
    monkeypatch.setattr(run, "can_be_cuda_graph", on_a_gpu)
    monkeypatch.setattr(loop, "CudaGraphBackward", lambda backward, _: made.append(backward) or backward)
    monkeypatch.setattr(torch, "compile", lambda model: model)
    tiny = {"depth": 10, "growth_rate": 2, "n_epochs": 1, "batch_size": 700, "device": "cpu", "save": str(tmp_path)}
    run.train({**tiny, **given})
    assert bool(made) is chosen
    said = "\na step's forward and backward are one CUDA graph (not with --cuda_graph False)\n"
    assert (said in capsys.readouterr().out) is chosen


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("engine", ["plain", "shared"])
def test_a_gpu_trains_alike_with_a_graph(engine, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    losses, context = [], replace(SINGLE, device=torch.device("cuda", 0))
    for with_graph in (False, True):
        trainer = _trainer(engine, double=False, drop_rate=0.2)
        options = replace(trainer.options, cuda_graph=with_graph)
        trainer = Trainer(trainer.model, trainer.transform, options, context)
        losses.append(_sums(trainer, *[16] * 8)[:, 0])
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)
