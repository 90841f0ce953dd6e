"""Where the memory of training goes, and five ways to need less: measured on one small network, on a CPU.

python demos/memory_tour.py          about a minute
TOUR_QUICK=1 python demos/memory_tour.py     a few seconds, on a smaller network: a check that all of it runs

Each lesson below is a few lines that you can take with you. Every figure that is printed was measured in this run: the
most bytes that tensors held during a forward and a backward, above what was held before.
"""

import os
import tempfile
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from efficient_densenet import DenseNet
from efficient_densenet.checkpoint import checkpoint_wrapper
from efficient_densenet.memory import tensor_peak
from efficient_densenet.training import command

QUICK = os.environ.get("TOUR_QUICK", "") not in ("", "0")
LAYERS, BATCH, SIDE = ((2, 2, 2), 8, 16) if QUICK else ((6, 6, 6), 64, 32)
ROUNDS = 1 if QUICK else 3
Lesson = tuple[DenseNet, Callable[[], None]]
"""A network, and a forward and backward of it."""


def network(engine: str = "plain") -> DenseNet:
    """The same network with the same weights in every lesson: only the way it is run differs."""
    torch.manual_seed(0)
    return DenseNet(12, LAYERS, efficient=engine)


def pictures() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, 3, SIDE, SIDE, generator=generator), torch.arange(BATCH) % 10


def whole_batch(model: DenseNet) -> Lesson:
    images, labels = pictures()
    return model, lambda: F.cross_entropy(model(images), labels).backward()


def footprint() -> None:
    """1. Parameters, their gradients and SGD's momentum are three times the weights, whatever the batch."""
    weights = sum(p.numel() * p.element_size() for p in network().parameters())
    print(f"1. parameters {mib(weights)}, with gradients and momentum {mib(3 * weights)}: not where the memory goes")


def plain() -> Lesson:
    """2. What autograd keeps for the backward is: every concatenation, every norm's and every ReLU's output."""
    return whole_batch(network())


def accumulation(parts: int = 4) -> Lesson:
    """3. Gradients add up, so a batch can be run in parts; a batch norm then sees one part at a time."""
    model, (images, labels) = network(), pictures()

    def step() -> None:
        for some, theirs in zip(images.chunk(parts), labels.chunk(parts), strict=True):
            (F.cross_entropy(model(some), theirs) / parts).backward()

    return model, step


def checkpointing() -> Lesson:
    """4. A block can keep its input alone and compute the rest again; ours updates batch norms once all the same."""
    model = network()
    for i in range(len(LAYERS)):
        checkpoint_wrapper(getattr(model.features, f"denseblock{i + 1}"))
    return whole_batch(model)


def per_layer() -> Lesson:
    """5. Recomputed layer by layer, only one layer's inside is there at a time: for DenseNets that is better."""
    return whole_batch(network("checkpoint"))


def offloading() -> Lesson:
    """6. What is kept can wait elsewhere: here on disk, on a GPU in the host's memory (save_on_cpu)."""
    model, step = whole_batch(network())

    def offloaded() -> None:
        with torch.autograd.graph.saved_tensors_hooks(to_disk, from_disk):
            step()

    return model, offloaded


def to_disk(tensor: torch.Tensor) -> "Stored | torch.Tensor":
    # Parameters stay: they are held anyway.
    return tensor if tensor.is_leaf or tensor.numel() < 1000 else Stored(tensor)


def from_disk(kept: "Stored | torch.Tensor") -> torch.Tensor:
    return kept.read() if isinstance(kept, Stored) else kept


class Stored:
    """A tensor in a temporary file, which goes when this object does."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.file = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the tensor is wanted
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self.file.write(tensor.contiguous().numpy().data)

    def read(self) -> torch.Tensor:
        tensor = torch.empty(self.shape, dtype=self.dtype)
        self.file.seek(0)
        self.file.readinto(tensor.numpy().data)
        return tensor


def shared() -> Lesson:
    """7. Our engine: a block's features are kept once, nothing is joined, and what is computed again is cheap."""
    return whole_batch(network("shared"))


LESSONS = {
    "plain": plain,
    "gradient accumulation, 4 parts": accumulation,
    "a checkpoint around each block": checkpointing,
    "a checkpoint around each layer": per_layer,
    "plain, what is kept on disk": offloading,
    "shared engine": shared,
}


def measure(lesson: Lesson) -> tuple[int, float, torch.Tensor]:
    """Peak bytes, the least seconds of a step, and the gradient of the first convolution."""
    model, step = lesson
    step()
    gradient = model.features.conv0.weight.grad.clone()
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return tensor_peak(step), min(seconds), gradient


def tour() -> None:
    """Measure where the memory of training goes, and five ways to need less, on one small network, on a CPU.

    TOUR_QUICK=1 in the environment makes it a check of a few seconds, on a smaller network. There are no options.
    """
    footprint()
    print(f"\nDenseNet-BC, blocks of {LAYERS} layers, {BATCH} pictures of {SIDE}×{SIDE}, float32, on the CPU")
    print(f"{'':34}{'peak':>10}{'of plain':>10}{'time':>9}{'gradient off by':>18}")
    exact = exact_gradient()
    reference = None
    for name, lesson in LESSONS.items():
        peak, seconds, gradient = measure(lesson())
        reference = reference or (peak, seconds)
        error = ((gradient - exact).norm() / exact.norm()).item()
        print(f"{name:34}{mib(peak):>10}{peak / reference[0]:>10.2f}{seconds / reference[1]:>8.2f}×{error:>18.0e}")
    print("\nGradients are compared with float64's. The accumulated ones differ in kind: each part of the batch was")
    print("normalised by its own statistics. The others differ by float32's rounding.")


def exact_gradient() -> torch.Tensor:
    """That of the first convolution, which all rounding reaches, in float64."""
    model, (images, labels) = network().double(), pictures()
    F.cross_entropy(model(images.double()), labels).backward()
    return model.features.conv0.weight.grad


def mib(number: float) -> str:
    return f"{number / 2**20:.1f} MiB"


if __name__ == "__main__":
    command(tour)
