"""Forward, loss and backward of a training step as a CUDA graph: one launch for all of its kernels.

The host then takes no time for Python, PyTorch's dispatcher and launches. What is captured works on fixed memory: each
batch is copied there, and the gradients are always the same tensors.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from .distributed import DistributedContext
from .options import RunOptions

WARM_UP_STEPS = 3
"""Training steps before the capture, in which kernels are compiled and algorithms are chosen."""


def can_be_cuda_graph(options: RunOptions, context: DistributedContext) -> bool:
    """Whether a step of this run can be one CUDA graph; raises where it cannot, but is asked for."""
    device = context.device
    reasons = {
        f"but the device is {device}, and CUDA graphs need a GPU": device.type != "cuda",
        f"but {context.world_size} processes exchange their gradients, which is not captured": context.world_size > 1,
        f"but {context.num_gpus} GPUs, while a CUDA graph is of one (give --device cuda:0)": context.num_gpus > 1,
        "and --micro_batch_size, whose gradients accumulate, not in a CUDA graph": options.micro_batch_size is not None,
        f"and the engine {options.engine}, which saves the state of random numbers, while a capture has none (give "
        "--engine shared or plain)": options.engine in ("official", "checkpoint"),
    }
    found = [reason for reason, applies in reasons.items() if applies]
    if options.cuda_graph and found:
        raise ValueError(f"found --cuda_graph, {found[0]}: leave --cuda_graph out")
    return not found


class CudaGraphBackward:
    """Runs `backward` of a batch, at first as it is, then captured as a CUDA graph.

    All batches must have one shape and one scale of the loss, as the full batches of a run have.

    Args:
        backward: runs forward and backward on images, labels and a scale of the loss, and returns a tensor. It must not
            wait for the device.
        parameters: those whose gradients `backward` computes. They must have none before a call.
    """

    def __init__(self, backward: Callable[[Tensor, Tensor, float], Tensor], parameters: Iterable[nn.Parameter]) -> None:
        self.backward, self.parameters = backward, list(parameters)
        self.num_warm_up_steps = 0
        self.device = self.parameters[0].device
        self.stream = torch.cuda.Stream(self.device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, images: Tensor, labels: Tensor, loss_scale: float) -> Tensor:
        with torch.cuda.device(self.device):  # whose streams are meant
            if self.num_warm_up_steps < WARM_UP_STEPS:
                # On the stream of the capture, to which what is set up now belongs then.
                self.num_warm_up_steps += 1
                self.stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self.stream):
                    result = self.backward(images, labels, loss_scale)
                torch.cuda.current_stream().wait_stream(self.stream)
                return result
            if self.graph is None:
                self._capture(images, labels, loss_scale)
            assert self.graph is not None
            self.images.copy_(images)
            self.labels.copy_(labels)
            self.graph.replay()
            for parameter, grad in zip(self.parameters, self.grads, strict=True):
                parameter.grad = grad
            return self.result

    def _capture(self, images: Tensor, labels: Tensor, loss_scale: float) -> None:
        """Record the graph and the memory that it reads and writes. Nothing runs before the first replay."""
        self.images, self.labels = images.clone(), labels.clone()
        self.graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may go on, as those do that decode images.
            with torch.cuda.graph(self.graph, stream=self.stream, capture_error_mode="thread_local"):
                self.result = self.backward(self.images, self.labels, loss_scale)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as exc:
            raise ValueError(
                f"the training step cannot be captured as a CUDA graph ({str(exc).strip().splitlines()[0]}): "
                "give --cuda_graph False, or another --engine"
            ) from exc
        self.grads = [parameter.grad for parameter in self.parameters]
