"""The time of each Triton kernel with each of several tiles, on a GPU: python benchmarks/gpu_tiles.py

For each convolution of the sizes below it prints all candidates, the fastest first, with registers and spills of those
that are launched for the first time. The tile that `host/tiles.py` or `host/conv3x3.py` chooses is marked by a star.
Times are of CUDA graphs of several launches, so that the host's time is not in them. Kernels are compiled before, in
processes side by side.
"""

import argparse
import os
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from rows import commit

from efficient_densenet.kernels.comparison import Case
from efficient_densenet.kernels.interface import StatisticsOutput
from efficient_densenet.kernels.triton_gpu.host import conv1x1, conv3x3, launch, tiles

LAUNCHES = 4
"""Number of launches that one CUDA graph captures."""

CONV3X3 = {
    "densenet_bc_100_12, batch 256": (48, 12, [(256, 32, 32), (256, 16, 16), (256, 8, 8), (64, 8, 8)]),
    "densenet121, batch 64": (128, 32, [(64, 56, 56), (64, 28, 28), (64, 14, 14), (64, 7, 7)]),
}
CONV1X1 = {
    "densenet_bc_100_12, batch 256": (48, [((256, 32, 32), 120), ((256, 16, 16), 204), ((256, 8, 8), 246)]),
    "densenet121, batch 64": (
        128,
        [((64, 56, 56), 160), ((64, 28, 28), 320), ((64, 14, 14), 640), ((64, 7, 7), 768)],
    ),
}
"""Bottleneck and output channels, and shapes; for 1×1 the bottleneck channels, and shapes with input channels."""

Tile = dict[str, Any] | tiles.Tile


class Convolution(NamedTuple):
    """One convolution; the candidates for its tile, the first of them the one that is chosen; and how to launch it."""

    name: str
    candidates: Sequence[Tile]
    launch: Callable[[Tile], Any]
    kind: int = 0
    """Sizes for which Triton compiles a kernel of their own, as one number."""


def conv3x3_tiles(sizes: str, third: str = "BLOCK_OUT", **constants: bool) -> list[dict[str, int]]:
    """Tiles from lines of "rows channels out warps stages"; `third` is the name of the third number."""
    names = "BLOCK_ROWS", "BLOCK_CHANNELS", third, "num_warps", "num_stages"
    return [dict(zip(names, map(int, each.split()), strict=True)) | constants for each in sizes.strip().splitlines()]


def conv1x1_tiles(sizes: str, chosen: tiles.Tile) -> list[tiles.Tile]:
    """Tiles from lines of "rows channels warps stages registers", where 0 registers are no limit."""
    candidates = []
    for each in sizes.strip().splitlines():
        rows, channels, warps, stages, registers = map(int, each.split())
        candidate = chosen._replace(rows=rows, channels=channels, num_warps=warps, num_stages=stages)
        candidates.append(candidate._replace(max_registers=registers or None))
    return candidates


FORWARD_3X3 = """
32 32 16 1 1
32 64 16 2 1
64 32 16 2 1
64 16 16 4 1
64 32 16 4 1
64 64 16 4 1
128 16 16 4 1
128 32 16 4 1
128 32 16 8 1
128 16 16 8 1
128 64 16 8 1
256 16 16 8 1
256 32 16 8 1
64 16 16 4 2
64 32 16 4 3
128 16 16 4 3
128 32 16 4 2
128 32 16 4 3
128 32 16 8 3
"""
GRAD_INPUT = """
16 32 16 1 1
32 32 16 1 1
32 32 16 2 1
64 32 16 2 1
64 32 16 4 1
64 16 16 4 1
64 64 16 4 1
64 32 16 4 2
64 32 16 4 3
128 16 16 4 1
128 32 16 4 1
128 32 16 8 1
128 32 16 4 3
128 64 16 8 1
128 64 16 8 2
256 16 16 8 1
256 32 16 8 1
"""
GRAD_WEIGHT = """
32 32 64 2 1
32 64 32 2 1
32 128 64 4 1
32 128 128 8 1
32 64 128 4 1
64 64 128 8 1
32 32 128 4 1
64 32 128 8 1
64 32 128 4 1
32 64 64 4 1
64 64 64 4 1
64 64 64 8 1
128 32 128 8 1
64 64 128 8 2
32 64 128 8 3
64 32 128 8 3
64 64 64 4 3
"""
FORWARD_1X1 = """
128 32 8 3 128
128 32 8 3 0
128 32 4 3 0
128 32 4 2 0
128 16 4 4 0
128 64 8 2 0
256 32 8 3 0
256 16 8 4 0
64 32 4 3 0
64 32 4 4 0
64 32 8 3 128
64 64 4 3 0
64 16 4 4 0
32 32 4 4 0
32 64 4 3 0
"""
BACKWARD_1X1 = """
16 64 8 2 128
16 64 4 2 0
16 64 8 3 128
16 64 8 4 128
16 64 4 3 0
16 64 4 4 0
16 128 8 3 0
16 32 4 3 0
16 32 4 4 0
32 64 8 2 128
32 64 8 3 128
32 64 8 2 0
32 64 8 3 0
32 64 4 2 0
32 64 4 3 0
32 32 4 2 0
32 32 4 3 0
64 64 8 2 0
64 64 8 3 0
64 32 4 2 0
64 32 8 2 0
32 128 8 2 0
16 128 8 2 0
"""


