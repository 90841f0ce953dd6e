"""What a run will need at its end is checked before its first step; and images that were replaced since."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from samples import TINY, contents, demo, demo_stopped, read_rows, refused, write_folder
from training.data import UndecodableImage
from training.loop import Trainer

WORDS = (*TINY, "--data", "own", "--batch_size", "5", "--image_size", "8", "--device", "cpu", "--save", "run")
RESUME = ("cp_demo.py", "--save", "run", "--resume")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A run on an image folder with 18 images to train on, stopped after two steps of its second epoch of three."""
    folder = tmp_path_factory.mktemp("stopped")
    write_folder(folder / "own", each=10)
    demo_stopped(2, 2, *WORDS, "--n_epochs", "3", cwd=folder)
    return folder


@pytest.fixture
def copied(stopped, tmp_path) -> Path:
    """A copy of the run, on a copy of its images."""
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "run" / "last.pt"
    content = torch.load(path, weights_only=True)
    content["options"]["data"] = str(tmp_path / "own")
    torch.save(content, path)
    return tmp_path


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(("split", "workers"), [("train", "0"), ("test", "0"), ("val", "1")])
def test_a_streamed_image_is_decoded_before_anything_is_written(split, workers, tmp_path):
    write_folder(tmp_path / "own", each=5, splits=("train", "test", "val"))
    _truncate(tmp_path / "own" / split / "dog" / "4.jpg")
    done = demo("cp_demo.py", *WORDS, "--stream", "--workers", workers, cwd=tmp_path)
    refused(done, f"own/{split}/dog/4.jpg is not an image that can be decoded (")
    assert not (tmp_path / "run").exists()


def _resaved(path: Path) -> None:
    weights = torch.load(path, weights_only=True)
    weights["classifier.weight"] = weights["classifier.weight"][:, :-1].clone()
    torch.save(weights, path)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (Path.unlink, "run/model.pt is missing, but the run has finished an epoch, whose weights it had: copy it back"),
        (_truncate, "run/model.pt is truncated, damaged or contains more than tensors and plain data"),
        (_resaved, "run/model.pt: classifier.weight is a tensor of 2×"),
    ],
)
def test_weights_of_the_best_epoch_that_are_gone_are_noticed_on_resuming(harm, message, copied, monkeypatch):
    harm(copied / "run" / "model.pt")
    before = contents(copied / "run")
    monkeypatch.setattr(Trainer, "step", lambda *_: pytest.fail("a step was run"))
    refused(demo(*RESUME, cwd=copied), message)
    assert contents(copied / "run") == before


@pytest.mark.parametrize("name", ["curves.png", "results.csv", "model.pt", "config.json", "last.pt", "run_log.txt"])
def test_a_directory_in_the_place_of_a_file_to_write_is_refused(name, tmp_path):
    (tmp_path / "run" / name).mkdir(parents=True)
    overwrite = ["--overwrite"] if name in ("model.pt", "results.csv") else []
    done = demo("cp_demo.py", *TINY, "--save", "run", *overwrite, cwd=tmp_path)
    refused(done, f"run/{name} is a directory, but a run writes a file of that name: remove it, or give another --save")
    assert [path.name for path in (tmp_path / "run").iterdir()] == [name]


@pytest.mark.parametrize("name", ["matplotlib", "tqdm", "tensorboard"])
def test_a_package_that_only_the_end_needs_is_missed_at_once(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    done = demo("cp_demo.py", *TINY, "--save", "run", "--tensorboard", cwd=tmp_path)
    refused(done, f"{name} is not installed, but is needed here: pip install 'efficient_densenet[")
    assert list(tmp_path.iterdir()) == []


def _last(folder: Path) -> dict:
    return torch.load(folder / "run" / "last.pt", weights_only=True)


def test_after_an_image_was_removed_a_run_goes_on_if_that_is_accepted(copied):
    (copied / "own" / "train" / "cat" / "3.png").unlink()
    before = _last(copied)
    refused(demo(*RESUME, cwd=copied), "found 17 for train images of the data, but the run was started with 18: give")
    assert _last(copied)["position"] == before["position"]
    done = demo(*RESUME, "--accept_changed_data", cwd=copied)
    assert done.returncode == 0, done.stderr
    assert "note: found 17 for train images of the data, but the run was started with 18\n" in done.stdout
    assert "note: epoch 2 begins anew, since its batches are others\n" in done.stdout
    after = _last(copied)
    assert (before["data"]["train_pictures"], after["data"]["train_pictures"]) == (18, 17)
    assert after["model"] == before["model"]  # the normalization too
    assert len(read_rows(copied / "run")) == 3
    done = demo(*RESUME, cwd=copied)
    assert "test error" in done.stdout, done.stderr
    assert "note:" not in done.stdout


def test_after_an_image_was_replaced_a_run_goes_on_at_the_same_step(copied):
    shutil.copy(copied / "own" / "test" / "cat" / "3.png", copied / "own" / "test" / "cat" / "5.png")
    refused(demo(*RESUME, cwd=copied), "found other images than the run was started with, though as many: give")
    done = demo(*RESUME, "--accept_changed_data", cwd=copied)
    assert "test error" in done.stdout, done.stderr
    assert "note: found other images than the run was started with, though as many\n" in done.stdout
    assert "resuming run in epoch 2, step 3\n" in done.stdout


def test_other_classes_are_never_accepted(copied):
    for split in ("train", "test"):
        (copied / "own" / split / "cat").rename(copied / "own" / split / "lion")
    done = demo(*RESUME, "--accept_changed_data", cwd=copied)
    refused(done, "found ['dog', 'lion'] for classes of the data, but the run was started with ['cat', 'dog']: give")
    assert "accept" not in done.stderr


def test_an_image_that_cannot_be_decoded_says_how_to_go_on(copied, monkeypatch):
    def steps(*_):
        raise UndecodableImage("own/1.png is not an image: replace it or remove it")

    monkeypatch.setattr(Trainer, "steps", steps)
    done = demo(*RESUME, cwd=copied)
    refused(done, "replace it or remove it, then continue with --resume --accept_changed_data and --save run")
