"""A training step on a GPU, modelled without one: its launches and bytes are counted, its times are estimates.

    python benchmarks/gpu_model.py --model densenet_bc_100_12 --batch_size 256 --precision tf32
    python benchmarks/gpu_model.py --model densenet121 --batch_size 64 --precision bf16 --kernels
    python benchmarks/gpu_model.py --page docs/benchmarks.md

The step is traced on the meta device (`gpu_step`), every operation and Triton launch with its bytes (`gpu_trace`,
`gpu_aten`, `gpu_kernels`); published figures of four GPUs then say how long it would take (`gpu_devices`). On a machine
with one of them the measured times stand beside the estimates. `--folder` writes all of it to a CSV file, and `--page`
writes the tables of a document again.
"""

import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import rows as results
import torch
from gpu_devices import DEVICES, Device, Estimate, estimate, estimate_compiled, estimate_graph, fused
from gpu_measured import Measured, measure_method
from gpu_step import trace_step
from gpu_trace import StepTrace
from options import parse_arguments, run_command
from settings import Setting, architecture, expand

COUNTING_DEVICE = DEVICES["H200"]
"""For which launches and bytes are counted: by its L2 cache, and by its limits where kernels read them."""

LABELS = {
    "plain": "`plain`",
    "graph_plain": "`plain` in a CUDA graph",
    "compile_plain": "`torch.compile` of `plain`",
    "shared": "`shared`",
    "graph_shared": "`shared` in a CUDA graph",
}
FIRST_KERNELS = 10
COMMAND = re.compile(
    r"(<!-- python benchmarks/gpu_model\.py (.+?) -->\n)(.*?)(<!-- end of the estimates -->)", re.DOTALL
)


class Counts(NamedTuple):
    """What is counted of a step of one engine.

    Attributes:
        aten: launches of ATen's operations.
        triton: launches of Triton kernels.
        layer_forward: launches of either kind that one more layer in each block adds to the forward, for each block.
        layer_backward: the same of the backward.
        bytes: what is moved through memory.
        tensor_peak: the most bytes that tensors hold at once.
    """

    aten: int
    triton: int
    layer_forward: float
    layer_backward: float
    bytes: int
    tensor_peak: int

    @property
    def launches(self) -> int:
        return self.aten + self.triton


class Row(NamedTuple):
    """The time of a method on a device."""

    method: str
    device: Device
    estimate: Estimate
    over_plain: float
    measured: Measured | None


def model_gpu(
    model: Any = "densenet_bc_100_12",
    batch_size: Any = 256,
    image_size: int = 0,
    precision: Any = "tf32",
    layout: Any = "contiguous",
    kernels: bool = False,
    folder: str = "",
    page: str = "",
) -> None:
    """Print what a training step asks of a GPU, counted, and how long it would take, estimated.

    Args:
        model: a name of the zoo, or densenet_bc_<depth>_<growth rate>, or several of them.
        batch_size: number of images, or several.
        image_size: height and width of the images. Default: 32 for models for CIFAR, 224 for ImageNet.
        precision: float32, tf32, bf16 or fp16 (by autocast), or several of them.
        layout: contiguous or channels_last, or both.
        kernels: list the first ten kernels by bytes too.
        folder: where to write a CSV file for each configuration. Default: none is written.
        page: a document in which what its commands print is written again.
    """
    if page:
        Path(page).write_text(rewritten(Path(page).read_text()))
        return
    if torch.cuda.is_available() and device_here() is None:
        print(f"{torch.cuda.get_device_name()} is not among the devices of gpu_devices.py: nothing is measured")
    for setting in expand(model, batch_size, image_size, precision, layout, device="cuda"):
        counts, traces = _counts_and_traces(setting)
        rows = times(setting, traces["plain"], measured_on=device_here())
        print(report(setting, counts, traces, rows, kernels))
        if folder:
            _write(Path(folder), setting, counts, rows)


