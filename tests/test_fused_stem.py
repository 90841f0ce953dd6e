"""The stem on a GPU agrees with plain modules: on a GPU if there is one, else through Triton's interpreter."""

import copy
import importlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from grids import grid
from helpers import (
    add_conv_biases,
    assert_all_close,
    assert_close,
    assert_same_buffers,
    backward,
    freeze_norms,
    small_model,
    with_engine,
)
from test_activations import MODULES
from test_stem import _step
from torch.utils._python_dispatch import TorchDispatchMode
from triton_interpreter import mended_interpreter  # noqa: F401 (a fixture)

from efficient_densenet import kernels
from efficient_densenet.engine import choose
from efficient_densenet.engine.stem import backward as stem_backward
from efficient_densenet.engine.stem import forward
from efficient_densenet.engine.stem.spec import Conv, StemSpec
from efficient_densenet.kernels import portable
from efficient_densenet.kernels.activations import RELU_SPEC
from efficient_densenet.kernels.interface import INV_STD, MEAN, BatchNormAffine, StatisticsOutput
from efficient_densenet.kernels.max_pooling import MaxPool
from efficient_densenet.norms.sync_batch_norm import synchronize_norms

pytest.importorskip("triton", reason="needs Triton")
triton_operations = importlib.import_module("efficient_densenet.kernels.triton_gpu.host.operations")
triton_stem = importlib.import_module("efficient_densenet.kernels.triton_gpu.host.stem")

pytestmark = pytest.mark.usefixtures("mended_interpreter")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = [torch.contiguous_format, torch.channels_last]
POOL = MaxPool([3, 3], [2, 2], [1, 1], [1, 1], False)
SPEC = StemSpec("float32", "float32", False, 1e-5, None, RELU_SPEC, Conv([2, 2], [3, 3], [1, 1], 1), POOL)


@pytest.fixture
def fused_stems(monkeypatch) -> list[bool]:
    """Let the Triton kernels run every stem, as on a GPU; notes each forward and backward. None is left to portable."""
    ran = []

    def chosen(x, **options):
        ran.append(True)
        return triton_operations

    monkeypatch.setattr(forward, "kernels_for", chosen)
    monkeypatch.setattr(triton_stem, "portable_stem", None)
    return ran


@pytest.fixture
def few_tiles(monkeypatch):
    """Larger tiles: the interpreter's time is that of the operations, whatever the size of what they operate on."""
    monkeypatch.setattr(triton_stem, "_TILE", dict.fromkeys((False, True), (1024, 8)))
    monkeypatch.setattr(triton_stem, "_STATISTICS_TILE", dict.fromkeys((False, True), (1024, 8)))


@pytest.fixture(autouse=True)
def exact_products(monkeypatch):
    """On a GPU too: the errors of products in TF32 would hide those of the kernels."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.mark.usefixtures("few_tiles")
@pytest.mark.parametrize(
    *grid(
        size=[(31, 17), (23, 40), (9, 8)],
        batch=[1, 3],
        memory_format=FORMATS,
        frozen=[False, True],
        bias=[False, True],
        autocast=[False, True],
        activation=["relu", "silu", "hardtanh"],
    )
)
def test_errors_are_at_most_twice_plain_s(size, batch, memory_format, frozen, bias, autocast, activation, fused_stems):
    exact = small_model("imagenet", efficient=False, block_config=(2,))
    exact.features.relu0 = MODULES[activation]()
    exact.to(DEVICE, memory_format=memory_format)
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
    assert found[0].dtype == expected[0].dtype
    assert found[0].stride() == expected[0].stride()
    for ours_value, theirs, right in zip(found, expected, reference, strict=True):
        error, allowed = ((tensor.double() - right).norm() for tensor in (ours_value, theirs))
        assert error <= 2 * allowed + 1e-6 * right.norm()
    assert_same_buffers(ours, plain, 1e-5)


@pytest.mark.usefixtures("few_tiles")
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("memory_format", FORMATS)
def test_the_gradient_of_the_images_lies_as_they_do(memory_format, weight_format, fused_stems):
    """Whichever memory format the convolution takes: the operator's fake implementation promises it."""
    model = (
        small_model("imagenet", efficient="shared", block_config=(2,)).float().to(DEVICE, memory_format=weight_format)
    )
    x = torch.randn(2, 3, 23, 40, device=DEVICE).contiguous(memory_format=memory_format).requires_grad_()
    output = choose.run_stem(list(model.features), model.features.denseblock1, x)
    (grad,) = torch.autograd.grad(output.sum(), x)
    assert fused_stems == [True, True]
    assert grad.stride() == torch.empty_like(x).stride()


