"""The Triton kernels, compiled for GPUs that need not be there: they fit, do not spill, many are resident.

The launches are those of the host code, with the tiles that it chooses for each device.
"""

import functools
import itertools
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from helpers import kernel_modules
from triton_resources import ARCHITECTURES, LIMITS, Compilation, compile_all

from efficient_densenet.kernels.activations import RELU, TABLE
from efficient_densenet.kernels.comparison import Case, StemCase
from efficient_densenet.kernels.interface import (
    AffineInput,
    BatchNormAffine,
    BatchNormBackward,
    Conv1x1,
    GradAccumulator,
    StatisticsOutput,
)
from efficient_densenet.kernels.max_pooling import MaxPool

KERNELS_PAGE = Path(__file__).parents[1] / "docs" / "kernels.md"
triton = pytest.importorskip("triton", reason="needs Triton")
common, conv1x1, conv3x3, stem, launch, tiles, device_functions = kernel_modules(
    "triton_gpu", "common", "conv1x1", "conv3x3", "stem", "launch", "tiles", "device_functions"
)

MODELS = {"BC-100-12": (12, 48, 216), "densenet121": (32, 128, 512), "densenet161": (48, 192, 768)}
"""Growth rate, and output and input channels of a 1×1 convolution of each."""

UNALIGNED = {"BC-100-12's third stage": (12, 48, 246), "odd": (12, 48, 245), "odd and wide": (32, 128, 509)}
"""The same of rows whose alignment is 2 or 1 numbers, and MAX_SPILLS, the most bytes that a thread spills there. On an
H100 a tile with 24 bytes was as fast as one without."""

MAX_SPILLS = {"BC-100-12's third stage": 24, "odd": 48, "odd and wide": 256}

