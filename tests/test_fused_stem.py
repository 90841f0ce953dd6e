"""The stem on a GPU agrees with plain modules: on a GPU if there is one, else through Triton's interpreter."""

import copy
import importlib

import pytest
import torch
from grids import pairwise
from helpers import (
    ACTIVATIONS,
    add_conv_biases,
    assert_all_close,
    assert_same_buffers,
    freeze_norms,
    run_stem,
    small_model,
    with_engine,
)
from torch import Tensor, nn
from triton_interpreter import mended_interpreter  # noqa: F401 (a fixture)

from efficient_densenet.engine.stem import forward
from efficient_densenet.kernels.max_pooling import MaxPool

pytest.importorskip("triton", reason="needs Triton")
triton_operations = importlib.import_module("efficient_densenet.kernels.triton_gpu.host.operations")
triton_stem = importlib.import_module("efficient_densenet.kernels.triton_gpu.host.stem")

pytestmark = pytest.mark.usefixtures("mended_interpreter")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = [torch.contiguous_format, torch.channels_last]
POOL = MaxPool([3, 3], [2, 2], [1, 1], [1, 1], False)


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
    *pairwise(
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
