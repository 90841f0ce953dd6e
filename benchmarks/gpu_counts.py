"""Count what a training step asks of a GPU, without one: launches, bytes moved, the tensor peak.

    python benchmarks/gpu_counts.py --model densenet_bc_100_12 --batch_size 256 --precision tf32
    python benchmarks/gpu_counts.py --page docs/benchmarks.md

Each line of the table is a step (forward, cross entropy, backward, gradients None before) on the meta device, as
`gpu_trace` sees it. `--page` writes the tables of a document again.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from gpu_trace import StepTrace, trace_step
from methods import LAYOUTS, Setting, architecture, expand
from options import run_command
from pages import rewritten

from efficient_densenet import DenseNet


def count(
    model: Any = "densenet_bc_100_12",
    batch_size: Any = 256,
    image_size: int = 0,
    precision: Any = "tf32",
    layout: Any = "contiguous",
    page: str = "",
) -> None:
    """Print what a training step by plain modules and by the shared engine asks of a GPU.

    Args:
        model: a name of the zoo, or densenet_bc_<depth>_<growth rate>, or several of them.
        batch_size: number of images, or several.
        image_size: height and width of the images. Default: 32 for models for CIFAR, 224 for ImageNet.
        precision: float32, tf32, bf16 or fp16 (by autocast), or several of them.
        layout: contiguous or channels_last, or both.
        page: a document in which what its commands print is written again.
    """
    if page:
        Path(page).write_text(rewritten_counts(Path(page).read_text()))
        return
    print(_reports(model, batch_size, image_size, precision, layout))


def rewritten_counts(text: str) -> str:
    """Return the document with its tables replaced by the present counts."""
    return rewritten(text, "gpu_counts.py", count, _reports)


def _reports(*options: Any, **named: Any) -> str:
    return "".join(map(report, expand(*options, **named, device="cuda")))


def report(setting: Setting) -> str:
    """The configuration and the counts of both engines, in Markdown."""
    images = f"images of {setting.image_size}×{setting.image_size}, {setting.precision}, {setting.layout}"
    rows = "".join(f"| {' | '.join(cells)} |\n" for cells in _table(setting))
    return "\n".join(["", f"{setting.model}, batch {setting.batch_size}, {images}:", "", rows])


def _table(setting: Setting) -> Iterable[tuple[str, ...]]:
    yield "counted", "ATen", "Triton", "launches", "a layer, forward + backward", "bytes", "tensor peak"
    yield "---", *["---:"] * 6
    plain = trace(setting, "plain")
    for engine in ("plain", "shared"):
        step = trace(setting, engine)
        launches = (step.launches(is_triton=triton) for triton in (False, True, None))
        forward, backward = layer_launches(setting, engine, step)
        yield (
            f"`{engine}`",
            *(f"{number:,}" for number in launches),
            f"{forward:.1f} + {backward:.1f}",
            f"{step.bytes / 1e9:.2f} GB ({step.bytes / plain.bytes:.3f}×)",
            f"{step.peak / 2**20:,.0f} MiB ({step.peak / plain.peak:.3f}×)",
        )


def layer_launches(setting: Setting, engine: str, step: StepTrace) -> tuple[float, float]:
    """The launches that one more layer in a block adds to the forward and to the backward, averaged over the blocks."""
    deeper, num_blocks = trace(setting, engine, extra_layers=1), len(architecture(setting.model)["block_config"])
    forward, backward = (deeper.launches(phase) - step.launches(phase) for phase in ("forward", "backward"))
    return forward / num_blocks, backward / num_blocks


def trace(setting: Setting, engine: str, extra_layers: int = 0) -> StepTrace:
    """A step of the model on the meta device, each of whose blocks has `extra_layers` more."""
    arguments = architecture(setting.model)
    blocks = tuple(num_layers + extra_layers for num_layers in arguments["block_config"])
    memory_format: Any = LAYOUTS[setting.layout]
    with torch.device("meta"):
        network = DenseNet(**(arguments | {"block_config": blocks, "efficient": engine}))
        images = torch.empty(setting.batch_size, 3, setting.image_size, setting.image_size)
    network.to(memory_format=memory_format)
    return trace_step(network, images.contiguous(memory_format=memory_format), setting.precision)


if __name__ == "__main__":
    run_command(count)
