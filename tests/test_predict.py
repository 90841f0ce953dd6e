"""Classifying images by a saved model: what is printed, what is refused, and where nobody reads."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from samples import DEMOS, DIGITS, IMAGE, demo, refused

from efficient_densenet import DenseNet
from efficient_densenet.weights.trained import TRAINED, TrainedWeights


def test_predict_reports_what_is_wrong(tmp_path):
    (tmp_path / "a.png").write_text("not an image")
    model = ("--model", str(DIGITS))
    refused(demo("predict.py", *model, cwd=tmp_path), "found no image to classify")
    refused(demo("predict.py", "b.png", *model, cwd=tmp_path), "b.png is neither a file nor a folder")
    refused(demo("predict.py", "a.png", *model, cwd=tmp_path), "a.png is not an image that can be decoded")
    refused(demo("predict.py", "a.png", "--model", "nowhere", cwd=tmp_path), "nowhere does not exist")


def test_a_folder_stands_for_the_images_in_it(tmp_path):
    (tmp_path / "some" / "more").mkdir(parents=True)
    refused(
        demo("predict.py", "some", cwd=tmp_path), "some contains no images: give a folder with files such as .bmp, "
    )
    for name in ("b.png", "a.PNG", "more/c.png", "notes.txt"):
        shutil.copy(IMAGE, tmp_path / "some" / name)
    done = demo("predict.py", "some", IMAGE, "--model", str(DIGITS), cwd=tmp_path)
    names = [line.partition(": 3 (")[0] for line in done.stdout.splitlines()]
    assert names == ["some/a.PNG", "some/b.png", "some/more/c.png", IMAGE], done.stderr


@pytest.fixture
def ships_and_cars(tmp_path, monkeypatch) -> Path:
    """Weights for images in color, under the name that the demo looks for."""
    torch.manual_seed(0)
    content = json.loads((DIGITS / "config.json").read_text())
    network = {"model": None, "depth": 10, "growth_rate": 4}
    shown = {"channels": 3, "classes": ["ship", "car"], "mean": [120.0] * 3, "std": [60.0] * 3}
    content["options"] |= network
    content["model"] |= network | shown
    content["data"]["classes"] = shown["classes"]
    folder = tmp_path / "colors"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    torch.save(DenseNet(4, (1, 1, 1), num_init_features=8, num_classes=2).state_dict(), folder / "model.pt")
    sha256 = hashlib.sha256((folder / "model.pt").read_bytes()).hexdigest()
    monkeypatch.setattr("efficient_densenet.weights.trained.CHECKPOINTS", tmp_path)
    monkeypatch.setitem(TRAINED, "cifar10", TrainedWeights("densenet_bc_100_12", "colors", sha256))
    Image.new("RGB", (50, 40), (30, 60, 200)).save(tmp_path / "blue.png")
    return tmp_path


def test_images_in_color_are_classified_by_the_weights_for_them(ships_and_cars):
    Image.open(IMAGE).convert("RGB").save(ships_and_cars / "digit.jpg")
    done = demo("predict.py", "blue.png", IMAGE, "digit.jpg", cwd=ships_and_cars)
    blue, gray, digit = done.stdout.splitlines()
    assert blue.startswith(("blue.png: ship (", "blue.png: car ("))
    assert "digit_3.png: 3 (" in gray
    assert re.match(r"digit.jpg: \d \(", digit)
    done = demo("predict.py", IMAGE, "--model", "cifar10", "--top", "2", cwd=ships_and_cars)
    assert "ship (" in done.stdout, done.stderr
    (ships_and_cars / "colors" / "model.pt").unlink()
    refused(demo("predict.py", "blue.png", cwd=ships_and_cars), "model.pt cannot be read (No such file or directory), ")
    assert "digit_3.png: 3 (" in demo("predict.py", IMAGE, cwd=ships_and_cars).stdout


@pytest.mark.exhaustive
def test_predict_in_a_pipe_that_is_closed_early(tmp_path):
    pipe = '"$@" | head -1; exit ${PIPESTATUS[0]}'
    command = [sys.executable, str(DEMOS / "predict.py"), *[IMAGE] * 20]
    done = subprocess.run(["bash", "-c", pipe, "bash", *command], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (1, "", 1)
