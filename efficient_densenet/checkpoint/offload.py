"""A tensor that waits in CPU memory between the forward and the backward."""

import torch
from torch import Tensor


class Resting:
    """A copy in CPU memory of a tensor that lives elsewhere; a tensor of the CPU rests as it is.

    From a CUDA device the copy goes to pinned memory without waiting, and comes back the same way: both are queued on
    the stream that computes, so that nothing reads a tensor before it has arrived.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.device = tensor.device
        self.tensor = tensor.detach()
        self.version = tensor._version
        if self.device.type != "cpu":
            pinned = self.device.type == "cuda" and tensor.layout == torch.strided
            self.tensor = torch.empty_like(self.tensor, device="cpu", pin_memory=pinned)
            self.tensor.copy_(tensor.detach(), non_blocking=pinned)

    def woken(self) -> Tensor:
        if self.device.type != "cpu":
            return self.tensor.to(self.device, non_blocking=True)
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: an "
                f"input of a checkpoint, of shape {tuple(self.tensor.shape)}, is at version {self.tensor._version}; "
                f"expected version {self.version} instead"
            )
        return self.tensor
