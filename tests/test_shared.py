"""The shared engine: settings beside those of `test_matches_plain`, memory, formats of what stages hand on."""

import copy

import pytest
import torch
import torch.nn.functional as F
import torchvision
from helpers import (
    assert_all_close,
    assert_close,
    assert_same_buffers,
    assert_same_step,
    nodes_of,
    plan_stage,
    random_images,
    small_model,
    use_kernels,
    with_engine,
)
from torch import Tensor, nn

from efficient_densenet import DenseBlock, DenseLayer, DenseNet, create_model, make_efficient
from efficient_densenet._tensors import memory_format_of
from efficient_densenet.engine import choose
from efficient_densenet.engine.choose import Engine
from efficient_densenet.kernels import row_tiles
from efficient_densenet.memory import tensor_peak


@pytest.mark.parametrize("kernels", [("portable", 2000), ("compiled", 50)])
@pytest.mark.parametrize("widths", [(6, 3, 8), (2, 0, 5, 3), (0, 0, 4, 4)])
def test_bottleneck_widths_may_differ_within_a_block(widths, kernels, monkeypatch):
    use_kernels(monkeypatch, *kernels)
    plain = DenseBlock(0, 6, 3, efficient=False)
    for i, width in enumerate(widths):
        layer = DenseLayer(6 + 3 * i, 3, bn_size=1 if width else 0, drop_rate=0.0)
        if width:
            layer.conv1 = nn.Conv2d(6 + 3 * i, width, 1, bias=False)
            layer.norm2, layer.conv2 = nn.BatchNorm2d(width), nn.Conv2d(width, 3, 3, padding=1, bias=False)
        plain.add_module(f"denselayer{i + 1}", layer)
    efficient = copy.deepcopy(plain.double())
    efficient.engine = choose.parse("shared")
    assert_same_step(efficient, plain, torch.randn(4, 6, 9, 7, dtype=torch.double))


@pytest.mark.parametrize("negates", ["x", "grad_output"])
def test_views_that_negate_what_is_in_memory(negates):
    """Those of the imaginary part of a conjugate, with one channel, so that a matrix of pixels is a view too."""

    def imaginary(values: Tensor) -> Tensor:
        return torch.complex(torch.zeros_like(values), -values).conj().imag

    results, x = [], torch.randn(2, 1, 6, 4, dtype=torch.double)
    consumer = nn.Sequential(nn.BatchNorm2d(7), nn.ReLU(), nn.Conv2d(7, 1, 1))
    model = nn.Sequential(DenseBlock(2, 1, 3, 2, 0.0, "plain"), consumer).double()
    for run in (lambda x: plan_stage(*model, x).run(x)[0], model):
        for _ in range(3):
            model.zero_grad()
            output = run(imaginary(x) if negates == "x" else x)
            grad_output = output.detach().sin()
            output.backward(imaginary(grad_output) if negates == "grad_output" else grad_output)
        results.append([output, *(each.grad.clone() for each in model.parameters())])
    assert_all_close(*results)


def test_momentum_of_each_norm():
    plain = small_model("bc", efficient=False)
    for i, norm in enumerate(module for module in plain.modules() if isinstance(module, nn.BatchNorm2d)):
        norm.momentum = (None, 0.0, 0.3, 1.0)[i % 4]
    efficient = with_engine(plain, "shared")
    for batch in (2, 7, 3):
        assert_same_step(efficient, plain, random_images("bc", batch))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("absent", ["num_batches_tracked", "running_mean running_var", "all", "tracking"])
def test_norms_without_some_buffers(absent, momentum):
    plain = small_model("bc", efficient=False)
    for name, module in plain.named_modules():
        if name.endswith("norm2"):
            module.momentum = momentum
            module.track_running_stats = absent != "tracking"
            vars(module)["_buffers"].update(dict.fromkeys(absent.split()) if "_" in absent else {})
    for layer in (plain.features.denseblock1.denselayer1, plain.features.denseblock2.denselayer1):
        if absent == "all":
            layer.norm1 = nn.BatchNorm2d(layer.norm1.num_features, track_running_stats=False).double()
    assert_same_step(with_engine(plain, "shared"), plain, random_images("bc"))


def test_norms_of_two_precisions_update_each_their_own():
    plain = small_model("bc", efficient=False).bfloat16()
    for name, module in plain.named_modules():
        if name.endswith("norm1"):
            module.float()
    ours, x = with_engine(plain, "shared"), random_images("bc").bfloat16()
    for model in (ours, plain):
        model(x).sum().backward()
    assert_same_buffers(ours, plain, tolerance=2e-2)


# Memory


