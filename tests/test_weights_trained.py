"""Weights by name that were trained here: from the repository's checkpoints/, without a network."""

import hashlib
import shutil

import pytest
import torch
from PIL import Image
from samples import DEMOS
from training.data import load
from training.data.augment import Transform
from training.data.folder import decode
from training.models import load_model

from efficient_densenet import create_model, densenet121, weights_classes, weights_transforms
from efficient_densenet.models import zoo
from efficient_densenet.weights import named
from efficient_densenet.weights.named import CHECKPOINTS, TRAINED, TrainedWeights
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
