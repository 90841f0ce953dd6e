"""The memory of a step as it is predicted from sizes, beside the memory of the step itself."""

import copy
import json
import re
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from grids import grid
from torch import nn

from efficient_densenet import DenseNet, create_model, densenet121, fc_densenet56, kernels, make_efficient
from efficient_densenet._tensors import meta_stands_for
from efficient_densenet.engine import choose
from efficient_densenet.memory import __main__ as command
from efficient_densenet.memory import predict, tensor_peak, what_fits
from efficient_densenet.memory.budget import total_memory_of_step
from efficient_densenet.memory.meta import OPTIMIZERS
from efficient_densenet.memory.step import MetaModel, autocast_dtype, default_loss
from efficient_densenet.memory.trace import MemoryMode
from efficient_densenet.models import zoo

MIB = 2**20
ENGINES = ("plain", "checkpoint", "shared")


def _frozen(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    return model


def _torchvision_s(efficient: str) -> nn.Module:
    import torchvision

    model = torchvision.models.DenseNet(12, (4, 4, 4), 24)
    make_efficient(model, efficient)
    return model


def _monai_s(efficient: str) -> nn.Module:
    nets = pytest.importorskip("monai.networks.nets")
    model = nets.DenseNet(3, 1, 2, init_features=16, growth_rate=8, block_config=(3, 3))
    make_efficient(model, efficient)
    return model


FAMILIES = {
    "bc": (partial(DenseNet, 12, (6, 6, 6)), (16, 3, 32, 32)),
    "odd sizes and dropout": (partial(DenseNet, 24, (4, 5, 3), drop_rate=0.2), (7, 3, 41, 39)),
    "densenet121": (densenet121, (2, 3, 128, 128)),
    "no bottleneck": (partial(DenseNet, 12, (6, 6, 6), bn_size=0), (16, 3, 32, 32)),
    "volumes": (partial(DenseNet, 16, (4, 4, 4), dims=3), (3, 3, 24, 24, 24)),
    "signals": (partial(DenseNet, 16, (4, 4, 4), dims=1), (64, 3, 512)),
    "labels of pixels": (fc_densenet56, (2, 3, 64, 64)),
    "dilated": (partial(DenseNet, 16, (3, 3, 3, 3), small_inputs=False, output_stride=8), (2, 3, 128, 128)),
    "feature maps": (partial(DenseNet, 12, (6, 6, 6), features_only=True), (16, 3, 32, 32)),
    "torchvision's": (_torchvision_s, (4, 3, 96, 96)),
    "MONAI's": (_monai_s, (2, 1, 32, 32, 32)),
}


def _compare(model: nn.Module, shape: tuple[int, ...], precision: str | None, tolerance: float, more: int = 0) -> None:
    x, dtype = torch.randn(shape).to(next(model.parameters()).dtype), autocast_dtype(precision)

    def step() -> None:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = default_loss(model(x))
        loss.backward()

    step()
    predicted = MetaModel(model, precision=precision).training_step(shape).tensor_peak
    measured = tensor_peak(step)
    assert (1 - tolerance) * measured - more <= predicted <= (1 + tolerance) * measured


@pytest.mark.filterwarnings("ignore:falling back")
@pytest.mark.parametrize(*grid(family=FAMILIES, engine=ENGINES[::-1], precision=[None, "bf16"], strength=1))
def test_a_step_takes_what_was_predicted(family, engine, precision):
    """What oneDNN reorders depends on the processor; with AMX it takes megabytes a thread for the weight's gradient of
    MONAI's stem of 7×7×7 in bf16, more than all else. Of `shared` only the classifier, and in float32 the stem, use it.
    """
    make, shape = FAMILIES[family]
    if engine == "shared":
        _compare(make(efficient=engine), shape, precision, 0.01)
        return
    megabytes = 4 * torch.get_num_threads() if (family, precision) == ("MONAI's", "bf16") else 0
    _compare(make(efficient=engine), shape, precision, 0.1, megabytes * MIB)


@pytest.mark.parametrize("threads", [1, 3])
def test_a_stem_in_bf16_takes_what_was_predicted_with_any_number_of_threads(threads):
    """On a processor with AMX oneDNN's convolutions of these images take megabytes a thread in bf16."""
    torch.set_num_threads(threads)
    _compare(DenseNet(8, (2,), small_inputs=False, dims=3, in_channels=1), (2, 1, 32, 32, 32), "bf16", 0.01)
    _compare(DenseNet(16, (2,), small_inputs=False), (2, 3, 128, 128), "bf16", 0.01)


def test_steps_in_float64_with_frozen_norms_in_channels_last_and_with_saved_bottlenecks():
    large = DenseNet(12, (4, 4), small_inputs=False).double()
    _compare(large, (24, 3, 64, 64), None, 0.01)  # by portable kernels, in more tiles than are traced
    frozen = _frozen(DenseNet(12, (4, 4), small_inputs=False)).to(memory_format=torch.channels_last)
    _compare(frozen, (4, 3, 96, 96), None, 0.01)
    model = DenseNet(12, (6, 6))
    for _, block in choose.engine_blocks(model):
        block.keep_bottlenecks(range(0, 6, 2))
    _compare(model, (16, 3, 32, 32), None, 0.01)


def test_convolutions_that_pytorch_computes_by_im2col():
    """On every processor: in float64, dilated ones an image at a time, and a single small image in float32."""
    _compare(nn.Conv2d(16, 24, 3, padding=1).double(), (4, 16, 16, 16), None, 0.02)
    _compare(nn.Conv2d(16, 24, 3, padding=2, dilation=2).double(), (4, 16, 16, 16), None, 0.02)
    _compare(nn.Conv2d(16, 24, 3, padding=1), (1, 16, 16, 16), None, 0.02)
    _compare(nn.Conv3d(16, 24, 3, padding=1), (1, 16, 8, 8, 8), None, 0.02)
    _compare(nn.Conv1d(16, 24, 7, padding=3), (1, 16, 64), None, 0.02)


def test_inference_takes_what_was_predicted():
    model, x = DenseNet(12, (6, 6)).eval(), torch.randn(16, 3, 32, 32)

    def forward() -> None:
        with torch.no_grad():
            model(x)

    forward()
    assert MetaModel(model).inference(x.shape) == pytest.approx(tensor_peak(forward), rel=0.01)


def test_an_estimate_in_parts():
    model = DenseNet(12, (4, 4), num_classes=7)
    estimate = predict(model, (8, 3, 32, 32), optimizer="adam", device="cpu")
    parameters = 4 * sum(p.numel() for p in model.parameters())
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    held = estimate.persistent
    assert (held.parameters, held.buffers, held.gradients) == (parameters, buffers, parameters)
    assert held.optimizer_state == 2 * parameters  # the count of steps is on the CPU
    assert estimate.inputs == 4 * 8 * 3 * 32 * 32
    assert estimate.total == held.total + estimate.inputs + round(1.01 * estimate.tensor_peak)
    assert estimate.step.features + estimate.step.scratch == estimate.tensor_peak
    assert sum(stage.saved for stage in estimate.step.stages) == estimate.step.features
    assert max(stage.peak for stage in estimate.step.stages) == estimate.tensor_peak
    names = "features.conv0", "features.denseblock1 + transition1", "features.denseblock2 + norm5", "classifier"
    assert tuple(stage.name for stage in estimate.step.stages) == names
    assert (estimate.engine, tuple(estimate.by_engine)) == ("best", ENGINES)
    shared = estimate.by_engine["shared"]  # which saves no bottleneck unless it is asked to
    assert shared.tensor_peak == estimate.tensor_peak
    assert shared.features < estimate.step.features
    assert estimate.inference < estimate.tensor_peak < estimate.by_engine["checkpoint"].tensor_peak
    plain = predict(model.set_engine("plain"), (8, 3, 32, 32), device="cpu")  # oneDNN's formats are no tensors
    assert plain.spare == round(0.1 * plain.tensor_peak)
    model.set_engine(True)
    text = str(estimate)
    assert "training on 8×3×32×32, on cpu, engine best" in text
    assert predict(model.eval(), (8, 3, 32, 32), optimizer="adam", device="cpu") == estimate


@pytest.mark.parametrize("engine", ENGINES)
def test_features_are_saved_by_the_stage_that_makes_them(engine):
    """The part of the model before, whose parameters were used last, does not get them."""
    model, pixels = DenseNet(12, (6, 6), small_inputs=False, efficient=engine), 8 * 16 * 16
    first, second, third, _ = MetaModel(model, device="cpu").training_step((8, 3, 64, 64)).stages
    assert (first.name, second.name) == ("features.conv0 + norm0", "features.denseblock1 + transition1")
    # A stage saves at least its 24 + 72 channels (48 + 72 in the second), of float32.
    assert second.saved >= 4 * pixels * (24 + 72)
    assert third.saved >= pixels * (48 + 72)
    if engine == "shared":  # the stem recomputes all, and its output is copied by the stage
        assert first.saved < 0.1 * second.saved


# On a GPU


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_every_engine_is_predicted_in_half_precision_on_a_gpu(precision):
    """A recomputation has the forward's autocast, also where PyTorch's own checkpoint runs it."""
    model, shape = DenseNet(12, (3, 3), small_inputs=False), (64, 3, 128, 128)
    full = predict(model, shape, device="cuda")
    half = predict(model, shape, device="cuda", precision=precision)
    assert full.spare == round(0.01 * full.tensor_peak) + 40 * MIB  # for cuDNN
    assert half.refused == {}
    for engine in ENGINES:
        assert 0.45 < half.by_engine[engine].tensor_peak / full.by_engine[engine].tensor_peak < 0.7
    official = MetaModel(model.set_engine("official"), device="cuda", precision=precision).training_step(shape)
    assert official.tensor_peak == pytest.approx(half.by_engine["checkpoint"].tensor_peak, rel=0.1)


def test_a_step_on_an_h100():
    """An H100 measured 575.7 MiB in TF32, cuDNN's workspaces included (benchmarks/results)."""
    pytest.importorskip("triton")
    with torch.device("meta"):
        model = create_model("densenet_bc_100_12")
    peak = MetaModel(model, device="cuda").training_step((256, 3, 32, 32)).tensor_peak
    assert peak / MIB == pytest.approx(575.7, rel=0.03)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_trace_is_as_long_for_any_batch(device, dtype, monkeypatch):
    """Loops over tiles of images run three of them on the meta device."""
    operations, lengths = [], []
    monkeypatch.setattr(MemoryMode, "has_run", lambda mode, operation, *_: operations.append(operation))
    traced = MetaModel(DenseNet(12, (2, 2), small_inputs=False).to(dtype), device=device)
    peaks = []
    for images in (2**18, 2**24):
        peaks.append(traced.training_step((images, 3, 64, 64)).tensor_peak)
        lengths.append(len(operations))
        operations.clear()
    assert max(lengths) < 2000
    assert peaks[1] == pytest.approx(64 * peaks[0], rel=0.01)
    for batch in (10**15, 10**30):
        with pytest.raises(ValueError, match=r"found a tensor of 2\^63 bytes or more: give a smaller batch or"):
            traced.training_step((batch, 3, 64, 64))


def test_dropout_and_the_convolutions_of_many_tiles_on_a_gpu():
    """A tile that is left out of a trace has its part of the convolution's output all the same."""
    pytest.importorskip("triton")
    traced = MetaModel(DenseNet(12, (2, 2), bn_size=0, drop_rate=0.2, dims=3, in_channels=1), device="cuda")
    some, more = (traced.training_step((2**i, 1, 32, 32, 32)).tensor_peak for i in (10, 13))
    assert more == pytest.approx(8 * some, rel=0.1)


# The optimizer, the caller's contexts, the model


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_state_of_an_optimizer(name):
    """The optimizer is given by name, by a function, or as one that trains already, whose state is not touched."""
    model = DenseNet(4, (2,))
    real = OPTIMIZERS[name](model.parameters())
    F.cross_entropy(model(torch.randn(2, 3, 8, 8)), torch.zeros(2, dtype=torch.long)).backward()
    real.step()
    before = copy.deepcopy(real.state_dict())
    tensors = [value for state in before["state"].values() for value in state.values() if value is not None]
    expected = sum(value.nbytes for value in tensors if value.dim())
    for optimizer in (name, OPTIMIZERS[name], real):
        assert MetaModel(model, optimizer=optimizer).persistent.optimizer_state == expected
    torch.testing.assert_close(real.state_dict(), before, rtol=0, atol=0)
    assert MetaModel(model).persistent.optimizer_state == 0


def test_optimizers_before_their_first_step():
    model = DenseNet(4, (2,))
    with pytest.raises(ValueError, match="found a LBFGS, whose state is not known before its first step"):
        MetaModel(model, optimizer=torch.optim.LBFGS)
    with pytest.raises(ValueError, match="found a SGD that trains no parameter of this model"):
        MetaModel(model, optimizer=torch.optim.SGD(DenseNet(4, (2,)).parameters(), lr=0.1))
    fused = torch.optim.Adam(model.parameters(), fused=True)
    numbers = sum(p.numel() for p in model.parameters())
    assert MetaModel(model, optimizer=fused).persistent.optimizer_state == 8 * numbers
    model.features.requires_grad_(False)
    assert MetaModel(model).persistent.gradients == 4 * sum(p.numel() for p in model.classifier.parameters())
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        MetaModel(model.requires_grad_(False)).training_step((2, 3, 8, 8))


def _fail(tensor: torch.Tensor) -> torch.Tensor:
    raise AssertionError("a hook of saved tensors was called")


def test_the_contexts_of_the_caller_and_forwards_that_are_set_on_modules_do_nothing():
    model, shape = DenseNet(4, (2, 2)), (2, 3, 8, 8)
    expected = MetaModel(model).training_step(shape).tensor_peak
    autocast, hooks = torch.autocast("cpu", torch.bfloat16), torch.autograd.graph.saved_tensors_hooks(_fail, _fail)
    for context in (torch.no_grad(), torch.inference_mode(), autocast, hooks, meta_stands_for("cuda")):
        with context:
            assert MetaModel(model).training_step(shape).tensor_peak == expected
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)  # of the original, whose tensors have data
    assert MetaModel(model).training_step(shape).tensor_peak == expected


