"""The zoo: published parameter counts, builders and defaults."""

import inspect
import re
import subprocess
import sys
from typing import Any, get_type_hints

import pytest
import torch

import efficient_densenet
from efficient_densenet import DenseNet, FCDenseNet, create_model, densenet121, list_models, weights_classes
from efficient_densenet.models.arguments import DenseNetArguments, ModelArguments

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
def test_parameter_counts_and_the_defaults_and_the_example_that_help_shows(name):
    signature = inspect.signature(getattr(efficient_densenet, name))
    (example,) = re.findall(r">>> model = (.*)", getattr(efficient_densenet, name).__doc__)
    bound = eval(example, {name: signature.bind})
    bound.apply_defaults()
    with torch.device("meta"):
        model = getattr(efficient_densenet, name)(efficient=False)
        given = {"weights": None, "num_classes": model.num_classes, "in_channels": model.in_channels}
        shown = create_model(name, **bound.arguments | given | {"efficient": False})
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 3) == PARAMETERS_IN_MILLIONS[name]
    assert model.engine == "plain"
    assert str(model) == str(shown)


def test_list_models():
    assert set(list_models()) == set(PARAMETERS_IN_MILLIONS)
    assert list_models("densenet_bc_40_*") == ["densenet_bc_40_36", "densenet_bc_40_48", "densenet_bc_40_60"]
    assert list_models("resnet*") == []


def test_unknown_model_and_unknown_argument_raise():
    with pytest.raises(ValueError, match=r"unknown model 'densenet12': did you mean 'densenet121'.*densenet_40_12"):
        create_model("densenet12")
    hints = {
        "growth": "did you mean 'growth_rate'",
        "in_chans": "did you mean 'in_channels', which timm calls in_chans",
        "spatial_dims": "did you mean 'dims', which MONAI calls spatial_dims",
        "pretrained": "did you mean 'weights', which timm and MONAI call pretrained",
    }
    for word, hint in hints.items():
        with pytest.raises(
            TypeError, match=rf"unknown argument '{word}' for densenet121: {hint}\? DenseNet takes growth"
        ):
            create_model("densenet121", **{word: 3})


@pytest.mark.parametrize(("cls", "typed"), [(DenseNet, DenseNetArguments), (FCDenseNet, ModelArguments)])
def test_the_typed_arguments_are_those_of_the_class(cls, typed):
    expected = get_type_hints(cls.__init__) | {"weights": Any, "adapt_input": str | None}
    assert get_type_hints(typed) == {name: hint for name, hint in expected.items() if name != "return"}


SMALL: Any = {"growth_rate": 4, "num_init_features": 8}


@pytest.mark.parametrize("name", ["densenet_bc_100_12", "densenet121", "fc_densenet56"])
def test_weights_from_a_file(name, tmp_path):
    shape = SMALL | {"block_config": (2, 1, 2)}
    path = tmp_path / "weights.pt"
    source = create_model(name, **shape, num_classes=7, in_channels=1)
    torch.save(source.state_dict(), path)
    for weights in (path, str(path)):
        model = create_model(name, weights=weights, **shape)
        assert (model.num_classes, model.in_channels) == (7, 1)
        assert all(map(torch.equal, model.state_dict().values(), source.state_dict().values()))
    model = create_model(name, weights=path, **shape, num_classes=3, in_channels=2, adapt_input="sum")
    assert model.weights_report.skipped == ["classifier.weight", "classifier.bias"]
    assert model.classifier.weight.shape[0] == 3
    with pytest.raises(
        ValueError, match=rf"{tmp_path}/config.json cannot be read .* what the classes of weights.pt are"
    ):
        weights_classes(name, path)
    with pytest.raises(ValueError, match=r"absent\.pt is no file: give one that torch.save or safetensors wrote"):
        create_model(name, weights=tmp_path / "absent.pt")
    with pytest.raises(ValueError, match=r"absent\.pth is no file"):
        create_model(name, weights="absent.pth")


def test_backbones_and_files_of_weights(tmp_path):
    shape = SMALL | {"block_config": (1, 1, 1, 1)}
    whole = densenet121(num_classes=7, **shape)
    torch.save(whole.state_dict(), tmp_path / "whole.pt")
    backbone = densenet121(weights=tmp_path / "whole.pt", features_only=True, out_indices=(1, 2), **shape)
    torch.save(backbone.state_dict(), tmp_path / "backbone.pt")
    again = densenet121(weights=tmp_path / "backbone.pt", features_only=True, out_indices=(1, 2), **shape)
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, whole.state_dict()[name]), name
    torch.save(whole.features.state_dict(prefix="features."), tmp_path / "backbone.pt")
    model = densenet121(weights=tmp_path / "backbone.pt", num_classes=3, **shape)
    assert torch.equal(model.features.norm5.running_var, whole.features.norm5.running_var)
    assert model.num_classes == 3


@pytest.mark.exhaustive
def test_a_type_checker_knows_arguments_and_results(tmp_path):
    """Of pyright, on a script that uses the package."""
    (tmp_path / "script.py").write_text(
        """import torch
from efficient_densenet import DenseNet, create_model, densenet121, fc_densenet103, features, make_efficient
densenet121(num_classs=14)
densenet121(num_classes="3")
densenet121().set_engine("sharedd")
DenseNet(efficient="sharedd")
make_efficient(DenseNet(), "sharedd")
reveal_type(features(densenet121(weights="DEFAULT", num_classes=14), (1, 2)).feature_info)
reveal_type(features(densenet121())(torch.ones(1)))
reveal_type(DenseNet()(torch.ones(1)))
reveal_type(densenet121()(torch.ones(1)))
reveal_type(fc_densenet103()(torch.ones(1)))
reveal_type(create_model("densenet121")(torch.ones(1)))
reveal_type(create_model("fc_densenet56"))
"""
    )
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "script.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = re.findall(
        r"script.py:\d+:\d+ - (?:error: (No parameter|Argument)|.* is \"(.+)\"$)", done.stdout, re.MULTILINE
    )
    wrong = ["No parameter", *["Argument"] * 4]
    types = ["FeatureInfo", "tuple[Tensor, ...]", *["Tensor"] * 4, "FCDenseNet"]
    assert found == [*((error, "") for error in wrong), *(("", name) for name in types)], done.stdout


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
