"""Activations other than ReLU: their formulas, and models that have them, in every engine and set of kernels."""

import copy
import itertools

import pytest
import torch
from helpers import assert_close, assert_same_buffers, assert_same_step, random_images, small_model
from torch import nn

from efficient_densenet import DenseNet, memory
from efficient_densenet.engine import choose
from efficient_densenet.kernels.activations import TABLE, ActivationSpec, spec_of
from efficient_densenet.models.layers import DenseLayer, Transition

MODULES = {
    "identity": nn.Identity,
    "relu": nn.ReLU,
    "leaky_relu": lambda: nn.LeakyReLU(0.2),
    "elu": lambda: nn.ELU(0.7),
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU("tanh"),
    "hardtanh": nn.ReLU6,
    "mish": nn.Mish,
}


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)  # for the scalars in formulas
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", TABLE)
def test_formulas_are_pytorchs_functions_and_their_derivatives(name):
    module, definition = MODULES[name](), TABLE[name]
    z = torch.linspace(-30, 30, 30000).view(-1, 3).requires_grad_()
    spec, grad = spec_of(module), torch.randn(10000, 3)
    assert spec.name == name
    y, constants = module(z), spec[1:]
    assert_close(definition.formula(z, *constants), y, 1e-13)
    assert_close(spec.forward(z), y, 0)
    (grad_z,) = torch.autograd.grad(y, z, grad)
    assert_close(grad * definition.derivative(z, *constants), grad_z, 1e-13)
    assert_close(spec.backward(grad, z.detach()), grad_z, 1e-12)


def test_settings_are_read_from_modules_of_exactly_pytorchs_classes():
    assert spec_of(nn.LeakyReLU(0.3)) == ActivationSpec("leaky_relu", 0.3)
    assert spec_of(nn.ReLU6()) == spec_of(nn.Hardtanh(0, 6)) == ActivationSpec("hardtanh", 0, 6)
    assert spec_of(type("Mish", (nn.Mish,), {})()) is None
    assert spec_of(nn.Tanh()) is None


def test_an_activation_with_weights_is_recomputed():
    """No table has its weights: the best engine says why, and runs `checkpoint`; a stem, plain modules."""
    choose._warned.clear()
    plain = small_model("imagenet", activation="prelu", efficient=False)
    model = copy.deepcopy(plain).set_engine(True)
    x = random_images("imagenet")
    with pytest.warns(UserWarning, match="found a PReLU inside a layer, where the shared engine takes activations wi"):
        assert_same_step(model, plain, x)
    assert_same_buffers(model, plain)
    with pytest.raises(RuntimeError, match="found a PReLU inside a layer"):
        model.set_engine("shared")(x)


def _assert_same_second_derivatives(plain, shared, family):
    results = []
    for model in (plain, shared):
        x = random_images(family).requires_grad_()
        x.data.copy_(torch.linspace(-2, 2, x.numel()).view_as(x).sin())
        inputs = [x, *model.parameters()]
        grads = torch.autograd.grad(model(x).square().sum(), inputs, create_graph=True)
        results.append(torch.autograd.grad(sum(grad.square().sum() for grad in grads), inputs, allow_unused=True))
    largest = max(each.abs().max() for each in results[0] if each is not None)
    for expected, actual in zip(*results, strict=True):
        assert (expected is None) == (actual is None)
        if expected is not None:
            assert (expected - actual).abs().max() <= 1e-10 * largest


@pytest.mark.parametrize("name", ["relu", "prelu", "gelu"])
def test_state_dicts_are_relus_but_for_the_weights_of_prelus(name):
    keys = DenseNet(block_config=(1, 1), small_inputs=False).state_dict().keys()
    own = DenseNet(block_config=(1, 1), small_inputs=False, activation=name).state_dict().keys()
    activations = "relu0", "denseblock1.denselayer1.relu1", "denseblock1.denselayer1.relu2", "transition1.relu"
    last = "denseblock2.denselayer1.relu1", "denseblock2.denselayer1.relu2", "relu5"
    weights = {f"features.{each}.weight" for each in (*activations, *last)} if name == "prelu" else set()
    assert own - keys == weights
    assert keys <= own