@pytest.mark.usefixtures("few_tiles")
@pytest.mark.parametrize("memory_format", FORMATS)
def test_a_network_s_step(memory_format, fused_stems):
    truth = small_model("imagenet", efficient=False)
    plain = copy.deepcopy(truth).float().to(DEVICE, memory_format=memory_format)
    ours = with_engine(plain, "shared")
    x = torch.randn(2, 3, 69, 75, dtype=torch.double)
    steps = []
    for model in (truth, plain, ours):
        inputs = x if model is truth else x.float().to(DEVICE).contiguous(memory_format=memory_format)
        output, grad = backward(model, inputs)
        steps.append([tensor.double().cpu() for tensor in (output, grad, *(p.grad for p in model.parameters()))])
    assert fused_stems == [True, True]
    for right, expected, found in zip(*steps, strict=True):
        assert (found - right).norm() <= 2 * (expected - right).norm() + 1e-5 * (1 + right.norm())
    assert_same_buffers(ours, plain, 1e-5)


@pytest.mark.usefixtures("few_tiles")
@pytest.mark.parametrize(
    ("name", "frozen"),
    [("conv0.weight", False), ("conv0.bias", True), ("norm0.weight", True), ("norm0.bias", False), ("x", True)],
)
def test_one_tensor_alone_requires_a_gradient(name, frozen, fused_stems):
    plain = add_conv_biases(small_model("imagenet", efficient=False, block_config=(2,)), "conv0").float()
    if frozen:
        freeze_norms(plain, "norm0")
    plain.to(DEVICE).requires_grad_(False)
    inputs, grads = torch.randn(2, 3, 19, 13, device=DEVICE), []
    for model in (with_engine(plain, "shared"), plain):
        x = inputs.clone()
        tensor = (x if name == "x" else model.features.get_parameter(name)).requires_grad_()
        grads += torch.autograd.grad(model(x).sum(), tensor)
    assert fused_stems == [True, True]
    assert_close(grads[0], grads[1], 1e-5)


@pytest.mark.usefixtures("few_tiles")
def test_second_derivatives(fused_stems):
    plain = small_model("imagenet", efficient=False, block_config=(1,)).float().to(DEVICE)
    x, found = torch.randn(2, 3, 17, 16, device=DEVICE), []
    for model in (with_engine(plain, "shared"), plain):
        inputs = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(inputs).square().sum(), inputs, create_graph=True)
        found += torch.autograd.grad(grad.square().sum(), model.features.conv0.weight)
    assert fused_stems == [True, True]  # the forward, and its backward in the second derivative
    assert_close(*found, 1e-4)


@pytest.mark.skipif(DEVICE == "cuda", reason="torch's own synchronized norms run on a GPU")
@pytest.mark.usefixtures("few_tiles", "process_group_of_one")
def test_synchronized_norms(fused_stems):
    plain = small_model("imagenet", efficient=False, block_config=(1,)).float()
    ours = with_engine(plain, "shared")
    synchronize_norms(ours, None)
    x = torch.randn(3, 3, 17, 16)
    found, expected = _step(ours, x), _step(plain, x)
    assert fused_stems == [True, True]
    assert_all_close(found, expected, 1e-5)
    assert_same_buffers(ours, plain, 1e-6)