PRECISIONS = {"tf32": torch.float32, "ieee": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MULTIPROCESSORS = {80: 108, 86: 82, 89: 128, 90: 132, 100: 148, 120: 170}

LOW_OCCUPANCY = {
    ("densenet161", "conv1x1_backward"): "192 × 64 sums and a weight of as many take more than 128 registers of 256 "
    "threads. The loads of the next tile of rows are in flight meanwhile (num_stages=2): "
    "32 rows of 64 channels and of 2 · 192 are 57 KB in float32, of the 25 KB that hide the latency of an H200.",
}
"""Why fewer than a quarter of the warps are resident on compute capability 8.0 and 9.0, unless products are in float32
without tensor cores, whose tiles are smaller. Those with 100 KiB of shared memory on a multiprocessor (8.6, 8.9, 12.0)
hold one block of the TF32 tiles, of 8 warps in 48."""

MEASURED = {"conv1x1_forward", "conv3x3_forward"}
"""Kernels whose tiles were the fastest of many on an H100 (`benchmarks/gpu_tiles.py`) although few warps are resident:
each has several products and loads in flight. In exact float32 `conv3x3_forward` takes 132 registers on 10.0, and 128
elsewhere, so that 19 percent of the warps are resident there."""

empty = functools.partial(torch.empty, device="meta")


class Job(NamedTuple):
    """A launch to compile, and what it must keep to."""

    compilation: Compilation
    has_low_occupancy: bool | None = False  # None: it may
    estimate: int | None = None
    """At most so many bytes of shared memory, as the host code reckons."""
    resident: int = 1
    """At least so many blocks on a multiprocessor."""


def activation_of(name, channels):
    """As a case has it."""
    return StemCase(channels, torch.float32, activation=name).on("meta").activation


@pytest.fixture
def launched(monkeypatch):
    """Launches, (kernel, arguments, constants), which run nothing."""
    launches = []
    monkeypatch.setattr(
        launch,
        "launch",
        lambda prepared, *tensors: launches.append(
            (prepared.kernel, (*tensors, *prepared.numbers), prepared.constants)
        ),
    )
    return launches


@pytest.fixture
def on_device(monkeypatch):
    """A function that chooses the device and the precision of products. It returns the device's limits."""

    def choose(arch, precision="tf32"):
        of_arch = LIMITS[arch]
        limits = tiles.DeviceLimits(MULTIPROCESSORS[arch], of_arch.shared_memory, of_arch.shared_memory_of_a_block)
        for module in tiles, conv3x3:
            monkeypatch.setattr(module, "device_limits", lambda device: limits)
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", precision != "ieee")
        return limits

    return choose


@pytest.fixture
def conv1x1_jobs(launched, on_device):
    """A forward with statistics and a backward."""

    def jobs(model, precision, arch, activation="relu"):
        limits, dtype, (_, width, channels), rows = (
            on_device(arch, precision),
            PRECISIONS[precision],
            (MODELS | UNALIGNED)[model],
            12544,
        )
        norm, weight = BatchNormAffine(*empty(4, channels)), empty(width, channels, dtype=dtype)
        input = AffineInput(empty(rows, channels, dtype=dtype), norm, activation_of(activation, channels))
        output = empty(rows, width, dtype=dtype)
        mean, inv_std = empty(2, width)
        launched.clear()
        conv1x1.forward(Conv1x1(input, weight, output), with_statistics=True)
        grad = BatchNormBackward(output, output, inv_std, mean, empty(2, width), rows)
        conv1x1.backward(
            grad, input, weight, GradAccumulator(empty(input.values.shape, dtype=dtype), sums=empty(2, channels))
        )
        products = conv1x1.product_precision(weight)
        forward, backward = (choose(width, products, limits) for choose in (tiles.forward_tile, tiles.backward_tile))
        chosen = {
            "conv1x1_forward": (forward, forward.forward_shared_memory(products)),
            "conv1x1_backward": (backward, backward.backward_shared_memory(products)),
        }
        vectors = (*device_functions.VECTORS, "out_mean", "out_inv_std", "out_sums")
        for kernel, arguments, constants in launched:
            name = kernel.fn.__name__
            if name in chosen:
                tile, estimate = chosen[name]
                is_low = precision != "ieee" and (model, name) in LOW_OCCUPANCY if arch in (80, 90) else None
                is_low = None if name in MEASURED and precision == "tf32" else is_low
                compilation = Compilation.of(kernel, arguments, constants, arch, misaligned=vectors)
                yield Job(compilation, is_low, estimate, tile.resident_blocks(estimate, limits))

    return jobs


@pytest.fixture
def conv3x3_jobs(launched, on_device):
    """A backward and a forward with statistics, where they are not cuDNN's."""

    def jobs(model, precision, arch, overwrite, activation="relu", images=2):
        on_device(arch, precision)
        width, channels, _ = MODELS[model]
        case = Case((images, 32, 32), channels, width, PRECISIONS[precision], overwrite)
        vars(case).update({name: x.to("meta") for name, x in vars(case).items() if isinstance(x, torch.Tensor)})
        input = AffineInput(case.values.contiguous(), case.norm(), activation_of(activation, channels))
        grad_output = case.grad_output.contiguous()
        launched.clear()
        if conv3x3.is_for_triton(case.weight3x3, case.shape):
            accumulator = case.accumulator(case.grad_accum.contiguous(), overwrite)
            conv3x3.backward(grad_output, input, case.weight3x3, accumulator, case.shape)
            case.with_statistics(functools.partial(conv3x3.forward, input, case.weight3x3, case.shape, 1), width)
        for kernel, arguments, constants in launched:
            if "conv3x3" in (name := kernel.fn.__name__):
                is_exact_on_100 = (precision, arch) == ("ieee", 100)
                may_be_low = None if name in MEASURED and (precision == "tf32" or is_exact_on_100) else False
                yield Job(Compilation.of(kernel, arguments, constants, arch), may_be_low)

    return jobs


@pytest.fixture
def stem_jobs(launched):
    """The kernels of densenet121's stem, in both memory formats."""

    def jobs(dtype, arch):
        norm, pool = BatchNormAffine(*empty(4, 64)), MaxPool([3, 3], [2, 2], [1, 1], [1, 1], False)
        launched.clear()
        for memory_format in (torch.contiguous_format, torch.channels_last):
            values = empty(1, 64, 112, 112, dtype=dtype).contiguous(memory_format=memory_format)
            stem.image_statistics(values, StatisticsOutput(empty(3, 64), 1e-5))
            output = stem.norm_activation_max_pool(values, norm, RELU, pool, dtype)
            places, grads = stem.norm_activation_max_pool_reduce(output, values, norm, RELU, pool)
            stem.norm_activation_max_pool_backward(output, places, values, norm, RELU, pool, grads, 1)
        for kernel, arguments, constants in launched:
            if kernel.fn.__name__.startswith(("image", "norm")):
                yield Job(Compilation.of(kernel, arguments, constants, arch, misaligned=device_functions.VECTORS))

    return jobs


def check_all(jobs, count):
    jobs = list(jobs)
    assert len(jobs) == count
    for job, resources in zip(jobs, compile_all([each.compilation for each in jobs]), strict=True):
        found = job, resources, f"{resources.blocks} blocks, {resources.occupancy:.0%}"
        assert resources.spills == 0, found
        assert resources.fits, found
        assert job.estimate is None or resources.shared_memory <= job.estimate, found
        assert resources.blocks >= job.resident, found
        assert job.has_low_occupancy in (None, resources.occupancy < 0.25), found


def test_the_most_common_kernels(conv1x1_jobs, conv3x3_jobs, stem_jobs):
    jobs = [
        *conv1x1_jobs("BC-100-12", "tf32", 80),
        *conv1x1_jobs("densenet121", "tf32", 90),
        *conv1x1_jobs("densenet161", "tf32", 86),
        *conv3x3_jobs("BC-100-12", "tf32", 90, True),
        *conv3x3_jobs("densenet121", "tf32", 90, True),
        *stem_jobs(torch.float32, 90),
    ]
    check_all(jobs, 3 * 2 + 2 * 3 + 8)


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", MODELS)
def test_every_conv1x1_kernel(model, precision, arch, conv1x1_jobs):
    check_all(conv1x1_jobs(model, precision, arch), 2)


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", UNALIGNED)
def test_rows_that_are_not_aligned_spill_little(model, precision, arch, conv1x1_jobs):
    jobs = [job.compilation for job in conv1x1_jobs(model, precision, arch)]
    assert len(jobs) == 2
    found = [resources.spills for resources in compile_all(jobs)]
    assert max(found) <= MAX_SPILLS[model], found


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(("precision", "models"), [("tf32", MODELS), ("bfloat16", MODELS), ("ieee", ["BC-100-12"])])
def test_every_conv3x3_kernel(precision, models, arch, conv3x3_jobs):
    jobs = [
        job
        for model in models
        for overwrite in (False, True)
        for job in conv3x3_jobs(model, precision, arch, overwrite)
    ]
    check_all(jobs, 6 * len(models))


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_tile_of_many_rows(arch, conv3x3_jobs):
    few, many = (list(conv3x3_jobs("BC-100-12", "tf32", arch, True, images=images)) for images in (2, 64))
    changed = [job for job in many if job.compilation.constants not in [each.compilation.constants for each in few]]
    assert [job.compilation.kernel for job in changed] == ["conv3x3_forward"]
    check_all(changed, 1)


@pytest.mark.parametrize(
    ("activation", "arch", "models"),
    [
        ("prelu", 90, ["densenet121"]),
        *(pytest.param(name, 80, MODELS, marks=pytest.mark.exhaustive) for name in TABLE if name != "relu"),
    ],
)
def test_other_activations_spill_little(activation, arch, models, conv1x1_jobs, conv3x3_jobs):
    """At most 8 bytes of a thread: those of a PReLU's third sum on 9.0, of an identity and a GELU on 8.0."""
    jobs = [
        job.compilation
        for model, precision in itertools.product(models, ["tf32", "bfloat16"])
        for job in (
            *conv1x1_jobs(model, precision, arch, activation),
            *conv3x3_jobs(model, precision, arch, True, activation),
        )
    ]
    assert len(jobs) == 2 * 5 * len(models)
    for job, resources in zip(jobs, compile_all(jobs), strict=True):
        assert job.constants["ACTIVATION"] == activation
        assert resources.fits, (job, resources)
        assert resources.spills <= 8, (job, resources)


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_statistics_of_few_and_many_tiles(arch, launched):
    """Of BC-100-12's growth rate and bottleneck, and of 256 images of 32×32 in tiles of 62 rows."""
    for channels, num_tiles in itertools.product((12, 48), (100, 4229)):
        statistics = StatisticsOutput(empty(3, channels), 1e-5)
        common.combine_statistics(empty(num_tiles, 2, channels), 62, 62 * num_tiles, statistics)
    check_all([Job(Compilation.of(*launch, arch)) for launch in launched], 4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kernel_of_the_stem(dtype, arch, stem_jobs):
    check_all(stem_jobs(dtype, arch), 8)


IN_THE_DOCS = {
    ("BC-100-12", "tf32"): ((4, 2, 1), (4, 2, 1)),
    ("BC-100-12", "bfloat16"): ((8, 2, 1), (8, 1)),
    ("BC-100-12", "ieee"): ((4,), (4,)),
    ("densenet121", "tf32"): ((4, 2, 1), (4,)),
    ("densenet121", "bfloat16"): ((8, 1), (8,)),
    ("densenet161", "tf32"): ((4,), (4,)),
    ("densenet161", "bfloat16"): ((8,), (8,)),
}
"""What divides the rows of 1×1 convolutions, and those of 3×3 convolutions."""


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", [80, 86, 90, 100, 120])
def test_the_spills_in_the_docs(arch, conv1x1_jobs, conv3x3_jobs, monkeypatch):
    """The table in docs/kernels.md, for the Triton that is installed or the first of PYTHONPATH."""
    page = KERNELS_PAGE.read_text()
    if f"\n| {triton.__version__}, " not in page:
        pytest.skip(f"docs/kernels.md has no rows for Triton {triton.__version__}")
    jobs: list[tuple[int, Compilation]] = []
    for (model, precision), (of_1x1, of_3x3) in IN_THE_DOCS.items():
        growth_rate, width, channels = MODELS[model]
        for divisor in of_1x1:
            monkeypatch.setitem(MODELS, "changed", (growth_rate, width, channels - divisor % 4))
            jobs += [(divisor, job.compilation) for job in conv1x1_jobs("changed", precision, arch)]
        for divisor in of_3x3:
            monkeypatch.setitem(MODELS, "changed", (growth_rate - divisor % 4, width - divisor % 4, channels))
            jobs += [(divisor, job.compilation) for job in conv3x3_jobs("changed", precision, arch, False)]
    most: dict[str, list[int]] = {}
    for (divisor, job), resources in zip(jobs, compile_all([job for _, job in jobs]), strict=True):
        cell, column = most.setdefault(job.kernel, [0, 0, 0]), 0 if divisor >= 4 else 3 - divisor
        cell[column] = max(cell[column], resources.spills)
    kernels = "conv1x1_forward", "conv1x1_backward", "conv3x3_forward", "conv3x3_grad_input"
    name = f"| {triton.__version__}, {arch // 10}.{arch % 10} |"
    row = " ".join([name, *(f"{' / '.join(map(str, most[kernel]))} |" for kernel in kernels)])
    assert [line for line in page.splitlines() if line.startswith(name)] == [row]
