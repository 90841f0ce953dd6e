"""A training step never waits for the device: neither a number nor a shape depends on values there.

On the meta device tensors have no values, and whatever asks for one raises.
"""

from typing import ClassVar

import pytest
import torch
from checkpoint_outcomes import CountingOperations
from helpers import FAMILIES, SIZES, freeze_norms, small_model
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from efficient_densenet import DenseNet
from efficient_densenet.engine.stage import running_statistics as running
from efficient_densenet.engine.stage.operator import STAGE
from efficient_densenet.engine.stage.statistics import BackwardStatistics, ForwardStatistics
from efficient_densenet.engine.stem.operator import STEM
from efficient_densenet.kernels import row_tiles

OPERATORS = torch.ops.efficient_densenet


class WithinOperators(CountingOperations):
    """Runs the operators of the package by their implementations, on the meta device too, and counts what they call.

    Without it they would be opaque, and their fake implementations would run on the meta device.
    """

    implementations: ClassVar = {
        OPERATORS.stage.default: STAGE.forward_implementation,
        OPERATORS.stage_backward.default: STAGE.backward_implementation,
        OPERATORS.update_running_statistics.default: running._update,
        OPERATORS.stem.default: STEM.forward_implementation,
        OPERATORS.stem_backward.default: STEM.backward_implementation,
    }

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation not in self.implementations:
            return super().__torch_dispatch__(operation, types, args, kwargs)
        self.counts[operation] += 1
        with self:
            return self.implementations[operation](*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def _several_tiles(monkeypatch):
    monkeypatch.setitem(row_tiles.TILE_BYTES, "cuda", 3000)  # which other devices than the CPU take


def _train(model: nn.Module, family: str) -> None:
    images = torch.empty(3, 3, *SIZES[family], dtype=torch.double, device="meta", requires_grad=True)
    labels = torch.zeros(3, dtype=torch.long, device="meta")
    with WithinOperators() as operations:
        nn.functional.cross_entropy(model.to("meta")(images), labels).backward()
    assert images.grad.shape == images.shape
    if model.features.denseblock1.engine == "shared":
        used = {name for name, count in operations.counts.items() if name in operations.implementations and count}
        assert {OPERATORS.stage.default, OPERATORS.stage_backward.default} <= used


def _average_cumulatively(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.momentum = None


def _freeze_inner_norms(model: DenseNet) -> None:
    freeze_norms(model, "norm2" if model.features.denseblock1.denselayer1.has_bottleneck else "norm1")


CHANGES = {
    "batch statistics": lambda model: None,
    "cumulative averages": _average_cumulatively,
    "frozen norms": freeze_norms,
    "some frozen norms": _freeze_inner_norms,
    "channels last": lambda model: model.to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("change", CHANGES)
def test_engines_do_not_wait_for_the_device(family, change):
    for engine in ["shared"] if change == "cumulative averages" else ["shared", "checkpoint"]:  # plain's read a count
        model = small_model(family, efficient=engine, drop_rate=0.2)
        CHANGES[change](model)
        _train(model, family)


@pytest.mark.parametrize(
    "method", [ForwardStatistics.write, BackwardStatistics.grad_input], ids=["forward", "backward"]
)
def test_a_number_that_is_read_in_an_operator_is_noticed(method, monkeypatch):
    def reading(self, *args):
        self.features.sum().item()
        return method(self, *args)

    owner = ForwardStatistics if method is ForwardStatistics.write else BackwardStatistics
    monkeypatch.setattr(owner, method.__name__, reading)
    with pytest.raises(RuntimeError, match="meta tensors"):
        _train(small_model("bc", efficient="shared"), "bc")
