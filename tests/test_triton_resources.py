"""The Triton kernels, compiled for GPUs that need not be there: they fit and do not spill.

The launches are those of the host code, with the tiles that it chooses for each device.
"""

import contextlib
import itertools

import pytest
import torch
from helpers import kernel_modules

pytest.importorskip("triton", minversion="3.3", reason="needs Triton, whose older versions take other descriptions")
from triton_resources import LIMITS, Resources, compilation_of, compile_all

from efficient_densenet.kernels.comparison import OPERATIONS, STEM_OPERATIONS, Case, StemCase

operations, conv1x1, conv3x3, launch, tiles, device_functions = kernel_modules(
    "triton_gpu", "operations", "conv1x1", "conv3x3", "launch", "tiles", "device_functions"
)

MODELS = {"BC-100-12": (12, 48, 216), "densenet121": (32, 128, 512), "densenet161": (48, 192, 768)}
"""The growth rate, and the output and input channels of a 1×1 convolution, of each model."""

PRECISIONS = {"tf32": torch.float32, "ieee": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
VECTORS = (*device_functions.VECTORS, "out_mean", "out_inv_std", "out_sums")


def _conv1x1(model: str, precision: str, activation: str = "relu") -> tuple[list[str], Case]:
    _, width, channels = MODELS[model]
    case = Case((2, 16, 16), channels, width, PRECISIONS[precision], padding=0, activation=activation)
    return ["conv1x1_forward_with_statistics", "conv1x1_backward"], case


def _conv3x3(model: str, precision: str, activation: str = "relu", images=2, overwrite=True) -> tuple[list[str], Case]:
    width, channels, _ = MODELS[model]
    shape, dtype = (images, 32, 32), PRECISIONS[precision]
    case = Case(shape, channels, width, dtype, overwrite, padding=0, activation=activation)
    return ["conv3x3_forward_with_statistics", "conv3x3_backward"], case


def _stem(precision: str, memory_format: torch.memory_format) -> tuple[list[str], StemCase]:
    return list(STEM_OPERATIONS), StemCase(64, PRECISIONS[precision], memory_format, (112, 112))


@pytest.fixture
def check(monkeypatch):
    """A function: the resources, by name, of the kernels that operations launch on cases, compiled for a device of an
    architecture. They take no more shared memory than there is, nor than the host code reckons, and spill at most so
    many bytes of a thread."""
    launched = []
    monkeypatch.setattr(launch, "launch", lambda prepared, *tensors: launched.append((prepared, tensors)))

    def function(arch: int, precision: str, *cases, spills: int = 0) -> dict[str, Resources]:
        for module in tiles, conv3x3:
            monkeypatch.setattr(module, "device_limits", lambda device: LIMITS[arch])
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", precision != "ieee")
        compilations, limits = [], []
        for names, case in cases:
            for name in names:
                with contextlib.suppress(AssertionError):  # of a case that finds memory that nobody wrote
                    (OPERATIONS | STEM_OPERATIONS)[name](operations, case)
            for prepared, tensors in launched:
                kernel = prepared.kernel.fn.__name__
                if kernel.startswith(("conv", "image", "norm")):
                    misaligned = () if "conv3x3" in kernel else VECTORS
                    compilations.append(compilation_of(prepared, tensors, arch, misaligned))
                    limits.append(_shared_memory(kernel, case, arch))
            launched.clear()
        resources = compile_all(compilations)
        for compilation, limit, found in zip(compilations, limits, resources, strict=True):
            assert found.spills <= spills, (compilation, found)
            assert found.shared_memory <= limit, (compilation, found)
        return {each.kernel: found for each, found in zip(compilations, resources, strict=True)}

    return function


def _shared_memory(kernel: str, case, arch: int) -> int:
    """The most that a kernel may take, as the host code reckons that of a 1×1 convolution."""
    limit = LIMITS[arch].shared_memory_of_a_block
    if not kernel.startswith("conv1x1"):
        return limit
    width, products = len(case.weight1x1), conv1x1.product_precision(case.weight1x1)
    if kernel == "conv1x1_forward":
        return min(limit, tiles.forward_tile(width, products, LIMITS[arch]).forward_shared_memory(products))
    return min(limit, tiles.backward_tile(width, products, LIMITS[arch]).backward_shared_memory(products))


@pytest.mark.exhaustive
def test_the_most_common_kernels(check):
    kinds = _conv1x1("densenet161", "tf32"), _conv3x3("densenet121", "tf32"), _stem("tf32", torch.channels_last)
    found = check(86, "tf32", *kinds)
    assert found.keys() == {
        *("conv1x1_forward", "conv1x1_backward", "conv3x3_forward", "conv3x3_grad_input", "conv3x3_grad_weight"),
        *("image_statistics", "norm_activation_max_pool_forward", "norm_activation_max_pool_backward_reduce"),
        "norm_activation_max_pool_backward",
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("precision", "arch"),
    [each for each in itertools.product(PRECISIONS, LIMITS) if each[1] >= 80 or each[0] in ("ieee", "float16")],
)
def test_every_kernel(precision, arch, check):
    models = MODELS if precision != "ieee" else ["BC-100-12"]
    conv3x3s = [
        _conv3x3(model, precision, images=images, overwrite=overwrite)
        for model in models
        for images in (2, 64)
        for overwrite in (False, True)
    ]
    stems = [_stem(precision, memory_format) for memory_format in (torch.contiguous_format, torch.channels_last)]
    conv1x1s = [_conv1x1(model, precision) for model in models]
    check(arch, precision, *conv1x1s, *conv3x3s, *stems, spills=16 if arch == 70 else 0)
