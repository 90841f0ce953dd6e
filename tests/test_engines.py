"""The choice of an engine: names, copies, what each refuses, fallbacks, reports, what runs without gradients."""

import contextlib
import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from grids import grid
from helpers import (
    MEMORY_EFFICIENT,
    assert_close,
    assert_same_step,
    backward,
    can_join,
    random_images,
    small_model,
    with_engine,
)
from torch import nn
from training.models import describe_engines

from efficient_densenet import DenseBlock, DenseLayer, DenseNet, kernels
from efficient_densenet._tensors import CHANNELS_LAST
from efficient_densenet.engine import choose


def _assert_draws_plain_s_numbers(plain: nn.Module, x: torch.Tensor) -> list[tuple[int, ...]]:
    """Random numbers are drawn in the order of the elements in memory; another mask would zero other values.

    Returns the strides of the outputs.
    """
    shared, outputs = copy.deepcopy(plain), []
    shared.engine = choose.Engine.SHARED
    for model in (shared, plain):
        torch.manual_seed(1)
        outputs.append(model(x).detach())
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-4)
    return [output.stride() for output in outputs]


def _stored_as_hwoi(weight: torch.Tensor) -> torch.Tensor:
    return weight.movedim((0, 1), (-2, -1)).contiguous().movedim((-2, -1), (0, 1))


@pytest.mark.parametrize(
    *grid(
        dims__dtype=[(2, torch.float64), (2, torch.float32), (3, torch.float32)],
        channels_last=[False, True],
        changed=["conv1", "conv2", "denselayer1.conv"],
        threads__onednn=[(1, True), (2, True), (2, False)],
    )
)
def test_dropout_with_weights_in_any_order(dims, dtype, channels_last, changed, threads, onednn, monkeypatch):
    """PyTorch chooses the memory format of a convolution by threads and settings too."""
    plain = DenseBlock(3, 3, 4, 4, drop_rate=0.3, efficient=False, dims=dims).to(dtype)
    x = torch.randn(2, 3, *[5] * dims, dtype=dtype)
    x = x.contiguous(memory_format=CHANNELS_LAST[x.dim()]) if channels_last else x
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", onednn)
    torch.set_num_threads(threads)
    for change in (_stored_as_hwoi, lambda weight: weight.contiguous(memory_format=CHANNELS_LAST[x.dim()])):
        for name, parameter in plain.named_parameters():
            if changed in name:
                parameter.data = change(parameter.data)
        _assert_draws_plain_s_numbers(plain, x)


def test_dropout_where_settings_change_between_steps(monkeypatch):
    """A memory format that was found under other settings may not be PyTorch's any more: of volumes it is not."""
    plain = DenseBlock(2, 3, 4, 4, drop_rate=0.3, efficient=False, dims=3)
    for layer in plain.children():
        layer.conv2.weight.data = _stored_as_hwoi(layer.conv2.weight.data)
    x = torch.randn(2, 3, 5, 5, 5).contiguous(memory_format=torch.channels_last_3d)
    for threads, onednn in ((2, True), (1, True), (2, False), (2, True)):
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", onednn)
        torch.set_num_threads(threads)
        _assert_draws_plain_s_numbers(plain, x)


@pytest.mark.parametrize("dims", [2, 3])
def test_dropout_after_a_bottleneck_of_one_channel(dims):
    """PyTorch's batch norm returns it with contiguous strides. Of ten layers, so that masks have two bytes."""
    plain = DenseBlock(10, 3, 4, 1, drop_rate=0.3, efficient=False, dims=dims)
    for layer in plain.children():
        for tensor in (layer.conv1.weight, *layer.norm2.parameters(), *layer.norm2.buffers()):
            tensor.data = tensor.data[:1] if tensor.dim() else tensor.data
        layer.conv2.weight.data = layer.conv2.weight.data[:, :1].contiguous()
    x = torch.randn(2, 3, *[5] * dims)
    _assert_draws_plain_s_numbers(plain, x.contiguous(memory_format=CHANNELS_LAST[x.dim()]))


