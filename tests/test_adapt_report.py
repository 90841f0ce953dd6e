"""What the report of a conversion says: what was found, what is needed and what to do."""

import copy

import pytest
import torch
import torch.nn.functional as F
from dense_families import Block, ResidualDense, TwoDropouts, tiramisu
from helpers import convert_and_report
from third_party_models import GROWTH, START, LayerHalves, assert_same_training, block_batch, features_block
from torch import Tensor, nn

from efficient_densenet import conversion_report, densenet121, make_efficient, restore
from efficient_densenet.checkpoint import checkpoint_wrapper


def test_a_residual_dense_block_is_reported_with_the_reason():
    model = nn.Sequential(nn.Conv2d(3, START, 1), ResidualDense())
    report = convert_and_report(model, "shared")
    assert list(report.unchanged) == ["1"]
    assert report.unchanged["1"].startswith(
        "found the output of add, where a dense layer has norm, activation and convolution"
    )


def test_a_block_is_listed_once_though_its_container_looks_like_one_too():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(*(tiramisu(START + i * GROWTH) for i in range(3)))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layer:
                x = torch.cat([x, layer(x) * 0.5], 1)
            return x

    report = convert_and_report(nn.Sequential(Outer()))
    assert [change.name for change in report.changed] == ["0"]
    assert not report.unchanged
    report = convert_and_report(nn.Sequential(Outer()), "shared")
    assert list(report.unchanged) == ["0"]


def test_a_list_of_layers_that_the_author_s_forward_calls_is_said_to_be_one():
    model = nn.Module()
    model.layers = nn.ModuleList(tiramisu(START + i * GROWTH) for i in range(3))
    model.head = nn.Linear(3, 2)
    (reason,) = convert_and_report(model).unchanged.values()
    assert reason.startswith(
        "found a ModuleList, whose layers the author's forward calls one by one; a module is needed"
    )


class _TakesMask(Block):
    """Its forward takes more than one tensor, and so do its layers."""

    class Masked(LayerHalves):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.second_half(self.first_half(x)) * mask

    def __init__(self) -> None:
        super().__init__(self.Masked)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x, mask)], 1)
        return x


def test_what_our_trace_cannot_call_is_said_as_the_trace_s_trouble_and_once():
    report = convert_and_report(nn.ModuleList(_TakesMask() for _ in range(6)))
    assert len(report.unchanged) == 6
    (line,) = (line for line in str(report).splitlines() if "our trace" in line)
    assert line.startswith("  0, 1, 2 and 3 more: could not be tried: our trace calls it with one tensor of 6 channels")
    assert "its forward seems to take something else (it raises TypeError: " in line


class _InSinglePrecision(LayerHalves):
    """Makes a constant in the default dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(self.second_half(self.first_half(x)), torch.ones(GROWTH, GROWTH, 1, 1))


class _PadsByReflection(nn.Sequential):
    """Needs more pixels than the trace's first input has."""

    def __init__(self, channels: int) -> None:
        conv = nn.Conv2d(channels, GROWTH, 9, padding=4, padding_mode="reflect")
        super().__init__(nn.BatchNorm2d(channels), nn.ReLU(), conv)


@pytest.mark.parametrize("layer", [_InSinglePrecision, _PadsByReflection])
@pytest.mark.filterwarnings("ignore:falling back")
def test_a_block_that_needs_another_trace_input_gets_it(layer):
    block, x = Block(layer), block_batch().float().repeat(1, 1, 2, 2)
    plain = copy.deepcopy(block)
    (changed,) = convert_and_report(block).changed
    assert changed.recomputes == "each layer whole"
    block(x).sum().backward()
    plain(x).sum().backward()
    for actual, expected in zip(block.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-3, atol=1e-3)


class _DropoutBetween(LayerHalves):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second_half(self.dropout(self.first_half(x)))