def test_the_model_and_the_random_numbers_are_left_alone():
    """Hooks are not called, buffers do not change, and a warning that is due comes with the real step."""
    model, called = DenseNet(4, (2, 2), drop_rate=0.5), []
    for name in ("denseblock1", "denseblock2.denselayer1"):
        model.features.get_submodule(name).register_forward_hook(lambda *_: called.append("hook"))
    before, random_state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predict(model, (2, 3, 8, 8), device="cpu")
    assert called == []
    assert torch.equal(torch.get_rng_state(), random_state)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert all(p.grad is None for p in model.parameters())
    with pytest.warns(UserWarning, match="falling back from engine 'shared'"):
        model(torch.randn(2, 3, 8, 8))


# Errors


class Counts(nn.Module):
    def forward(self, x):
        return x * x.sum().item()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_shape": (3,)}, r"input_shape is \(3,\), but must be whole numbers such as \(64, 3, 224, 224\)"),
        ({"input_shape": (2, 4, 8, 8)}, r"found an input of shape \(2, 4, 8, 8\), but this model needs"),
        ({"input_shape": torch.ones(2, 3, 8, 8)}, r"input_shape is a tensor, but must be its shape: \(2, 3, 8, 8\)"),
        ({"precision": "int8"}, "precision is 'int8', but must be one of float32, tf32"),
        ({"optimizer": "lamb"}, "optimizer is 'lamb', but must be one of sgd"),
        ({"device": "xpu"}, "device is 'xpu', but memory is known on 'cpu' and 'cuda' only"),
        ({"model": nn.LazyLinear(3)}, "found parameters without a size: run the model once"),
        ({"model": Counts()}, "so the memory of a step is not known"),
        ({"model": "densenet121"}, "memory needs a module"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises((ValueError, TypeError), match=message):
        predict(**{"model": DenseNet(4, (2,)), "input_shape": (2, 3, 8, 8)} | arguments)


def test_tensors_on_the_meta_device_beside_others_are_an_error():
    """No kernel reads address 0."""
    model = DenseNet(4, (2,))
    if kernels.numba_supports(torch.empty(1)):
        model.features.denseblock1.denselayer1.norm1.to("meta")
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 3, 8, 8))


