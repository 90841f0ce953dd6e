"""The stem for large images as one node: the modules that it takes or leaves, ties, errors and memory.

`test_matches_plain` has its numbers within networks, `test_shared_autograd` its contract with autograd.
"""

import copy
import itertools

import pytest
import torch
from grids import grid
from helpers import assert_same_step, freeze_norms, run_stem, small_model, with_engine
from torch import Tensor, nn

from efficient_densenet import DenseNet, create_model
from efficient_densenet.checkpoint import checkpoint_wrapper
from efficient_densenet.kernels import row_tiles
from efficient_densenet.kernels.max_pooling import MaxPool
from efficient_densenet.memory import tensor_peak


def _plain(dims: int = 2, **overrides) -> DenseNet:
    return small_model("imagenet", dims=dims, efficient=False, block_config=(2,), **overrides)


def _input(*size: int, batch: int = 3) -> Tensor:
    return torch.randn(batch, 3, *size, dtype=torch.double)


def _stem_is_one(model: DenseNet, x: Tensor) -> bool:
    """Return whether the stem runs as one node, without calling its modules."""
    model = copy.deepcopy(model)
    return run_stem(list(model.features), model.features.denseblock1, x) is not None


def _with(**modules: nn.Module) -> DenseNet:
    model = _plain()
    model.features._modules.update(modules)
    return model.double()


TAKEN = {
    "usual": _plain,
    "of several geometries": lambda: _with(conv0=nn.Conv2d(3, 6, (5, 3), (2, 1), (1, 0), (1, 2), bias=True)),
    "groups": lambda: _with(conv0=nn.Conv2d(3, 6, 3, padding=2, groups=3, bias=False), pool0=nn.MaxPool2d(2)),
    "a pooling that keeps the size": lambda: _with(pool0=nn.MaxPool2d(3, 1)),
    "a pooling that rounds up": lambda: _with(pool0=nn.MaxPool2d((5, 2), (2, 3), (2, 1), ceil_mode=True)),
    "a pooling with lists": lambda: _with(pool0=nn.MaxPool2d([3, 2], [2], [1, 1], [1, 2])),
    "a dilated pooling": lambda: _with(pool0=nn.MaxPool2d(3, 2, 1, dilation=2)),
    "settings that are numbers": lambda: _with_settings_that_are_numbers(),
}


def _with_settings_that_are_numbers() -> DenseNet:
    model = _plain()
    model.features.conv0.stride, model.features.conv0.padding, model.features.conv0.dilation = 2, 3, 1
    return model


def _parametrized() -> DenseNet:
    model = _plain()
    nn.utils.parametrizations.weight_norm(model.features.conv0)
    return model


