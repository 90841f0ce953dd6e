"""A training step never waits for the device: neither a number nor a shape depends on values there.

Tensors on the meta device have no values, and reading one raises.
"""

from typing import ClassVar

import pytest
import torch
from checkpoint_outcomes import CountingOperations
from grids import grid
from helpers import FAMILIES, SIZES, freeze_norms, small_model
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from efficient_densenet import DenseNet
from efficient_densenet.engine.stage import running_statistics as running
from efficient_densenet.engine.stage.operator import STAGE
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


@pytest.mark.parametrize(
    *grid(
        # plain's cumulative averages read a count
        lambda engine, change, **_: engine == "shared" or change != "cumulative averages",
        family=FAMILIES,
        change=CHANGES,
        engine=["shared", "checkpoint"],
    )
)
def test_engines_do_not_wait_for_the_device(family, change, engine, monkeypatch):
    monkeypatch.setitem(row_tiles.TILE_BYTES, "cuda", 3000)  # several tiles on other devices than the CPU
    model = small_model(family, efficient=engine, drop_rate=0.2)
    CHANGES[change](model)
    images = torch.empty(3, 3, *SIZES[family], dtype=torch.double, device="meta", requires_grad=True)
    labels = torch.zeros(3, dtype=torch.long, device="meta")
    with WithinOperators() as operations:
        nn.functional.cross_entropy(model.to("meta")(images), labels).backward()
    assert images.grad.shape == images.shape
    if engine == "shared":
        assert operations.counts[OPERATORS.stage.default]
        assert operations.counts[OPERATORS.stage_backward.default]