# The command


def test_the_command(capsys, monkeypatch):
    monkeypatch.setitem(zoo.VARIANTS, "tiny", zoo.VARIANTS["densenet_bc_100_12"] | {"block_config": (5, 5)})
    words = ["tiny", "--batch_size", "4", "--budget", "20MiB", "--device", "cpu", "--measure"]
    command.main([*words, "--verbose"])
    printed, progress = capsys.readouterr()
    assert "of 20.0 MiB, with the bottlenecks of all 4 layers saved" in printed
    assert "tensor peak by engine shared, 4 bottlenecks saved" in printed
    assert float(printed.partition("tensor peak, measured")[2].split("×")[0].split()[-1]) == pytest.approx(1, abs=0.01)
    assert all(f"tracing: training step on 4×3×32×32, engine {engine}\n" in progress for engine in ("best", *ENGINES))
    for size, message in (
        ("1MiB", r"found a memory budget of 1\.00 MiB, but a step of 4 images"),
        ("6 gigs", "budget is '6 gigs', but must be a number above 0 with its unit, such as"),
    ):
        with pytest.raises(SystemExit, match=f"error: {message}"):
            command.main([*words[:4], size, "--device", "cpu"])
    assert "tracing" not in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"unknown model 'densenet12': did you mean 'densenet121'\?"):
        command.main(["densenet12"])


