"""The demos as commands: predicting, the committed model, running from a clone."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from samples import DEMOS, DIGITS, IMAGE, TINY, demo, refused, write_folder

ROOT = DEMOS.parent


@pytest.mark.parametrize("engine", ["plain", "shared"])
def test_a_batch_of_one_image_without_a_variance_ends_with_a_sentence(engine, tmp_path):
    write_folder(tmp_path / "own", each=5)
    words = ["--data", "own", "--image_size", "4", "--batch_size", "1", "--engine", engine, "--device", "cpu"]
    done = demo("cp_demo.py", *TINY, *words, "--n_epochs", "1", "--save", "run", cwd=tmp_path)
    refused(done, "more than 1 value per channel")


def test_the_committed_model_has_the_stated_error(tmp_path):
    stated = (ROOT / "checkpoints" / "README.md").read_text()
    assert hashlib.sha256((DIGITS / "model.pt").read_bytes()).hexdigest() in stated
    error = re.search(r"test error of ([\d.]+%)", stated)[1]
    done = demo("cp_demo.py", "--evaluate", str(DIGITS), "--device", "cpu", cwd=tmp_path)
    assert f"test error {error}" in done.stdout, done.stderr
    assert float(error.rstrip("%")) < 5
    command = json.loads((DIGITS / "config.json").read_text())["options"]
    assert (command["seed"], command["data"], command["depth"]) == (0, None, 22)
    assert list(tmp_path.iterdir()) == []


def test_training_on_and_predicting_own_images(tmp_path):
    write_folder(tmp_path / "own", each=40)
    words = ["--data", "own", *TINY, "--n_epochs", "3", "--batch_size", "8", "--workers", "0"]
    done = demo("cp_demo.py", *words, "--recipe", "one_cycle", "--save", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    Image.new("RGB", (50, 40), (10, 10, 10)).save(tmp_path / "dark.png")
    Image.new("RGB", (50, 40), (240, 240, 240)).save(tmp_path / "bright.jpg")
    done = demo("predict.py", "dark.png", "bright.jpg", "--model", "run", "--top", "2", cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("dark.png: cat ("), done.stdout
    assert lines[1].startswith("bright.jpg: dog ("), done.stdout


def test_evaluating_on_other_classes_is_refused(tmp_path):
    write_folder(tmp_path / "own")
    done = demo("cp_demo.py", "--evaluate", str(DIGITS), "--data", "own", cwd=tmp_path)
    refused(done, "has 2 classes (cat, dog), but")


def _write_package(place: Path, name: str) -> None:
    """A package that ends the process that imports it, with its name."""
    place.mkdir(parents=True)
    (place / "__init__.py").write_text(f"raise SystemExit({name!r})")


@pytest.mark.parametrize("cloned", [True, False])
def test_a_demo_prefers_the_package_beside_it_to_an_installed_one(cloned, tmp_path):
    _write_package(tmp_path / "installed" / "efficient_densenet", "the installed package")
    if cloned:
        _write_package(tmp_path / "clone" / "efficient_densenet", "the package of the clone")
    training = tmp_path / "clone" / "demos" / "training"
    training.mkdir(parents=True)
    shutil.copy(DEMOS / "cp_demo.py", training.parent)
    for name in ("__init__.py", "clone.py", "command_line.py"):
        shutil.copy(DEMOS / "training" / name, training)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    command = [sys.executable, "clone/demos/cp_demo.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.stderr.strip() == ("the package of the clone" if cloned else "the installed package")


# What predict prints, what it refuses, and where nobody reads


def test_predict_reports_what_is_wrong(tmp_path):
    (tmp_path / "a.png").write_text("not an image")
    model = ("--model", str(DIGITS))
    done = demo("predict.py", *model, cwd=tmp_path)
    assert done.returncode == 2
    assert "error: the following arguments are required: IMAGE" in done.stderr
    refused(demo("predict.py", "b.png", *model, cwd=tmp_path), "b.png is neither a file nor a folder")
    done = demo("predict.py", "a.png", *model, cwd=tmp_path)
    assert "note: a.png is not an image that can be decoded" in done.stderr
    assert (done.returncode, done.stderr.count("\n")) == (1, 2), done.stderr
    refused(demo("predict.py", "a.png", "--model", "nowhere", cwd=tmp_path), "nowhere does not exist")
    refused(demo("predict.py", "a.png", *model, "--top", "0", cwd=tmp_path), "top is 0, but must be a whole number")


@pytest.mark.exhaustive
def test_predict_that_is_interrupted(tmp_path):
    command = [sys.executable, str(DEMOS / "predict.py"), *[IMAGE] * 5000, "--model", str(DIGITS)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().startswith(IMAGE)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert (process.returncode, errors) == (128 + signal.SIGINT, "interrupted\n")
