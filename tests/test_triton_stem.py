"""The stem's Triton kernels agree with portable's: on a GPU if there is one, else through Triton's interpreter."""

import math

import pytest
import torch
from grids import sampled
from helpers import kernel_modules
from triton_interpreter import mended_interpreter  # noqa: F401 (a fixture)

from efficient_densenet.kernels import stem as portable_stem
from efficient_densenet.kernels.activations import TABLE
from efficient_densenet.kernels.comparison import STEM_OPERATIONS, StemCase
from efficient_densenet.kernels.interface import StatisticsOutput
from efficient_densenet.kernels.max_pooling import MaxPool

pytest.importorskip("triton", reason="needs Triton")
(triton_stem,) = kernel_modules("triton_gpu", "stem")

pytestmark = pytest.mark.usefixtures("mended_interpreter")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = [torch.contiguous_format, torch.channels_last]
POOLS = {
    "3x3": MaxPool([3, 3], [2, 2], [1, 1], [1, 1], False),
    "3x3_ceil": MaxPool([3, 3], [2, 2], [0, 0], [1, 1], True),
    "overlapping": MaxPool([3, 2], [1, 1], [1, 0], [1, 1], False),
    "oblong": MaxPool([5, 2], [2, 3], [2, 1], [1, 1], True),
    "gaps": MaxPool([1, 2], [3, 4], [0, 1], [1, 1], False),
}


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Fewer channels and more rows: the images here have few channels."""
    monkeypatch.setattr(triton_stem, "_TILE", {False: (64, 4), True: (32, 4)})


def _check(case: StemCase, *operations: str) -> None:
    """The results are portable's, but for the order of sums."""
    rtol = 2 * torch.finfo(case.values.dtype).eps
    for operation in operations or STEM_OPERATIONS:
        results, expected = (STEM_OPERATIONS[operation](each, case) for each in (triton_stem, portable_stem))
        for result, other in zip(results, expected, strict=True):
            assert result.stride() == other.stride()
            torch.testing.assert_close(result, other, rtol=max(rtol, 1e-5), atol=1e-4, equal_nan=True)


@pytest.mark.parametrize(
    *sampled(
        lambda **_: True,
        count=300,
        pool=list(POOLS),
        size=[(7, 10), (9, 6), (5, 4)],
        channels=[4, 6, 3],
        dtype=[torch.float32, torch.bfloat16, torch.float16],
        memory_format=FORMATS,
        activation=["relu", "silu", "hardtanh"],
        frozen=[False, True],
        instances=[1, 2048],
    )
)
def test_every_operation(pool, size, channels, dtype, memory_format, activation, frozen, instances, monkeypatch):
    monkeypatch.setattr(triton_stem, "MAX_PROGRAM_INSTANCES", instances)
    case = StemCase(channels, dtype, memory_format, size, activation, POOLS[pool], frozen)
    _check(case.on(DEVICE))


@pytest.mark.parametrize("activation", TABLE)
def test_every_activation(activation):
    _check(StemCase(4, torch.float32, size=(5, 4), activation=activation).on(DEVICE))


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_are_equal_only_when_rounded_are_ties(memory_format, dtype):
    """The gradient goes to the first of them; a frozen norm's has no sums."""
    case = StemCase(4, dtype, memory_format, (11, 9), frozen=True).on(DEVICE)
    case.values.mul_(2.0**-7 if dtype is torch.bfloat16 else 2.0**-22)
    case.vectors = torch.tensor([1.0, 4.0, 1.0, 0.0], device=DEVICE)[:, None].repeat(1, 4)
    _check(case, "norm_activation_max_pool_backward")


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("pool", ["3x3", "oblong"])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_non_finite_values(pool, memory_format):
    case = StemCase(4, torch.float32, memory_format, (13, 11), pool=POOLS[pool], frozen=True).on(DEVICE)
    for value in (math.nan, math.inf, -math.inf):
        case.values[torch.rand(case.values.shape, device=DEVICE) < 0.1] = value
    case.values[:, 3] = -math.inf
    _check(case, "norm_activation_max_pool")
    # A maximum that is not finite takes its gradient from finite pixels; portable's is NaN in the pixel itself.
    grads = [STEM_OPERATIONS["norm_activation_max_pool_backward"](k, case)[-1] for k in (triton_stem, portable_stem)]
    torch.testing.assert_close(*(grad[case.values.isfinite()] for grad in grads))


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("shape", [(1, 3, 1, 2), (3, 5, 9, 14), (2, 33, 13, 11)])
def test_statistics_of_values_far_from_zero(shape, memory_format):
    values = (1000 + torch.randn(shape)).contiguous(memory_format=memory_format).to(DEVICE)
    statistics = torch.empty(3, shape[1], device=DEVICE)
    triton_stem.image_statistics(values, StatisticsOutput(statistics, 1e-5))
    variance, mean = torch.var_mean(values.double(), (0, 2, 3), correction=0)
    expected = torch.stack([mean, variance, torch.rsqrt(variance + 1e-5)])
    torch.testing.assert_close(statistics.double(), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(statistics[0].double(), mean, rtol=1e-6, atol=0)
