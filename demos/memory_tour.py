"""Where the memory of training goes, and five ways to need less: measured on one small network, on a CPU.

python demos/memory_tour.py                  about a minute
TOUR_QUICK=1 python demos/memory_tour.py     a check of a few seconds, on a smaller network

Each lesson below is a few lines that can be copied. Every number printed is measured in this run: the peak bytes of
tensors during a forward and a backward, above what was allocated before. Beside it stands what sizes alone predict,
before anything ran.
"""

import os
import tempfile
import time
from collections.abc import Callable
from typing import IO

import torch
import torch.nn.functional as F
from torch import Tensor
from training import command

from efficient_densenet import DenseNet
from efficient_densenet.checkpoint import checkpoint_wrapper
from efficient_densenet.memory import predict, tensor_peak
from efficient_densenet.memory.step import MetaModel

QUICK = os.environ.get("TOUR_QUICK", "") not in ("", "0")
BLOCK_CONFIG, BATCH_SIZE, IMAGE_SIZE = ((2, 2, 2), 8, 16) if QUICK else ((6, 6, 6), 64, 32)
REPETITIONS = 1 if QUICK else 3


def network(engine: str = "plain") -> DenseNet:
    """The same network with the same weights in every lesson; only its execution differs."""
    torch.manual_seed(0)
    return DenseNet(12, BLOCK_CONFIG, efficient=engine)


def whole_batch(model: DenseNet, images: Tensor, labels: Tensor) -> None:
    """1. Autograd saves activations for the backward: the output of every concatenation, every norm, every ReLU."""
    F.cross_entropy(model(images), labels).backward()


def gradient_accumulation(model: DenseNet, images: Tensor, labels: Tensor) -> None:
    """2. Gradients accumulate, so a batch can be run as micro-batches; each batch norm then sees one of them."""
    for some_images, some_labels in zip(images.chunk(4), labels.chunk(4), strict=True):
        (F.cross_entropy(model(some_images), some_labels) / 4).backward()


def checkpointed_blocks() -> DenseNet:
    """3. A checkpointed block saves only its input and is recomputed; ours still updates batch norms once."""
    model = network()
    for i in range(len(BLOCK_CONFIG)):
        checkpoint_wrapper(getattr(model.features, f"denseblock{i + 1}"))
    return model


def checkpointed_layers() -> DenseNet:
    """4. Recomputing layer by layer needs the activations of only one layer at a time, which suits DenseNets better."""
    return network("checkpoint")


def offloading(model: DenseNet, images: Tensor, labels: Tensor) -> None:
    """5. Saved tensors can be offloaded: to disk, as here, or from a GPU to host memory (save_on_cpu)."""
    with torch.autograd.graph.saved_tensors_hooks(to_disk, torch.load):
        whole_batch(model, images, labels)


def to_disk(tensor: Tensor) -> IO[bytes]:
    """A temporary file, which is deleted once nobody has it."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with its last reference
    torch.save(tensor.clone(), file)
    file.seek(0)
    return file


def shared() -> DenseNet:
    """6. Our engine saves a block's features once, concatenates nothing, and recomputes what is cheap."""
    return network("shared")


LESSONS: dict[str, tuple[Callable[[], DenseNet], Callable[[DenseNet, Tensor, Tensor], None]]] = {
    "plain": (network, whole_batch),
    "gradient accumulation, 4 parts": (network, gradient_accumulation),
    "a checkpoint around each block": (checkpointed_blocks, whole_batch),
    "a checkpoint around each layer": (checkpointed_layers, whole_batch),
    "plain, offloaded to disk": (network, offloading),
    "shared engine": (shared, whole_batch),
}
"""What builds the network of a lesson, and what runs a forward and backward of it."""


def tour() -> None:
    """Measure where the memory of training goes, and five ways to need less, on one small network, on a CPU.

    TOUR_QUICK=1 in the environment makes it a check of a few seconds, on a smaller network. There are no options.
    """
    images = torch.randn(BATCH_SIZE, 3, IMAGE_SIZE, IMAGE_SIZE, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(BATCH_SIZE) % 10
    held = predict(network(), images.shape, optimizer="sgd").persistent
    print(
        f"parameters {mib(held.parameters)}, with gradients and SGD's momentum {mib(held.total)}, whatever the batch is"
    )
    size = f"{BATCH_SIZE} images of {IMAGE_SIZE}×{IMAGE_SIZE}"
    print(f"\nDenseNet-BC, blocks of {BLOCK_CONFIG} layers, {size}, float32, on the CPU")
    print(f"{'':34}{'peak':>10}{'predicted':>11}{'of plain':>10}{'time':>9}{'gradient off by':>18}")
    whole_batch(model := network().double(), images.double(), labels)
    exact, plain = first_gradient(model), None
    for name, (build, step) in LESSONS.items():
        model = build()
        step(model, images, labels)
        error = ((first_gradient(model) - exact).norm() / exact.norm()).item()
        seconds = min(timed(lambda: step(model, images, labels)) for _ in range(REPETITIONS))  # noqa: B023 - runs now
        peak = tensor_peak(lambda: step(model, images, labels))  # noqa: B023
        plain = plain or (peak, seconds)
        predicted = mib(MetaModel(model).training_step(images.shape).tensor_peak) if step is whole_batch else ""
        ratios = f"{peak / plain[0]:>10.2f}{seconds / plain[1]:>8.2f}×"
        print(f"{name:34}{mib(peak):>10}{predicted:>11}{ratios}{error:>18.0e}")
    print(
        "\nGradients are compared with float64's. Those of accumulation differ since each micro-batch was normalized by"
    )
    print("its own statistics, the others by float32's rounding.")


def timed(step: Callable[[], None]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def first_gradient(model: DenseNet) -> Tensor:
    """The gradient of the first convolution, which rounding errors of all layers reach."""
    gradient = model.get_parameter("features.conv0.weight").grad
    assert gradient is not None
    return gradient.clone()


def mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


if __name__ == "__main__":
    command(tour)
