"""torchvision's published weights, without a network."""

import functools
from urllib.error import URLError

import pytest
import torch
import torchvision

from efficient_densenet import create_model, densenet121, weights_transforms


@functools.cache
def _weights(name: str) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        meta = getattr(torchvision.models, name)().state_dict()
    return {key: torch.zeros(tensor.shape, dtype=tensor.dtype) for key, tensor in meta.items()}


@pytest.fixture
def registry(monkeypatch):
    """Replaces torchvision's download by weights; returns the list of requested entries."""
    asked = []

    def get_state_dict(self, *args, **kwargs):
        assert kwargs["weights_only"]
        assert kwargs["check_hash"]
        asked.append(self)
        return dict(_weights(type(self).__name__.partition("_")[0].lower()))

    monkeypatch.setattr(torchvision.models.WeightsEnum, "get_state_dict", get_state_dict)
    return asked


@pytest.mark.parametrize("name", ["densenet121", "densenet161", "densenet169", "densenet201"])
def test_published_weights_by_name(name, registry):
    entry = torchvision.models.get_model_weights(name).IMAGENET1K_V1
    words = {"num_classes": 3} if name == "densenet121" else {}
    with torch.device("cpu" if words else "meta"):
        model = create_model(name, weights="DEFAULT", **words)
    assert registry == [entry]
    report = model.weights_report
    assert report.skipped == (["classifier.weight", "classifier.bias"] if words else [])
    assert len(report.used) + len(report.skipped) == len(model.state_dict())


def test_names_of_published_weights(registry):
    entry = torchvision.models.DenseNet121_Weights.IMAGENET1K_V1
    names = "IMAGENET1K_V1", f"{type(entry).__name__}.IMAGENET1K_V1", f"{type(entry).__name__}.DEFAULT"
    with torch.device("meta"):
        for weights in (*names, entry, torchvision.models.get_weight("DenseNet121_Weights.IMAGENET1K_V1")):
            densenet121(weights=weights)
    assert registry == [entry] * 5


def test_published_weights_in_a_backbone_and_for_one_channel(registry):
    words = {"features_only": True, "out_indices": (1, 2), "in_channels": 1}
    with torch.device("meta"):
        model = densenet121(weights="DEFAULT", adapt_input="sum", **words)
    assert model.weights_report.kept == []
    assert model.weights_report.adapted == ["features.conv0.weight"]
    parts = {name.removeprefix("features.").split(".")[0] for name in model.weights_report.skipped}
    assert parts == {"transition2", "denseblock3", "transition3", "denseblock4", "norm5", "classifier"}
    with torch.device("meta"), pytest.raises(ValueError, match=r"of another shape: features.conv0.weight"):
        densenet121(weights="DEFAULT", in_channels=1)
    with torch.device("meta"), pytest.raises(ValueError, match=r"missing: .*of another shape: "):
        densenet121(weights="DEFAULT", growth_rate=16, block_config=(6, 12, 24, 18))


def test_the_transforms_are_torchvision_s():
    transforms = weights_transforms("densenet169")
    x = torch.randint(256, (3, 300, 280), dtype=torch.uint8)
    expected = torchvision.models.DenseNet169_Weights.DEFAULT.transforms()(x)
    assert torch.equal(transforms(x), expected)
    assert expected.shape == (3, 224, 224)
    assert torch.equal(weights_transforms("densenet169", "IMAGENET1K_V1")(x), expected)


def test_unknown_published_weights(registry):
    with pytest.raises(ValueError, match=r"torchvision has no weights for 'densenet264', but for densenet121"):
        create_model("densenet264", weights="DEFAULT")
    message = "weights is {}, but must be one of 'IMAGENET1K_V1', 'DEFAULT' for densenet121"
    for weights in ("IMAGENET1K_V2", True, 1):
        with pytest.raises(ValueError, match=message.format(repr(weights))):
            densenet121(weights=weights)
    with pytest.raises(ValueError, match=r"weights is DenseNet169_Weights.IMAGENET1K_V1, but must be"):
        densenet121(weights=torchvision.models.DenseNet169_Weights.DEFAULT)
    assert not registry


@pytest.mark.parametrize(
    "failure", [URLError("no route to host"), TimeoutError("timed out"), RuntimeError("invalid hash value (…)")]
)
def test_a_failed_download_is_an_error_of_one_sentence(failure, monkeypatch):
    def get_state_dict(self, *args, **kwargs):
        raise failure

    monkeypatch.setattr(torchvision.models.WeightsEnum, "get_state_dict", get_state_dict)
    with (
        torch.device("meta"),
        pytest.raises(OSError, match=r"could not be downloaded from https://.*load_weights") as error,
    ):
        densenet121(weights="DEFAULT")
    assert "\n" not in str(error.value)
    assert error.value.__suppress_context__