def rewritten(text: str) -> str:
    """A document with what its commands print, here and now and without a measurement."""

    def output(match: re.Match[str]) -> str:
        _, options = parse_arguments(model_gpu, shlex.split(match[2]))
        kernels = options.pop("kernels")
        settings = expand(**{name: options[name] for name in options if name not in ("folder", "page")}, device="cuda")
        reports = []
        for setting in settings:
            counts, traces = _counts_and_traces(setting)
            reports.append(report(setting, counts, traces, times(setting, traces["plain"]), kernels))
        return f"{match[1]}{''.join(reports)}\n{match[4]}"

    return COMMAND.sub(output, text)


def _counts_and_traces(setting: Setting) -> tuple[dict[str, Counts], dict[str, StepTrace]]:
    traces = {engine: trace_step(setting, engine, device=COUNTING_DEVICE) for engine in ("plain", "shared")}
    return {engine: count(setting, engine, trace) for engine, trace in traces.items()}, traces


def count(setting: Setting, engine: str, trace: StepTrace) -> Counts:
    """The counts of a step, of which `trace` is the trace for `COUNTING_DEVICE`."""
    deeper = trace_step(setting, engine, device=COUNTING_DEVICE, extra_layers=1)
    num_blocks = len(architecture(setting.model)["block_config"])
    forward, backward = (
        (deeper.launches(phase) - trace.launches(phase)) / num_blocks for phase in ("forward", "backward")
    )
    return Counts(
        aten=trace.launches(is_triton=False),
        triton=trace.launches(is_triton=True),
        layer_forward=forward,
        layer_backward=backward,
        bytes=trace.bytes(COUNTING_DEVICE.l2_bytes),
        tensor_peak=trace.tensor_peak,
    )


def times(setting: Setting, plain: StepTrace, measured_on: Device | None = None) -> list[Row]:
    """Each method on each device that has the precision; measured on this machine's, `measured_on`."""
    rows = []
    for device in DEVICES.values():
        if setting.precision not in device.flops:
            continue
        shared = trace_step(setting, "shared", kernels="triton" if device.has_triton else "portable", device=device)
        arguments = device, setting.precision
        estimates = {
            "plain": estimate(plain, *arguments),
            "graph_plain": estimate_graph(plain, *arguments),
            "compile_plain": estimate_compiled(plain, *arguments),
            "shared": estimate(shared, *arguments),
            "graph_shared": estimate_graph(shared, *arguments),
        }
        for method, each in estimates.items():
            measured = measure_method(method, setting) if device is measured_on else None
            rows.append(Row(method, device, each, each.seconds / estimates["plain"].seconds, measured))
    return rows


