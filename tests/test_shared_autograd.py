"""The shared engine as a guest of autograd: what it must not touch, and the modes that others train in."""

import copy

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

from efficient_densenet import DenseBlock, DenseLayer
from efficient_densenet.engines import dispatch as engines
from efficient_densenet.engines import kernels
from efficient_densenet.engines.kernels import scratch
from efficient_densenet.engines.shared import backward as backward_module
from efficient_densenet.engines.shared import forward, plan

LAYOUTS = [torch.contiguous_format, torch.channels_last]
CONSUMERS = ["block", "transition1", "norm5"]


@pytest.fixture(
    autouse=True,
    params=[
        pytest.param(0, id="a layer at a time"),
        # small networks have one layer group in all other tests
        pytest.param(plan.LAYER_GROUP_BYTES, id="a stage at a time", marks=pytest.mark.exhaustive),
    ],
)
def _layer_groups(request, monkeypatch):
    monkeypatch.setattr(plan, "LAYER_GROUP_BYTES", request.param)


def _stage(consumer: str, engine: str = "shared", training: bool = True) -> nn.Sequential:
    """A block and what consumes it, of its own, run as the model runs them."""
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


@pytest.mark.parametrize(
    *grid(
        consumer=CONSUMERS,
        layout=LAYOUTS,
        training=[True, False],
    )
)
def test_nothing_that_it_is_handed_is_written_into_or_given_back(consumer, layout, training):
    stage = _stage(consumer, training=training)
    x = _input(stage).to(memory_format=layout).requires_grad_()
    y = stage(x)
    grad = torch.randn_like(y)
    handed = [x, grad, *stage.parameters()]
    before = [tensor.detach().clone() for tensor in handed]
    y.backward(grad, retain_graph=True)
    given = [x.grad, *(parameter.grad for parameter in stage.parameters())]
    first = [tensor.clone() for tensor in given]
    assert all(torch.equal(tensor, old) for tensor, old in zip(handed, before, strict=True))
    storages = [tensor.untyped_storage().data_ptr() for tensor in (*handed, y, *given)]
    assert len(set(storages)) == len(storages)
    for tensor in (*given, grad):  # what is done to gradients does not reach a second backward
        tensor.fill_(torch.nan)
    y.detach().fill_(torch.nan)
    x.grad = None
    stage.zero_grad()
    y.backward(before[1])
    for tensor, old in zip((x.grad, *(parameter.grad for parameter in stage.parameters())), first, strict=True):
        assert torch.equal(tensor, old)


@pytest.mark.parametrize(
    *grid(
        consumer=CONSUMERS,
        layout=LAYOUTS,
        grad=["expanded", "transposed", "narrowed"],
    )
)
def test_incoming_gradients_of_any_strides(consumer, layout, grad):
    ours = _stage(consumer)
    plain = copy.deepcopy(ours)
    for block in (module for module in plain if isinstance(module, DenseBlock)):
        block.engine = engines.Engine.PLAIN
    x, found = _input(ours).to(memory_format=layout), []
    for stage in (ours, plain):
        torch.manual_seed(1)
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        y = stage(leaf)
        incoming = {
            "expanded": lambda y: torch.randn(y.shape[1], 1, 1, dtype=y.dtype).expand_as(y),
            "transposed": lambda y: torch.randn(y.transpose(0, 3).shape, dtype=y.dtype).transpose(0, 3),
            "narrowed": lambda y: torch.randn(*y.shape[:-1], 2 * y.shape[-1], dtype=y.dtype)[..., ::2],
        }[grad](y)
        y.backward(incoming)
        found += [y, leaf.grad]
        assert leaf.grad.stride() == leaf.stride()
    assert_close(found[0], found[2])
    assert_close(found[1], found[3])
    assert_same_gradients(ours, plain)


