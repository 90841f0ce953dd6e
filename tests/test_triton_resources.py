"""The kernels of 1×1 convolutions, compiled for GPUs that need not be there: they fit, do not spill, many are resident.

The launches are those of the host code, with the tiles that it chooses for each device.
"""

from typing import NamedTuple

import pytest
import torch
from helpers import kernel_modules
from triton_resources import ARCHITECTURES, LIMITS, Compilation, Resources, compile_all

from efficient_densenet.kernels.interface import (
    AffineInput,
    BatchNormAffine,
    BatchNormBackward,
    Conv1x1,
    GradAccumulator,
)

pytest.importorskip("triton", reason="needs Triton")
conv1x1, launch, tiles = kernel_modules("triton_gpu", "conv1x1", "launch", "tiles")

MODELS = {"BC-100-12": (48, 216), "densenet121": (128, 512), "densenet161": (192, 768)}
"""Output and input channels of a 1×1 convolution of each."""

PRECISIONS = {"tf32": torch.float32, "ieee": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MULTIPROCESSORS = {80: 108, 86: 82, 89: 128, 90: 132, 120: 170}

LOW_OCCUPANCY = {
    ("densenet161", "conv1x1_backward"): "192 × 64 sums and a weight of as many take more than 128 registers of 256 "
    "threads. The loads of the next tile of rows are in flight meanwhile (num_stages=2): "
    "32 rows of 64 channels and of 2 · 192 are 57 KB in float32, of the 25 KB that hide the latency of an H200.",
}
"""Why fewer than a quarter of the warps are resident on compute capability 8.0 and 9.0, unless products are in float32
without tensor cores, whose tiles are smaller. Those with 100 KiB of shared memory on a multiprocessor (8.6, 8.9, 12.0)
hold one block of the TF32 tiles, of 8 warps in 48."""


class Job(NamedTuple):
    model: str
    precision: str
    arch: int


class Recorded(NamedTuple):
    kernel: str
    estimate: int
    resident: int
    compilation: Compilation


def limits_of(arch):
    limits = LIMITS[arch]
    return tiles.DeviceLimits(MULTIPROCESSORS[arch], limits.shared_memory, limits.shared_memory_of_a_block)


def record(job, monkeypatch):
    """The launches of a forward with statistics and of a backward, which run nothing."""
    launches = []
    limits = limits_of(job.arch)
    monkeypatch.setattr(tiles, "device_limits", lambda device: limits)
    monkeypatch.setattr(
        launch, "launch", lambda kernel, grid, *args, **constants: launches.append((kernel, args, constants))
    )
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", job.precision == "tf32")
    dtype, (width, channels), rows = PRECISIONS[job.precision], MODELS[job.model], 12544

    def matrix(rows, columns, dtype=dtype):
        return torch.empty(rows, columns, dtype=dtype, device="meta")

    norm = BatchNormAffine(*matrix(4, channels, torch.float32))
    input, weight, output = AffineInput(matrix(rows, channels), norm), matrix(width, channels), matrix(rows, width)
    conv1x1.forward(Conv1x1(input, weight, output), with_statistics=True)
    mean, inv_std = matrix(2, width, torch.float32)
    grad = BatchNormBackward(output, output, inv_std, mean, matrix(2, width, torch.float32), rows)
    accumulator = GradAccumulator(matrix(rows, channels), sums=matrix(2, channels, torch.float32))
    conv1x1.backward(grad, input, weight, accumulator)
    precision = conv1x1.product_precision(weight)
    forward_tile, backward_tile = (
        tiles.forward_tile(width, precision, limits),
        tiles.backward_tile(width, precision, limits),
    )
    estimates = {
        "conv1x1_forward": (forward_tile, forward_tile.forward_shared_memory(precision)),
        "conv1x1_backward": (backward_tile, backward_tile.backward_shared_memory(precision)),
    }
    vectors = ("norm_weight", "norm_bias", "mean", "inv_std", "out_mean", "out_inv_std", "out_sums")
    recorded = []
    for kernel, args, constants in launches:
        if kernel.fn.__name__ in estimates:
            tile, estimate = estimates[kernel.fn.__name__]
            compilation = Compilation.of(kernel, args, constants, job.arch, misaligned=vectors)
            resident = tile.resident_blocks(estimate, limits)
            recorded.append(Recorded(kernel.fn.__name__, estimate, resident, compilation))
    return recorded


def check(job, recorded: Recorded, resources: Resources):
    print(job, recorded.kernel, resources, f"{resources.blocks} blocks, {resources.occupancy:.0%}")
    assert resources.spills == 0
    assert resources.fits
    assert resources.shared_memory <= recorded.estimate
    assert resources.blocks >= recorded.resident
    if job.arch in (80, 90):
        is_low = job.precision != "ieee" and (job.model, recorded.kernel) in LOW_OCCUPANCY
        assert (resources.occupancy < 0.25) == is_low


def check_all(jobs, monkeypatch):
    pairs = [(job, recorded) for job in jobs for recorded in record(job, monkeypatch)]
    assert len(pairs) == 2 * len(jobs)
    for (job, recorded), resources in zip(pairs, compile_all([each.compilation for _, each in pairs]), strict=True):
        check(job, recorded, resources)


def test_the_most_common_kernels(monkeypatch):
    check_all(
        [Job("BC-100-12", "tf32", 80), Job("densenet121", "tf32", 90), Job("densenet161", "tf32", 86)], monkeypatch
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", MODELS)
def test_every_kernel(model, precision, arch, monkeypatch):
    check_all([Job(model, precision, arch)], monkeypatch)
