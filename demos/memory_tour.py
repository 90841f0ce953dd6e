"""Where the memory of training goes, and five ways to need less: measured on one small network, on a CPU.

python demos/memory_tour.py                  about a minute
TOUR_QUICK=1 python demos/memory_tour.py     a check of a few seconds, on a smaller network

PYTORCH_INTRO_CHECK_MODE=1 is a quick check too.

Each lesson below is a few lines that can be copied, and asserts what it teaches. Every number printed is measured in
this run: the peak bytes of tensors during a forward and a backward, above what was allocated before. Beside it stands
what sizes alone predict, before anything ran.
"""

import os
import tempfile
import time
from collections.abc import Callable
from typing import IO

import torch
import torch.nn.functional as F
from training import command

from efficient_densenet import DenseNet
from efficient_densenet.checkpoint import checkpoint_wrapper
from efficient_densenet.memory import predict, tensor_peak
from efficient_densenet.memory.step import MetaModel

QUICK = any(os.environ.get(name, "") not in ("", "0") for name in ("TOUR_QUICK", "PYTORCH_INTRO_CHECK_MODE"))
BLOCK_CONFIG, BATCH_SIZE, IMAGE_SIZE = ((2, 2, 2), 8, 16) if QUICK else ((6, 6, 6), 64, 32)
REPETITIONS = 1 if QUICK else 3
Lesson = tuple[DenseNet, Callable[[], None]]
"""A network, and a function that runs its forward and backward."""
PREDICTED = ("plain", "a checkpoint around each block", "a checkpoint around each layer", "shared engine")
"""The lessons whose step is that of the network alone, on the whole batch."""


def network(engine: str = "plain") -> DenseNet:
    """The same network with the same weights in every lesson; only its execution differs."""
    torch.manual_seed(0)
    return DenseNet(12, BLOCK_CONFIG, efficient=engine)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH_SIZE, 3, IMAGE_SIZE, IMAGE_SIZE, generator=generator), torch.arange(BATCH_SIZE) % 10


def whole_batch(model: DenseNet) -> Lesson:
    images, labels = batch()
    return model, lambda: F.cross_entropy(model(images), labels).backward()


def parameter_memory() -> None:
    """1. Parameters, their gradients and SGD's momentum take three times the weights, whatever the batch size."""
    small, large = network(), DenseNet(24, BLOCK_CONFIG)
    for name, model in (("small", small), ("large", large)):
        count = sum(parameter.numel() for parameter in model.parameters())
        held = predict(model, batch()[0].shape, optimizer="sgd").persistent
        assert held.parameters == 4 * count, "a float32 parameter takes 4 bytes"
        weights, total = mib(held.parameters), mib(held.total)
        print(f"1. the {name} network: {count:,} parameters, {weights}, with gradients and momentum {total}")
    assert sum(p.numel() for p in large.parameters()) > 3 * sum(p.numel() for p in small.parameters())
    print("   Twice the growth rate is nearly four times the parameters: still not where the memory goes")


def plain() -> Lesson:
    """2. Autograd saves activations for the backward: the output of every concatenation, every norm, every ReLU."""
    return whole_batch(network())


def gradient_accumulation(micro_batches: int = 4) -> Lesson:
    """3. Gradients accumulate, so a batch can be run as micro-batches; each batch norm then sees one of them."""
    model, (images, labels) = network(), batch()

    def step() -> None:
        for some_images, some_labels in zip(images.chunk(micro_batches), labels.chunk(micro_batches), strict=True):
            (F.cross_entropy(model(some_images), some_labels) / micro_batches).backward()

    return model, step


def check_accumulation(micro_batches: int = 4) -> None:
    """Gradients of micro-batches add up to those of the batch, where batch norms use their running statistics."""
    (model, step), (whole, whole_step) = gradient_accumulation(micro_batches), whole_batch(network())
    for each, run in ((model, step), (whole, whole_step)):
        each.eval()
        run()
    torch.testing.assert_close(first_gradient(model), first_gradient(whole), rtol=1e-3, atol=1e-6)


def checkpointed_blocks() -> Lesson:
    """4. A checkpointed block saves only its input and is recomputed; ours still updates batch norms once."""
    model = network()
    for i in range(len(BLOCK_CONFIG)):
        checkpoint_wrapper(getattr(model.features, f"denseblock{i + 1}"))
    return whole_batch(model)


