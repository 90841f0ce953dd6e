"""The ImageNet stem as one autograd node agrees with its four modules to 1e-10, and saves only its input."""

import copy

import pytest
import torch
import torch.nn.functional as F
from grids import grid, pairwise
from helpers import (
    assert_all_close,
    assert_close,
    assert_same_buffers,
    assert_same_gradients,
    assert_same_step,
    freeze_norms,
    small_model,
    with_engine,
)
from test_activations import MODULES as ACTIVATIONS
from torch import Tensor, nn

from efficient_densenet import DenseNet, create_model
from efficient_densenet.checkpoint import checkpoint_wrapper
from efficient_densenet.engine import choose
from efficient_densenet.engine.refuse import can_share_stem
from efficient_densenet.engine.stem import Stem, StemPlan
from efficient_densenet.kernels import row_tiles
from efficient_densenet.memory import saved_bytes, tensor_peak
from efficient_densenet.norms.sync_batch_norm import synchronize_norms

SIZES = {1: [(5,), (38,)], 2: [(9, 14), (23, 17)], 3: [(9, 6, 11)]}
CASES = [(dims, size) for dims, sizes in SIZES.items() for size in sizes]
CHANNELS_LAST = {2: torch.channels_last, 3: torch.channels_last_3d}
FEW_AND_MANY = [6, 11]  # channels: pooled in the memory format of the input, and in channels_last
MODULES = ["conv0", "norm0", "relu0", "pool0"]


def _plain(dims: int = 2, **overrides) -> DenseNet:
    return small_model("imagenet", dims=dims, efficient=False, block_config=(2,), **overrides)


def _input(*size: int, batch: int = 3) -> Tensor:
    return torch.randn(batch, 3, *size, dtype=torch.double)


def _run_stem(model: DenseNet, x: Tensor) -> tuple[Tensor, int]:
    """The stem's output and how many modules ran as one node; the input and 0 where it cannot."""
    result = choose.run_stem(list(model.features), model.features.denseblock1, x)
    return (x, 0) if result is None else (result, 4)


def _stem_is_one(model: DenseNet, x: Tensor) -> bool:
    """Whether the stem runs as one node, without calling its modules."""
    return _run_stem(copy.deepcopy(model), x)[1] == 4


def _of_some_layout(dims, last, **_):
    """A signal has no channels_last."""
    return dims in CHANNELS_LAST or not last


@pytest.mark.parametrize(
    *pairwise(
        _of_some_layout,
        activation=list(ACTIVATIONS),
        dims__size=CASES,
        last=[False, True],
        tile_bytes=[1, 3000, 1 << 22],
        frozen=[False, True],
        channels=FEW_AND_MANY,
    )
)
def test_values_gradients_and_buffers(activation, dims, size, last, tile_bytes, frozen, channels, monkeypatch):
    monkeypatch.setitem(row_tiles.TILE_BYTES, "cpu", tile_bytes)
    layout = CHANNELS_LAST[dims] if last else torch.contiguous_format
    plain = _with_activation(activation, dims, num_init_features=channels).to(memory_format=layout)
    if frozen:
        freeze_norms(plain, "norm0")
    ours = with_engine(plain, "shared")
    x = _input(*size).to(memory_format=layout)
    assert _stem_is_one(ours, x)
    assert_same_step(ours, plain, x)
    assert_same_buffers(ours, plain)
    output, expected = _run_stem(ours, x)[0], plain.features[:4](x)
    assert output.stride() == expected.stride()


def _with_activation(activation: str, dims: int = 2, **overrides) -> DenseNet:
    plain = _plain(dims, **overrides)
    plain.features.relu0 = ACTIVATIONS[activation]()
    return plain.double()


def test_an_activation_with_weights_is_no_part_of_a_stem():
    stem = _with_activation("silu").features[:4]
    assert can_share_stem(*stem, _input(13, 12))
    assert not can_share_stem(stem[0], stem[1], nn.PReLU(), stem[3], _input(13, 12))


@pytest.mark.parametrize(*pairwise(activation=["silu", "elu"], dims=[1, 2, 3], frozen=[False, True]))
def test_second_derivatives_of_activations(activation, dims, frozen):
    plain = _with_activation(activation, dims)
    if frozen:
        freeze_norms(plain, "norm0")
    ours = with_engine(plain, "shared")
    x, grads = _input(*(9, 7, 8)[:dims], batch=2).requires_grad_(), []
    assert _stem_is_one(ours, x)
    for model in (ours, plain):
        output = _run_stem(ours, x)[0] if model is ours else model.features[:4](x)
        inputs = [x, *model.features[:4].parameters()]
        first = torch.autograd.grad(output.square().sum(), inputs, create_graph=True)
        loss = torch.stack([each.square().sum() for each in first]).sum()
        grads.append([*first, *torch.autograd.grad(loss, inputs)])
    assert_all_close(*grads)


