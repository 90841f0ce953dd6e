"""The Triton kernels, compiled for GPUs that need not be there: they fit and do not spill.

The launches are those of the host code, with the tiles that it chooses for each device.
"""

import functools
import itertools
from typing import NamedTuple

import pytest
import torch
from helpers import kernel_modules
from triton_resources import LIMITS, Compilation, compile_all

from efficient_densenet.kernels.activations import RELU_SPEC, TABLE
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

pytest.importorskip("triton", reason="needs Triton")
conv1x1, conv3x3, stem, launch, tiles, device_functions = kernel_modules(
    "triton_gpu", "conv1x1", "conv3x3", "stem", "launch", "tiles", "device_functions"
)

MODELS = {"BC-100-12": (12, 48, 216), "densenet121": (32, 128, 512), "densenet161": (48, 192, 768)}
"""The growth rate, and the output and input channels of a 1×1 convolution, of each model."""

PRECISIONS = {"tf32": torch.float32, "ieee": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

empty = functools.partial(torch.empty, device="meta")


class Job(NamedTuple):
    """A launch to compile, and the most bytes of shared memory that it may take, as the host code reckons them."""

    compilation: Compilation
    estimate: int | None = None


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
        for module in tiles, conv3x3:
            monkeypatch.setattr(module, "device_limits", lambda device: LIMITS[arch])
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", precision != "ieee")
        return LIMITS[arch]

    return choose


@pytest.fixture
def conv1x1_jobs(launched, on_device):
    """A forward with statistics and a backward."""

    def jobs(model, precision, arch, activation="relu"):
        limits, dtype, (_, width, channels), rows = (
            on_device(arch, precision),
            PRECISIONS[precision],
            MODELS[model],
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
        estimates = {
            "conv1x1_forward": forward.forward_shared_memory(products),
            "conv1x1_backward": backward.backward_shared_memory(products),
        }
        vectors = (*device_functions.VECTORS, "out_mean", "out_inv_std", "out_sums")
        for kernel, arguments, constants in launched:
            name = kernel.fn.__name__
            if name in estimates:
                yield Job(Compilation.of(kernel, arguments, constants, arch, misaligned=vectors), estimates[name])

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
            if "conv3x3" in kernel.fn.__name__:
                yield Job(Compilation.of(kernel, arguments, constants, arch))

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
            output = stem.norm_activation_max_pool(values, norm, RELU_SPEC, pool, dtype)
            places, grads = stem.norm_activation_max_pool_reduce(output, values, norm, RELU_SPEC, pool)
            stem.norm_activation_max_pool_backward(output, places, values, norm, RELU_SPEC, pool, grads, 1)
        for kernel, arguments, constants in launched:
            if kernel.fn.__name__.startswith(("image", "norm")):
                yield Job(Compilation.of(kernel, arguments, constants, arch, misaligned=device_functions.VECTORS))

    return jobs


def check_all(jobs, count, spills=0):
    jobs = list(jobs)
    assert len(jobs) == count
    for job, resources in zip(jobs, compile_all([each.compilation for each in jobs]), strict=True):
        limit = LIMITS[job.compilation.arch].shared_memory_of_a_block
        assert resources.spills <= spills, (job, resources)
        assert resources.shared_memory <= min(limit, job.estimate or limit), (job, resources)


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
@pytest.mark.parametrize("arch", LIMITS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_convolution(precision, arch, conv1x1_jobs, conv3x3_jobs):
    jobs = []
    for model in MODELS if precision != "ieee" else ["BC-100-12"]:
        jobs += conv1x1_jobs(model, precision, arch)
        for overwrite, images in itertools.product((False, True), (2, 64)):
            jobs += conv3x3_jobs(model, precision, arch, overwrite, images=images)
    assert len(jobs) > 10
    check_all(jobs, len(jobs))


@pytest.mark.exhaustive
@pytest.mark.parametrize("arch", LIMITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kernel_of_the_stem(dtype, arch, stem_jobs):
    check_all(stem_jobs(dtype, arch), 8)


@pytest.mark.parametrize("activation", [name for name in TABLE if name != "relu"])
@pytest.mark.exhaustive
def test_other_activations_spill_little(activation, conv1x1_jobs, conv3x3_jobs):
    """A thread spills at most 8 bytes."""
    jobs = []
    for model, precision in itertools.product(MODELS, ["tf32", "bfloat16"]):
        jobs += conv1x1_jobs(model, precision, 80, activation)
        jobs += conv3x3_jobs(model, precision, 80, True, activation)
    check_all(jobs, len(jobs), spills=8)
