"""The stem's Triton kernels agree with plain modules: on a GPU if there is one, else through Triton's interpreter."""

import importlib
import math

import pytest
import torch
import torch.nn.functional as F
from grids import grid
from torch import Tensor
from triton_interpreter import mended_interpreter  # noqa: F401 (a fixture)

from efficient_densenet.kernels.activations import TABLE
from efficient_densenet.kernels.comparison import StemCase
from efficient_densenet.kernels.interface import BatchNormAffine, Gradients, StatisticsOutput
from efficient_densenet.kernels.max_pooling import MaxPool

pytest.importorskip("triton", reason="needs Triton")
triton_stem = importlib.import_module("efficient_densenet.kernels.triton_gpu.host.stem")

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
    monkeypatch.setattr(triton_stem, "_TILE", {False: (128, 4), True: (64, 4)})


class Case:
    """Values whose normalization is exact in float32, with many ties, and a gradient of the pooled output."""

    def __init__(
        self,
        pool: MaxPool,
        shape: tuple[int, ...],
        dtype: torch.dtype = torch.float32,
        memory_format: torch.memory_format = torch.contiguous_format,
        activation: str = "relu",
    ) -> None:
        self.pool, channels, self.dtype = pool, shape[1], dtype
        self.pooled_size = pool.pooled_size(shape[2:])
        values = torch.randint(-3, 4, shape).double()
        self.values = values.to(dtype).contiguous(memory_format=memory_format).to(DEVICE)
        weight, bias = torch.tensor([1.0, -1, 0, 2]), torch.tensor([0.5, 1, 0.25, -1])
        mean, inv_std = torch.tensor([0.0, 1, -2, 1]), torch.tensor([0.5, 1, 2, 0.25])
        vectors = (vector.repeat(-(-channels // 4))[:channels].to(DEVICE) for vector in (weight, bias, mean, inv_std))
        weight, bias, mean, inv_std = vectors
        self.norm = BatchNormAffine(weight, bias, inv_std, mean)
        self.activation = StemCase(channels, dtype, activation=activation).on(DEVICE).activation
        grad = torch.randint(-4, 5, (*shape[:2], *self.pooled_size)).double()
        self.grad_output = grad.to(dtype).contiguous(memory_format=memory_format).to(DEVICE)

    @property
    def normalized(self) -> Tensor:
        """As the plain modules round it."""
        weight, bias, mean, inv_std = self.by_channel
        return ((self.values.double() - mean) * inv_std * weight + bias).to(self.dtype)

    @property
    def by_channel(self) -> list[Tensor]:
        """Weight, bias, mean and inverse deviation, which broadcast with images."""
        vectors = self.norm.weight, self.norm.bias, self.norm.mean, self.norm.inv_std
        return [vector.double().view(-1, 1, 1) for vector in vectors]

    def norm_gradients(self) -> tuple[Tensor, Tensor, Tensor]:
        """The places of the maxima, and the norm's grad_weight and grad_bias."""
        settings = self.norm, self.activation, self.pool
        places, grads = triton_stem.norm_activation_max_pool_reduce(self.grad_output, self.values, *settings)
        return places, grads.norm_weight, grads.norm_bias

    def maxima(self) -> tuple[Tensor, Tensor]:
        """PyTorch's, and their indices in the image."""
        return self.pool.forward(self.normalized.clamp_min(0))

    def indices_in_image(self, places: Tensor) -> Tensor:
        """From places in the windows, those of inactive maxima being −1."""
        width, places = self.values.shape[3], places.long()
        rows, columns = (torch.arange(size, device=DEVICE) for size in self.pooled_size)
        (stride_y, stride_x), (padding_y, padding_x) = self.pool.stride, self.pool.padding
        y = rows[:, None] * stride_y - padding_y + places // self.pool.kernel_size[1]
        x = columns * stride_x - padding_x + places % self.pool.kernel_size[1]
        return torch.where(places < 0, -1, y * width + x)


@pytest.mark.parametrize(
    *grid(
        pool=POOLS.values(),
        shape=[(2, 4, 9, 14), (1, 3, 17, 13), (3, 6, 5, 4)],
        dtype=[torch.float32, torch.bfloat16, torch.float16],
        memory_format=FORMATS,
        instances=[1, 3, 2048],
        frozen=[False, True],
    )
)
def test_the_pooling_its_indices_and_its_gradients_are_pytorch_s(
    pool, shape, dtype, memory_format, instances, frozen, monkeypatch
):
    monkeypatch.setattr(triton_stem, "MAX_PROGRAM_INSTANCES", instances)
    case = Case(pool, shape, dtype, memory_format)
    maxima, expected = case.maxima()
    output = triton_stem.norm_activation_max_pool(case.values, case.norm, case.activation, case.pool, dtype)
    assert torch.equal(output, maxima)
    assert output.is_contiguous(memory_format=memory_format)
    places, grad_weight, grad_bias = case.norm_gradients()
    assert torch.equal(case.indices_in_image(places), expected.masked_fill(maxima <= 0, -1))
    grad, values = case.grad_output.double().masked_fill(maxima <= 0, 0), case.values.double()
    weight, _, mean, inv_std = case.by_channel
    centered = values.flatten(2).gather(2, expected.flatten(2)).view_as(grad) - mean
    assert torch.equal(grad_bias.double(), grad.sum((0, 2, 3)))
    assert torch.equal(grad_weight.double(), (grad * centered).sum((0, 2, 3)) * case.norm.inv_std)
    grad = pool.backward(grad, expected, values)
    if not frozen:
        grad_sum, product_sum = (vector.double().view(-1, 1, 1) for vector in (grad_bias, grad_weight))
        grad = grad - (grad_sum + (values - mean) * inv_std * product_sum) * 0.125
    norm, sums = case.norm._replace(frozen=frozen), Gradients(grad_weight, grad_bias)
    settings = norm, case.activation, case.pool, sums, 8
    triton_stem.norm_activation_max_pool_backward(case.grad_output, places, case.values, *settings)
    rtol = torch.finfo(dtype).eps * (8 if dtype is torch.float32 else 1)
    torch.testing.assert_close(case.values.double(), weight * inv_std * grad, rtol=rtol, atol=1e-5)


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("bfloat16", [False, True])
def test_values_that_are_equal_only_when_rounded_are_ties(memory_format, bfloat16):
    case = Case(POOLS["3x3"], (2, 4, 11, 9), torch.bfloat16 if bfloat16 else torch.float32, memory_format)
    grain = 2.0**-7 if bfloat16 else 2.0**-22
    case.values.mul_(grain)  # exact
    vectors = (torch.full((4,), value, device=DEVICE) for value in (1.0, 4.0, 1.0, 0.0))
    case.norm = BatchNormAffine(*vectors)
    maxima, expected = case.maxima()
    exact = F.max_pool2d(case.values.double() + 4, 3, 2, 1, return_indices=True)[1]
    assert not torch.equal(expected, exact)  # rounding makes ties
    places, *_ = case.norm_gradients()
    assert torch.equal(case.indices_in_image(places), expected.masked_fill(maxima <= 0, -1))


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("pool", ["3x3", "oblong"])
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_non_finite_values(pool, memory_format):
    case = Case(POOLS[pool], (2, 4, 13, 11), memory_format=memory_format)
    flat = case.values.permute(1, 0, 2, 3)
    for value in (math.nan, math.inf, -math.inf):
        flat[torch.rand(flat.shape, device=DEVICE) < 0.1] = value
    flat[3] = -math.inf
    maxima, expected = case.maxima()
    assert maxima.isnan().any()
    assert maxima.isinf().any()
    output = triton_stem.norm_activation_max_pool(case.values, case.norm, case.activation, case.pool, torch.float32)
    assert torch.equal(output.nan_to_num(-1), maxima.nan_to_num(-1))
    places, *_ = case.norm_gradients()
    assert torch.equal(case.indices_in_image(places), expected.masked_fill(maxima <= 0, -1))


@pytest.mark.parametrize(
    *grid(
        strength=1,
        activation=[name for name in TABLE if name != "relu"],
        pool=POOLS.values(),
        dtype=[torch.float32, torch.bfloat16],
        memory_format=FORMATS,
        frozen=[False, True],
    )
)
def test_every_activation(activation, pool, dtype, memory_format, frozen):
    """Against autograd in float64, with the maxima of rounded activations."""
    case = Case(pool, (2, 6, 13, 9), dtype, memory_format, activation)
    exact, norm = case.activation, case.norm._replace(frozen=frozen)
    z, values = case.normalized.double().requires_grad_(), case.values.double()
    rounded, expected = pool.forward(exact.forward(z).detach().to(dtype))
    exact.forward(z).flatten(2).gather(2, expected.flatten(2)).view_as(expected).backward(case.grad_output.double())
    output = triton_stem.norm_activation_max_pool(case.values, norm, case.activation, pool, dtype)
    torch.testing.assert_close(output, rounded)
    settings = norm, case.activation, pool
    places, grads = triton_stem.norm_activation_max_pool_reduce(case.grad_output, case.values, *settings)
    assert torch.equal(case.indices_in_image(places), expected)
    weight, _, mean, inv_std = case.by_channel
    grad, centered = z.grad, values - mean
    sums = [grad.sum((0, 2, 3)), (grad * centered).sum((0, 2, 3)) * norm.inv_std]
    for found, right in zip([grads.norm_bias, grads.norm_weight], sums, strict=True):
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-4)
    if not frozen:
        grad = grad - (sums[0].view(-1, 1, 1) + centered * inv_std * sums[1].view(-1, 1, 1)) * 0.125
    triton_stem.norm_activation_max_pool_backward(case.grad_output, places, case.values, *settings, grads, 8)
    expected = (weight * inv_std * grad).to(dtype)
    torch.testing.assert_close(case.values, expected, rtol=1e-5 if dtype is torch.float32 else 1e-2, atol=1e-4)


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
