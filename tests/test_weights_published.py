"""torchvision's published weights, without a network."""

from urllib.error import URLError

import pytest
import torch
import torchvision

from efficient_densenet import create_model, densenet121, weights_transforms
from efficient_densenet.weights.named import find_weights


@pytest.fixture
def registry(monkeypatch):
    """Replaces torchvision's download by weights; returns the list of requested entries."""
    asked = []

    def get_state_dict(self, *args, **kwargs):
        assert kwargs["weights_only"]
        assert kwargs["check_hash"]
        asked.append(self)
        with torch.device("meta"):
            return torchvision.models.get_model(type(self).__name__.partition("_")[0].lower()).state_dict()

    monkeypatch.setattr(torchvision.models.WeightsEnum, "get_state_dict", get_state_dict)
    return asked


@pytest.mark.parametrize("name", ["densenet121", "densenet201"])
def test_published_weights_by_name(name, registry):
    entry = torchvision.models.get_model_weights(name).IMAGENET1K_V1
    with torch.device("meta"):
        model = create_model(name, weights="DEFAULT", num_classes=3)
        assert model.weights_report.skipped == ["classifier.weight", "classifier.bias"]
        assert len(create_model(name, weights=entry).weights_report.used) == len(model.state_dict())
    assert registry == [entry] * 2
    if name == "densenet121":
        names = "IMAGENET1K_V1", f"{type(entry).__name__}.IMAGENET1K_V1"
        assert [find_weights(name, each).entry for each in names] == [entry] * 2


def test_published_weights_in_a_backbone_and_for_one_channel(registry):
    words = {"features_only": True, "out_indices": (1, 2), "in_channels": 1}
    with torch.device("meta"):
        model = densenet121(weights="DEFAULT", adapt_input="sum", **words)
        assert model.weights_report.kept == []
        assert model.weights_report.adapted == ["features.conv0.weight"]
        with pytest.raises(ValueError, match=r"of another shape: features.conv0.weight"):
            densenet121(weights="DEFAULT", in_channels=1)


def test_the_transforms_are_torchvision_s():
    x = torch.randint(256, (3, 300, 280), dtype=torch.uint8)
    expected = torchvision.models.DenseNet169_Weights.DEFAULT.transforms()(x)
    assert torch.equal(weights_transforms("densenet169")(x), expected)


def test_unknown_published_weights_and_failed_downloads(monkeypatch):
    with pytest.raises(ValueError, match=r"torchvision has no weights for 'densenet264', but for densenet121"):
        create_model("densenet264", weights="DEFAULT")
    for weights in ("IMAGENET1K_V2", True, torchvision.models.DenseNet169_Weights.DEFAULT):
        with pytest.raises(ValueError, match=r"weights is .*, but must be one of 'IMAGENET1K_V1', 'DEFAULT' for"):
            densenet121(weights=weights)

    def get_state_dict(self, *args, **kwargs):
        raise URLError("no route to host")

    monkeypatch.setattr(torchvision.models.WeightsEnum, "get_state_dict", get_state_dict)
    message = (
        r"could not be downloaded from https://\S+ \(no route to host\): .*load_weights, or as --weights to the demo$"
    )
    with torch.device("meta"), pytest.raises(OSError, match=message):
        densenet121(weights="DEFAULT")
