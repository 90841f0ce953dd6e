"""Count what a training step asks of a GPU, without one: launches, bytes moved, the tensor peak, blocks of launches.

    python benchmarks/gpu_counts.py --model densenet_bc_100_12 --batch_size 256 --precision tf32
    python benchmarks/gpu_counts.py --what blocks --model densenet121 --batch_size 16,64,256
    python benchmarks/gpu_counts.py --page docs/benchmarks.md

Each line of the table is a step (forward, cross entropy, backward, gradients None before) on the meta device, as
`gpu_trace` sees it. With `--what blocks`, a line is a kernel of such steps by the shared engine, and a column a batch
size. `--page` writes the tables of a document again.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu_trace import StepTrace, trace_step
from methods import LAYOUTS, Setting, architecture, expand
from options import run_command
from pages import rewritten

from efficient_densenet import DenseNet

MULTIPROCESSORS = 132
"""Of an H100."""


def count(
    model: Any = "densenet_bc_100_12",
    batch_size: Any = 256,
    image_size: int = 0,
    precision: Any = "tf32",
    layout: Any = "contiguous",
    what: str = "step",
    page: str = "",
) -> None:
    """Print what a training step by plain modules and by the shared engine asks of a GPU.

    Args:
        model: a name of the zoo, or densenet_bc_<depth>_<growth rate>, or several of them.
        batch_size: number of images, or several.
        image_size: height and width of the images. Default: 32 for models for CIFAR, 224 for ImageNet.
        precision: float32, tf32, bf16 or fp16 (by autocast), or several of them.
        layout: contiguous or channels_last, or both.
        what: step, or blocks: of each kernel the launches, and the blocks of a launch.
        page: a document in which what its commands print is written again.
    """
    if page:
        Path(page).write_text(rewritten_counts(Path(page).read_text()))
        return
    print(_reports(model, batch_size, image_size, precision, layout, what=what))


def rewritten_counts(text: str) -> str:
    """A document with what its commands print now."""
    return rewritten(text, "gpu_counts.py", count, _reports)


def _reports(*options: Any, what: str = "step", **named: Any) -> str:
    settings = expand(*options, **named, device="cuda")
    if what == "step":
        return "".join(map(report, settings))
    if what != "blocks":
        raise ValueError(f"unknown {what!r}: take 'step' or 'blocks'")
    tables = defaultdict[Setting, list[Setting]](list)
    for each in settings:
        tables[replace(each, batch_size=0)].append(each)
    return "".join(map(report_of_blocks, tables.values()))


def report(setting: Setting) -> str:
    """The configuration and the counts of both engines, in Markdown."""
    return _in_markdown(f"{setting.model}, batch {setting.batch_size}, {_images(setting)}:", _table(setting))


def report_of_blocks(settings: Sequence[Setting]) -> str:
    """The blocks of the shared engine's launches, in Markdown; `settings` differ in their batch size alone."""
    return _in_markdown(f"{settings[0].model}, {_images(settings[0])}:", _table_of_blocks(settings))


def _images(setting: Setting) -> str:
    return f"images of {setting.image_size}×{setting.image_size}, {setting.precision}, {setting.layout}"


def _in_markdown(title: str, rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(["", title, "", "".join(f"| {' | '.join(cells)} |\n" for cells in rows)])


def _table_of_blocks(settings: Sequence[Setting]) -> Iterable[Sequence[str]]:
    title = f"blocks of a launch: fewest / median / most; launches with fewer than {MULTIPROCESSORS}"
    yield title, *(f"batch {each.batch_size}" for each in settings)
    yield "---", *["---:"] * len(settings)
    of_batches = [_blocks(each) for each in settings]
    for name in of_batches[0]:
        yield f"`{name}`", *(_spread(blocks[name]) for blocks in of_batches)


def _blocks(setting: Setting) -> dict[str, list[int]]:
    """The number of blocks of each launch, by kernel, in the order of the first launches."""
    blocks = defaultdict[str, list[int]](list)
    for each in trace(setting, "shared").computations:
        if each.is_triton:
            blocks[each.name].append(math.prod(each.grid))
    return blocks


def _spread(blocks: list[int]) -> str:
    few = sum(number < MULTIPROCESSORS for number in blocks)
    spread = (min(blocks), statistics.median(blocks), max(blocks)) if len(set(blocks)) > 1 else blocks[:1]
    return f"{' / '.join(f'{round(number):,}' for number in spread)}; {few} of {len(blocks)}"


def _table(setting: Setting) -> Iterable[tuple[str, ...]]:
    yield "counted", "ATen", "Triton", "launches", "a layer, forward + backward", "memory", "L2", "L1", "tensor peak"
    yield "---", *["---:"] * 8
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
            *(f"{each / 1e9:.2f} GB" if engine == "shared" else "–" for each in (step.l2_bytes, step.l1_bytes)),
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
