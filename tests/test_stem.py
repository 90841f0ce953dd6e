"""The stem for large images as one node: what it takes and what it leaves to its modules, ties, hooks and memory.

`test_matches_plain` has its numbers within networks, `test_shared_autograd` its contract with autograd.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from grids import grid
from helpers import assert_all_close, assert_same_buffers, assert_same_step, freeze_norms, small_model, with_engine
from torch import Tensor, nn

from efficient_densenet import DenseNet, create_model
from efficient_densenet.checkpoint import checkpoint_wrapper
from efficient_densenet.engine import choose
from efficient_densenet.kernels import row_tiles
from efficient_densenet.memory import tensor_peak

MODULES = ["conv0", "norm0", "relu0", "pool0"]


def _plain(dims: int = 2, **overrides) -> DenseNet:
    return small_model("imagenet", dims=dims, efficient=False, block_config=(2,), **overrides)


def _input(*size: int, batch: int = 3) -> Tensor:
    return torch.randn(batch, 3, *size, dtype=torch.double)


def _stem_is_one(model: DenseNet, x: Tensor) -> bool:
    """Whether the stem runs as one node, without calling its modules."""
    model = copy.deepcopy(model)
    return choose.run_stem(list(model.features), model.features.denseblock1, x) is not None


def _with(**modules: nn.Module) -> DenseNet:
    model = _plain()
    model.features._modules.update(modules)
    return model.double()


def _conv(**options) -> nn.Module:
    return nn.Conv2d(3, 6, 3, **{"bias": False} | options)


TAKEN = {
    "usual": _plain,
    "of several geometries": lambda: _with(conv0=nn.Conv2d(3, 6, (5, 3), (2, 1), (1, 0), (1, 2), bias=True)),
    "groups": lambda: _with(conv0=_conv(padding=2, groups=3), pool0=nn.MaxPool2d(2)),
    "a pooling that keeps the size": lambda: _with(pool0=nn.MaxPool2d(3, 1)),
    "a pooling that rounds up": lambda: _with(pool0=nn.MaxPool2d((5, 2), (2, 3), (2, 1), ceil_mode=True)),
    "a dilated pooling": lambda: _with(pool0=nn.MaxPool2d(3, 2, 1, dilation=2)),
}


def _parametrized() -> DenseNet:
    model = _plain()
    nn.utils.parametrizations.weight_norm(model.features.conv0)
    return model


LEFT = {
    "no affine": lambda: _with(norm0=nn.BatchNorm2d(6, affine=False)),
    "an activation that the engine lacks": lambda: _with(relu0=nn.Softplus()),
    "an activation with weights": lambda: _with(relu0=nn.PReLU()),
    "another pooling": lambda: _with(pool0=nn.AvgPool2d(3, 2, 1)),
    "padding by name": lambda: _with(conv0=_conv(padding="same")),
    "padding by reflection": lambda: _with(conv0=_conv(padding=1, padding_mode="reflect")),
    "a parametrization": _parametrized,
}


@pytest.mark.parametrize("what", [*TAKEN, *LEFT])
def test_which_stems_are_one_node(what):
    plain = (TAKEN | LEFT)[what]()
    ours, x = with_engine(plain, "shared"), _input(13, 12)
    assert _stem_is_one(ours, x) == (what in TAKEN)
    assert_same_step(ours, plain, x)
    assert_same_buffers(ours, plain)
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


@pytest.mark.parametrize("kind", ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"])
@pytest.mark.parametrize("place", MODULES)
def test_a_hook_fires_once_with_plain_s_values(place, kind):
    plain = _plain()
    plain.features.relu0.inplace = False  # autograd refuses a backward hook on an in-place ReLU and before it
    ours, seen = with_engine(plain, "shared"), ([], [])
    for model, calls in zip((ours, plain), seen, strict=True):

        def record(module, *values, calls=calls):
            tensors = (tensor for value in values for tensor in (value if isinstance(value, tuple) else (value,)))
            calls.append([tensor.detach().clone() for tensor in tensors if tensor is not None])

        getattr(model.features.get_submodule(place), f"register_{kind}")(record)
    assert_same_step(ours, plain, _input(13, 12))
    assert_same_buffers(ours, plain)
    assert [len(calls) for calls in seen] == [1, 1]
    assert_all_close(seen[0][0], seen[1][0])


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


def test_a_wrapped_first_block_does_not_lend_its_parts_to_the_next():
    """The stem reads the first block; the wrapped block is called, and the block after it is read by itself."""
    plain = small_model("imagenet", efficient=False, block_config=(2, 1))
    ours = with_engine(plain, "shared")
    checkpoint_wrapper(ours.features.denseblock1)
    assert_same_step(ours, plain, _input(40, 38))


@pytest.mark.parametrize(("dims", "size"), [(2, (128, 128)), (3, (48, 48, 48))])
def test_the_stem_s_own_peak(dims, size, request):
    """The convolution's output, the indices of the maxima, the output and its gradient, and some tiles.

    In one thread: PyTorch's convolution of volumes allocates a workspace for each.
    """
    threads = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    torch.set_num_threads(1)
    model = create_model("densenet121", dims=dims, in_channels=1, block_config=(1,), efficient="shared")
    modules, block = list(model.features), model.features.denseblock1
    x = torch.randn(8, 1, *size)
    conv_bytes = 8 * 64 * torch.Size(size).numel() // 2**dims * 4
    tile = max(conv_bytes // 8, row_tiles.TILE_BYTES["cpu"])
    peak = tensor_peak(lambda: choose.run_stem(modules, block, x).sum().backward())
    assert conv_bytes < peak <= conv_bytes * (1 + 3 / 2**dims) + 5 * tile + x.nbytes


@pytest.mark.exhaustive
@pytest.mark.parametrize(("dims", "batch", "side", "share"), [(2, 16, 224, 0.12), (3, 4, 64, 0.20)])
def test_the_whole_model_s_peak(dims, batch, side, share):
    model = create_model("densenet121", dims=dims, in_channels=3 if dims == 2 else 1)
    x = torch.randn(batch, model.in_channels, *[side] * dims)
    peaks = []
    for engine in ("plain", "shared"):
        model.set_engine(engine)

        def step():
            F.cross_entropy(model(x), torch.zeros(batch, dtype=torch.long)).backward()

        step()
        peaks.append(tensor_peak(step))
    assert peaks[1] <= share * peaks[0]