def convolutions(dtype: torch.dtype, device: str) -> Iterator[Convolution]:
    for name, (channels, out_channels, shapes) in CONV3X3.items():
        for shape in shapes:
            yield from _convolutions3x3(
                f"{name}, {channels}→{out_channels}", shape, channels, out_channels, dtype, device
            )
    for name, (width, sizes) in CONV1X1.items():
        for shape, channels in sizes:
            yield from _convolutions1x1(f"{name}, {channels}→{width}", shape, channels, width, dtype, device)


def _convolutions3x3(
    name: str, shape: Any, channels: int, out_channels: int, dtype: Any, device: str
) -> Iterator[Convolution]:
    case = Case(shape, channels, out_channels, dtype, device=device, padding=0)
    statistics = StatisticsOutput(torch.empty(3, out_channels, device=device), 1e-5)
    weight = case.weight3x3.contiguous(memory_format=torch.channels_last)
    conv = case.conv3x3._replace(weight=weight)
    accumulator = case.accumulator(case.grad_accum)
    shape, block_outs = case.shape, [16, 32] if out_channels > 16 else [16]
    products, limits = conv1x1.product_precision(weight), tiles.device_limits(case.values.device)
    chosen = conv3x3.forward_tile(out_channels, products, len(case.values), limits)
    candidates = [chosen, *(each | {"BLOCK_OUT": block_outs[-1]} for each in conv3x3_tiles(FORWARD_3X3))]

    def forward(tile: Tile) -> Any:
        with mock.patch.object(conv3x3, "forward_tile", return_value=tile):
            return conv3x3.forward(conv, statistics)

    def grad_input(tile: Tile) -> Any:
        with mock.patch.object(conv3x3, "grad_input_tile", return_value=tile):
            return conv3x3._grad_input(case.grad_output, conv, accumulator)

    def grad_weight(tile: Tile) -> Any:
        with mock.patch.object(conv3x3, "grad_weight_tile", return_value=tile):
            return conv3x3._grad_weight(case.grad_output, conv)

    yield Convolution(f"conv3x3_forward {name}, {tuple(shape)}", candidates, forward)
    chosen = conv3x3.grad_input_tile(out_channels, dtype, limits.shared_memory)
    candidates = [chosen, *(each | {"BLOCK_OUT": o} for each in conv3x3_tiles(GRAD_INPUT) for o in block_outs)]
    yield Convolution(f"conv3x3_grad_input {name}, {tuple(shape)}", candidates, grad_input)
    chosen = conv3x3.grad_weight_tile(out_channels, products)
    others = conv3x3_tiles(GRAD_WEIGHT, "BLOCK_COLUMNS", INCREMENTAL=True)
    candidates = [chosen, chosen | {"INCREMENTAL": not chosen["INCREMENTAL"]}, *others]
    yield Convolution(f"conv3x3_grad_weight {name}, {tuple(shape)}", candidates, grad_weight)


