"""Weights by name, without a network: those of checkpoints/, which were trained here, and torchvision's published."""

import hashlib
import shutil
from urllib.error import URLError

import pytest
import torch
import torchvision
from PIL import Image
from samples import DEMOS
from training.data import load
from training.data.augment import Transform
from training.data.folder import decode
from training.models import load_model

from efficient_densenet import DenseLayer, create_model, densenet121, weights_classes, weights_transforms
from efficient_densenet.models import zoo
from efficient_densenet.weights import named
from efficient_densenet.weights.named import CHECKPOINTS, TRAINED, TrainedWeights, find_weights
from efficient_densenet.weights.transforms import ImageTransform

MODEL = "densenet_bc_22_12"


@pytest.fixture(autouse=True)
def digits(monkeypatch) -> TrainedWeights:
    """The committed digits under a name, and their network as a variant of the zoo."""
    variant = zoo.VARIANTS["densenet_bc_100_12"] | {"block_config": (3, 3, 3)}
    monkeypatch.setitem(zoo.VARIANTS, MODEL, variant)
    monkeypatch.setitem(TRAINED, "digits", TrainedWeights(MODEL, "digits"))
    return TRAINED["digits"]


@pytest.mark.parametrize("name", [*TRAINED, "digits"])
def test_every_name_gives_the_weights_of_its_run(name):
    entry = TRAINED[name]
    model = create_model(entry.model, weights=name)
    expected, config = load_model(entry.folder)
    assert model.state_dict().keys() == expected.state_dict().keys()
    for key, tensor in expected.state_dict().items():
        assert torch.equal(model.state_dict()[key], tensor), key
    assert weights_classes(entry.model, name) == config.classes
    assert weights_transforms(entry.model, name) == ImageTransform(config.image_size, config.mean, config.std)
    sha256 = hashlib.sha256((entry.folder / "model.pt").read_bytes()).hexdigest()
    assert sha256 in (CHECKPOINTS / "README.md").read_text()


def test_its_transforms_classify_as_the_demos_do():
    model, transforms = create_model(MODEL, weights="digits").eval(), weights_transforms(MODEL, "digits")
    path = DEMOS / "pictures" / "digit_3.png"
    image = Image.open(path)
    config = load_model(CHECKPOINTS / "digits")[1]
    normalize = Transform(config.mean, config.std, padding=0, horizontal_flip=False).normalize
    expected = normalize(decode(path, 32, 1)[None])
    with torch.no_grad():
        for prepared in (transforms(image), transforms(image.convert("RGB"))):
            assert prepared.shape == (1, 32, 32)
            assert int(model(prepared[None]).argmax()) == 3
        assert torch.equal(transforms(image), expected[0])
        test = load(None).test
        images = transforms(test.images)
        assert torch.equal(images, normalize(test.images))
        assert (model(images).argmax(1) != test.labels).sum() == 8  # of checkpoints/README.md


@torch.no_grad()
def test_the_committed_colors_classify_photographs():
    names = "airplane", "automobile", "frog", "ship", "truck"
    prepare = weights_transforms("densenet_bc_100_12", "cifar10_jpeg")
    images = torch.stack([prepare(Image.open(DEMOS / "pictures" / f"{name}.png")) for name in names])
    probabilities = create_model("densenet_bc_100_12", weights="cifar10_jpeg").eval()(images).softmax(1)
    classes = weights_classes("densenet_bc_100_12", "cifar10_jpeg")
    assert tuple(classes[i] for i in probabilities.argmax(1)) == names
    assert probabilities.amax(1).min() > 0.5


def test_a_run_keeps_bottlenecks_as_its_option_says():
    config = load_model(CHECKPOINTS / "digits")[1]
    for keep in (True, False, None):
        layers = (each for each in zoo.build_configured(config, "best", keep).modules() if isinstance(each, DenseLayer))
        assert {layer.keep_bottleneck for layer in layers} == {keep}


def test_images_of_other_shapes_and_channels():
    transforms = ImageTransform(8, (100.0, 110.0, 120.0), (50.0, 60.0, 70.0))
    gray = torch.randint(256, (1, 8, 8), dtype=torch.uint8)
    assert torch.equal(transforms(gray), transforms(gray.expand(3, 8, 8)))
    wide = torch.randint(256, (2, 3, 8, 14), dtype=torch.uint8)
    assert torch.equal(transforms(wide), transforms(wide[..., 3:11]))
    assert torch.equal(transforms(wide)[1], transforms(wide[1]))
    flat = transforms(torch.full((3, 40, 30), 160, dtype=torch.uint8))
    assert torch.allclose(flat, torch.tensor([60 / 50, 50 / 60, 40 / 70])[:, None, None].expand(3, 8, 8))
    levels = ImageTransform(8, (0.0,), (1.0,))(torch.randint(256, (1, 11, 11), dtype=torch.uint8))
    assert torch.equal(levels, levels.round())
    for wrong in (torch.zeros(3, 8, 8), torch.zeros(2, 8, 8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)):
        with pytest.raises(ValueError, match=r"found an image of shape .*but these weights need uint8 with 3 channels"):
            transforms(wrong)


def test_another_classifier_and_more_channels():
    model = create_model(MODEL, weights="digits", num_classes=3, in_channels=3, adapt_input="sum")
    assert model.weights_report.skipped == ["classifier.weight", "classifier.bias"]
    assert model.weights_report.adapted == ["features.conv0.weight"]
    assert create_model(MODEL, weights="digits").in_channels == 1
    backbone = create_model(MODEL, weights="digits", features_only=True, out_indices=(1,))
    assert backbone.weights_report.kept == []


def test_wrong_names():
    with pytest.raises(ValueError, match=rf"the weights 'digits' are for {MODEL}, and not for densenet121"):
        densenet121(weights="digits")
    with pytest.raises(ValueError, match=rf"weights is 'DEFAULT', but must be 'digits' for {MODEL}"):
        create_model(MODEL, weights="DEFAULT")


def test_weights_that_are_absent_or_damaged(digits, tmp_path, monkeypatch):
    monkeypatch.setattr(named, "CHECKPOINTS", tmp_path)
    with pytest.raises(
        ValueError,
        match=r"^\S+model.pt is no file, .* only a clone of the repository has it: .*copy checkpoints/digits there",
    ):
        create_model(MODEL, weights="digits")
    shutil.copytree(CHECKPOINTS / "digits", tmp_path / "digits")
    content = bytearray((CHECKPOINTS / "digits" / "model.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (tmp_path / "digits" / "model.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"model.pt is truncated, damaged .*\(the checksum of its record .* is wrong"):
        create_model(MODEL, weights="digits")


# torchvision's published weights


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
