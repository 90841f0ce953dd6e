"""Networks on signals (1d) and volumes (3d): their structure, dtypes and errors.

`test_matches_plain` has their numbers, `test_shared` their memory formats.
"""

import copy

import pytest
import torch
from helpers import assert_same_step, relative_error, small_model, use_kernels, with_engine
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from efficient_densenet import DenseBlock, DenseLayer, DenseNet, Transition
from efficient_densenet.norms.sync_batch_norm import synchronize_norms


def _input(batch: int, size: tuple[int, ...]) -> Tensor:
    return torch.randn(batch, 3, *size, dtype=torch.double)


def _small(dims: int, **overrides) -> DenseNet:
    return small_model("bc", dims=dims, efficient=False, **overrides)


@pytest.mark.usefixtures("process_group_of_one")
@pytest.mark.parametrize("engine", ["plain", "shared"])
@pytest.mark.parametrize(("dims", "momentum"), [(1, 0.1), (3, 0.1), (1, None)])
def test_synchronized_norms(dims, momentum, engine):
    plain = _small(dims)
    for module in plain.modules():
        if isinstance(module, _BatchNorm):
            module.momentum = momentum
    efficient = with_engine(plain, engine)
    synchronize_norms(efficient, None)
    for batch in (2, 3):
        assert_same_step(efficient, plain, _input(batch, (7, 5, 6)[:dims]))


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_features_under_autocast_have_plain_s_dtype(dims, precision):
    """PyTorch pools volumes in float32 on a CPU."""
    ours, plain = (with_engine(_small(dims).to(precision), engine).features for engine in ("shared", "plain"))
    x = _input(2, (16, 10, 12)[:dims]).to(precision)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for stop in range(1, len(plain) + 1):
            assert ours[:stop](x).dtype == plain[:stop](x).dtype


@pytest.mark.parametrize("bn_size", [0, 2])
def test_gradients_of_volumes_of_two_slices_in_bfloat16(bn_size, monkeypatch):
    """oneDNN leaves a weight's gradient unwritten there: plain's own gradients are wrong in PyTorch 2.14."""
    use_kernels(monkeypatch, "portable", 1 << 22)
    block, results = DenseBlock(2, 16, 3, bn_size, dims=3, efficient="shared"), []
    x = torch.randn(4, 16, 2, 5, 6)
    for dtype in (torch.double, torch.float):
        copied = copy.deepcopy(block).to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.float):
            copied(x.to(dtype)).square().sum().backward()
        results.append([parameter.grad for parameter in copied.parameters()])
    assert relative_error(results[1], results[0]) < 0.2


@pytest.mark.parametrize("small_inputs", [True, False])
@pytest.mark.parametrize("dims", [1, 3])
def test_parameter_names_and_channels_match_2d(dims, small_inputs):
    state_dict, state_dict_2d = (DenseNet(4, (2, 1), small_inputs=small_inputs, dims=d).state_dict() for d in (dims, 2))
    assert list(state_dict) == list(state_dict_2d)
    for name, tensor in state_dict.items():
        expected = state_dict_2d[name].shape
        assert tensor.shape == (expected if len(expected) < 4 else (*expected[:2], *[expected[2]] * dims))


@pytest.mark.parametrize("dims", [0, 2.5, "3d", None])
@pytest.mark.parametrize(
    ("build", "given"),
    [(DenseNet, ()), (DenseBlock, (1, 3, 2)), (DenseLayer, (3, 2, 0, 0.0)), (Transition, (4, 2))],
)
def test_unsupported_dims_raise(build, given, dims):
    with pytest.raises(ValueError, match=r"dims is .*must be one of 1, 2, 3"):
        build(*given, dims=dims)


@pytest.mark.parametrize(
    ("dims", "shape", "message"),
    [
        (1, (2, 3, 8, 8), r"\(2, 3, 8, 8\), but this model needs \(N, 3, length\)"),
        (3, (2, 3, 8, 8), r"but this model needs \(N, 3, depth, height, width\)"),
        (1, (2, 3, 3), "found signals of 3, .*at least 4: enlarge"),
        (3, (2, 3, 3, 9, 9), "found volumes of 3×9×9, .*at least 4×4×4: enlarge"),
    ],
)
def test_unsuitable_inputs_raise(dims, shape, message):
    with pytest.raises(ValueError, match=message):
        DenseNet(dims=dims)(torch.randn(shape))
