"""Dense blocks without norms of public families, converted: the same numbers as plain, memory, and the report."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import conv_families as families
import pytest
import torch
from conv_families import CHANNELS
from helpers import assert_all_close, assert_same_gradients, nodes_of, relative_error
from torch import Tensor, nn

from efficient_densenet import make_efficient, restore
from efficient_densenet.engine import choose
from efficient_densenet.memory import saved_bytes, tensor_peak

FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "ESRGAN": families.ResidualDense,
    "scale in an attribute": families.ScaledByAttribute,
    "RDN": families.LocalFusion,
    "RDN by functions": partial(families.LocalFusion, True),
    "SRDenseNet": families.FirstLayerApart,
    "DenseFuse": families.Fusion,
    "padded by reflection": families.padded,
    "padded by the convolution": partial(families.padded, "replicate"),
    "new features only": partial(families.Fusion, new_only=True),
    "PWC-Net": families.FlowEstimator,
    "dilated": families.Dilated,
    "signals": partial(families.ResidualDense, 1),
    "volumes": partial(families.Fusion, nn.ReLU6, 3),
    "ELU": partial(families.Fusion, nn.ELU),
    "SiLU": partial(families.Fusion, nn.SiLU),
    "negative slope below 0": partial(families.Fusion, lambda: nn.LeakyReLU(-0.3)),
    "no activation": partial(families.Fusion, nn.Identity),
}
DIMS = {"signals": 1, "volumes": 3}


def _pair(build: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """A converted block in float64, with random values in its vectors, and a plain copy."""
    block = build().double()
    for parameter in block.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=0.2, std=0.5)
    plain = copy.deepcopy(block)
    report = make_efficient(block)
    assert report, str(report)
    return block, plain


def _batch(family: str = "", images: int = 3) -> Tensor:
    return torch.randn(images, CHANNELS, *(9, 7, 5)[: DIMS.get(family, 2)], dtype=torch.double)


def _tensors(output: Any) -> list[Tensor]:
    return list(output) if isinstance(output, (tuple, list)) else [output]


def _train(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The outputs, and the input's gradient."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    outputs = _tensors(model(x * 1))
    sum(output.sin().sum() for output in outputs).backward()
    return [*(output.detach() for output in outputs), x.grad]


def _assert_same_training(ours: nn.Module, plain: nn.Module, x: Tensor, tolerance: float = 1e-10) -> None:
    actual, expected = _train(ours, x), _train(plain, x)
    assert [each.is_contiguous() for each in actual] == [each.is_contiguous() for each in expected]
    assert_all_close(actual, expected, tolerance)
    assert_same_gradients(ours, plain, tolerance)


def _runs_shared(model: nn.Module, x: Tensor) -> bool:
    return "SharedConvBlock" in nodes_of(_tensors(model(x))[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_trains_as_plain_does(family):
    block, plain = _pair(FAMILIES[family])
    x = _batch(family)
    assert _runs_shared(block, x)
    _assert_same_training(block, plain, x)
    _assert_same_training(block.eval(), plain.eval(), x[:1])
    with torch.no_grad():
        assert_all_close(_tensors(block(x)), _tensors(plain(x)))
    restore(block)
    assert list(map(type, block.modules())) == list(map(type, plain.modules()))


@pytest.mark.parametrize("family", ["ESRGAN", "RDN", "DenseFuse", "PWC-Net", "volumes", "SiLU", "padded by reflection"])
def test_what_the_report_says_is_saved(family):
    block, plain = _pair(FAMILIES[family])
    (changed,) = make_efficient(block).changed
    assert changed.engine == "shared"
    x = torch.randn(2, CHANNELS, *[72 if DIMS.get(family, 2) == 2 else 16] * DIMS.get(family, 2), dtype=torch.double)
    saved, saved_by_plain = (saved_bytes(lambda each=each: each(x)) / x[:, 0].nbytes for each in (block, plain))
    assert changed.kept == pytest.approx(saved, rel=0.1)
    assert changed.kept_before == pytest.approx(saved_by_plain, rel=0.1)
    assert changed.kept < 0.4 * changed.kept_before or family in ("SiLU", "volumes")
    assert f"saves {changed.kept} values per pixel for backward instead of {changed.kept_before}" in str(changed)


@pytest.mark.parametrize("family", ["ESRGAN", "PWC-Net", "DenseFuse", "RDN"])
def test_channels_last_comes_out_where_plain_s_does(family):
    block, plain = _pair(FAMILIES[family])
    x = _batch().contiguous(memory_format=torch.channels_last)
    _assert_same_training(block, plain, x)
    for each in (block, plain):
        each.to(memory_format=torch.channels_last)
    _assert_same_training(block, plain, x)
    _assert_same_training(block, plain, _batch())


@pytest.mark.parametrize("frozen", ["weight", "bias", "conv1", "conv3", "conv5"])
def test_frozen_parameters_get_no_gradient(frozen):
    block, plain = _pair(families.ResidualDense)
    for model in (block, plain):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(frozen not in name)
    _assert_same_training(block, plain, _batch())
    x = _batch()
    for model in (block, plain):
        model.zero_grad()
        model(x).square().sum().backward()
    assert_same_gradients(block, plain)
    for model in (block, plain):
        model.zero_grad()
        model.requires_grad_(False)
    _assert_same_training(block, plain, _batch())


@pytest.mark.parametrize("used", [0, 1])
def test_an_unused_output(used):
    block, plain = _pair(families.FlowEstimator)
    x = _batch()
    for model in (block, plain):
        model(x)[used].square().sum().backward()
    assert_same_gradients(block, plain)


def test_several_backwards():
    block, plain = _pair(families.FlowEstimator)
    x = _batch()
    for model in (block, plain):
        outputs = model(x)
        for output in outputs:
            output.square().sum().backward(retain_graph=True)
        outputs[0].sum().backward()
    assert_same_gradients(block, plain)
    assert not hasattr(outputs[0], "grad_input")


def test_a_block_in_a_block_twice():
    block, plain = _pair(families.ResidualDense)
    x = _batch()
    _assert_same_training(nn.Sequential(block, block), nn.Sequential(plain, plain), x)


@pytest.mark.parametrize("family", ["ESRGAN", "PWC-Net", "SiLU", "RDN", "padded by reflection"])
def test_second_derivatives(family):
    block, plain = _pair(FAMILIES[family])
    results = []
    for model in (block, plain):
        x = torch.linspace(-1, 1, CHANNELS * 20, dtype=torch.double).view(1, CHANNELS, 5, 4).requires_grad_()
        loss = sum(output.sin().sum() for output in _tensors(model(x * 1)))
        inputs = [x, *model.parameters()]
        grads = torch.autograd.grad(loss, inputs, create_graph=True)
        penalty = sum(grad.square().sum() for grad in grads)
        results.append([*grads, *torch.autograd.grad(penalty, inputs)])
    assert_all_close(*results)


def test_gradients_by_finite_differences():
    block, _ = _pair(families.FlowEstimator)
    x = torch.randn(1, CHANNELS, 3, 4, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(block, (x,), fast_mode=True)


def test_a_parameter_that_is_changed_before_the_backward_raises():
    block, _ = _pair(families.ResidualDense)
    output = block(_batch())
    with torch.no_grad():
        block.conv2.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("family", ["ESRGAN", "DenseFuse", "PWC-Net"])
def test_outputs_and_input_may_be_changed_in_place(family):
    block, plain = _pair(FAMILIES[family])
    for model in (block, plain):
        x = torch.ones(2, CHANNELS, 5, 4, dtype=torch.double).requires_grad_()
        output = _tensors(model(x * 1))[-1]
        output.mul_(3)
        output.sin().sum().backward()
    assert_same_gradients(block, plain)


@pytest.mark.parametrize(
    "family", ["ESRGAN", "RDN", "DenseFuse", "new features only", "PWC-Net", "padded by reflection"]
)
def test_autocast(family):
    """The error of bfloat16, of ours at most twice plain's."""
    block, plain = _pair(FAMILIES[family])
    x = torch.randn(4, CHANNELS, 16, 16)
    truth = [*_train(plain, x.double()), *(each.grad.clone() for each in plain.parameters())]
    errors, dtypes = [], []
    for model in (block.float(), plain.float()):
        with torch.autocast("cpu", torch.bfloat16):
            results = [*_train(model, x), *(each.grad for each in model.parameters())]
        errors.append(relative_error(results, truth))
        dtypes.append([each.dtype for each in results])
    assert dtypes[0] == dtypes[1]
    assert errors[0] < 2 * errors[1]


