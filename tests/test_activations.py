"""Activations other than ReLU: their formulas, how they are read, and models that have them.

`test_matches_plain` has their numbers.
"""

import pytest
import torch
from helpers import ACTIVATIONS, assert_close
from torch import nn

from efficient_densenet import DenseNet
from efficient_densenet.kernels.activations import TABLE, ActivationSpec, spec_of


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)  # for the scalars in formulas
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize("name", TABLE)
def test_formulas_are_pytorchs_functions_and_their_derivatives(name):
    module, definition = ACTIVATIONS[name](), TABLE[name]
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


def test_torch_s_names_of_activations_are_taken():
    for name in ("LeakyReLU", "GELU"):
        assert type(DenseNet(block_config=(1,), activation=name).features.relu5) is getattr(nn, name)


def test_an_unknown_activation_is_refused():
    with pytest.raises(ValueError, match=r"activation .*'swish'"):
        DenseNet(activation="swish")
    with pytest.raises(TypeError, match=r"must be a name .* or a class or function that returns a new module"):
        DenseNet(activation=nn.SiLU())
    with pytest.raises(TypeError, match="which needs arguments"):
        DenseNet(activation=nn.functional.silu)
    with pytest.raises(TypeError, match="which returns 3, not a module"):
        DenseNet(activation=lambda: 3)


def test_timm_s_classes_are_pytorchs_functions():
    layers = pytest.importorskip("timm.layers.activations")
    z = torch.linspace(-4, 4, 99).view(33, 3)
    for name in ("GELU", "GELUTanh", "Swish", "Mish"):
        module = getattr(layers, name)()
        assert_close(spec_of(module).forward(z), module(z), 1e-6)
