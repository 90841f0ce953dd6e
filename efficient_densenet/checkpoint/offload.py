"""Saved tensors that wait in CPU memory between the forward and the backward."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


def resting_in_cpu_memory(wanted: bool) -> AbstractContextManager:
    """Copy every tensor that is saved in this context, and that lives elsewhere, to CPU memory."""
    return saved_tensors_hooks(_Resting, _Resting.woken) if wanted else nullcontext()


def lives_elsewhere(tensor: Tensor) -> bool:
    return tensor.device.type != "cpu"


class _Resting:
    """From a CUDA device the copy goes to pinned memory without waiting, and comes back the same way.

    Both copies are queued on the stream that computes, so that nothing reads a tensor before it has arrived. A tensor
    of the CPU rests as it is, under the eye that autograd has on tensors that it saves itself.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.device, self.version = tensor.device, tensor._version
        self.is_copy = lives_elsewhere(tensor)
        self.tensor = tensor
        if self.is_copy:
            pinned = self.device.type == "cuda" and tensor.layout == torch.strided
            self.tensor = torch.empty_like(tensor, device="cpu", pin_memory=pinned).copy_(tensor, non_blocking=pinned)

    def woken(self) -> Tensor:
        if self.is_copy:
            return self.tensor.to(self.device, non_blocking=True)
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: an "
                f"input of a checkpoint, of shape {tuple(self.tensor.shape)}, is at version {self.tensor._version}; "
                f"expected version {self.version} instead"
            )
        return self.tensor
