"""The Triton kernels, compiled for GPUs that need not be there: they fit and do not spill.

The launches are those of the host code, with the tiles that it chooses for each device.
"""

import contextlib
import itertools
from typing import NamedTuple

import pytest
import torch
from helpers import kernel_modules
from triton_resources import LIMITS, Compilation, compile_all

from efficient_densenet.kernels.activations import TABLE
from efficient_densenet.kernels.comparison import OPERATIONS, STEM_OPERATIONS, Case, StemCase

pytest.importorskip("triton", reason="needs Triton")
operations, conv1x1, conv3x3, launch, tiles, device_functions = kernel_modules(
    "triton_gpu", "operations", "conv1x1", "conv3x3", "launch", "tiles", "device_functions"
)

MODELS = {"BC-100-12": (12, 48, 216), "densenet121": (32, 128, 512), "densenet161": (48, 192, 768)}
"""The growth rate, and the output and input channels of a 1×1 convolution, of each model."""

PRECISIONS = {"tf32": torch.float32, "ieee": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
VECTORS = (*device_functions.VECTORS, "out_mean", "out_inv_std", "out_sums")
CONV1X1 = "conv1x1_forward_with_statistics", "conv1x1_backward"
CONV3X3 = "conv3x3_forward_with_statistics", "conv3x3_backward"


class Job(NamedTuple):
    """A launch to compile, and the most bytes of shared memory that it may take, as the host code reckons them."""

    compilation: Compilation
    estimate: int | None = None


@pytest.fixture
def jobs(monkeypatch):
    """A function: the launches of operations on a case, for a device of an architecture. They run nothing."""
    launched = []
    monkeypatch.setattr(launch, "launch", lambda prepared, *tensors: launched.append((prepared, tensors)))

    def record(names, case, arch, precision="tf32"):
        for module in tiles, conv3x3:
            monkeypatch.setattr(module, "device_limits", lambda device: LIMITS[arch])
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", precision != "ieee")
        launched.clear()
        for name in names:
            with contextlib.suppress(AssertionError):  # of a case that finds memory that nobody wrote
                (OPERATIONS | STEM_OPERATIONS)[name](operations, case)
        for prepared, tensors in launched:
            kernel = prepared.kernel.fn.__name__
            if kernel.startswith(("conv", "image", "norm")):
                arguments, misaligned = (*tensors, *prepared.numbers), () if "conv3x3" in kernel else VECTORS
                compilation = Compilation.of(prepared.kernel, arguments, prepared.constants, arch, misaligned)
                yield Job(compilation, _estimate(kernel, case, arch))

    return record


def _estimate(kernel: str, case, arch: int) -> int | None:
    if not kernel.startswith("conv1x1"):
        return None
    width, products = len(case.weight1x1), conv1x1.product_precision(case.weight1x1)
    if kernel == "conv1x1_forward":
        return tiles.forward_tile(width, products, LIMITS[arch]).forward_shared_memory(products)
    return tiles.backward_tile(width, products, LIMITS[arch]).backward_shared_memory(products)


def _conv1x1(model: str, precision: str = "tf32", activation: str = "relu") -> Case:
    _, width, channels = MODELS[model]
    return Case((2, 16, 16), channels, width, PRECISIONS[precision], padding=0, activation=activation)


def _conv3x3(model: str, precision: str = "tf32", activation: str = "relu", images: int = 2, overwrite=True) -> Case:
    width, channels, _ = MODELS[model]
    shape, dtype = (images, 32, 32), PRECISIONS[precision]
    return Case(shape, channels, width, dtype, overwrite, padding=0, activation=activation)


def _stems(dtype: torch.dtype) -> list[StemCase]:
    formats = torch.contiguous_format, torch.channels_last
    return [StemCase(64, dtype, memory_format, (112, 112)) for memory_format in formats]


def check_all(jobs, spills=0):
    jobs = list(jobs)
    assert len(jobs) > 1
    for job, resources in zip(jobs, compile_all([each.compilation for each in jobs]), strict=True):
        limit = LIMITS[job.compilation.arch].shared_memory_of_a_block
        assert resources.spills <= spills, (job, resources)
        assert resources.shared_memory <= min(limit, job.estimate or limit), (job, resources)


def test_the_most_common_kernels(jobs):
    found = [
        *jobs(CONV1X1, _conv1x1("BC-100-12"), 80),
        *jobs(CONV1X1, _conv1x1("densenet161"), 86),
        *jobs(CONV3X3, _conv3x3("densenet121"), 90),
        *jobs(STEM_OPERATIONS, _stems(torch.float32)[1], 90),
    ]
    assert {each.compilation.kernel for each in found} == {
        *("conv1x1_forward", "conv1x1_backward", "conv3x3_forward", "conv3x3_grad_input", "conv3x3_grad_weight"),
        *("image_statistics", "norm_activation_max_pool_forward", "norm_activation_max_pool_backward_reduce"),
        "norm_activation_max_pool_backward",
    }
    check_all(found)


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", LIMITS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_convolution(precision, arch, jobs):
    found = []
    for model in MODELS if precision != "ieee" else ["BC-100-12"]:
        found += jobs(CONV1X1, _conv1x1(model, precision), arch, precision)
        for overwrite, images in itertools.product((False, True), (2, 64)):
            case = _conv3x3(model, precision, images=images, overwrite=overwrite)
            found += jobs(CONV3X3, case, arch, precision)
    check_all(found)


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", LIMITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kernel_of_the_stem(dtype, arch, jobs):
    check_all(job for case in _stems(dtype) for job in jobs(STEM_OPERATIONS, case, arch))


@pytest.mark.parametrize("activation", [name for name in TABLE if name != "relu"])
@pytest.mark.exhaustive
def test_other_activations_spill_little(activation, jobs):
    """A thread spills at most 8 bytes."""
    found = []
    for model, precision in itertools.product(MODELS, ["tf32", "bfloat16"]):
        found += jobs(CONV1X1, _conv1x1(model, precision, activation), 80, precision)
        found += jobs(CONV3X3, _conv3x3(model, precision, activation), 80, precision)
    check_all(found, spills=8)
