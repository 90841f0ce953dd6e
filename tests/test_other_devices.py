"""Devices without kernels of their own, ROCm's and MPS, as far as a CPU shows: the portable kernels run there, with
plain's numbers and by operations that PyTorch has, or a sentence says what cannot be."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen
from helpers import FAMILIES, assert_same_step, random_images, small_model, with_engine
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training.distributed import _parse_device

from efficient_densenet import doctor, kernels
from efficient_densenet._tensors import meta_stands_for
from efficient_densenet._torch_private import run_cpu_implementation
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
