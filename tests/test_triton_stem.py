"""The stem's Triton kernels agree with portable's and with plain modules: on a GPU or, without one, interpreted."""

import copy
import math

import pytest
import torch
from grids import pairwise_exhaustive, sampled
from helpers import (
    ACTIVATIONS,
    add_conv_biases,
    assert_all_close,
    assert_same_buffers,
    freeze_norms,
    kernel_modules,
    run_stem,
    small_model,
    with_engine,
)
from torch import Tensor, nn
from triton_interpreter import mended_interpreter  # noqa: F401 (a fixture)

from efficient_densenet.engine.stem import forward
from efficient_densenet.kernels import stem as portable_stem
from efficient_densenet.kernels.activations import TABLE
from efficient_densenet.kernels.comparison import STEM_OPERATIONS, StemCase
from efficient_densenet.kernels.interface import StatisticsOutput
from efficient_densenet.kernels.max_pooling import MaxPool

pytest.importorskip("triton", reason="needs Triton")
triton_stem, triton_operations = kernel_modules("triton_gpu", "stem", "operations")

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


# Whole stems


@pytest.fixture
def fused_stems(monkeypatch) -> list[bool]:
    """Lets the Triton kernels run every stem, as on a GPU, and notes each forward and backward.

    Products are exact on a GPU too, where the errors of TF32 would hide those of the kernels. Tiles are large: the
    interpreter's time is that of the operations, whatever the size of their operands.
    """
    ran = []

    def chosen(x, **options):
        ran.append(True)
        return triton_operations

    monkeypatch.setattr(forward, "kernels_for", chosen)
    monkeypatch.setattr(triton_stem, "portable_stem", None)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    for name in ("_TILE", "_STATISTICS_TILE"):
        monkeypatch.setattr(triton_stem, name, dict.fromkeys((False, True), (1024, 8)))
    return ran


def _step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The stem's output and all its gradients, for a fixed gradient of the output."""
    x = x.detach().requires_grad_()
    result = run_stem(list(model.features), model.features.denseblock1, x)
    output = model.features[:4](x) if result is None else result
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(output)
    return [output.detach(), *torch.autograd.grad(output, [x, *model.features[:4].parameters()], grad)]


@pytest.mark.parametrize(
    *pairwise_exhaustive(
        size=[(17, 11), (13, 20), (9, 8)],
        batch=[1, 3],
        memory_format=FORMATS,
        weight_format=FORMATS,
        frozen=[False, True],
        bias=[False, True],
        autocast=[False, True],
        activation=["relu", "silu", "hardtanh"],
    )
)
def test_errors_are_at_most_twice_plain_s(
    size, batch, memory_format, weight_format, frozen, bias, autocast, activation, fused_stems
):
    exact = small_model("imagenet", efficient=False, block_config=(1,))
    exact.features.relu0 = ACTIVATIONS[activation]()
    exact.to(DEVICE, memory_format=weight_format)
    if bias:
        add_conv_biases(exact, "conv0").to(DEVICE)
    if frozen:
        freeze_norms(exact, "norm0")
    plain = copy.deepcopy(exact).float()
    ours = with_engine(plain, "shared")
    x = torch.randn(batch, 3, *size, dtype=torch.double) + 5  # a mean that is large beside the deviation
    x = x.contiguous(memory_format=memory_format).to(DEVICE)
    reference = _step(exact, x)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
        found, expected = _step(ours, x.float()), _step(plain, x.float())
    assert fused_stems == [True, True]
    for value, theirs, right in zip(found, expected, reference, strict=True):
        assert (value.dtype, value.shape) == (theirs.dtype, theirs.shape)
        error, allowed = ((tensor.double() - right).norm() for tensor in (value, theirs))
        assert error <= 2 * allowed + 1e-6 * (1 + right.norm())
    assert found[0].stride() == expected[0].stride()
    assert found[1].stride() == torch.empty_like(x).stride()
    assert_same_buffers(ours, plain, 1e-5)


POOL = POOLS["3x3"]
REFUSED = {
    "a dilated pooling": (POOL._replace(dilation=[1, 2]), (2, 64, 8, 8)),
    "a large window": (POOL._replace(kernel_size=[6, 5]), (2, 64, 64, 64)),
    "no image": (POOL, (0, 64, 4, 4)),
    "nothing to pool": (POOL._replace(padding=[0, 0]), (2, 64, 2, 2)),
    "images beyond 32 bits": (POOL, (1, 64, 1 << 13, 1 << 13)),
    "volumes": (MaxPool([3] * 3, [2] * 3, [1] * 3, [1] * 3, False), (2, 64, 4, 4, 4)),
}


def test_stems_that_the_kernels_refuse():
    assert triton_stem.supports(torch.Size([2, 64, 4, 4]), POOL)
    for what, (pool, shape) in REFUSED.items():
        assert not triton_stem.supports(torch.Size(shape), pool), what


@pytest.mark.parametrize("pool", [nn.MaxPool2d(3, 2, 1, (1, 2)), nn.MaxPool2d((6, 5), 2, 1), nn.MaxPool3d(3, 2, 1)])
def test_other_stems_take_portable_s_operations(pool, monkeypatch):
    monkeypatch.setattr(forward, "kernels_for", lambda x, **options: triton_operations)
    dims = 3 if isinstance(pool, nn.MaxPool3d) else 2
    plain = small_model("imagenet", efficient=False, block_config=(1,), dims=dims).float().to(DEVICE)
    plain.features.pool0 = pool
    x = torch.randn(2, 3, *[15] * dims, device=DEVICE)
    assert_all_close(_step(with_engine(plain, "shared"), x), _step(plain, x), 1e-5)