@pytest.mark.parametrize(*grid(bias=[False, True], frozen=[False, True], alone=[True, False]))
def test_each_parameter_alone_requires_a_gradient_or_is_alone_frozen(bias, frozen, alone):
    plain = _plain()
    if bias:
        plain.features.conv0 = nn.Conv2d(3, 6, (5, 3), (2, 1), (1, 0), (1, 2), bias=True).double()
    if frozen:
        freeze_norms(plain, "norm0")
    ours = with_engine(plain, "shared")
    names = [name for name, _ in plain.features[:4].named_parameters(prefix="features")]
    assert len(names) == 3 + bias
    for needs_grad_input in (False, True):
        x = _input(13, 12).requires_grad_(needs_grad_input)
        for name in (*names, "features.norm5.bias"):
            grads = []
            for model in (ours, plain):
                model.zero_grad()
                for other, parameter in model.named_parameters():
                    parameter.requires_grad_((other == name) is alone)
                output = model(x)
                grads += torch.autograd.grad(output.square().sum(), x, retain_graph=True) if needs_grad_input else ()
                output.square().sum().backward()
            assert_same_gradients(ours, plain)
            if needs_grad_input:
                assert_close(*grads)


def test_groups_and_other_poolings():
    pools = [
        nn.MaxPool2d(2),
        nn.MaxPool2d(3, 1),
        nn.MaxPool2d((5, 2), (2, 3), (2, 1), ceil_mode=True),
        nn.MaxPool2d(3, 2, 1, dilation=2),
    ]
    for pool in pools:
        plain = _plain()
        plain.features.conv0 = nn.Conv2d(3, 6, 3, padding=2, groups=3, bias=False).double()
        plain.features.pool0 = pool
        ours = with_engine(plain, "shared")
        assert _stem_is_one(ours, _input(13, 12))
        assert_same_step(ours, plain, _input(13, 12))


@pytest.mark.parametrize(*grid(dims=[1, 2, 3], frozen=[False, True], channels=FEW_AND_MANY))
def test_ties_in_the_pooling(dims, frozen, channels):
    """One of several equal maxima gets the gradient, the same one as in plain."""
    plain = _plain(dims, num_init_features=channels)
    norm = plain.features.norm0
    with torch.no_grad():
        plain.features.conv0.weight.copy_(torch.randint_like(plain.features.conv0.weight, -1, 2))
        norm.weight[0], norm.weight[1], norm.bias[1] = -1, 0, 0.5  # the second channel is the same everywhere
    if frozen:
        freeze_norms(plain, "norm0")
    ours = with_engine(plain, "shared")
    x = torch.randint(0, 2, (3, 3, *(12, 11, 9)[:dims]), dtype=torch.double)
    x[0] = 1
    assert_same_step(ours, plain, x)


def test_gradcheck():
    """It also leaves out the gradient of the output."""
    stem, x = Stem(*_plain().features[:4]), _input(5, 6, batch=2).requires_grad_()
    tensors, plan = [stem.norm.weight, stem.norm.bias, stem.conv.weight], StemPlan(stem, x)
    assert torch.autograd.gradcheck(lambda x, *each: plan.apply(x, *each, None), (x, *tensors))


def test_an_input_changed_in_place_is_detected():
    model = with_engine(_plain(), "shared")
    x = _input(13, 12)
    loss = model(x).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.usefixtures("process_group_of_one")
def test_synchronized_norms():
    plain = _plain()
    ours = with_engine(plain, "shared")
    synchronize_norms(ours, None)
    assert _stem_is_one(ours, _input(13, 12))
    for batch in (2, 3):
        assert_same_step(ours, plain, _input(13, 12, batch=batch))
    assert_same_buffers(ours, plain)


