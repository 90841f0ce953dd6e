"""Runs: their files, interruption and resuming, damaged checkpoints, image folders, the terminal."""

import contextlib
import fcntl
import json
import os
import pickle
import re
import select
import shutil
import signal
import struct
import termios
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
    publish,
    read_rows,
    refused,
    same_run,
    write_cifar10,
    write_cifar100,
    write_folder,
)
from torchvision import datasets
from training.data import load
from training.loop import Trainer
from training.models import load_model

from efficient_densenet.models.layers import DenseLayer


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of two epochs, never interrupted."""
    folder = tmp_path_factory.mktemp("finished")
    done = forked_demo("cp_demo.py", *RUN, "--n_epochs", "2", "--drop_rate", "0.1", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (folder / "printed.txt").write_text(done.stdout)
    return folder


def _copy(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished / "run", tmp_path / "run")
    return tmp_path / "run"


def test_a_run_writes_all_files_and_prints_where(finished):
    names = ["config.json", "curves.png", "last.pt", "model.pt", "results.csv"]
    assert sorted(path.name for path in (finished / "run").iterdir()) == sorted([*names, "run.lock", "run_log.txt"])
    printed = (finished / "printed.txt").read_text()
    assert re.search(
        r"DenseNet-BC-10-4: 2,522 parameters, 0.0 MiB; engine shared \((Numba|Triton|portable)\); c", printed
    )
    assert "expected memory of a step: about" in printed
    assert "epoch 2/2: train loss" in printed  # a line per epoch where there is no terminal
    assert "test error" in printed
    assert all(name in printed for name in names)
    header = (finished / "run" / "results.csv").read_text().splitlines()[0]
    assert header.startswith(
        "epoch,train_loss,train_error,valid_loss,valid_error,test_error,seconds,images_per_second,"
    )
    rows = read_rows(finished / "run")
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert rows[0]["test_error"] == "" != rows[1]["test_error"]
    assert (finished / "run" / "curves.png").read_bytes()[:4] == b"\x89PNG"
    config = json.loads((finished / "run" / "config.json").read_text())
    assert (config["options"]["depth"], config["options"]["engine"]) == (10, "best")
    assert config["data"]["train_pictures"] == 1294


def test_the_saved_model_has_the_error_in_the_table(finished):
    for words in (["--evaluate", "--save", "run"], ["--evaluate", "run/model.pt"]):
        done = demo("cp_demo.py", *words, cwd=finished)
        assert f"test error {float(read_rows(finished / 'run')[1]['test_error']):.2%}" in done.stdout, done.stderr
    model, _ = load_model(finished / "run" / "model.pt")
    assert not model.training


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive), signal.SIGTERM])
def test_a_signal_saves_after_the_step_and_resuming_gives_the_same_run(number, finished, tmp_path):
    process = ForkedDemo("cp_demo.py", *RUN, "--n_epochs", "2", "--drop_rate", "0.1", cwd=tmp_path)
    await_file(tmp_path / "run" / "last.pt", process)
    process.send_signal(number)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    assert f"stopped by {number.name} in epoch 1" in printed
    assert "continue with --resume and --save run" in printed
    assert "Traceback" not in errors
    again = demo("cp_demo.py", *RUN, cwd=tmp_path)
    refused(again, "run contains a run that stopped in epoch 1 of 2")
    assert "give --resume to resume it, --overwrite to start over" in again.stderr
    done = demo("cp_demo.py", "--save", "run", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    same_run(tmp_path / "run", finished / "run")
    started, stopped, resumed, ended = (tmp_path / "run" / "run_log.txt").read_text().splitlines()
    assert re.search(r"^\d{4}-\d\d-\d\dT[\d:]{8}\+00:00 started; engine shared \(\w+\); cpu; PyTorch 2\.", started)
    step = int(re.search(rf"stopped by {number.name} in epoch 1 after step (\d+)$", stopped)[1])
    assert re.search(rf" resumed in epoch 1(, step {step + 1}|, after its last step)?; engine", resumed)
    assert re.search(r" finished: test error \d+\.\d\d%$", ended)


def test_a_signal_to_the_process_group_saves_though_it_kills_the_workers(tmp_path):
    write_folder(tmp_path / "own")
    words = ["--data", "own", "--stream", "--depth", "10", "--growth_rate", "4", "--n_epochs", "10000", "--save", "run"]
    words += ["--batch_size", "2", "--device", "cpu"]
    process = ForkedDemo("cp_demo.py", *words, cwd=tmp_path, new_session=True)
    await_file(tmp_path / "run" / "results.csv", process)
    os.killpg(process.pid, signal.SIGTERM)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "stopped by SIGTERM in epoch" in printed
    assert "error" not in errors
    saved = torch.load(tmp_path / "run" / "last.pt", weights_only=True)["position"]
    assert f"in epoch {saved['epoch']}" in printed


def test_a_finished_run_is_neither_overwritten_nor_trained_on(finished, tmp_path):
    folder = _copy(finished, tmp_path)
    before = contents(folder)
    refused(demo("cp_demo.py", *RUN, cwd=tmp_path), "run contains a finished run of 2 epochs: give --resume")
    assert contents(folder) == before
    done = demo("cp_demo.py", *RUN, "--resume", cwd=tmp_path)
    assert "test error" in done.stdout, done.stderr
    assert "resuming run after the last epoch\n" in done.stdout
    same_run(folder, finished / "run")
    assert log_of(folder) == ["started", "finished", "resumed after the last epoch", "finished"]


def log_of(folder: Path) -> list[str]:
    """The events in the log of a run, without their times and what comes behind them."""
    lines = (folder / "run_log.txt").read_text().splitlines()
    return [re.split("[;:] ", line.partition(" ")[2])[0] for line in lines]


def test_overwrite_starts_over_and_tensorboard_writes_events(finished, tmp_path):
    folder = _copy(finished, tmp_path)
    (folder / "notes.txt").write_text("mine")
    done = demo("cp_demo.py", *RUN, "--n_epochs", "1", "--overwrite", "--tensorboard", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(read_rows(folder)) == 1
    assert (folder / "notes.txt").read_text() == "mine"
    assert log_of(folder) == ["started", "finished"]
    assert [path.name[:6] for path in (folder / "tensorboard").iterdir()] == ["events"]
    done = demo("cp_demo.py", "--save", "run", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (
            lambda path: path.write_bytes(path.read_bytes()[:5000]),
            "is truncated, damaged or contains more than",
        ),
        (lambda path: torch.save(PrintsWhenUnpickled(), path), "is truncated, damaged or contains more than"),
        (lambda path: torch.save({"state_dict": {}}, path), "is not the state of a run of these demos, and was left"),
        (Path.unlink, "is missing, but run/model.pt exists"),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name_and_nothing_is_overwritten(harm, message, finished, tmp_path):
    folder = _copy(finished, tmp_path)
    harm(folder / "last.pt")
    before = contents(folder)
    done = demo("cp_demo.py", "--save", "run", "--resume", cwd=tmp_path)
    refused(done, f"run/last.pt {message}")
    assert "code in a pickle was run" not in done.stdout
    assert contents(folder) == before


@pytest.mark.parametrize(("option", "value", "of_run"), [("lr", 0.2, 0.1), ("weight_decay", 5e-4, 1e-4)])
def test_resuming_with_another_recipe_is_refused(option, value, of_run, finished, tmp_path):
    _copy(finished, tmp_path)
    done = demo("cp_demo.py", "--save", "run", "--resume", f"--{option}", str(value), cwd=tmp_path)
    refused(done, f"{option} is {value}, but the run was started with {of_run}: leave it out to resume")


@pytest.mark.parametrize("mirror", [True, False])
def test_images_are_flipped_as_the_option_says(mirror, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        Trainer, "step", lambda trainer, *_: seen.append(trainer.transform.horizontal_flip) or [1.0, 0.0, 1.0]
    )
    write_folder(tmp_path / "own", each=5)
    data = [] if mirror else ["--data", "own"]  # where the default is the opposite
    done = demo("cp_demo.py", *RUN, *data, "--n_epochs", "1", "--mirror", str(mirror), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert set(seen) == {mirror}


def test_bottlenecks_are_kept_as_the_option_says_and_a_resumed_run_may_change_it(tmp_path, monkeypatch):
    kept, real_step = [], Trainer.step

    def step(trainer, *args):
        kept.append({layer.keep_bottleneck for layer in trainer.model.modules() if isinstance(layer, DenseLayer)})
        return real_step(trainer, *args)

    monkeypatch.setattr(Trainer, "step", step)
    for options in (["--n_epochs", "1", "--keep_bottleneck"], ["--resume", "--keep_bottleneck", "False"]):
        done = demo("cp_demo.py", *RUN, *options, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert kept
    assert all(layers == {True} for layers in kept)


def test_a_run_of_an_earlier_version_is_resumed(finished, tmp_path):
    """It recorded no fingerprint of its images, and fewer options."""
    folder = _copy(finished, tmp_path)
    content = torch.load(folder / "last.pt", weights_only=True)
    del content["data"]["fingerprint"], content["data"]["statistics"]
    del content["options"]["mirror"], content["options"]["accept_changed_data"]
    torch.save(content, folder / "last.pt")
    done = demo("cp_demo.py", "--save", "run", "--resume", cwd=tmp_path)
    assert "test error" in done.stdout, done.stderr
    same_run(folder, finished / "run")


@pytest.mark.parametrize(
    ("script", "layout"),
    [
        ("cp_demo.py", "cifar10"),
        pytest.param("original_demo.py", "folder", marks=pytest.mark.exhaustive),
        pytest.param("cp_demo.py", "folder", marks=pytest.mark.exhaustive),
        pytest.param("original_demo.py", "cifar10", marks=pytest.mark.exhaustive),
    ],
)
def test_the_command_of_the_readme_on_a_directory_called_cifar(script, layout, tmp_path):
    """As it stands, until the first step is done."""
    write_cifar10(tmp_path / "cifar", each=8) if layout == "cifar10" else write_folder(tmp_path / "cifar", each=8)
    words = ["--efficient", "True", "--data", "cifar", "--save", "model", "--batch_size", "256"]
    process = ForkedDemo(script, *words, cwd=tmp_path)
    await_file(tmp_path / "model" / "last.pt", process)
    process.send_signal(signal.SIGTERM)
    printed, errors = process.communicate(timeout=100)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "DenseNet-BC-100-12: 76" in printed
    assert ("engine official;" if script == "original_demo.py" else "engine shared (") in printed
    position = torch.load(tmp_path / "model" / "last.pt", weights_only=True)["position"]
    assert position["step"] + position["epoch"] >= 2


def test_a_terminal_shows_a_progress_bar(tmp_path):
    pty = pytest.importorskip("pty")
    terminal, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("4H", 24, 200, 0, 0))
    process = ForkedDemo("cp_demo.py", *RUN, "--n_epochs", "1", cwd=tmp_path, stderr=os.ttyname(child))
    shown = b""
    while process.poll() is None:
        if select.select([terminal], [], [], 0.05)[0]:
            shown += os.read(terminal, 65536)
    os.close(child)
    with contextlib.suppress(OSError):  # no process has the terminal open any more
        while part := os.read(terminal, 65536):
            shown += part
    assert process.wait() == 0, shown
    assert re.search(rb"epoch 1/1: .*\d+/10 .*loss \d\.\d+, error [\d.]+%, [\d,]+ images/s, peak [\d,]+ MiB", shown), (
        shown
    )


def test_a_run_finds_its_images_from_another_directory_and_never_downloads_them(tmp_path):
    """Of an image folder that was given as a relative path."""
    write_folder(tmp_path / "own", each=8)
    words = ["--data", "own", "--n_epochs", "1", "--batch_size", "5", "--image_size", "8", "--save", "run"]
    done = demo("cp_demo.py", *TINY, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "other").mkdir()
    for goes_on in ("--evaluate", "--resume"):
        done = demo("cp_demo.py", goes_on, "--save", "../run", cwd=tmp_path / "other")
        assert "test error" in done.stdout, done.stderr
    (tmp_path / "own").rename(tmp_path / "moved")
    for goes_on in ("--evaluate", "--resume"):
        done = demo("cp_demo.py", goes_on, "--save", "run", cwd=tmp_path)
        refused(done, f"{tmp_path / 'own'} is absent or empty, but images are needed there")
        done = demo("cp_demo.py", goes_on, "--save", "run", "--data", "moved", "--stream", cwd=tmp_path)
        assert "test error" in done.stdout, done.stderr


def test_the_fingerprint_depends_on_images_labels_and_splits(tmp_path):
    assert load(None).fingerprint == load(None).fingerprint != load(None).with_validation(9).fingerprint
    write_cifar10(tmp_path)
    before = load(str(tmp_path)).fingerprint
    path = tmp_path / "cifar-10-batches-py" / "test_batch"
    entries = pickle.loads(path.read_bytes())
    entries["labels"].reverse()
    path.write_bytes(pickle.dumps(entries, protocol=2))
    publish(datasets.CIFAR10, path.parent)
    assert load(str(tmp_path)).fingerprint != before


def test_a_resumed_or_evaluated_run_takes_the_data_set_that_it_was_started_with(tmp_path):
    """Of two in one directory."""
    write_cifar10(tmp_path / "sets")
    write_cifar100(tmp_path / "sets", each=200)
    words = ["--data", "sets", "--dataset", "cifar100", "--save", "run", "--valid_size", "20"]
    done = demo("cp_demo.py", *TINY, *words, "--n_epochs", "1", cwd=tmp_path)
    assert "100 classes" in done.stdout, done.stderr
    for words in (["--resume"], ["--evaluate"], ["--evaluate", "--cuda_graph"]):
        done = demo("cp_demo.py", *words, "--save", "run", cwd=tmp_path)
        assert "test error" in done.stdout, done.stderr


@pytest.mark.exhaustive
def test_memory_decides_what_is_kept_and_the_size_of_micro_batches(tmp_path):
    """The run is that of the micro-batch that was chosen, which its config has, and goes on with it anywhere."""
    command = "--depth", "16", "--growth_rate", "24", "--n_epochs", "1", "--batch_size", "256", "--device", "cpu"
    done = forked_demo("cp_demo.py", *command, "--memory", "40MiB", "--save", "chosen", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    chosen = re.search(
        r"memory: --memory 40MiB: (\d+) micro-batches of (\d+) images, as 256 images at once do not fit; "
        r"[0-9.]+ MiB of 40.0 MiB, with the bottlenecks of \d of \d layers saved",
        done.stdout,
    )
    assert chosen is not None, done.stdout
    assert re.search(r"memory: about \d+ MiB .* was expected; the process, .*, took [0-9,]+ MiB", done.stdout)
    options = json.loads((tmp_path / "chosen" / "config.json").read_text())["options"]
    assert (options["memory"], options["micro_batch_size"]) == ("40MiB", int(chosen[2]))
    assert int(chosen[1]) == -(-256 // int(chosen[2]))
    resumed = ("--save", "chosen", "--resume", "--n_epochs", "2", "--memory", "1GiB")
    refused = forked_demo("cp_demo.py", *resumed, cwd=tmp_path)
    assert "n_epochs is 2, but the run was started with 1" in refused.stderr
    done = forked_demo("cp_demo.py", *command, "--micro_batch_size", chosen[2], "--save", "given", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [read_rows(tmp_path / name)[0] for name in ("chosen", "given")]
    assert rows[0]["train_loss"] == rows[1]["train_loss"]


@pytest.mark.parametrize(
    ("memory", "message"),
    [
        ("6 gigs", "error: memory is '6 gigs', but must be bytes such as 6GiB"),
        ("200KiB", "error: found a memory budget of 200 KiB, but a step of 128 images of 1×32×32 needs"),
    ],
)
def test_memory_that_does_not_suffice(memory, message, tmp_path):
    done = forked_demo("cp_demo.py", *RUN, "--memory", memory, cwd=tmp_path)
    assert done.returncode == 1
    assert message in done.stderr
    assert list(tmp_path.iterdir()) == []
