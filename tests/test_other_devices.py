"""Other devices as far as a CPU shows: what runs on ROCm's and MPS, and that a step never waits for its device."""

import re
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torchgen
from checkpoint_outcomes import CountingOperations
from grids import grid
from helpers import FAMILIES, SIZES, assert_same_step, freeze_norms, random_images, small_model, with_engine
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training.distributed import _parse_device

from efficient_densenet import DenseNet, doctor, kernels
from efficient_densenet._tensors import meta_stands_for
from efficient_densenet._torch_private import run_cpu_implementation
from efficient_densenet.engine.stage import running_statistics as running
from efficient_densenet.engine.stage.operator import STAGE
from efficient_densenet.engine.stem.operator import STEM
from efficient_densenet.kernels import row_tiles
from efficient_densenet.memory import predict

NATIVE_FUNCTIONS = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
"""PyTorch's list of its operations, with the devices that have each."""


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_computed_otherwise_than_on_a_cpu_is_plain_s(family, monkeypatch):
    for name, module in list(sys.modules.items()):
        if name.startswith("efficient_densenet.") and hasattr(module, "device_type"):
            monkeypatch.setattr(module, "device_type", lambda x: "mps")
    plain, x = small_model(family, efficient=False), random_images(family)
    assert kernels.kernel_set_name(x) == "portable"
    assert_same_step(with_engine(plain, "shared"), plain, x)


class Mps(TorchDispatchMode):
    """Raises for operations that MPS lacks, and for float64."""

    def __init__(self) -> None:
        super().__init__()
        entries = NATIVE_FUNCTIONS.read_text().split("\n- func: ")[1:]
        self.entries = {entry.partition("(")[0]: entry for entry in entries}

    def has(self, name: str) -> bool:
        entry = self.entries[name]
        delegate = re.search(r"structured_delegate: (\S+)", entry)
        if delegate:
            return self.has(delegate[1])
        return "dispatch:" not in entry or bool(re.search(r"MPS|Composite", entry))

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation.namespace == "efficient_densenet":
            with self:
                return run_cpu_implementation(operation, args, kwargs or {})
        assert self.has(operation.name().removeprefix("aten::")), operation
        output = operation(*args, **(kwargs or {}))
        assert torch.float64 not in {getattr(each, "dtype", None) for each in tree_leaves(output)}, operation
        return output


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("settings", [{}, {"drop_rate": 0.2, "activation": "silu"}, {"keep_bottleneck": True}])
def test_mps_has_the_operations_of_a_step(family, settings):
    model = small_model(family, efficient="shared", **settings).float().to("meta")
    x = random_images(family).float().to("meta")
    with meta_stands_for("mps"), Mps() as mode:
        model(x).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not mode.has("linalg_eig")


def test_what_cannot_be_is_refused_in_a_sentence(monkeypatch):
    def zeros(*_: Any, dtype: torch.dtype | None = None, **__: Any) -> torch.Tensor:
        if dtype is torch.float64:
            raise TypeError("Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support it. Use")
        return torch.ones(1)

    with pytest.raises(ValueError, match="device is 'mps', but memory is known on 'cpu' and 'cuda' only"):
        predict(small_model("bc"), (1, 3, 8, 8), device="mps")
    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(ValueError, match=r"device is 'mps', but cannot be used here \(Cannot .* support it\): try cpu"):
        _parse_device("mps")


def test_the_doctor_knows_other_gpus(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert "GPU: MPS, on which PyTorch's operations run" in list(doctor.report())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "AMD Instinct MI300X")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 4))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "  PyTorch's operations: the Triton kernels are written for NVIDIA's GPUs" in list(doctor.report())


# Neither a number nor a shape depends on values: tensors on the meta device have none, and reading one raises

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
