"""The directory of a run: who may write there, what is refused before a step, and files that are damaged."""

import random
import shutil
import signal
from pathlib import Path

import pytest
import torch
from forks import ForkedDemo, await_file, forked_demo
from samples import (
    RUN,
    TINY,
    PrintsWhenUnpickled,
    contents,
    demo,
    flipped,
    log_of,
    read_rows,
    refused,
    same_content,
    same_run,
    stopped_in_middle,
    write_cifar10,
    write_folder,
)
from training import files
from training.run_directory import merge_options, read_state

from efficient_densenet.weights.named import TRAINED

OWN = (*TINY, "--data", "own", "--batch_size", "5", "--image_size", "8", "--device", "cpu", "--save", "run")
RESUME = ("cp_demo.py", "--save", "run", "--resume")
DAMAGED = "is truncated, damaged or not what a run of these demos writes ("


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A folder with a run on an image folder with 18 images to train on, in the middle of its second epoch."""
    folder = tmp_path_factory.mktemp("stopped")
    write_folder(folder / "own", each=10)
    stopped_in_middle(*OWN, "--workers", "0", cwd=folder)
    return folder


@pytest.fixture
def copied(stopped, tmp_path) -> Path:
    """A copy of the run, on a copy of its images."""
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    return tmp_path


def _resumed(folder: Path, *words: str):
    return demo(*RESUME, "--data", "own", "--workers", "0", *words, cwd=folder)


# Damaged files


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _flip_a_weight(path: Path) -> None:
    content = torch.load(path, weights_only=True)
    weight = content.get("state", {}).get("model", content)["features.conv0.weight"]
    path.write_bytes(flipped(path.read_bytes(), 8 * path.read_bytes().index(weight.numpy().tobytes())))


def _other_shape(path: Path) -> None:
    content = torch.load(path, weights_only=True)
    weights = content.get("state", {}).get("model", content)
    weights["classifier.weight"] = weights["classifier.weight"][:, :-1].clone()
    torch.save(content, path)


def _impossible_option(path: Path) -> None:
    content = torch.load(path, weights_only=True)
    content["options"]["batch_size"] = 0
    torch.save(content, path)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (_truncate, DAMAGED),
        (_flip_a_weight, f"{DAMAGED}the checksum of its record "),
        (_other_shape, DAMAGED),
        (_impossible_option, f"{DAMAGED}batch_size is 0, but must be a whole number of at least 1"),
        (lambda path: torch.save(PrintsWhenUnpickled(), path), DAMAGED),
        (lambda path: torch.save({"state_dict": {}}, path), f"{DAMAGED}KeyError: 'format')"),
        (Path.unlink, "cannot be read (No such file or directory): restore it"),
    ],
)
def test_a_damaged_state_is_refused_and_nothing_is_written(harm, message, copied):
    harm(copied / "run" / "last.pt")
    before = contents(copied / "run")
    done = _resumed(copied)
    refused(done, f"run/last.pt {message}")
    assert "code in a pickle was run" not in done.stdout
    assert contents(copied / "run") == before


@pytest.mark.parametrize("name", ["model.pt", "last.pt"])
def test_a_flipped_bit_is_noticed_or_harmless(name, stopped, tmp_path):
    path, expected = tmp_path / name, files.load_torch(stopped / "run" / name)
    shutil.copy(stopped / "run" / name, path)
    content, noticed = path.read_bytes(), 0
    for bit in random.Random(0).sample(range(8 * len(content)), 60):
        path.write_bytes(flipped(content, bit))
        try:
            same_content(files.load_torch(path), expected)
        except ValueError:
            noticed += 1
    assert noticed > 20


# Images that changed since


def test_after_an_image_was_removed_a_run_goes_on_if_that_is_accepted(copied):
    (copied / "own" / "train" / "cat" / "3.png").unlink()
    before = files.load_torch(copied / "run" / "last.pt")
    refused(_resumed(copied), "found 17 for train images of the data, but the run was started with 18: give the same")
    done = _resumed(copied, "--accept_changed_data")
    assert done.returncode == 0, done.stderr
    assert "note: found 17 for train images of the data, but the run was started with 18\n" in done.stdout
    assert "note: epoch 2 begins anew, since its batches are others\n" in done.stdout
    after = files.load_torch(copied / "run" / "last.pt")
    assert after["model"] == before["model"]  # the normalization too
    assert len(read_rows(copied / "run")) == 3


def test_a_replaced_image_is_accepted_at_the_same_step_and_other_classes_never(copied):
    shutil.copy(copied / "own" / "test" / "cat" / "3.png", copied / "own" / "test" / "cat" / "5.png")
    refused(_resumed(copied), "found other images than the run was started with, though as many: give the same --data")
    done = _resumed(copied, "--accept_changed_data")
    assert "resuming run in epoch 2, after step 2\n" in done.stdout, done.stderr
    for split in ("train", "test"):
        (copied / "own" / split / "cat").rename(copied / "own" / split / "lion")
    done = _resumed(copied, "--accept_changed_data")
    refused(done, "found ['dog', 'lion'] for classes of the data, but the run was started with ['cat', 'dog']: give")
    assert "accept" not in done.stderr


# Resuming and overwriting


def test_resume_begins_no_run_and_auto_begins_or_resumes(tmp_path):
    words = (*RUN, "--n_epochs", "1", "--valid_size", "1200")
    done = demo("cp_demo.py", *words, "--resume", cwd=tmp_path)
    refused(done, "found --resume, but run contains no run to resume: name the run with --save, or leave --resume out")
    assert list(tmp_path.iterdir()) == []
    done = demo("cp_demo.py", *words, "--resume", "auto", cwd=tmp_path)
    assert "nothing to resume in run: starting" in done.stdout, done.stderr
    (tmp_path / "run" / "notes.txt").write_text("mine")
    refused(demo("cp_demo.py", *words, cwd=tmp_path), "run contains a run: give --resume to resume it, --overwrite to")
    before = {name: content for name, content in contents(tmp_path / "run").items() if name.endswith(".pt")}
    done = demo("cp_demo.py", *words, "--resume", "auto", cwd=tmp_path)
    assert "resuming run after the last epoch\n" in done.stdout, done.stderr
    assert log_of(tmp_path / "run") == ["started", "finished", "resumed after the last epoch", "finished"]
    assert before["model.pt"] == contents(tmp_path / "run")["model.pt"]
    done = demo("cp_demo.py", *words, "--overwrite", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    assert log_of(tmp_path / "run") == ["started", "finished"]


def test_resuming_with_another_recipe_is_refused(copied):
    state = read_state(copied / "run")
    given = [("lr", 0.2, 0.1), ("weight_decay", 5e-4, 1e-4), ("n_epochs", 4, 3), ("seed", 8, 0)]
    for option, value, of_run in given:
        with pytest.raises(ValueError, match=rf"^{option} is {value}, but the run was started with {of_run}: leave"):
            merge_options(state, {option: value})
    refused(_resumed(copied, "--lr", "0.2"), "lr is 0.2, but the run was started with 0.1: leave it out to resume")


# One run at a time

PAUSED = (*TINY, "--data", "cifar", "--batch_size", "45", "--recipe", "one_cycle", "--device", "cpu", "--n_epochs", "3")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run that nothing disturbed, and its data."""
    folder = tmp_path_factory.mktemp("whole")
    write_cifar10(folder / "cifar")
    assert forked_demo("cp_demo.py", *PAUSED, "--save", "run", cwd=folder).returncode == 0
    return folder