@pytest.mark.parametrize("kind", ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"])
@pytest.mark.parametrize("place", MODULES)
def test_a_hook_fires_once_with_plain_s_values(place, kind):
    plain = _plain()
    # Autograd refuses a backward hook on an in-place ReLU and on the module before it.
    plain.features.relu0.inplace = False
    ours = with_engine(plain, "shared")
    seen = [], []
    for model, calls in zip((ours, plain), seen, strict=True):

        def record(module, *values, calls=calls):
            tensors = (tensor for value in values for tensor in (value if isinstance(value, tuple) else (value,)))
            calls.append([tensor.detach().clone() for tensor in tensors if tensor is not None])

        getattr(model.features.get_submodule(place), f"register_{kind}")(record)
    assert_same_step(ours, plain, _input(13, 12))
    assert_same_buffers(ours, plain)
    assert [len(calls) for calls in seen] == [1, 1]
    assert_all_close(seen[0][0], seen[1][0])


def _with(name: str, module: nn.Module) -> DenseNet:
    model = _plain()
    model.features._modules[name] = module
    return model.double()


def _parametrized(model: DenseNet) -> DenseNet:
    nn.utils.parametrizations.weight_norm(model.features.conv0)
    return model


OTHERS = {
    "no affine": lambda: _with("norm0", nn.BatchNorm2d(6, affine=False)),
    "another activation": lambda: _with("relu0", nn.Softplus()),
    "another pooling": lambda: _with("pool0", nn.AvgPool2d(3, 2, 1)),
    "padding by name": lambda: _with("conv0", nn.Conv2d(3, 6, 3, padding="same", bias=False)),
    "padding by reflection": lambda: _with("conv0", nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect")),
    "a parametrization": lambda: _parametrized(_plain()),
    "another engine": lambda: _plain().set_engine("checkpoint"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_stems_run_as_modules(what):
    plain = OTHERS[what]()
    ours = copy.deepcopy(plain) if what == "another engine" else with_engine(plain, "shared")
    assert not _stem_is_one(ours, _input(13, 12))
    plain.set_engine("plain")
    assert_same_step(ours, plain, _input(13, 12))
    assert_same_buffers(ours, plain)


def test_without_gradients_the_modules_run():
    model = with_engine(_plain(), "shared")
    with torch.no_grad():
        assert not _stem_is_one(model, _input(13, 12))
    assert not _stem_is_one(model.requires_grad_(False), _input(13, 12))


def test_a_feature_map_from_inside_the_stem():
    plain = _plain()
    found = [
        backward_of_maps(with_engine(plain, engine).as_backbone(maps="raw"), _input(13, 12) * 0 + 0.3)
        for engine in ("shared", "plain")
    ]
    assert_all_close(*found)


def backward_of_maps(model: DenseNet, x: Tensor) -> list[Tensor]:
    maps = model(x + torch.linspace(-1, 1, 12))
    sum(found.square().sum() for found in maps).backward()
    return [*(found.detach() for found in maps), model.features.conv0.weight.grad]


def test_a_single_value_per_channel_raises_plain_s_error():
    model = with_engine(_plain(), "shared")
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(_input(1, 2, batch=1))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_convolution_without_an_output_pixel_raises_plain_s_error(frozen):
    plain = _plain()
    plain.features.conv0.padding = (0, 0)
    if frozen:
        freeze_norms(plain, "norm0")
    errors = []
    for model in (with_engine(plain, "shared"), plain):
        with pytest.raises(RuntimeError, match="Kernel size can't be greater") as caught:
            model(_input(6, 12))
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize(
    *grid(
        lambda dims, channels, **_: dims > 1 or channels == 6,
        dims=[1, 2, 3],
        channels=FEW_AND_MANY,
        autocast=[False, True],
        activation=["relu", "elu", "gelu", "hardtanh"],
        strength=3,
    )
)
def test_errors_are_at_most_twice_plain_s(dims, channels, autocast, activation):
    exact = _with_activation(activation, dims, num_init_features=channels)
    plain = copy.deepcopy(exact).float()
    x = _input(*(31, 17, 12)[:dims]) + 5  # a mean that is large beside the deviation
    reference = _step(exact, x)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ours = with_engine(plain, "shared")
        found, expected = _step(ours, x.float()), _step(plain, x.float())
    assert found[0].dtype == expected[0].dtype
    assert found[0].stride() == expected[0].stride()
    for value, theirs, right in zip(found, expected, reference, strict=True):
        error, allowed = ((tensor.double() - right).norm() for tensor in (value, theirs))
        assert error <= 2 * allowed + 1e-7 * right.norm()
    assert_same_buffers(ours, plain, 1e-5)


def _step(model: DenseNet, x: Tensor) -> list[Tensor]:
    """The stem's output, and the gradients of x and all parameters for a fixed grad_output."""
    x = x.detach().requires_grad_()
    output, consumed = _run_stem(model, x)
    if not consumed:
        output = model.features[:4](x)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(output)
    parameters = list(model.features[:4].parameters())
    return [output.detach(), *torch.autograd.grad(output, [x, *parameters], grad)]


def test_only_the_input_is_saved_for_backward():
    model = with_engine(_plain(), "shared")
    x = _input(64, 64)
    statistics = [model.features.norm0.weight] * 3
    tensors = [x, *model.features[:4].parameters(), *statistics]
    assert saved_bytes(lambda: _run_stem(model, x)) == sum(map(torch.Tensor.nbytes.__get__, tensors))


@pytest.mark.parametrize(("dims", "size"), [(2, (128, 128)), (3, (48, 48, 48))])
def test_the_stem_s_own_peak(dims, size, request):
    """The convolution's output, the indices of the maxima, the output and its gradient, and some tiles.

    In one thread: PyTorch's convolution of volumes allocates a workspace for each.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    model = create_model("densenet121", dims=dims, in_channels=1, block_config=(1,), efficient="shared")
    x = torch.randn(16, 1, *size)
    conv_bytes = 16 * 64 * torch.Size(size).numel() // 2**dims * 4
    tile = max(conv_bytes // 16, row_tiles.TILE_BYTES["cpu"])
    peak = tensor_peak(lambda: _step(model, x))
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


def test_a_wrapped_first_block_does_not_lend_its_parts_to_the_next():
    """The stem reads the first block; the wrapped block is called, and the block after it is read by itself."""
    plain = _plain()
    ours = with_engine(plain, "shared")
    checkpoint_wrapper(ours.features.denseblock1)
    assert_same_step(ours, plain, _input(40, 38))