@pytest.mark.parametrize("part", [(..., slice(2, 8)), (slice(None), slice(6), slice(1, 5)), (..., slice(1))], ids=str)
@pytest.mark.parametrize(("dims", "dtype"), [(2, torch.float64), (3, torch.float32)])
def test_dropout_and_strides_with_a_part_of_a_larger_tensor(part, dims, dtype):
    """As a random crop in channels_last is, or a half of the channels."""
    x = torch.randn(3, *[6] * dims, 10, dtype=dtype)[part].movedim(-1, 1)
    assert not x.is_contiguous(memory_format=CHANNELS_LAST[x.dim()])
    plain = DenseBlock(2, x.shape[1], 4, 2, drop_rate=0.3, efficient=False, dims=dims).to(dtype)
    actual, expected = _assert_draws_plain_s_numbers(plain, x)
    assert actual == expected


def test_names_of_engines():
    model = small_model("bc")
    before = model.state_dict(keep_vars=True)
    for engine in choose.Engine:
        assert model.set_engine(engine.value).engine == engine.value
        after = model.state_dict(keep_vars=True)
        assert list(after) == list(before)
        assert all(after[name] is before[name] for name in before)
    assert model.set_engine("best").engine == small_model("bc", efficient="best").engine == "best"
    with pytest.raises(ValueError, match="unknown engine 3"):
        model.set_engine(3)
    with pytest.raises(ValueError, match=r"unknown engine 'fast'.*'plain', .*'shared'.*True.*False"):
        small_model("bc", efficient="fast")