def device_here() -> Device | None:
    """The device of this machine, if it has a GPU that the table knows."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((device for part, device in DEVICES.items() if part in name), None)


def report(
    setting: Setting, counts: dict[str, Counts], traces: dict[str, StepTrace], rows: list[Row], kernels: bool
) -> str:
    """The configuration and its tables, in Markdown."""
    size = f"{setting.image_size}×{setting.image_size}"
    title = f"{setting.model}, batch {setting.batch_size}, images of {size}, {setting.precision}, {setting.layout}:"
    tables = [_counts_table(counts, traces["plain"])]
    tables += [_kernels_table(engine, trace) for engine, trace in traces.items()] if kernels else []
    tables.append(_times_table(rows))
    return "\n".join(["", title, "", *("".join(f"| {' | '.join(line)} |\n" for line in table) for table in tables)])


def _counts_table(counts: dict[str, Counts], plain: StepTrace) -> Iterable[tuple[str, ...]]:
    yield "counted", "ATen", "Triton", "launches", "a layer, forward + backward", "traffic", "tensor peak"
    yield "---", *["---:"] * 6
    for engine, each in counts.items():
        bytes_ratio, peak_ratio = each.bytes / counts["plain"].bytes, each.tensor_peak / counts["plain"].tensor_peak
        yield (
            LABELS[engine],
            *(f"{number:,}" for number in (each.aten, each.triton, each.launches)),
            f"{each.layer_forward:.1f} + {each.layer_backward:.1f}",
            f"{each.bytes / 1e9:.2f} GB ({bytes_ratio:.3f}×)",
            f"{each.tensor_peak / 2**20:,.0f} MiB ({peak_ratio:.3f}×)",
        )
    compiled = fused(plain)
    size = compiled.bytes(COUNTING_DEVICE.l2_bytes)
    traffic = f"{size / 1e9:.2f} GB ({size / counts['plain'].bytes:.3f}×)"
    yield f"{LABELS['compile_plain']}, estimated", "–", "–", f"{compiled.launches():,}", "–", traffic, "–"


def _kernels_table(engine: str, trace: StepTrace) -> Iterable[tuple[str, ...]]:
    total = trace.bytes(COUNTING_DEVICE.l2_bytes)
    yield f"{LABELS[engine]}, counted", "launches", "traffic", "of the step"
    yield "---", *["---:"] * 3
    for name, launches, size in trace.by_name(COUNTING_DEVICE.l2_bytes)[:FIRST_KERNELS]:
        yield name, f"{launches:,}", f"{size / 1e9:.2f} GB", f"{size / total:.1%}"


def _times_table(rows: list[Row]) -> Iterable[tuple[str, ...]]:
    devices = list(dict.fromkeys(row.device.name for row in rows))
    yield "estimated step", *devices
    yield "---", *["---:"] * len(devices)
    for method, label in LABELS.items():
        yield label, *(_cell(row) for row in rows if row.method == method)


def _cell(row: Row) -> str:
    host = ", host" if row.estimate.host > row.estimate.device else ""
    measured = f"; measured {row.measured.seconds * 1000:.1f} ms" if row.measured else ""
    return f"{row.estimate.seconds * 1000:.1f} ms ({row.over_plain:.2f}×){host}{measured}"


def _write(folder: Path, setting: Setting, counts: dict[str, Counts], rows: list[Row]) -> None:
    layout = "" if setting.layout == "contiguous" else f"_{setting.layout}"
    path = folder / f"gpu_model_{setting.model}_{setting.batch_size}_{setting.precision}{layout}.csv"
    results.write(path, [_record(setting, counts, row) for row in rows])


def _record(setting: Setting, counts: dict[str, Counts], row: Row) -> dict[str, Any]:
    """A row of the file. The counts are of the engine in eager mode, with the Triton kernels."""
    counted = counts.get(row.method) if row.device.has_triton else None
    measured = row.measured
    return {
        "model": setting.model,
        "batch_size": setting.batch_size,
        "image_size": setting.image_size,
        "precision": setting.precision,
        "layout": setting.layout,
        "method": row.method,
        "device_name": row.device.name,
        "estimated_ms": f"{row.estimate.seconds * 1000:.2f}",
        "estimated_device_ms": f"{row.estimate.device * 1000:.2f}",
        "estimated_host_ms": f"{row.estimate.host * 1000:.2f}",
        "estimated_over_plain": f"{row.over_plain:.3f}",
        "measured_ms": f"{measured.seconds * 1000:.2f}" if measured else "",
        "measured_tensor_peak_mib": f"{measured.tensor_peak / 2**20:.1f}" if measured and measured.tensor_peak else "",
        "aten_launches": counted.aten if counted else "",
        "triton_launches": counted.triton if counted else "",
        "gigabytes": f"{counted.bytes / 1e9:.3f}" if counted else "",
        "traffic_over_plain": f"{counted.bytes / counts['plain'].bytes:.3f}" if counted else "",
        "tensor_peak_mib": f"{counted.tensor_peak / 2**20:.1f}" if counted else "",
        **results.provenance(),
    }


if __name__ == "__main__":
    run_command(model_gpu)