def test_low_precision_throughout():
    block, plain = _pair(families.LocalFusion)
    x = torch.randn(2, CHANNELS, 12, 12)
    truth = _train(plain, x.double())
    ours, plains = (_train(model.bfloat16(), x.bfloat16()) for model in (block, plain))
    errors = [[(a.double() - b).norm() for a, b in zip(each, truth, strict=True)] for each in (ours, plains)]
    assert all(a <= 2 * b for a, b in zip(*errors, strict=True)), errors


def test_a_network_of_blocks():
    model, plain = _pair(families.SuperResolution)
    report = make_efficient(model)
    assert [change.name for change in report.changed] == [f"trunk.{i}.blocks.{j}" for i in range(2) for j in range(3)]
    assert {(change.layers, change.engine) for change in report.changed} == {(4, "shared")}, str(report)
    assert list(model.state_dict()) == list(plain.state_dict())
    _assert_same_training(model, plain, torch.randn(2, 3, 8, 9, dtype=torch.double))
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        _assert_same_training(again, plain, torch.randn(2, 3, 8, 9, dtype=torch.double))
        assert nodes_of(again(torch.randn(2, 3, 8, 9, dtype=torch.double))).count("SharedConvBlock") == 6
    restore(model)
    assert list(map(type, model.modules())) == list(map(type, plain.modules()))
    assert not any("_conversion" in vars(module) for module in model.modules())