LEFT = {
    "no affine": lambda: _with(norm0=nn.BatchNorm2d(6, affine=False)),
    "an activation that the engine lacks": lambda: _with(relu0=nn.Softplus()),
    "an activation with weights": lambda: _with(relu0=nn.PReLU()),
    "another pooling": lambda: _with(pool0=nn.AvgPool2d(3, 2, 1)),
    "padding by name": lambda: _with(conv0=nn.Conv2d(3, 6, 3, padding="same")),
    "padding by reflection": lambda: _with(conv0=nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect")),
    "a parametrization": _parametrized,
}


@pytest.mark.parametrize("what", [*TAKEN, *LEFT])
def test_which_stems_are_one_node(what):
    plain = (TAKEN | LEFT)[what]()
    ours, x = with_engine(plain, "shared"), _input(13, 12)
    assert _stem_is_one(ours, x) == (what in TAKEN)
    assert_same_step(ours, plain, x)
    with torch.no_grad():
        assert not _stem_is_one(ours, x)
    assert not _stem_is_one(with_engine(plain, "checkpoint"), x)
    assert not _stem_is_one(copy.deepcopy(ours).requires_grad_(False), x)


@pytest.mark.parametrize(*grid(dims=[1, 2, 3], frozen=[False, True], channels=[6, 11]))
def test_ties_in_the_pooling(dims, frozen, channels):
    """One of several equal maxima gets the gradient, the same one as in plain."""
    plain = _plain(dims, num_init_features=channels)
    norm = plain.features.norm0
    with torch.no_grad():
        plain.features.conv0.weight.copy_(torch.randint_like(plain.features.conv0.weight, -1, 2))
        norm.weight[0], norm.weight[1], norm.bias[1] = -1, 0, 0.5  # the second channel is the same everywhere
    if frozen:
        freeze_norms(plain, "norm0")
    x = torch.randint(0, 2, (3, 3, *(12, 11, 9)[:dims]), dtype=torch.double)
    x[0] = 1
    assert_same_step(with_engine(plain, "shared"), plain, x)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_not_finite_spreads_as_in_plain_through_a_frozen_norm(value):
    plain, x = _plain(), _input(32, 32)
    freeze_norms(plain)
    x[1, 0, 3, 2] = value
    gradients = []
    for model in (plain, with_engine(plain, "shared")):
        images = x.clone().requires_grad_()
        model.features(images).sum().backward()
        gradients.append([images.grad, model.features.conv0.weight.grad])
    for expected, actual in zip(*gradients, strict=True):
        torch.testing.assert_close(actual, expected, equal_nan=True)


@pytest.mark.parametrize(
    ("size", "batch", "message"),
    [((1, 2), 1, "more than 1 value per channel"), ((6, 12), 3, "Kernel size can't be greater")],
)
def test_errors_are_plain_s(size, batch, message):
    plain, errors = _plain(), []
    if batch > 1:
        plain.features.conv0.padding = (0, 0)
    for model in (with_engine(plain, "shared"), plain):
        with pytest.raises((ValueError, RuntimeError), match=message) as caught:
            model(_input(*size, batch=batch))
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("ceil_mode", [False, True])
def test_the_pooled_size_is_pytorch_s(ceil_mode):
    for geometry in itertools.product([1, 2, 3, 5], [1, 2, 3], [0, 1, 2], [1, 2]):
        kernel_size, _, padding, _ = geometry
        pool = MaxPool(*([each] for each in geometry), ceil_mode)
        for size in range(1, 12) if 2 * padding <= kernel_size else ():
            try:
                expected = nn.functional.max_pool1d(torch.empty(1, 1, size), *geometry, ceil_mode).shape[2]
            except RuntimeError:
                expected = 0
            assert max(0, *pool.pooled_size([size])) == expected, (pool, size)


def test_a_wrapped_first_block_does_not_lend_its_parts_to_the_next():
    """The stem reads the first block; the wrapped block is called, and the block after it is read by itself."""
    plain = small_model("imagenet", efficient=False, block_config=(2, 1))
    ours = with_engine(plain, "shared")
    checkpoint_wrapper(ours.features.denseblock1)
    assert_same_step(ours, plain, _input(40, 38))


@pytest.mark.parametrize(("dims", "size"), [(2, (128, 128)), (3, (48, 48, 48))])
def test_the_stem_s_own_peak(dims, size):
    """The convolution's output, the indices of the maxima, the output and its gradient, and some tiles.

    In one thread: PyTorch's convolution of volumes allocates a workspace for each.
    """
    torch.set_num_threads(1)
    model = create_model("densenet121", dims=dims, in_channels=1, block_config=(1,), efficient="shared")
    modules, block = list(model.features), model.features.denseblock1
    x = torch.randn(8, 1, *size)
    conv_bytes = 8 * 64 * torch.Size(size).numel() // 2**dims * 4
    tile = max(conv_bytes // 8, row_tiles.TILE_BYTES["cpu"])
    peak = tensor_peak(lambda: run_stem(modules, block, x).sum().backward())
    assert conv_bytes < peak <= conv_bytes * (1 + 3 / 2**dims) + 5 * tile + x.nbytes