def test_a_reason_is_said_once():
    report = convert_and_report(nn.ModuleList(Block(TwoDropouts) for _ in range(3)))
    lines = str(report).splitlines()
    assert [("found a Dropout (" in line, "(for the same reason)" in line) for line in lines[1:]] == [
        (True, False),
        (False, True),
        (False, True),
    ]


def _conv(size: int = 3, **options) -> nn.Module:
    return nn.Conv2d(2 * GROWTH, GROWTH, size, **options)


def _with(name: str, module: nn.Module) -> nn.Module:
    block = features_block().float()
    setattr(block.denselayer2, name, module)
    return block


@pytest.mark.parametrize(
    ("build", "found"),
    [
        (lambda: _with("conv2", _conv(padding=1, groups=2)), "groups=2 in a Conv2d"),
        (lambda: _with("conv2", _conv(5, padding=2)), "kernel_size=(5, 5) in a Conv2d"),
        (lambda: _with("conv2", _conv(padding=1, padding_mode="reflect")), "padding_mode="),
        (lambda: _with("norm2", nn.BatchNorm2d(2 * GROWTH, affine=False)), "a BatchNorm2d without weight and bias"),
        (lambda: Block(_DropoutBetween), "found a Dropout (layers.0.dropout) inside layer 1, where a dense layer has"),
        (lambda: Block(TwoDropouts), "and perhaps dropout after the last one"),
    ],
)
def test_what_is_unusual_in_a_layer_is_named(build, found):
    (changed,) = convert_and_report(build()).changed
    assert changed.engine.startswith("checkpoint (found ")
    assert found in changed.engine


def test_padding_given_by_name_is_the_usual_one():
    block = features_block()
    for layer in block.children():
        layer.conv2 = _conv(padding="same", bias=False).double()
    plain = copy.deepcopy(block)
    assert [change.engine for change in convert_and_report(block).changed] == ["shared"]
    assert_same_training(block, plain, block_batch())


def test_batched_gradients_are_refused_with_the_remedy():
    block, x = features_block().eval(), torch.randn(1, START, 4, 4, dtype=torch.double)
    make_efficient(block)
    with pytest.raises(RuntimeError, match=r"several gradients at once.*make_efficient\(model, 'checkpoint'\)"):
        torch.autograd.functional.jacobian(block, x, vectorize=True)
    make_efficient(block, "checkpoint")
    assert torch.autograd.functional.jacobian(block, x, vectorize=True).isfinite().all()


def test_a_conversion_is_logged_in_a_line_and_its_report_is_kept_until_restore(caplog):
    model = nn.Sequential(features_block(), Block(TwoDropouts), ResidualDense())
    caplog.set_level("INFO", "efficient_densenet")
    assert make_efficient(model, "shared") is model
    (line,) = (record.getMessage() for record in caplog.records if "make_efficient" in record.getMessage())
    assert line.startswith(
        "make_efficient: 2 of 3 dense blocks run by shared, 1 is left as it is: found the output of "
    )
    report = conversion_report(model)
    assert [change.name for change in report.changed] == ["0", "1"]
    assert str(conversion_report(copy.deepcopy(model))) == str(report)
    with pytest.raises(ValueError, match=r"found a Sequential without a report: call make_efficient\(model\)"):
        conversion_report(restore(model))


def test_a_model_without_a_dense_block_is_warned_of():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    with pytest.warns(UserWarning, match="make_efficient has converted nothing: found no dense block"):
        assert make_efficient(model) is model
    assert not conversion_report(model)


@pytest.mark.parametrize("function", [make_efficient, conversion_report, checkpoint_wrapper])
@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("densenet121", ""),
        (None, ""),
        ({}, ""),
        (nn.ReLU, r", as in \w+\(ReLU\(\)\)"),
        (densenet121, r", as in \w+\(densenet121"),
    ],
)
def test_anything_but_a_module_is_refused(function, value, hint):
    with pytest.raises(TypeError, match=rf"^{function.__name__} needs a module, found .*: give the model itself{hint}"):
        function(value)