class _Operations(TorchDispatchMode):
    """The names of the operations that are no allocation, no view and no operator of the package."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = function.overloadpacket.__name__
        if function.namespace == "aten" and name not in {"empty", "new_empty", "select", "unbind", "view", "slice"}:
            self.names.append(name)
        return function(*arguments, **(options or {}))


def test_launches_and_bytes_of_densenet121_s_stem(monkeypatch):
    """z is written once, and read twice, in the forward and in the backward; its gradient is written over it."""
    bytes_of_launches = []

    def record(prepared, *tensors):
        bytes_of_launches.append(sum(each.nbytes for each in tensors if each is not None))

    monkeypatch.setattr(triton_stem.launch, "launch", record)
    monkeypatch.setattr(kernels, "triton_supports", lambda values: True)
    x, weight = torch.empty(64, 3, 224, 224, device="meta"), torch.empty(64, 3, 7, 7, device="meta")
    norm, z, pooled = [torch.empty(64, device="meta")] * 2, 64 * 64 * 112**2 * 4, 64 * 64 * 56**2 * 4
    convolved = forward.Convolved(SPEC, x, weight, None)
    assert convolved.values.nbytes == z
    with _Operations() as operations:
        output, statistics = forward.forward(convolved, *norm, ())
    assert operations.names == ["mul_"]  # the variance that running statistics take
    assert len(bytes_of_launches) == 3
    assert sum(bytes_of_launches) <= 1.01 * (2 * z + pooled)
    bytes_of_launches.clear()
    grad_output = torch.empty_like(output)
    with _Operations() as operations:
        affine = convolved.norm(*norm, statistics)
        needs_grad = [False, True, True, True, False]
        stem_backward.backward(convolved, grad_output, affine, None, needs_grad)
    assert operations.names == ["convolution_backward"]
    assert len(bytes_of_launches) == 3
    assert sum(bytes_of_launches) <= 1.01 * (3 * z + 2 * pooled + 2 * pooled / 4)


REFUSED = {
    "a dilated pooling": (POOL._replace(dilation=[1, 2]), (2, 64, 8, 8)),
    "a large window": (POOL._replace(kernel_size=[6, 5]), (2, 64, 64, 64)),
    "no image": (POOL, (0, 64, 4, 4)),
    "nothing to pool": (POOL._replace(padding=[0, 0]), (2, 64, 2, 2)),
    "images beyond 32 bits": (POOL, (1, 64, 1 << 13, 1 << 13)),
    "volumes": (POOL, (2, 64, 4, 4, 4)),
}


def test_which_stems_are_fused():
    assert triton_stem.supports(torch.Size([2, 64, 4, 4]), POOL)
    for what, (pool, shape) in REFUSED.items():
        assert not triton_stem.supports(torch.Size(shape), pool), what


@pytest.mark.parametrize("refused", ["a dilated pooling", "a large window", "volumes"])
def test_other_stems_take_portable_s_operations(refused):
    pool, (_, channels, *size) = REFUSED[refused]
    if len(size) == 3:
        pool = MaxPool([3] * 3, [2] * 3, [1] * 3, [1] * 3, False)
    z, statistics = torch.randn(2, channels, *size, device=DEVICE), torch.zeros(3, channels, device=DEVICE)
    results = []
    for kernel_set in (triton_operations, portable):
        values, matrix = z.clone(), statistics.clone()
        kernel_set.image_statistics(values, StatisticsOutput(matrix, 1e-5))
        weight, bias = torch.ones_like(matrix[0]), torch.zeros_like(matrix[0])
        norm = BatchNormAffine(weight, bias, matrix[INV_STD], matrix[MEAN])
        output = kernel_set.norm_activation_max_pool(values, norm, RELU_SPEC, pool, torch.float32)
        arguments = torch.ones_like(output), values, norm, RELU_SPEC, pool
        indices, grads = kernel_set.norm_activation_max_pool_reduce(*arguments)
        count = values[:, 0].numel()
        kernel_set.norm_activation_max_pool_backward(arguments[0], indices, values, norm, RELU_SPEC, pool, grads, count)
        results.append([output, *grads[:2], values])
    for found, expected in zip(*results, strict=True):
        assert_close(found, expected, 1e-5)


@pytest.mark.parametrize("ceil_mode", [False, True])
def test_the_pooled_size_is_pytorch_s(ceil_mode):
    for kernel_size, stride, padding, dilation in itertools.product([1, 2, 3, 5], [1, 2, 3], [0, 1, 2], [1, 2]):
        pool = MaxPool([kernel_size], [stride], [padding], [dilation], ceil_mode)
        for size in range(1, 12):
            values = torch.empty(1, 1, size)
            if 2 * padding > kernel_size:
                continue
            try:
                expected = F.max_pool1d(values, kernel_size, stride, padding, dilation, ceil_mode).shape[2]
            except RuntimeError:
                expected = 0
            assert max(0, *pool.pooled_size([size])) == expected, (pool, size)