@pytest.mark.parametrize("shape", [(1, 4, 1, 7), (3, 4, 1, 1), (1, 4, 6, 1)])
def test_sides_of_one_in_either_layout_and_expanded_inputs(shape):
    ours = _stage("block")
    plain = copy.deepcopy(ours)
    plain.denseblock1.engine = engines.Engine.PLAIN
    x = torch.randn(shape, dtype=torch.double)
    for leaf in (x, x.to(memory_format=torch.channels_last)):
        assert_same_step(ours, plain, leaf)
    base = torch.randn(4, 4, 1, dtype=torch.double)
    assert_same_step(ours, plain, base.expand(3, 4, 4, 5))
    assert_same_buffers(ours, plain)


MODES = {
    "anomaly mode": torch.autograd.detect_anomaly,
    "saved tensors moved": torch.autograd.graph.save_on_cpu,
    "saved tensors copied": lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone),
    "one thread": lambda: torch.autograd.set_multithreading_enabled(False),
    "mutation allowed": torch.autograd.graph.allow_mutation_on_saved_tensors,
}


OF_TORCH = pytest.mark.xfail(
    not kernels.numba_supports(torch.empty(1)),
    strict=True,
    raises=KeyError,
    reason="torch takes every output argument to be named out, which that of the pooling's gradient is not",
)


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("mode", [pytest.param(mode, marks=OF_TORCH if "mutation" in mode else ()) for mode in MODES])
def test_modes_of_autograd(mode):
    plain = small_model("bc", efficient=False, drop_rate=0.1)
    ours = with_engine(plain, "shared")
    with MODES[mode]():
        assert_same_step(ours, plain, random_images("bc"))
    assert_same_buffers(ours, plain)


def test_memory_that_nobody_wrote_is_never_read():
    """Deterministic mode fills new memory with NaN."""
    plain = small_model("bc", efficient=False, drop_rate=0.1)
    ours = with_engine(plain, "shared")
    torch.use_deterministic_algorithms(True)
    try:
        for frozen in (False, True):
            ours.train(not frozen), plain.train(not frozen)
            assert_same_step(ours, plain, random_images("bc"))
    finally:
        torch.use_deterministic_algorithms(False)
    assert_same_buffers(ours, plain)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_torch_s_checkpoint_around_stages(use_reentrant):
    plain = small_model("bc", efficient=False, drop_rate=0.2)
    ours = with_engine(plain, "shared")
    x = random_images("bc")
    for model in (ours, plain):
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        features = torch_checkpoint(model.features, leaf, use_reentrant=use_reentrant)
        model.classifier(features.mean((2, 3))).square().sum().backward()
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)


def test_an_input_made_in_inference_mode():
    plain = _stage("block", engine="plain")
    ours = copy.deepcopy(plain)
    ours.denseblock1.engine = engines.Engine.SHARED
    with torch.inference_mode():
        x = _input(plain)
        assert_close(ours(x).clone(), plain(x).clone())
    for stage in (ours, plain):
        stage(x).square().sum().backward()
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("consumer", CONSUMERS)
def test_inputs_and_outputs_may_be_changed_in_place_where_plain_allows_it(consumer, layout):
    ours = _stage(consumer)
    plain = copy.deepcopy(ours)
    for block in (module for module in plain if isinstance(module, DenseBlock)):
        block.engine = engines.Engine.PLAIN
    x = _input(ours)
    for stage in (ours, plain):
        given = x.to(memory_format=layout, copy=True)
        y = stage(given)
        given.zero_()
        (y.mul_(2) + 1).square().sum().backward()
    assert_same_gradients(ours, plain)


