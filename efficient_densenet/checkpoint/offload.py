"""Saved tensors in CPU memory between the forward and the backward."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def offload_to_cpu(enabled: bool) -> AbstractContextManager:
    """Copy every tensor that is saved for backward in this context to CPU memory, if it is on another device."""
    return saved_tensors_hooks(_OffloadedTensor, _OffloadedTensor.restore) if enabled else nullcontext()


def is_not_on_cpu(tensor: Tensor) -> bool:
    """Return True if offloading copies `tensor`."""
    return tensor.device.type != "cpu"


class _OffloadedTensor:
    """A saved tensor, packed in CPU memory.

    From a CUDA device, the tensor is copied to pinned memory and back without blocking. Both copies are queued on the
    current stream, so that no kernel reads a tensor before it is copied. A tensor that is already on the CPU is not
    copied; `restore` checks its version, as autograd does for tensors that it saves itself.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.device, self.version = tensor.device, tensor._version
        self.is_copy = is_not_on_cpu(tensor)
        self.tensor = tensor
        if self.is_copy:
            pinned = self.device.type == "cuda" and tensor.layout == torch.strided
            self.tensor = torch.empty_like(tensor, device="cpu", pin_memory=pinned).copy_(tensor, non_blocking=pinned)

    def restore(self) -> Tensor:
        if self.is_copy:
            return self.tensor.to(self.device, non_blocking=True)
        check_version(self.tensor, self.version)
        return self.tensor


def check_version(tensor: Tensor, version: int) -> None:
    """Raise autograd's error if `tensor`, an input of a checkpoint, was changed in place since it had `version`."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: an "
            f"input of a checkpoint, of shape {tuple(tensor.shape)}, is at version {tensor._version}; "
            f"expected version {version} instead"
        )