def test_the_innermost_module_with_all_convolutions_of_a_block_is_converted():
    model = nn.Sequential(nn.Conv2d(3, CHANNELS, 1), families.ResidualDense())
    report = make_efficient(model)
    assert [change.name for change in report.changed] == ["1"]
    assert not report.lines
    assert [change.name for change in make_efficient(families.FirstLayerApart()).changed] == ["layers"]


def test_a_hook_inside_is_called():
    block, plain = _pair(families.ResidualDense)
    calls = []
    block.conv3.register_forward_hook(lambda *_: calls.append(1))
    with choose.no_warnings():
        _assert_same_training(block, plain, _batch())
    assert calls == [1]


def test_a_hook_on_the_block_is_called_and_the_engine_runs():
    block, _ = _pair(families.ResidualDense)
    outputs = []
    block.register_forward_hook(lambda module, args, output: outputs.append(output))
    assert _runs_shared(block, _batch())
    assert len(outputs) == 1


def test_a_changed_scale_is_noticed():
    block, plain = _pair(families.ScaledByAttribute)
    block.scale = plain.scale = 0.7
    with pytest.warns(UserWarning, match="scale of a ScaledByAttribute was 0.3 and is 0.7"):
        _assert_same_training(block, plain, _batch())
    make_efficient(block)
    assert _runs_shared(block, _batch())
    _assert_same_training(block, plain, _batch())


def test_a_slope_is_read_at_every_forward():
    block, plain = _pair(families.ResidualDense)
    block.lrelu.negative_slope = plain.lrelu.negative_slope = 0.4
    assert _runs_shared(block, _batch())
    _assert_same_training(block, plain, _batch())


@pytest.mark.parametrize("engine", ["plain", "checkpoint", "shared"])
@pytest.mark.parametrize("family", ["ESRGAN", "DenseFuse"])
def test_an_engine_by_its_name(family, engine):
    block, plain = _pair(FAMILIES[family])
    make_efficient(block, engine)
    _assert_same_training(block, plain, _batch())
    assert _runs_shared(block, _batch()) == (engine == "shared")


class _AddsInBetween(families.ResidualDense):
    """As in ESRGAN+: a layer's output is added to an earlier one's."""

    def forward(self, x: Tensor) -> Tensor:
        y1 = self.lrelu(self.conv1(x))
        y2 = self.lrelu(self.conv2(torch.cat((x, y1), 1))) + y1
        y3 = self.lrelu(self.conv3(torch.cat((x, y1, y2), 1)))
        y4 = self.lrelu(self.conv4(torch.cat((x, y1, y2, y3), 1)))
        return self.conv5(torch.cat((x, y1, y2, y3, y4), 1)) * 0.2 + x


class _Branches(families.ResidualDense):
    def forward(self, x: Tensor) -> Tensor:
        output = super().forward(x)
        return output * 2 if self.training else output


class _Counts(families.ResidualDense):
    count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x)


class _Mixed(families.ResidualDense):
    """The channels in another order than that of the features."""

    def forward(self, x: Tensor) -> Tensor:
        y1 = self.lrelu(self.conv1(x))
        y2 = self.lrelu(self.conv2(torch.cat((x, y1), 1)))
        y3 = self.lrelu(self.conv3(torch.cat((x, y2, y1), 1)))
        y4 = self.lrelu(self.conv4(torch.cat((x, y1, y2, y3), 1)))
        return self.conv5(torch.cat((x, y1, y2, y3, y4), 1)) * 0.2 + x


@pytest.mark.parametrize("build", [_AddsInBetween, _Branches, _Counts, _Mixed])
def test_what_is_no_such_block_stays_exact(build):
    block = build().double()
    plain = copy.deepcopy(block)
    make_efficient(block)
    _assert_same_training(block, plain, _batch())
    _assert_same_training(block.eval(), plain.eval(), _batch())
    assert not _runs_shared(block, _batch())


def _peak(model: nn.Module, x: Tensor) -> int:
    def step() -> None:
        sum(output.sum() for output in _tensors(model(x))).backward()

    step()  # allocates the gradients
    return tensor_peak(step)


PEAKS = {
    "RRDB trunk": (lambda: nn.Sequential(*(families.ResidualDense(2, 64, 32) for _ in range(6))), (2, 64, 32, 32), 0.5),
    "PWC-Net": (lambda: families.FlowEstimator(115, (128, 128, 96, 64, 32)), (2, 115, 64, 64), 0.5),
}
"""Each: a model of a public one's widths, an input, and the tensor peak of a step as a fraction of plain's."""


@pytest.mark.parametrize("model", PEAKS)
def test_the_peak_of_a_step_at_widths_as_in_the_model(model):
    build, shape, ratio = PEAKS[model]
    block, x = build(), torch.randn(shape)
    plain = copy.deepcopy(block)
    make_efficient(block)
    assert _peak(block, x) < ratio * _peak(plain, x)