@pytest.mark.parametrize(
    "name", ["denseblock1.denselayer1.norm1.weight", "denseblock1.denselayer2.conv2.weight", "transition1.conv.weight"]
)
def test_a_parameter_changed_in_place_raises_autograd_s_error_as_in_plain(name):
    for engine in ("shared", "plain"):
        stage = _stage("transition1", engine)
        loss = stage(_input(stage).requires_grad_()).square().sum()
        with torch.no_grad():
            stage.get_parameter(name).mul_(1.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_graph_used_up_raises_autograd_s_error():
    stage = _stage("transition1")
    loss = stage(_input(stage)).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


GRADIENTS = ["conv1x1_backward", "conv3x3_backward", "pooled_conv1x1_backward"]


@pytest.mark.parametrize(
    *grid(
        lambda learning, bn_size, **_: not (learning == "conv2" and bn_size == 0),
        learning=["norms", "conv1", "conv2", "transition"],
        bn_size=[0, 2],
        ours=[("portable", 1 << 22), ("compiled", 256)],
    )
)
def test_gradients_of_weights_that_do_not_learn_are_not_made(ours, bn_size, learning, monkeypatch):
    use_kernels(monkeypatch, *ours)
    plain = small_model("bc", bn_size=bn_size, efficient=False)
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_("norm" in name if learning == "norms" else learning in name and "norm" not in name)
    model, made = with_engine(plain, "shared"), []
    here = kernels.kernels_for(random_images("bc"))
    for name in GRADIENTS:
        monkeypatch.setattr(here, name, _noting(getattr(here, name), name, made))
    assert_same_step(model, plain, random_images("bc"))
    expected = {
        "norms": set(),
        "conv1": {"conv1x1_backward" if bn_size else "conv3x3_backward"},
        "conv2": {"conv3x3_backward"} if bn_size else set(),
        "transition": {"pooled_conv1x1_backward"},
    }
    assert set(made) == expected[learning]


def _noting(function, name, made):
    def noting(*args):
        found = function(*args)
        if found[0] is not None:
            made.append(name)
        return found

    return noting


def test_running_statistics_written_before_the_backward_do_not_matter():
    """As in plain in training mode; where norms are frozen the shared engine has its own copy."""
    plain = small_model("bc", efficient=False)
    ours = with_engine(plain, "shared")
    x = random_images("bc")
    for model in (ours, plain):
        loss = model(x).square().sum()
        model(x + 1)  # a second forward moves the running statistics
        loss.backward()
    assert_same_gradients(ours, plain)


def test_an_error_midway_leaves_nothing_behind(monkeypatch):
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
    for found, value in zip(backward(stage, x), expected, strict=True):
        assert torch.equal(found, value)


def _raise(*_):
    raise ZeroDivisionError


# Values that are not finite, and inputs that are not there


def _everything(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    output, grad = backward(model, x)
    found = {"output": output, "input": grad, **{name: p.grad for name, p in model.named_parameters()}}
    return found | dict(model.named_buffers())


@pytest.mark.parametrize(
    *grid(
        place=["input", "features.denseblock1.denselayer1.conv1.weight", "features.norm5.bias"],
        training=[True, False],
        value=[float("nan"), float("inf"), -float("inf")],
    )
)
def test_not_finite_values_reach_everything_that_they_reach_in_plain(place, training, value):
    plain = small_model("bc", efficient=False)
    plain(random_images("bc"))
    plain.train(training)
    x = random_images("bc")
    with torch.no_grad():
        tensor = x if place == "input" else plain.get_parameter(place)
        tensor.view(-1)[0] = value
    ours = with_engine(plain, "shared")
    expected = _everything(plain, x)
    for name, found in _everything(ours, x).items():
        assert torch.equal(found.isfinite(), expected[name].isfinite()), name
        finite = found.isfinite()
        assert_close(found[finite].nan_to_num(), expected[name][finite].nan_to_num()) if finite.any() else None


@pytest.mark.parametrize("training", [True, False])
def test_an_empty_batch_runs_as_in_plain(training):
    plain = small_model("bc", efficient=False).train(training)
    ours = with_engine(plain, "shared")
    for model in (ours, plain):
        output = model(torch.empty(0, 3, 9, 7, dtype=torch.double))
        assert output.shape == (0, 5)
        output.sum().backward()
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)


# Structures that only look like what it takes


def _fails_as_plain(stage: nn.Module, x: Tensor, found: str) -> None:
    block = stage.denseblock1
    for engine in (engines.Engine.PLAIN, None):
        block.engine = engine
        with pytest.raises((RuntimeError, ValueError)) as raised:
            stage(x)
        assert "engine" not in str(raised.value)
    block.engine = engines.Engine.SHARED
    with pytest.raises(RuntimeError, match=f"engine 'shared' cannot run here: {found}"):
        stage(x)


@pytest.mark.filterwarnings("ignore:falling back")
@pytest.mark.parametrize("shape", [(2, 3, 5, 5), (2, 6, 5, 5), (4, 5, 5)])
def test_an_input_of_other_channels_or_dimensions_is_refused(shape):
    _fails_as_plain(_stage("block"), torch.randn(shape, dtype=torch.double), "found (a layer|an input)")


@pytest.mark.filterwarnings("ignore:falling back")
def test_layers_that_do_not_fit_together_are_refused():
    stage = _stage("block")
    stage.denseblock1.denselayer2.norm1 = nn.BatchNorm2d(5).double()
    _fails_as_plain(stage, _input(stage), "found a layer from 5 channels")
    stage = _stage("block")
    stage.denseblock1.denselayer2.norm2 = nn.BatchNorm2d(5).double()
    _fails_as_plain(stage, _input(stage), "found a norm of 5 channels")


@pytest.mark.filterwarnings("ignore:falling back")
def test_a_layer_of_another_growth_rate_falls_back():
    plain = _stage("block", engine="plain")
    block = plain.denseblock1
    block.add_module("denselayer3", DenseLayer(10, 5, 4, 0.0).double())
    ours = copy.deepcopy(plain)
    ours.denseblock1.engine = None
    assert_same_step(ours, plain, _input(plain))
    ours.denseblock1.engine = engines.Engine.SHARED
    with pytest.raises(RuntimeError, match="found a layer from 10 channels to 5"):
        ours(_input(plain))


@pytest.mark.filterwarnings("ignore:falling back")
def test_norms_inside_that_measure_a_single_value_are_refused_as_in_plain():
    stage = _stage("block")
    for layer in stage.denseblock1.children():
        layer.norm1.eval()
    x = torch.randn(1, 4, 1, 1, dtype=torch.double)
    _fails_as_plain(stage, x, "found a single value per channel")


def _unnamed(features: nn.Sequential) -> None:
    features.transition1 = nn.Sequential(*features.transition1.children())


def _wrapped_norm(features: nn.Sequential) -> None:
    features.norm5 = nn.Sequential(features.norm5)


def _no_norm(features: nn.Sequential) -> None:
    features.norm5 = nn.Sequential()


class Doubling(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def _doubling(features: nn.Sequential) -> None:
    features.norm5 = Doubling(features.norm5)


class DoublingBlock(DenseBlock):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def _doubling_block(features: nn.Sequential) -> None:
    features.denseblock1.__class__ = DoublingBlock


def _extra(features: nn.Sequential) -> None:
    features.transition1.add_module("dropout", nn.Dropout(0.5))


def _renamed_norm(features: nn.Sequential) -> None:
    features.norm5.norm = nn.Identity()


@pytest.mark.parametrize(
    "change", [_unnamed, _wrapped_norm, _no_norm, _doubling, _doubling_block, _extra, _renamed_norm]
)
def test_consumers_and_blocks_of_other_forms(change):
    plain = small_model("bc", efficient=False)
    change(plain.features)
    ours = with_engine(plain, "shared")
    assert_same_step(ours, plain, random_images("bc"))
    assert_same_buffers(ours, plain)


@pytest.mark.filterwarnings("ignore:falling back")
def test_a_layer_without_a_norm_in_a_whole_model():
    plain = small_model("bc", efficient=False)
    plain.features.denseblock1.denselayer1.norm1 = nn.Identity()
    assert_same_step(with_engine(plain, True), plain, random_images("bc"))


def test_a_drop_rate_of_one():
    plain = small_model("bc", efficient=False)
    plain.features.denseblock1.denselayer1.drop_rate = 1.0
    assert_same_step(with_engine(plain, "shared"), plain, random_images("bc"))


def test_norms_without_a_bias_fall_back(monkeypatch):
    monkeypatch.setattr(engines, "_warned", set())
    plain = small_model("bc", efficient=False)
    plain.features.denseblock1.denselayer2.norm1.register_parameter("bias", None)
    plain.features.norm5.register_parameter("bias", None)
    with pytest.warns(UserWarning, match="found a layer that is not batch norm"):
        assert_same_step(with_engine(plain, True), plain, random_images("bc"))