def test_a_backbone_applies_its_last_activation():
    model = DenseNet(block_config=(1, 1), features_only=True, activation="elu")
    x = torch.randn(2, 3, 8, 8)
    maps = model(x)
    assert maps[-1].min() < 0  # a ReLU's are not
    whole = DenseNet(block_config=(1, 1), activation="elu")
    whole.load_state_dict(model.state_dict(), strict=False)
    assert_close(whole.forward_features(x), maps[-1], 1e-5)


def test_an_unknown_activation_is_refused():
    with pytest.raises(ValueError, match=r"activation .*'swish'"):
        DenseNet(activation="swish")
    with pytest.raises(TypeError, match=r"must be a name .* or a class or function that returns a new module"):
        DenseNet(activation=nn.SiLU())
    with pytest.raises(TypeError, match="which needs arguments"):
        DenseNet(activation=nn.functional.silu)
    with pytest.raises(TypeError, match="which returns 3, not a module"):
        DenseNet(activation=lambda: 3)


def _mixed(family: str, **overrides) -> DenseNet:
    """A model in which no two neighbors have the same activation, and few the same constants."""
    model = small_model(family, efficient=False, **overrides)
    others = [lambda: nn.LeakyReLU(-0.3), lambda: nn.Hardtanh(-0.5, 2), lambda: nn.ELU(0.4)]
    activations = itertools.cycle([*others, *(make for name, make in MODULES.items() if name != "relu")])
    for module in model.modules():
        if isinstance(module, DenseLayer):
            module.relu1 = next(activations)()
            if module.has_bottleneck:
                module.relu2 = next(activations)()
        elif isinstance(module, Transition):
            module.relu = next(activations)()
    return model


@pytest.mark.parametrize("family", ["basic", "bc", "imagenet"])
@pytest.mark.parametrize("option", [{"block_config": (3, 3)}, {"drop_rate": 0.3}, {"keep_bottleneck": True}])
def test_activations_that_differ(family, option):
    plain = _mixed(family, **option)
    shared = copy.deepcopy(plain).set_engine("shared")
    assert_same_step(shared, plain, random_images(family))
    assert_same_buffers(shared, plain)


@pytest.mark.parametrize("family", ["basic", "bc"])
def test_second_derivatives_of_activations_that_differ(family):
    plain = _mixed(family)
    _assert_same_second_derivatives(plain, copy.deepcopy(plain).set_engine("shared"), family)


@pytest.mark.parametrize("name", ["elu", "silu", "gelu", "mish"])
def test_small_norm_weights_lose_no_digits(name):
    """The error of new features in float32, relative to their size, is at most twice plain's."""
    model = DenseNet(8, (4,), num_init_features=8, activation=name, efficient="plain").double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.constant_(module.weight, 1e-4)
    x = torch.randn(4, 8, 12, 12, dtype=torch.double)
    exact = model.features.denseblock1(x)[:, 8:]
    errors = []
    for engine in ("plain", "shared"):
        block = copy.deepcopy(model).set_engine(engine).float().features.denseblock1
        errors.append((block(x.float().requires_grad_())[:, 8:].double() - exact).norm() / exact.norm())
    assert errors[1] <= 2 * errors[0] + 2e-7


@pytest.mark.exhaustive
def test_the_memory_of_a_step_is_predicted():
    x = torch.randn(16, 3, 32, 32)
    for engine, tolerance in (("shared", 0.01), ("plain", 0.03)):
        model = DenseNet(12, (6, 6), activation="silu", efficient=engine)
        model(x).sum().backward()
        peak = memory.tensor_peak(lambda model=model: model(x).sum().backward())
        assert memory.predict(model, x.shape, loss=torch.Tensor.sum).tensor_peak == pytest.approx(peak, rel=tolerance)


def test_a_new_forward_of_pytorchs_class_is_called(monkeypatch):
    model = DenseNet(4, (2,), activation=nn.ReLU6)
    monkeypatch.setattr(nn.ReLU6, "forward", lambda self, z: 2 * z)
    assert "ReLU6.forward" in choose.why_not(choose.Engine.SHARED, model.features.denseblock1, torch.randn(2, 8, 4, 4))


def test_timm_s_classes_are_pytorchs_functions():
    layers = pytest.importorskip("timm.layers.activations")
    z = torch.linspace(-4, 4, 99).view(33, 3)
    for name in ("GELU", "GELUTanh", "Swish", "Mish"):
        module = getattr(layers, name)()
        assert_close(spec_of(module).forward(z), module(z), 1e-6)
