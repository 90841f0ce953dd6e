"""The zoo: published parameter counts, builders and defaults."""

import inspect

import pytest
import torch

import efficient_densenet
from efficient_densenet import DenseNet, create_model, list_models

PARAMETERS_IN_MILLIONS = {
    "densenet_40_12": 1.020,
    "densenet_100_12": 6.980,
    "densenet_100_24": 27.249,
    "densenet_bc_100_12": 0.769,
    "densenet_bc_250_24": 15.324,
    "densenet_bc_190_40": 25.624,
    "densenet_bc_40_36": 1.543,
    "densenet_bc_40_48": 2.733,
    "densenet_bc_40_60": 4.262,
    "densenet121": 7.979,
    "densenet169": 14.149,
    "densenet201": 20.014,
    "densenet161": 28.681,
    "densenet264": 33.338,
    "densenet232_48": 55.571,
    "densenet264_48": 72.687,
    "fc_densenet56": 1.377,
    "fc_densenet67": 3.463,
    "fc_densenet103": 9.322,
}


@pytest.mark.parametrize("name", PARAMETERS_IN_MILLIONS)
def test_parameter_counts_and_builder_functions(name):
    with torch.device("meta"):
        model = getattr(efficient_densenet, name)(efficient=False)
    count = sum(p.numel() for p in model.parameters())
    assert round(count / 1e6, 3) == PARAMETERS_IN_MILLIONS[name]
    assert model.engine == "plain"


def test_list_models():
    assert set(list_models()) == set(PARAMETERS_IN_MILLIONS)
    assert list_models("densenet_bc_40_*") == ["densenet_bc_40_36", "densenet_bc_40_48", "densenet_bc_40_60"]
    assert list_models("resnet*") == []


def test_unknown_model_and_unknown_argument_raise():
    with pytest.raises(ValueError, match=r"unknown model 'densenet12': did you mean 'densenet121'.*densenet_40_12"):
        create_model("densenet12")
    with pytest.raises(TypeError, match="unknown argument 'growth' for densenet121: DenseNet takes growth_rate"):
        create_model("densenet121", growth=3)


def test_positional_arguments_and_defaults():
    parameters = inspect.signature(DenseNet).parameters
    expected = {
        "growth_rate": 12,
        "block_config": (16, 16, 16),
        "compression": 0.5,
        "num_init_features": 24,
        "bn_size": 4,
        "drop_rate": 0.0,
        "num_classes": 10,
        "small_inputs": True,
        "efficient": True,
    }
    assert {name: p.default for name, p in list(parameters.items())[:9]} == expected
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in list(parameters.values())[9:])
