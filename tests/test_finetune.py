"""Fine-tuning: runs that begin with given weights."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from helpers import assert_close
from samples import DIGITS, TINY, demo, demo_stopped, refused, same_run, write_folder
from torch import Tensor
from training import finetune

from efficient_densenet import DenseNet
from efficient_densenet.weights.named import NAMES, PUBLISHED, TRAINED, TrainedWeights

OWN = ("--data", "own", "--batch_size", "8", "--lr", "1e-9", "--save", "run", "--device", "cpu", "--workers", "0")
FROM = ("--weights", "source", *OWN)
FEW_DIGITS = ("--n_epochs", "1", "--valid_size", "1300", "--batch_size", "128", "--lr", "1e-9")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run on images of three classes of 16×16 pixels, to fine-tune on two classes."""
    folder = tmp_path_factory.mktemp("finetune")
    write_folder(folder / "three", ("bear", "cat", "dog"), each=10)
    write_folder(folder / "own", each=16)
    words = ("--image_size", "16", "--n_epochs", "1", *OWN, "--data", "three", "--batch_size", "9", "--save", "source")
    done = demo("cp_demo.py", *TINY, *words, cwd=folder)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(folder / "three")
    return folder


@pytest.fixture
def place(folder, tmp_path) -> Path:
    """A copy of the run and of the images."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return tmp_path


def _weights(folder: Path) -> dict[str, Tensor]:
    return torch.load(folder / "model.pt", weights_only=True)


def _config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def _test_error(done: subprocess.CompletedProcess) -> str:
    return done.stdout.rpartition("test error ")[2].partition("%")[0]


def _assert_loaded(source: Path, run: Path, *, with_classifier: bool = False) -> None:
    """The parameters of a run are those of its source, since its learning rate is next to nothing."""
    before, after = _weights(source), _weights(run)
    parameters = [name for name in before if name.endswith(("weight", "bias"))]
    for name in parameters if with_classifier else [name for name in parameters if name.startswith("features.")]:
        assert_close(after[name], before[name], 1e-6)


def test_other_classes_get_a_new_classifier(place):
    done = demo("cp_demo.py", *FROM, "--n_epochs", "2", cwd=place)
    assert done.returncode == 0, done.stderr
    new = "the classifier is new: for 2 classes (cat, dog), where the weights have 3 classes (bear, cat, dog)"
    assert new in done.stdout
    _assert_loaded(place / "source", place / "run")
    assert len(_weights(place / "run")["classifier.bias"]) == 2
    source, run = (_config(place / name)["model"] for name in ("source", "run"))
    for name in ("model", "depth", "growth_rate", "channels", "image_size", "mean", "std"):
        assert run[name] == source[name], name
    assert run["classes"] == ["cat", "dog"]
    assert f"test error {_test_error(done)}%" in demo("cp_demo.py", "--evaluate", "run", cwd=place).stdout


@pytest.mark.exhaustive
def test_the_same_classes_keep_their_classifier(place):
    done = demo("cp_demo.py", "--weights", str(DIGITS), "--save", "run", *FEW_DIGITS, cwd=place)
    assert "classifier" not in done.stdout, done.stderr
    _assert_loaded(DIGITS, place / "run", with_classifier=True)


def test_a_fine_tuned_run_resumes_bit_for_bit_without_its_source(place):
    words = (*FROM, "--n_epochs", "2")
    assert demo("cp_demo.py", *words, cwd=place).returncode == 0
    (place / "run").rename(place / "whole")
    demo_stopped(2, 1, *words, cwd=place)
    (place / "source").rename(place / "away")
    done = demo("cp_demo.py", "--save", "run", "--resume", "--weights", "other", cwd=place)
    refused(done, "weights is 'other', but the run was started with 'source'")
    shutil.copytree(place / "run", place / "again")
    assert demo("cp_demo.py", *words, "--resume", "auto", cwd=place).returncode == 0  # the words that began it
    same_run(place / "run", place / "whole")
    done = demo("cp_demo.py", "--save", "again", "--resume", cwd=place)
    assert done.returncode == 0, done.stderr
    same_run(place / "again", place / "whole")


def test_weights_by_name(place, monkeypatch):
    """Of a variant of the zoo, although the config of their run names its depth and growth rate."""
    model = DenseNet(12, (12, 12, 12), 1.0, 16, bn_size=0, num_classes=3)
    config = _config(place / "source")
    network = {"model": "densenet_40_12", "depth": None, "growth_rate": None}
    content = {"options": config["options"] | network, "model": config["model"] | network, "data": config["data"]}
    (place / "source" / "config.json").write_text(json.dumps(content))
    torch.save(model.state_dict(), place / "source" / "model.pt")
    monkeypatch.setattr("efficient_densenet.weights.named.CHECKPOINTS", place)
    monkeypatch.setitem(TRAINED, "animals", TrainedWeights("densenet_40_12", "source"))
    words = ("--weights", "animals", "--n_epochs", "1", "--lr", "1e-9", "--data", "own", "--workers", "0")
    done = demo("cp_demo.py", *words, "--model", "densenet_40_12", cwd=place)
    assert "weights: " in done.stdout, done.stderr
    assert done.returncode == 0
    run = place / "checkpoints" / "own_from_animals"
    assert _config(run)["options"]["weights"] == "animals"
    _assert_loaded(place / "source", run)
    refused(
        demo("cp_demo.py", *words, "--depth", "40", "--save", "a", cwd=place), "the weights animals are of densenet_"
    )


def test_images_in_color_for_a_network_of_gray(place):
    words = ("--weights", str(DIGITS), *OWN, "--n_epochs", "1")
    done = demo("cp_demo.py", *words, cwd=place)
    assert "the classifier is new: for 2 classes (cat, dog)" in done.stdout, done.stderr
    assert _config(place / "run")["model"]["channels"] == 1
    error = f"test error {_test_error(done)}%"
    assert error in demo("cp_demo.py", "--evaluate", "run", "--stream", "--workers", "0", cwd=place).stdout
    image = next((place / "own" / "test" / "cat").iterdir())
    assert "cat (" in demo("predict.py", str(image), "--model", "run", cwd=place).stdout


def test_a_file_of_weights_needs_the_network_only(place):
    source = DenseNet(4, (1, 1, 1), num_init_features=8, num_classes=3)
    torch.save({"state_dict": source.state_dict()}, place / "theirs.pth")
    words = ("--weights", "theirs.pth", *FEW_DIGITS)
    refused(demo("cp_demo.py", *words, cwd=place), "theirs.pth, since no run's config.json is beside it: name the")
    refused(demo("cp_demo.py", *words, "--depth", "16", cwd=place), "theirs.pth are not of this network (missing: ")
    done = demo("cp_demo.py", *words, *TINY, cwd=place)
    assert done.returncode == 0, done.stderr
    for sentence in (
        "the classifier is new: for 10 classes (0, 1, 2, …), where the weights have 3 classes",
        "the first convolution is adapted to 1 input channels",
        "the images are normalized by their own mean and std",
    ):
        assert sentence in done.stdout
    after = _weights(place / "checkpoints" / "digits_from_theirs")
    assert_close(after["features.conv0.weight"], source.features.conv0.weight.sum(1, keepdim=True), 1e-6)
    name = "features.denseblock3.denselayer1.conv2.weight"
    assert_close(after[name], source.state_dict()[name], 1e-6)


def test_torchvision_s_weights_by_name(monkeypatch):
    theirs = torchvision.models.densenet121()
    monkeypatch.setattr(torchvision.models.WeightsEnum, "get_state_dict", lambda *_, **__: theirs.state_dict())
    given = {"weights": "DEFAULT", "model": "densenet121", "data": "own"}
    pretrained = finetune.find_weights("DEFAULT", given)
    assert pretrained.complete(given) == given | {"image_size": 224}
    assert pretrained.inputs["mean"] == pytest.approx([123.675, 116.28, 103.53])
    assert pretrained.inputs["std"] == pytest.approx([58.395, 57.12, 57.375])
    assert pretrained.classes[0] == "tench"
    model = DenseNet(32, (6, 12, 24, 16), 0.5, 64, num_classes=2, small_inputs=False)
    assert pretrained.load_into(model, ("cat", "dog"))[1].startswith("the classifier is new: for 2 classes (cat, dog)")
    assert torch.equal(model.features.norm5.weight, theirs.features.norm5.weight)
    for name in PUBLISHED:
        assert set(torchvision.models.get_model_weights(name).__members__) <= set(NAMES)
    message = "found no --model with --weights DEFAULT, but torchvision has weights for densenet121"
    with pytest.raises(ValueError, match=message):
        finetune.find_weights("DEFAULT", {})


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--weights", "nothing"], "nothing: give the directory of a run, a file of weights, or a name: "),
        (["--weights", "source", "--depth", "40"], "found --depth 40, but the weights "),
        (["--weights", "source", "--model", "densenet121"], "are of a DenseNet-BC of depth 10 and growth rate 4: "),
        (["--weights", "own"], "own/model.pt does not exist"),
        (["--weights", "DEFAULT", "--model", "densenet264"], "found --model densenet264 with --weights DEFAULT, but"),
        (["--weights"], "weights is True, but must be a path"),
    ],
)
def test_what_cannot_be_fine_tuned_is_refused_before_anything_is_written(words, message, folder):
    before = sorted(folder.rglob("*"))
    refused(demo("cp_demo.py", "--save", "run", "--device", "cpu", *words, cwd=folder), message)
    assert sorted(folder.rglob("*")) == before