def _convolutions1x1(
    name: str, shape: Any, channels: int, width: int, dtype: Any, device: str
) -> Iterator[Convolution]:
    case = Case(shape, channels, width, dtype, device=device, padding=0)
    output = torch.empty(len(case.values), width, dtype=dtype, device=device)
    conv = conv1x1.Conv1x1(case.input, case.weight1x1, output)
    statistics = StatisticsOutput(torch.empty(3, width, device=device), 1e-5)
    accumulator = case.accumulator(case.grad_accum)
    grad_output = case.batch_norm_backward(output, case.grad_output, width)
    precision, limits = conv1x1.product_precision(case.weight1x1), tiles.device_limits(case.values.device)

    def forward(tile: Any) -> Any:
        with mock.patch.object(tiles, "forward_tile", return_value=tile):
            return conv1x1.forward(conv, statistics)

    def backward(tile: Any) -> Any:
        with mock.patch.object(tiles, "backward_tile", return_value=tile):
            return conv1x1.backward(grad_output, case.input, case.weight1x1, accumulator)

    chosen = tiles.forward_tile(width, precision, limits)
    candidates = [chosen, *conv1x1_tiles(FORWARD_1X1, chosen)]
    yield Convolution(f"conv1x1_forward {name}, {shape}", candidates, forward, channels % 4)
    chosen = tiles.backward_tile(width, precision, limits)
    yield Convolution(
        f"conv1x1_backward {name}, {shape}", [chosen, *conv1x1_tiles(BACKWARD_1X1, chosen)], backward, channels % 4
    )


def microseconds(function: Callable[[], Any], replays: int = 7) -> float:
    """The median time of one call in microseconds, from replays of a CUDA graph of several calls."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            function()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / LAUNCHES)
    return sorted(times)[replays // 2]


def measure(convolution: Convolution, share: tuple[int, int] | None = None) -> Iterator[tuple[float, str]]:
    """The time and the description of each candidate; or, with (i, n) as `share`, compile only the i-th of n shares."""
    seen = []
    for i, tile in enumerate(convolution.candidates):
        key = f"{convolution.name.split(',')[0]} {convolution.kind} {tile}".encode()
        if tile in seen or (share and zlib.crc32(key) % share[1] != share[0]):
            continue
        seen.append(tile)
        compiled: list[Any] = []
        original = launch._launch_by_triton

        def record(*arguments: Any, original: Any = original, compiled: Any = compiled) -> Any:
            compiled.append(original(*arguments))
            return compiled[-1]

        settings = tile if isinstance(tile, dict) else tile._asdict()
        described = " ".join(f"{name.removeprefix('BLOCK_').lower()}={value}" for name, value in settings.items())
        try:
            with mock.patch.object(launch, "_launch_by_triton", record):
                convolution.launch(tile)
            named = {getattr(getattr(each, "metadata", None), "name", ""): each for each in reversed(compiled)}
            kernel = named.get(convolution.name.split()[0])
            if kernel is not None:
                described += f"  {kernel.n_regs} registers, {kernel.n_spills} spills, {kernel.metadata.shared} shared"
            if not share:
                yield microseconds(lambda tile=tile: convolution.launch(tile)), described + ("  *" if i == 0 else "")
        except Exception as error:
            yield float("inf"), f"{described}: {type(error).__name__}: {' '.join(str(error).split())[:100]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--precision", default="tf32", choices=["tf32", "ieee", "bf16", "fp16"])
    parser.add_argument("--only", default="", help="convolutions whose name has this in it")
    parser.add_argument("--compile", help=argparse.SUPPRESS)  # i/n: compile every n-th candidate
    parser.add_argument("--top", type=int, default=6, help="candidates that are printed of each convolution")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(
            "error: found no CUDA device that torch can use, which gpu_tiles.py needs: run it on a machine with one"
        )
    torch.backends.cudnn.allow_tf32 = arguments.precision == "tf32"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(arguments.precision, torch.float32)
    if arguments.compile:
        index, count = map(int, arguments.compile.split("/"))
        for convolution in convolutions(dtype, "cuda"):
            if arguments.only in convolution.name:
                for _ in measure(convolution, (index, count)):
                    pass
        return
    count = min(14, os.cpu_count() or 1)
    command = [sys.executable, __file__, "--precision", arguments.precision, "--only", arguments.only]
    processes = [subprocess.Popen([*command, "--compile", f"{i}/{count}"]) for i in range(count)]
    for process in processes:
        process.wait()  # what it has not compiled is compiled below
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {arguments.precision}, commit {commit()}")
    for convolution in convolutions(dtype, "cuda"):
        if arguments.only in convolution.name:
            timed = sorted(measure(convolution))
            print(convolution.name, flush=True)
            for i, (time, described) in enumerate(timed):
                if i < arguments.top or described.endswith("*"):
                    print(f"  {time:8.1f} µs  {described}", flush=True)


if __name__ == "__main__":
    main()