@pytest.mark.parametrize("family", ["basic", "imagenet"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_network_is_a_stem_and_stages(dims, family):
    """Each transition is a part of its block's stage: no module of a block or after it runs by itself."""
    settings = {"dims": dims, "block_config": (2, 1), "efficient": "shared"}
    model = small_model(family, **settings)
    names = nodes_of(model.features(torch.randn(2, 3, *(21, 18, 19)[:dims], dtype=torch.double)))
    first = "SharedStem" if family == "imagenet" else "Convolution"
    assert [name for name in names if "Accumulate" not in name] == ["SharedStage"] * 2 + [first]


def _peak(depth: int) -> int:
    model = create_model("densenet_bc_100_12", efficient="shared", block_config=(depth,))
    x, labels = torch.randn(4, 3, 32, 32), torch.zeros(4, dtype=torch.long)

    def step():
        F.cross_entropy(model(x), labels).backward()

    step()
    return tensor_peak(step)


def test_memory_grows_linearly_with_depth(monkeypatch):
    """The peak is reached where the backward enters the stage.

    Four tensors as wide as the stage exist then: the features, the accumulator of their gradient, the output of the
    last norm's ReLU and the gradient of that output.
    """
    monkeypatch.setitem(row_tiles.TILE_BYTES, "cpu", 1 << 16)  # scratch has a constant size for this many rows
    peaks = [_peak(depth) for depth in (16, 24, 32)]
    channel_bytes, growth_rate = 4 * 32 * 32 * 4, 12
    assert peaks[2] - peaks[1] == pytest.approx(peaks[1] - peaks[0], rel=0.05)
    assert peaks[1] - peaks[0] == pytest.approx(4 * 8 * growth_rate * channel_bytes, rel=0.05)


def test_a_stage_s_input_is_freed_in_the_forward():
    """The first convolution's output is stored in the features, and needed by nobody else."""
    model, x = DenseNet(2, (1, 1), num_init_features=64, efficient="shared"), torch.randn(4, 3, 32, 32)
    step = lambda: model(x).sum().backward()  # noqa: E731
    step()
    # The features, their gradient and the input's gradient are all nearly as large as the input.
    assert tensor_peak(step) < 3.8 * 4 * 64 * 32 * 32 * 4


def test_parameters_are_saved_for_backward_without_copies():
    """Saved-tensor hooks may recognize parameters by their class and leave them in place."""
    model, saved = small_model("bc", efficient="shared"), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        model.features(random_images("bc"))
    parameter_addresses = {parameter.data_ptr() for parameter in model.features.parameters()}
    assert parameter_addresses <= {tensor.data_ptr() for tensor in saved}
    assert all(isinstance(tensor, nn.Parameter) for tensor in saved if tensor.data_ptr() in parameter_addresses)


# A stage's output stays in channels_last, in which it is computed, for the next stage; nobody else sees that

FORMATS = [
    (2, torch.contiguous_format),
    (2, torch.channels_last),
    (3, torch.contiguous_format),
    (3, torch.channels_last_3d),
]
two_dimensional = pytest.mark.parametrize("memory_format", [each for dims, each in FORMATS if dims == 2])


@pytest.mark.parametrize(("dims", "memory_format"), [*FORMATS, (1, torch.contiguous_format)])
def test_the_output_has_the_format_of_the_first_convolution_s(dims, memory_format):
    model = small_model("bc", dims=dims, drop_rate=0.2).to(memory_format=memory_format)
    images = torch.randn(3, 3, *(9, 8, 6)[:dims], dtype=torch.double).contiguous(memory_format=memory_format)
    expected = memory_format_of(model.features.conv0(images))  # volumes of doubles are contiguous
    assert memory_format_of(model.features(images)) is expected
    assert_same_step(model, with_engine(model, "plain"), images)


@two_dimensional
def test_a_block_that_must_be_called_or_has_another_engine_gets_the_users_format(memory_format):
    model, images = small_model("bc"), random_images("bc").contiguous(memory_format=memory_format)
    expected, seen = with_engine(model, "plain")(images), []
    block = model.features.denseblock2
    handle = block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    assert_close(model(images), expected)
    handle.remove()
    block.engine = Engine.CHECKPOINT
    block.denselayer1.norm1.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    assert_close(model(images), expected)
    assert [memory_format_of(x) for x in seen] == [memory_format] * 2


@two_dimensional
def test_feature_maps_have_the_users_format(memory_format):
    images = random_images("bc").contiguous(memory_format=memory_format)
    plain = small_model("bc", efficient=False, features_only=True)
    formats = [[memory_format_of(x) for x in model(images)] for model in (with_engine(plain, "shared"), plain)]
    assert formats[0] == formats[1]


def test_a_converted_model():
    model = torchvision.models.DenseNet(4, (2, 2), num_init_features=8, num_classes=3).double()
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    expected = model.features(images)
    make_efficient(model, "shared")
    output = model.features(images)
    assert_close(output, expected, 1e-8)
    assert memory_format_of(output) is memory_format_of(expected)
