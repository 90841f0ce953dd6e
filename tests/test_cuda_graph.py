"""--cuda_graph: what is captured, what runs eagerly, and that the training is the same.

Without a GPU, a stub plays the graph: its capture undoes what the step has done, and a replay does the step on the
memory that was captured.
"""

import contextlib
import copy
from dataclasses import replace
from unittest import mock

import pytest
import torch
from test_training import SINGLE, _few, _trainer
from training import loop, run
from training.cuda_graph import WARM_UP_STEPS, CudaGraphBackward, check_cuda_graph, why_no_cuda_graph
from training.loop import Trainer
from training.options import parse


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
    ("given", "context", "message"),
    [
        ({}, {"device": torch.device("cuda", 0), "world_size": 2}, "2 processes exchange their gradients"),
        ({}, {"device": torch.device("cuda")}, r"3 GPUs, while a CUDA graph is of one \(give --device cuda:0\): leave"),
        (
            {"micro_batch_size": 4},
            {"device": torch.device("cuda", 0)},
            "and --micro_batch_size, .*: leave --cuda",
        ),
        (
            {"engine": "official"},
            {"device": torch.device("cuda", 0)},
            "the engine official, .* --engine shared",
        ),
    ],
)
def test_refusals(given, context, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    context = replace(SINGLE, **context)
    check_cuda_graph(parse(given, "best"), context)
    with pytest.raises(ValueError, match=f"found --cuda_graph, .*{message}"):
        check_cuda_graph(parse({"cuda_graph": True, **given}, "best"), context)


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({}, True),
        pytest.param({"cuda_graph": False}, False, marks=pytest.mark.exhaustive),
        pytest.param({"compile": True}, False, marks=pytest.mark.exhaustive),
        ({"memory": "8MiB"}, False),
    ],
)
def test_a_run_that_can_be_a_graph_is_one_and_says_so(given, chosen, tmp_path, monkeypatch, capsys):
    """Micro-batches that fit a budget of memory come first."""

    def on_a_gpu(options, context):
        return why_no_cuda_graph(options, replace(context, device=torch.device("cuda", 0)))

    made = []
    monkeypatch.setattr(run, "why_no_cuda_graph", on_a_gpu)
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