@pytest.mark.parametrize(
    *grid(
        engine=[True, *choose.Engine],
        copier=[copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), "torch.save"],
        strength=1,
    )
)
def test_copies_compute_with_their_own_weights(engine, copier, tmp_path):
    model = small_model("bc").set_engine(engine)
    if copier == "torch.save":
        torch.save(model, tmp_path / "model.pt")
        copied = torch.load(tmp_path / "model.pt", weights_only=False)
    else:
        copied = copier(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    _, grad = backward(copied, random_images("bc"))
    assert grad.any()
    assert all(p.grad is not None and p.grad.any() for p in copied.parameters())
    assert all(p.grad is None for p in model.parameters())
    assert copied.engine == model.engine


@pytest.mark.parametrize("engine", [True, *choose.Engine])
def test_no_grad_runs_plain_s_numbers_without_a_warning(engine):
    model, x = small_model("bc").set_engine(engine), random_images("bc")
    model.features.denseblock1.denselayer1.norm1 = nn.GroupNorm(1, 4).double()  # nothing is to be saved, or refused
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        assert_close(model(x), with_engine(model, "plain")(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")  # raised by torch on entering a dual level
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_forward_mode_falls_back():
    model, x, step = small_model("bc", efficient=True).eval(), random_images("bc"), 1e-6
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.warns(UserWarning, match="forward-mode"):
            output = model(dual)
        tangent = torch.autograd.forward_ad.unpack_dual(output).tangent
    with torch.no_grad():
        assert_close(tangent, (model(x + step) - model(x - step)) / (2 * step), 1e-6)


# What the shared engine refuses


def _other(name, module):
    return lambda layer: setattr(layer, name, module(layer.norm1.num_features).double())


def _uneven_dilation(layer: nn.Module) -> None:
    geometry = {"padding": (2, 1), "dilation": (2, 1)}
    layer.conv2 = nn.Conv2d(*layer.conv2.weight.shape[1::-1], 3, **geometry, bias=False).double()


class Scaled(DenseLayer):
    def first_half(self, *features):
        return self.gain * super().first_half(*features)


def _subclass(layer: nn.Module) -> None:
    layer.gain = nn.Parameter(torch.tensor(2.0, dtype=torch.double))
    layer.__class__ = Scaled


def _statistics_of_batches_in_eval(layer: nn.Module) -> None:
    layer.norm1 = nn.BatchNorm2d(layer.norm1.num_features, track_running_stats=False).double().eval()


UNSUPPORTED = {
    "dilation": (_uneven_dilation, r"found padding=\(2, 1\) in a Conv2d of a layer, where the shared engine takes \(2"),
    "subclass": (_subclass, "found a layer of class Scaled"),
    "GroupNorm": (_other("norm1", lambda width: nn.GroupNorm(1, width)), "found a GroupNorm inside a layer"),
    "Identity": (_other("norm2", lambda _: nn.Identity()), "found a Identity inside a layer"),
    "no affine": (_other("norm1", lambda width: nn.BatchNorm2d(width, affine=False)), "without weight and bias"),
    "no statistics": (_statistics_of_batches_in_eval, "found a BatchNorm2d in evaluation mode without running stat"),
    "Tanh": (_other("relu1", lambda _: nn.Tanh()), "found a Tanh inside a layer, which is no activation"),
    "PReLU": (_other("relu1", lambda _: nn.PReLU()), "found a PReLU inside a layer, .* takes activations without wei"),
    "hook": (lambda layer: layer.conv1.register_forward_hook(lambda *_: None), "found a hook on, .*, a Conv2d inside"),
    "hook on the layer": (
        lambda layer: layer.register_full_backward_hook(lambda *_: None),
        "found a hook on, or a new forward of, a DenseLayer",
    ),
    "parametrization": (
        lambda layer: nn.utils.parametrizations.weight_norm(layer.conv1),
        "found a .*Conv2d inside a layer|found a parametrization",
    ),
    "eps": (lambda layer: setattr(layer.norm1, "eps", 1e-3), "disagree about training mode, eps"),
    "mode": (lambda layer: layer.norm1.eval(), "disagree about training mode, eps"),
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("change", UNSUPPORTED)
def test_unsupported_block_falls_back_with_one_warning_or_raises(change):
    """The warning names the caller's line."""
    (edit, found), plain = UNSUPPORTED[change], small_model("bc", efficient=False, drop_rate=0.2)
    for block in (plain.features.denseblock1, plain.features.denseblock3):
        edit(block.denselayer2)
    x, efficient = random_images("bc"), with_engine(plain, True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        efficient(x).sum().backward()
        assert_same_step(copy.deepcopy(efficient), copy.deepcopy(efficient).set_engine(False), x)
    (warning,) = [each for each in caught if "falling back" in str(each.message)]
    assert str(warning.message).startswith("falling back from engine 'shared' to 'checkpoint': found ")
    assert warning.filename == __file__
    with pytest.raises(RuntimeError, match=f"engine 'shared' cannot run here: .*({found}).*efficient=True"):
        with_engine(plain, "shared")(x)
    assert_same_step(with_engine(plain, "official"), plain, x)


def test_after_a_block_another_norm_runs_alone_without_a_warning():
    plain = small_model("bc", efficient=False)
    plain.features.transition1.norm = nn.GroupNorm(1, plain.features.transition1.norm.num_features).double()
    plain.features.norm5 = nn.BatchNorm2d(plain.features.norm5.num_features, affine=False).double()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_step(with_engine(plain, True), plain, random_images("bc"))


@pytest.mark.parametrize("dims", [1, 3])
def test_modules_and_inputs_of_other_dimensions(dims):
    block = small_model("bc", dims=dims).features.denseblock1
    block.denselayer1.conv1 = nn.Conv2d(4, 12, 1, bias=False).double()
    reason = choose.why_not(choose.Engine.SHARED, block, torch.randn(2, 4, *[3] * dims, dtype=torch.double))
    assert reason == f"found a Conv2d inside a layer, where the shared engine takes Conv{dims}d"
    reason = choose.why_not(choose.Engine.SHARED, block, torch.randn(2, 4, 3, 3, 3, 3, dtype=torch.double))
    assert reason == "found an input of 6 dimensions, where the shared engine takes 3 to 5"


def test_unsupported_mixed_precision():
    model = small_model("bc", efficient=True).float()
    model.features.denseblock2.denselayer1.norm1.double()
    x = torch.randn(2, 5, 3, 3)
    with pytest.warns(UserWarning, match="found float64 in a CpBatchNorm2d"), pytest.raises(RuntimeError):
        model.features.denseblock2(x)  # plain raises too
    model = small_model("bc", efficient="shared")
    block, transition, x = model.features.denseblock1, model.features.transition1, torch.randn(2, 4, 5, 5).double()
    transition.conv.bias = nn.Parameter(torch.zeros(transition.conv.out_channels))
    assert not can_join(block, transition, x)
    block.denselayer1.conv1.bias = nn.Parameter(torch.zeros(block.denselayer1.conv1.out_channels))
    assert "found float32, float64 in a Conv2d" in choose.why_not(choose.Engine.SHARED, block, x)


def _other_norm(name: str):
    return lambda block: setattr(block.denselayer2, name, nn.BatchNorm2d(5).double())


def _frozen_features(block: nn.Module) -> None:
    for layer in block.children():
        layer.norm1.eval()


@pytest.mark.filterwarnings("ignore:falling back")
@pytest.mark.parametrize(
    ("shape", "edit", "message"),
    [
        ((2, 3, 5, 5), lambda block: None, "found an input of 3 channels"),
        ((4, 5, 5), lambda block: None, "found an input"),
        ((2, 4, 5, 5), _other_norm("norm1"), r"found a norm's weight of shape \(5,\), where \(7,\)"),
        ((2, 4, 5, 5), _other_norm("norm2"), r"found a norm's weight of shape \(5,\), where \(12,\)"),
        ((1, 4, 1, 1), _frozen_features, "found a single value per channel"),
    ],
)
def test_what_raises_in_plain_raises_alike(shape, edit, message):
    block, x = small_model("bc").features.denseblock1, torch.randn(shape, dtype=torch.double)
    edit(block)
    for engine in (choose.Engine.PLAIN, None):
        block.engine = engine
        with pytest.raises((RuntimeError, ValueError)) as raised:
            block(x)
        assert "engine" not in str(raised.value)
    block.engine = choose.Engine.SHARED
    with pytest.raises(RuntimeError, match=f"engine 'shared' cannot run here: {message}"):
        block(x)


def test_parametrizations_that_are_cached_or_change_their_state_raise_in_checkpoint():
    for parametrize, context, message in (
        (nn.utils.parametrizations.spectral_norm, contextlib.nullcontext, "changes its own state when it is run"),
        (nn.utils.parametrizations.weight_norm, nn.utils.parametrize.cached, "being cached"),
    ):
        model = small_model("bc", efficient="checkpoint")
        parametrize(model.features.denseblock1.denselayer1.conv1)
        with context(), pytest.raises(RuntimeError, match=message):
            model(random_images("bc"))


@pytest.mark.parametrize("engine", ["plain", *MEMORY_EFFICIENT])
def test_block_and_layer_without_a_model(engine):
    block = small_model("bc", efficient=engine).features.denseblock1
    features = [torch.randn(2, 4, 5, 5, dtype=torch.double)]
    for layer in block.children():
        features.append(layer(features))
    assert_close(block(features[0]), torch.cat(features, 1))
    assert_close(block.denselayer1(features[0]), features[1])


@pytest.mark.parametrize("kind", [lambda pair: tuple(map(np.int64, pair)), list], ids=["NumPy", "lists"])
def test_settings_may_be_numpy_s_numbers_and_lists_as_in_modules_of_pytorch(kind):
    """As in models whose settings come from JSON or YAML."""
    sizes = {"growth_rate": np.int64(5), "bn_size": np.int64(3), "num_init_features": np.int64(7)}
    plain = small_model("imagenet", drop_rate=np.float32(0.25), efficient=False, **sizes)
    for module in plain.modules():
        if isinstance(module, nn.Conv2d):
            module.out_channels = np.int64(module.out_channels)
            for name in ("kernel_size", "stride", "padding", "dilation"):
                setattr(module, name, kind(getattr(module, name)))
        elif isinstance(module, nn.BatchNorm2d):
            module.eps = np.int64(1)
    plain.features.transition1.pool = nn.AvgPool2d([2, 2], [2], [0, 0])
    assert_same_step(with_engine(plain, "shared"), plain, random_images("imagenet"))


def test_inputs_of_other_kinds_are_refused():
    with pytest.raises(TypeError, match=r"found an input of torch.uint8, .* as by x.float\(\) / 255"):
        small_model("bc")(torch.zeros(2, 3, 8, 8, dtype=torch.uint8))
    with pytest.raises(TypeError, match=r"found a ndarray, .* needs a tensor: torch.as_tensor\(x\).float\(\)"):
        small_model("bc")(torch.zeros(2, 3, 8, 8).numpy())
    with pytest.raises(TypeError, match=r"found an input of torch.float64, but weights of torch.float32: give x.float"):
        small_model("bc").float()(torch.zeros(2, 3, 8, 8, dtype=torch.float64))


# The engine that a run reports is the one that runs, with the kernels of the model's device and dtype


def _model(efficient: bool | str = True, **overrides) -> DenseNet:
    return DenseNet(4, (2, 1), num_init_features=4, efficient=efficient, **overrides)


def _with_kernels(monkeypatch: pytest.MonkeyPatch, triton: bool, numba: bool) -> None:
    monkeypatch.setattr(kernels, "triton_supports", lambda values: triton)
    monkeypatch.setattr(kernels, "numba_supports", lambda values: numba)


@pytest.mark.parametrize("engine", [True, "shared", "plain", "official", "checkpoint"])
@pytest.mark.parametrize(("triton", "numba", "name"), [(1, 0, "Triton"), (0, 1, "Numba"), (0, 0, "portable")])
def test_engines_and_their_kernels(engine, triton, numba, name, monkeypatch):
    _with_kernels(monkeypatch, triton, numba)
    expected = f"shared ({name})" if engine in (True, "shared") else engine
    assert describe_engines(_model(engine), 2, 8) == expected
    compiled = describe_engines(_model(engine), 2, 8, compiled=True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    block = _model(engine).get_submodule("features.denseblock1")
    assert compiled.split(" ")[0] == choose.plan_block(block, torch.randn(2, 4, 8, 8)).engine.value


@pytest.mark.parametrize("small_inputs", [True, False])
@pytest.mark.parametrize("amp_dtype", [None, torch.bfloat16])
def test_the_reported_kernels_are_those_of_a_step(small_inputs, amp_dtype, monkeypatch):
    used, numba_supports = set(), kernels.numba_supports

    def note(values: torch.Tensor) -> bool:
        used.add(f"shared ({'Numba' if numba_supports(values) else 'portable'})")
        return numba_supports(values)

    model = _model(small_inputs=small_inputs)
    with torch.autocast("cpu", amp_dtype, enabled=amp_dtype is not None):
        reported = describe_engines(model, 2, 32)
        monkeypatch.setattr(kernels, "numba_supports", note)
        loss = F.cross_entropy(model(torch.randn(2, 3, 32, 32)), torch.tensor([0, 1]))
    loss.backward()
    assert used == {reported}


@pytest.mark.filterwarnings("ignore:falling back")
def test_blocks_that_differ_are_reported_one_by_one(monkeypatch):
    _with_kernels(monkeypatch, triton=False, numba=False)
    model = _model()
    model.get_submodule("features.denseblock2.denselayer1.conv1").register_forward_hook(lambda *_: None)
    assert describe_engines(model, 2, 8) == "shared (portable) in denseblock1, checkpoint in denseblock2"