def check_recomputation() -> None:
    """Recomputing changes no gradient, and each batch norm counts one batch, though its block ran twice."""
    (model, step), (whole, whole_step) = checkpointed_blocks(), plain()
    step()
    whole_step()
    torch.testing.assert_close(first_gradient(model), first_gradient(whole), rtol=1e-3, atol=1e-6)
    assert all(int(b) == 1 for name, b in model.named_buffers() if name.endswith("num_batches_tracked"))


def checkpointed_layers() -> Lesson:
    """5. Recomputing layer by layer needs the activations of only one layer at a time, which suits DenseNets better."""
    return whole_batch(network("checkpoint"))


def offloading() -> Lesson:
    """6. Saved tensors can be offloaded: to disk, as here, or from a GPU to host memory (save_on_cpu)."""
    model, step = whole_batch(network())

    def offloaded() -> None:
        with torch.autograd.graph.saved_tensors_hooks(to_disk, from_disk):
            step()

    return model, offloaded


def to_disk(tensor: torch.Tensor) -> IO[bytes] | torch.Tensor:
    """A temporary file, which is deleted once nobody has it; parameters are leaves, and stay in memory in any case."""
    if tensor.is_leaf or tensor.numel() < 1000:
        return tensor
    file = tempfile.TemporaryFile()  # noqa: SIM115 - closed with its last reference
    torch.save(tensor.contiguous().clone(), file)
    return file


def from_disk(saved: IO[bytes] | torch.Tensor) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    saved.seek(0)
    return torch.load(saved)


def shared() -> Lesson:
    """7. Our engine saves a block's features once, concatenates nothing, and recomputes what is cheap."""
    return whole_batch(network("shared"))


LESSONS = {
    "plain": plain,
    "gradient accumulation, 4 parts": gradient_accumulation,
    "a checkpoint around each block": checkpointed_blocks,
    "a checkpoint around each layer": checkpointed_layers,
    "plain, offloaded to disk": offloading,
    "shared engine": shared,
}


def measure(lesson: Lesson) -> tuple[int, float, torch.Tensor]:
    """Peak bytes, the fastest step in seconds, and the gradient of the first convolution."""
    model, step = lesson
    step()
    gradient = first_gradient(model)
    seconds = []
    for _ in range(REPETITIONS):
        started = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - started)
    return tensor_peak(step), min(seconds), gradient


def tour() -> None:
    """Measure where the memory of training goes, and five ways to need less, on one small network, on a CPU.

    TOUR_QUICK=1 in the environment makes it a check of a few seconds, on a smaller network. There are no options.
    """
    parameter_memory()
    check_accumulation()
    check_recomputation()
    size = f"{BATCH_SIZE} images of {IMAGE_SIZE}×{IMAGE_SIZE}"
    print(f"\nDenseNet-BC, blocks of {BLOCK_CONFIG} layers, {size}, float32, on the CPU")
    print(f"{'':34}{'peak':>10}{'predicted':>11}{'of plain':>10}{'time':>9}{'gradient off by':>18}")
    exact = exact_gradient()
    reference = None
    for name, lesson in LESSONS.items():
        model, step = lesson()
        predicted = mib(MetaModel(model).training_step(batch()[0].shape).tensor_peak) if name in PREDICTED else ""
        peak, seconds, gradient = measure((model, step))
        reference = reference or (peak, seconds)
        error = ((gradient - exact).norm() / exact.norm()).item()
        assert name == "plain" or peak < reference[0], f"{name} saves nothing"
        assert error < 1e-4 or "accumulation" in name, f"{name} has another gradient"
        ratios = f"{peak / reference[0]:>10.2f}{seconds / reference[1]:>8.2f}×"
        print(f"{name:34}{mib(peak):>10}{predicted:>11}{ratios}{error:>18.0e}")
    print(
        "\nGradients are compared with float64's. Those of accumulation differ for another reason than rounding: each"
    )
    print("micro-batch was normalized by its own statistics. The others differ by float32's rounding.")


def exact_gradient() -> torch.Tensor:
    """The gradient of the first convolution in float64; rounding errors of all layers reach this one."""
    model, (images, labels) = network().double(), batch()
    F.cross_entropy(model(images.double()), labels).backward()
    return first_gradient(model)


def first_gradient(model: DenseNet) -> torch.Tensor:
    gradient = model.get_parameter("features.conv0.weight").grad
    assert gradient is not None
    return gradient.clone()


def mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


if __name__ == "__main__":
    command(tour)
