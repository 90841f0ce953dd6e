"""The shared engine in autograd: no modified arguments, autograd's modes, errors and unusual structures."""

import copy
import gc

import pytest
import torch
from grids import grid
from helpers import (
    assert_close,
    assert_same_buffers,
    assert_same_gradients,
    assert_same_step,
    backward,
    random_images,
    small_model,
    use_kernels,
    with_engine,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from efficient_densenet import DenseBlock, kernels
from efficient_densenet.engine import choose
from efficient_densenet.engine.stage import backward as backward_module
from efficient_densenet.engine.stage import forward
from efficient_densenet.kernels import scratch

MEMORY_FORMATS = [torch.contiguous_format, torch.channels_last]
CONSUMERS = ["block", "transition1", "norm5"]


def _plain(efficient: nn.Sequential) -> nn.Sequential:
    """A copy whose block runs by plain modules."""
    plain = copy.deepcopy(efficient)
    for block in (module for module in plain if isinstance(module, DenseBlock)):
        block.engine = choose.Engine.PLAIN
    return plain


def _stage(consumer: str, engine: str = "shared", training: bool = True) -> nn.Sequential:
    """The features of a small model, reduced to a block and its consumer."""
    model = small_model("bc", efficient=engine).train(training)
    features = model.features
    names = {"block": ["denseblock1"], "transition1": ["denseblock1", "transition1"], "norm5": ["denseblock3", "norm5"]}
    for name in list(features._modules):
        if name not in names[consumer]:
            del features._modules[name]
    return features


def _input(stage: nn.Sequential, batch: int = 2) -> Tensor:
    channels = next(m for m in stage.modules() if isinstance(m, nn.BatchNorm2d)).num_features
    return torch.randn(batch, channels, 5, 6, dtype=torch.double)


@pytest.mark.parametrize(*grid(consumer=CONSUMERS, memory_format=MEMORY_FORMATS, training=[True, False]))
def test_arguments_are_neither_modified_nor_returned(consumer, memory_format, training):
    stage = _stage(consumer, training=training)
    x = _input(stage).to(memory_format=memory_format).requires_grad_()
    y = stage(x)
    grad = torch.randn_like(y)
    arguments = [x, grad, *stage.parameters()]
    originals = [tensor.detach().clone() for tensor in arguments]
    y.backward(grad, retain_graph=True)
    grads = [x.grad, *(parameter.grad for parameter in stage.parameters())]
    expected = [tensor.clone() for tensor in grads]
    assert all(torch.equal(tensor, old) for tensor, old in zip(arguments, originals, strict=True))
    storages = [tensor.untyped_storage().data_ptr() for tensor in (*arguments, y, *grads)]
    assert len(set(storages)) == len(storages)
    for tensor in (*grads, grad):  # overwritten gradients must not affect a second backward
        tensor.fill_(torch.nan)
    y.detach().fill_(torch.nan)
    x.grad = None
    stage.zero_grad()
    y.backward(originals[1])
    for tensor, old in zip((x.grad, *(parameter.grad for parameter in stage.parameters())), expected, strict=True):
        assert torch.equal(tensor, old)


@pytest.mark.parametrize(
    *grid(
        consumer=CONSUMERS,
        memory_format=MEMORY_FORMATS,
        grad=["expanded", "transposed", "narrowed"],
    )
)
def test_output_gradients_of_any_strides(consumer, memory_format, grad):
    efficient = _stage(consumer)
    plain = _plain(efficient)
    x, results = _input(efficient).to(memory_format=memory_format), []
    for stage in (efficient, plain):
        torch.manual_seed(1)
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        y = stage(leaf)
        grad_output = {
            "expanded": lambda y: torch.randn(y.shape[1], 1, 1, dtype=y.dtype).expand_as(y),
            "transposed": lambda y: torch.randn(y.transpose(0, 3).shape, dtype=y.dtype).transpose(0, 3),
            "narrowed": lambda y: torch.randn(*y.shape[:-1], 2 * y.shape[-1], dtype=y.dtype)[..., ::2],
        }[grad](y)
        y.backward(grad_output)
        results += [y, leaf.grad]
        assert leaf.grad.stride() == leaf.stride()
    assert_close(results[0], results[2])
    assert_close(results[1], results[3])
    assert_same_gradients(efficient, plain)


@pytest.mark.parametrize("shape", [(1, 4, 1, 7), (3, 4, 1, 1), (1, 4, 6, 1)])
def test_sides_of_one_pixel_and_expanded_inputs(shape):
    efficient = _stage("block")
    plain = _plain(efficient)
    x = torch.randn(shape, dtype=torch.double)
    for leaf in (x, x.to(memory_format=torch.channels_last)):
        assert_same_step(efficient, plain, leaf)
    base = torch.randn(4, 4, 1, dtype=torch.double)
    assert_same_step(efficient, plain, base.expand(3, 4, 4, 5))
    assert_same_buffers(efficient, plain)


MODES = {
    "anomaly mode": torch.autograd.detect_anomaly,
    "saved tensors moved": torch.autograd.graph.save_on_cpu,
    "saved tensors copied": lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone),
    "one thread": lambda: torch.autograd.set_multithreading_enabled(False),
    "mutation allowed": torch.autograd.graph.allow_mutation_on_saved_tensors,
}