def test_the_command_takes_a_model_of_one_s_own(capsys, tmp_path, monkeypatch):
    """By module and function, which gets other libraries' words for what the options say."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    lines = ["from torchvision.models import DenseNet", "def build(out_channels, init_features=8):"]
    Path("of_my_own.py").write_text(
        "\n".join([*lines, "    return DenseNet(4, (2, 2), init_features, 2, 0, out_channels)"])
    )
    command.main(["of_my_own:build", "--num_classes", "3", "--device", "cpu", "--batch_size", "2"])
    printed, progress = capsys.readouterr()
    assert "training on 2×3×224×224, on cpu" in printed
    assert "tensor peak by engine shared" in printed
    assert progress == ""
    command.main(["torchvision:densenet121", "--batch_size", "2", "--image_size", "64"])  # in torchvision.models
    assert "features.denseblock4" in capsys.readouterr().out
    for words, message in (
        (["torchvision:densenet12"], "no attribute 'densenet12'"),
        (["of_my_own:build"], "'out_channels'; it is called with --dims"),
        (["of_my_own:built"], "no attribute 'built'"),
    ):
        with pytest.raises(SystemExit, match=f"{words[0]} built no model: .*{message}"):
            command.main(words)


def test_what_fits_a_card(capsys, monkeypatch):
    """Of volumes: one image more would not fit."""
    monkeypatch.setitem(zoo.VARIANTS, "tiny", zoo.VARIANTS["densenet_bc_100_12"] | {"block_config": (2, 2)})
    words = ["--in_channels", "2", "--num_classes", "3", "--dims", "3", "--image_size", "16", "8", "12"]
    command.main(["tiny", "--card", "0.75GB", *words, "--json"])
    content = json.loads(capsys.readouterr().out)
    assert content["usable"] == 0.95 * 750_000_000 - 600 * 2**20
    rows = [(fit["engine"], fit["precision"]) for fit in content["fits"]]
    assert rows == [("plain", "float32"), ("shared", "float32"), ("plain", "bf16"), ("shared", "bf16")]
    for fit in content["fits"]:
        model = create_model("tiny", efficient=fit["engine"], in_channels=2, num_classes=3, dims=3)
        traced = MetaModel(model, optimizer="sgd", precision=fit["precision"], device="cuda")
        sizes = [total_memory_of_step(traced, (fit["largest_batch"] + i, 2, 16, 8, 12)) for i in (0, 1)]
        assert fit["peak"] == sizes[0] <= content["usable"] < sizes[1]
    small = ["tiny", "--card", "700MB", "--precision", "bf16", "--engine", "plain", "--image_size", "512"]
    command.main([*small, "--batch_size", "2"])
    printed = capsys.readouterr().out
    assert "of a card of 700MB, " in printed
    assert re.search(r" batch of 2\nplain +bf16 +none; of one +\d+ MiB +\d+ MiB\n$", printed)
    with pytest.raises(
        SystemExit, match="error: card is '24', but must be a number above 0 with its unit, such as '24GB'"
    ):
        command.main(["tiny", "--card", "24"])
    assert capsys.readouterr().out == ""
    with pytest.raises(SystemExit, match="found --card, which plans for a GPU's memory alone, with --device"):
        command.main([*small, "--device", "cpu"])


def test_what_fits_says_which_engine_cannot_run_a_model():
    refused, fit = what_fits(
        DenseNet(4, (2,), activation="prelu"), 8, "1GB", engines=("shared", "plain"), precisions="bf16"
    )
    assert (refused.engine, refused.sizes, refused.peak) == ("shared", {}, 0)
    assert "found a PReLU inside a layer" in refused.refused
    assert (fit.engine, fit.refused, fit.largest_batch > 1) == ("plain", "", True)