@pytest.fixture
def paused(whole, tmp_path):
    """A run that is in the middle, and does not go on: its process is stopped."""
    (tmp_path / "cifar").symlink_to(whole / "cifar")
    process = ForkedDemo("cp_demo.py", *PAUSED, "--save", "run", cwd=tmp_path)
    await_file(tmp_path / "run" / "run_log.txt", process)
    process.send_signal(signal.SIGSTOP)
    yield process
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
        process.wait()


def test_a_second_run_is_refused_may_evaluate_and_goes_on_where_the_first_was_killed(paused, whole, tmp_path):
    before = contents(tmp_path / "run")
    for words in (["--seed", "1"], ["--resume"], ["--overwrite", "--seed", "1"]):
        done = demo("cp_demo.py", *PAUSED, "--save", "run", *words, cwd=tmp_path)
        refused(done, "run is in use, as the last line of its run_log.txt may say: wait until that run ends")
    assert contents(tmp_path / "run") == before
    shutil.copy(whole / "run" / "model.pt", tmp_path / "run" / "model.pt")
    done = demo("cp_demo.py", "--save", "run", "--evaluate", cwd=tmp_path)
    assert "test error" in done.stdout, done.stderr
    (tmp_path / "run" / "model.pt").unlink()
    paused.send_signal(signal.SIGKILL)
    assert paused.wait() == -signal.SIGKILL
    done = demo("cp_demo.py", "--save", "run", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    same_run(tmp_path / "run", whole / "run")


def test_a_run_whose_lock_was_removed_saves_nothing_more(paused, tmp_path):
    (tmp_path / "run" / "run.lock").unlink()
    before = (tmp_path / "run" / "last.pt").read_bytes()
    paused.send_signal(signal.SIGCONT)
    _, errors = paused.communicate()
    assert "error: run/run.lock was removed or replaced during the run, so that another run may write" in errors
    assert (tmp_path / "run" / "last.pt").read_bytes() == before


# Runs that fail


def test_a_full_disk_is_reported_and_the_old_checkpoint_kept(copied):
    before = (copied / "run" / "last.pt").read_bytes()
    done = forked_demo(*RESUME, "--data", "own", cwd=copied, max_file_bytes=len(before) // 2)
    refused(done, "run/last.pt could not be written (File too large): its previous content is kept")
    assert (copied / "run" / "last.pt").read_bytes() == before
    assert [path.name for path in (copied / "run").glob(".*")] == []


def test_a_loss_that_is_not_finite_keeps_the_last_good_state(tmp_path):
    done = demo("cp_demo.py", *RUN, "--n_epochs", "3", "--lr", "1e30", "--recipe", "step", cwd=tmp_path)
    refused(done, "error: the loss became")
    assert "start over with a smaller --lr; what was saved before is kept" in done.stderr
    state = files.load_torch(tmp_path / "run" / "last.pt")["state"]
    assert all(torch.isfinite(tensor).all() for tensor in state["model"].values())


# What is saved, drawn and printed


def test_weights_that_have_a_name_are_never_overwritten(tmp_path):
    folder = TRAINED["cifar10_jpeg"].folder
    done = demo("cp_demo.py", *TINY, "--save", str(folder), "--overwrite", cwd=tmp_path)
    refused(done, "has the weights called cifar10_jpeg: give another --save")