MUTATION_XFAIL = pytest.mark.xfail(
    not kernels.numba_supports(torch.empty(1)),
    strict=True,
    raises=KeyError,
    reason="torch looks for an output argument named out, but that of the pooling's gradient has another name",
)
# PyTorch 2.6 looks for the memory of every argument that an operator changes, and finds a list of running statistics.
MUTATION_SKIP = pytest.mark.skipif(torch.__version__ < "2.7", reason="needs operators that may change lists")


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[MUTATION_XFAIL, MUTATION_SKIP] if "mutation" in mode else ()) for mode in MODES]
)
def test_autograd_modes(mode):
    plain = small_model("bc", efficient=False, drop_rate=0.1)
    efficient = with_engine(plain, "shared")
    with MODES[mode]():
        assert_same_step(efficient, plain, random_images("bc"))
    assert_same_buffers(efficient, plain)


def test_uninitialized_memory_is_never_read():
    """Deterministic mode fills new memory with NaN."""
    plain = small_model("bc", efficient=False, drop_rate=0.1)
    efficient = with_engine(plain, "shared")
    torch.use_deterministic_algorithms(True)
    try:
        for frozen in (False, True):
            efficient.train(not frozen), plain.train(not frozen)
            assert_same_step(efficient, plain, random_images("bc"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_buffers(efficient, plain)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_torch_checkpoint_around_the_features(use_reentrant):
    plain = small_model("bc", efficient=False, drop_rate=0.2)
    efficient = with_engine(plain, "shared")
    x = random_images("bc")
    for model in (efficient, plain):
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        features = torch_checkpoint(model.features, leaf, use_reentrant=use_reentrant)
        model.classifier(features.mean((2, 3))).square().sum().backward()
    assert_same_gradients(efficient, plain)
    assert_same_buffers(efficient, plain)


def test_input_created_in_inference_mode():
    plain = _stage("block", engine="plain")
    efficient = copy.deepcopy(plain)
    efficient.denseblock1.engine = choose.Engine.SHARED
    with torch.inference_mode():
        x = _input(plain)
        assert_close(efficient(x).clone(), plain(x).clone())
    for stage in (efficient, plain):
        stage(x).square().sum().backward()
    assert_same_gradients(efficient, plain)
    assert_same_buffers(efficient, plain)


@pytest.mark.parametrize("memory_format", MEMORY_FORMATS)
@pytest.mark.parametrize("consumer", CONSUMERS)
def test_inputs_and_outputs_may_be_modified_in_place_as_in_plain(consumer, memory_format):
    efficient = _stage(consumer)
    plain = _plain(efficient)
    x = _input(efficient)
    for stage in (efficient, plain):
        copied = x.to(memory_format=memory_format, copy=True)
        y = stage(copied)
        copied.zero_()
        (y.mul_(2) + 1).square().sum().backward()
    assert_same_gradients(efficient, plain)


@pytest.mark.parametrize(
    "name", ["denseblock1.denselayer1.norm1.weight", "denseblock1.denselayer2.conv2.weight", "transition1.conv.weight"]
)
def test_parameter_modified_in_place_raises_autograd_error_as_in_plain(name):
    for engine in ("shared", "plain"):
        stage = _stage("transition1", engine)
        loss = stage(_input(stage).requires_grad_()).square().sum()
        with torch.no_grad():
            stage.get_parameter(name).mul_(1.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


BACKWARD_KERNELS = ["conv1x1_backward", "conv3x3_backward", "pooled_conv1x1_backward"]


@pytest.mark.parametrize(
    *grid(
        lambda trainable, bn_size, **_: not (trainable == "conv2" and bn_size == 0),
        trainable=["norms", "conv1", "conv2", "transition"],
        bn_size=[0, 2],
        backend=[("portable", 1 << 22), ("compiled", 256)],
    )
)
def test_gradients_of_frozen_weights_are_not_computed(backend, bn_size, trainable, monkeypatch):
    use_kernels(monkeypatch, *backend)
    plain = small_model("bc", bn_size=bn_size, efficient=False)
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_("norm" in name if trainable == "norms" else trainable in name and "norm" not in name)
    model, computed = with_engine(plain, "shared"), []
    backend_kernels = kernels.kernels_for(random_images("bc"))
    for name in BACKWARD_KERNELS:
        monkeypatch.setattr(backend_kernels, name, _recording(getattr(backend_kernels, name), name, computed))
    assert_same_step(model, plain, random_images("bc"))
    expected = {
        "norms": set(),
        "conv1": {"conv1x1_backward" if bn_size else "conv3x3_backward"},
        "conv2": {"conv3x3_backward"} if bn_size else set(),
        "transition": {"pooled_conv1x1_backward"},
    }
    assert set(computed) == expected[trainable]


def _recording(function, name, computed):
    def recording(*args):
        gradients = function(*args)
        if gradients.conv_weight is not None:
            computed.append(name)
        return gradients

    return recording


def test_running_statistics_updated_before_the_backward_do_not_affect_it():
    """In plain this holds in training mode; for frozen norms the shared engine keeps a copy."""
    plain = small_model("bc", efficient=False)
    efficient = with_engine(plain, "shared")
    x = random_images("bc")
    for model in (efficient, plain):
        loss = model(x).square().sum()
        model(x + 1)  # a second forward moves the running statistics
        loss.backward()
    assert_same_gradients(efficient, plain)


def test_exceptions_in_forward_or_backward_leave_no_state_behind(monkeypatch):
    stage = _stage("transition1")
    x = _input(stage)
    expected = [tensor.clone() for tensor in backward(copy.deepcopy(stage), x)]
    original = forward.bottleneck_conv
    for failing in ("forward", "backward"):
        broken = copy.deepcopy(stage)
        loss = broken(x).sum() if failing == "backward" else None
        for module in (forward, backward_module):
            monkeypatch.setattr(module, "bottleneck_conv", _raise)
        with pytest.raises(ZeroDivisionError):
            loss.backward() if loss is not None else broken(x)
        for module in (forward, backward_module):
            monkeypatch.setattr(module, "bottleneck_conv", original)
        assert getattr(scratch._local, "held", None) is None
        assert torch.is_grad_enabled()
        assert not torch.is_autocast_enabled("cpu")
    for actual, value in zip(backward(stage, x), expected, strict=True):
        assert torch.equal(actual, value)


def _raise(*_):
    raise ZeroDivisionError


# Non-finite values and empty batches


def _outputs_gradients_and_buffers(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    output, grad = backward(model, x)
    result = {"output": output, "input": grad, **{name: p.grad for name, p in model.named_parameters()}}
    return result | dict(model.named_buffers())


@pytest.mark.parametrize(
    *grid(
        location=["input", "features.denseblock1.denselayer1.conv1.weight", "features.norm5.bias"],
        training=[True, False],
        value=[float("nan"), float("inf"), -float("inf")],
    )
)
def test_non_finite_values_propagate_as_in_plain(location, training, value):
    plain = small_model("bc", efficient=False)
    plain(random_images("bc"))
    plain.train(training)
    x = random_images("bc")
    with torch.no_grad():
        tensor = x if location == "input" else plain.get_parameter(location)
        tensor.view(-1)[0] = value
    efficient = with_engine(plain, "shared")
    expected = _outputs_gradients_and_buffers(plain, x)
    for name, actual in _outputs_gradients_and_buffers(efficient, x).items():
        assert torch.equal(actual.isfinite(), expected[name].isfinite()), name
        finite = actual.isfinite()
        assert_close(actual[finite].nan_to_num(), expected[name][finite].nan_to_num()) if finite.any() else None


@pytest.mark.parametrize("training", [True, False])
def test_empty_batch_matches_plain(training):
    plain = small_model("bc", efficient=False).train(training)
    efficient = with_engine(plain, "shared")
    for model in (efficient, plain):
        output = model(torch.empty(0, 3, 9, 7, dtype=torch.double))
        assert output.shape == (0, 5)
        output.sum().backward()
    assert_same_gradients(efficient, plain)
    assert_same_buffers(efficient, plain)


# Structures that the shared engine does not support


def _assert_raises_as_plain(stage: nn.Module, x: Tensor, message: str) -> None:
    block = stage.denseblock1
    for engine in (choose.Engine.PLAIN, None):
        block.engine = engine
        with pytest.raises((RuntimeError, ValueError)) as raised:
            stage(x)
        assert "engine" not in str(raised.value)
    block.engine = choose.Engine.SHARED
    with pytest.raises(RuntimeError, match=f"engine 'shared' cannot run here: {message}"):
        stage(x)


@pytest.mark.filterwarnings("ignore:falling back")
@pytest.mark.parametrize("shape", [(2, 3, 5, 5), (2, 6, 5, 5), (4, 5, 5)])
def test_input_with_wrong_channels_or_dimensions_raises(shape):
    _assert_raises_as_plain(_stage("block"), torch.randn(shape, dtype=torch.double), "found (a layer|an input)")


@pytest.mark.filterwarnings("ignore:falling back")
def test_inconsistent_layers_raise():
    stage = _stage("block")
    stage.denseblock1.denselayer2.norm1 = nn.BatchNorm2d(5).double()
    _assert_raises_as_plain(stage, _input(stage), "found a layer from 5 channels")
    stage = _stage("block")
    stage.denseblock1.denselayer2.norm2 = nn.BatchNorm2d(5).double()
    _assert_raises_as_plain(stage, _input(stage), "found a norm of 5 channels")


@pytest.mark.filterwarnings("ignore:falling back")
def test_single_value_per_channel_in_an_inner_norm_raises_as_in_plain():
    stage = _stage("block")
    for layer in stage.denseblock1.children():
        layer.norm1.eval()
    x = torch.randn(1, 4, 1, 1, dtype=torch.double)
    _assert_raises_as_plain(stage, x, "found a single value per channel")


class Doubling(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class DoublingBlock(DenseBlock):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


UNUSUAL = {
    "unnamed transition": lambda features: setattr(
        features, "transition1", nn.Sequential(*features.transition1.children())
    ),
    "wrapped norm": lambda features: setattr(features, "norm5", nn.Sequential(features.norm5)),
    "no norm": lambda features: setattr(features, "norm5", nn.Sequential()),
    "doubled norm": lambda features: setattr(features, "norm5", Doubling(features.norm5)),
    "doubled block": lambda features: setattr(features.denseblock1, "__class__", DoublingBlock),
    "extra module": lambda features: features.transition1.add_module("dropout", nn.Dropout(0.5)),
    "norm inside the norm": lambda features: features.norm5.add_module("norm", nn.Identity()),
}


@pytest.mark.parametrize("change", UNUSUAL)
def test_unusual_consumers_and_blocks_match_plain(change):
    plain = small_model("bc", efficient=False)
    UNUSUAL[change](plain.features)
    efficient = with_engine(plain, "shared")
    assert_same_step(efficient, plain, random_images("bc"))
    assert_same_buffers(efficient, plain)


def _live_backwards() -> int:
    return sum(type(thing) is backward_module.Backward for thing in gc.get_objects())


def test_a_failed_backward_leaves_nothing_in_the_graph():
    model = small_model("bc", efficient="shared", block_config=(3, 2))
    loss = model(random_images("bc")).square().sum()
    handle = model.features.denseblock1.denselayer2.conv1.weight.register_hook(_raise)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            loss.backward(retain_graph=True)
    gc.collect()
    assert _live_backwards() == 0
    handle.remove()
    loss.backward()
