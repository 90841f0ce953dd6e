"""Runs: their files, interruption, kills and resuming, image folders, the terminal."""

import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from forks import ForkedDemo, await_file, forked_demo
from samples import (
    RUN,
    TINY,
    demo,
    demo_stopped,
    read_rows,
    refused,
    same_run,
    write_cifar10,
    write_folder,
)
from training.loop import Trainer
from training.models import load_model
from training.run_directory import RunDirectory

WORDS = (*RUN, "--n_epochs", "2", "--drop_rate", "0.1")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of two epochs, never interrupted."""
    folder = tmp_path_factory.mktemp("finished")
    done = forked_demo("cp_demo.py", *WORDS, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    (folder / "printed.txt").write_text(done.stdout)
    return folder


def test_a_run_writes_all_files_and_prints_where(finished):
    names = ["config.json", "curves.png", "last.pt", "model.pt", "results.csv"]
    assert sorted(path.name for path in (finished / "run").iterdir()) == sorted([*names, "run.lock", "run_log.txt"])
    printed = (finished / "printed.txt").read_text()
    assert re.search(
        r"DenseNet-BC-10-4: 2,522 parameters, 0.0 MiB; engine shared \((Numba|Triton|portable)\); c", printed
    )
    assert re.search(r"expected memory of a step: about \S+ MiB of tensors .* Python, PyTorch and its kernels", printed)
    assert re.search(r"epoch 1/2: .* peak memory of the process \(Python, PyTorch and tensors\) \S+ MiB", printed)
    assert "epoch 2/2: train loss" in printed  # a line per epoch where there is no terminal
    assert all(name in printed for name in names)
    rows = read_rows(finished / "run")
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert rows[0]["test_error"] == "" != rows[1]["test_error"]
    assert (finished / "run" / "curves.png").read_bytes()[:4] == b"\x89PNG"
    config = json.loads((finished / "run" / "config.json").read_text())
    assert (config["options"]["depth"], config["options"]["engine"]) == (10, "best")
    assert config["data"]["train_images"] == 1294


def test_the_saved_model_has_the_error_in_the_table(finished):
    for words in (["--evaluate", "--save", "run"], ["--evaluate", "run/model.pt"]):
        done = demo("cp_demo.py", *words, cwd=finished)
        assert f"test error {float(read_rows(finished / 'run')[1]['test_error']):.2%}" in done.stdout, done.stderr
    model, _ = load_model(finished / "run" / "model.pt")
    assert not model.training


def test_the_weights_that_are_kept_are_those_of_the_best_epoch(tmp_path, monkeypatch):
    validated = iter([(0.5, 0.4), (0.5, 0.2), (0.4, 0.3), (0.3, 0.2), (0.9, 0.5)])
    monkeypatch.setattr(Trainer, "evaluate", lambda *_: next(validated))
    kept, write = [], RunDirectory.write

    def record(directory, name, content):
        if name == "model.pt":
            kept.append(len(read_rows(directory.folder)) + 1 if (directory.folder / "results.csv").exists() else 1)
        write(directory, name, content)

    monkeypatch.setattr(RunDirectory, "write", record)
    done = demo("cp_demo.py", *RUN, "--n_epochs", "4", "--valid_size", "1300", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert kept == [1, 2, 4]


@pytest.mark.parametrize("step", [1, pytest.param(10, marks=pytest.mark.exhaustive)])
def test_a_run_stopped_after_any_step_goes_on_to_the_same_files(step, finished, tmp_path):
    demo_stopped(1, step, *WORDS, cwd=tmp_path)
    done = demo("cp_demo.py", "--save", "run", "--resume", cwd=tmp_path)
    assert f"resuming run in epoch 1, after step {step}\n" in done.stdout, done.stderr
    same_run(tmp_path / "run", finished / "run")


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive), signal.SIGTERM])
def test_a_signal_saves_after_the_step_and_resuming_gives_the_same_run(number, finished, tmp_path):
    process = ForkedDemo("cp_demo.py", *WORDS, cwd=tmp_path)
    await_file(tmp_path / "run" / "last.pt", process)
    process.send_signal(number)
    printed, errors = process.communicate(timeout=200)
    assert process.returncode == 128 + number, errors
    assert f"stopped by {number.name} in epoch 1" in printed
    assert "continue with --resume and --save run" in printed
    assert "Traceback" not in errors
    refused(demo("cp_demo.py", *RUN, cwd=tmp_path), "run contains a run: give --resume to resume it")
    done = demo("cp_demo.py", "--save", "run", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    same_run(tmp_path / "run", finished / "run")
    started, stopped, resumed, ended = (tmp_path / "run" / "run_log.txt").read_text().splitlines()
    assert re.search(r"^\d{4}-\d\d-\d\dT[\d:]{8}\+00:00 started by process \d+ on \S+; engine shared", started)
    assert re.search(rf"stopped by {number.name} in epoch 1 after step \d+$", stopped)
    assert " resumed in epoch 1" in resumed
    assert re.search(r" finished: test error \d+\.\d\d%$", ended)


def test_a_signal_to_the_process_group_saves_with_processes_that_decode(tmp_path):
    write_folder(tmp_path / "own")
    words = [*TINY, "--data", "own", "--stream", "--n_epochs", "10000", "--save", "run", "--batch_size", "2"]
    process = ForkedDemo("cp_demo.py", *words, "--device", "cpu", cwd=tmp_path, new_session=True)
    await_file(tmp_path / "run" / "results.csv", process)
    os.killpg(process.pid, signal.SIGTERM)
    printed, errors = process.communicate(timeout=200)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "stopped by SIGTERM in epoch" in printed
    assert "error" not in errors


@pytest.mark.exhaustive
def test_a_run_killed_many_times_ends_with_the_same_results(tmp_path):
    """Every restart resumes what the last kill left. An epoch is a few steps, so that many kills hit a write; they come
    within the time that a run of one epoch takes here."""
    words = f"cp_demo.py {' '.join(TINY)} --data {write_cifar10(tmp_path / 'cifar')} --batch_size 45".split()
    words += ["--recipe", "one_cycle", "--device", "cpu"]
    long = [*words, "--n_epochs", "150", "--save"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert forked_demo(*long, "whole", cwd=tmp_path).returncode == 0
    start = time.perf_counter()
    assert forked_demo(*words, "--n_epochs", "1", "--save", "short", cwd=tmp_path).returncode == 0
    epoch_seconds, rng, epochs = time.perf_counter() - start, random.Random(0), []
    for _ in range(30):
        process = ForkedDemo(*long, "killed", "--resume", "auto", cwd=tmp_path)
        time.sleep(rng.uniform(0.15, 1.0) * epoch_seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
        for path in killed.glob("*.pt"):
            torch.load(path, weights_only=True)
        if (killed / "last.pt").exists():
            epochs.append(torch.load(killed / "last.pt", weights_only=True)["position"]["epoch"])
    assert forked_demo(*long, "killed", "--resume", "auto", cwd=tmp_path).returncode == 0
    assert epochs == sorted(epochs)
    same_run(killed, whole)
    assert list(killed.glob(".*")) == []


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
    printed, errors = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "DenseNet-BC-100-12: 76" in printed
    assert ("engine official;" if script == "original_demo.py" else "engine shared (") in printed
    position = torch.load(tmp_path / "model" / "last.pt", weights_only=True)["position"]
    assert position["step"] + position["epoch"] >= 2


def test_a_run_finds_its_images_from_another_directory_and_never_downloads_them(tmp_path):
    """The image folder was given as a relative path."""
    write_folder(tmp_path / "own", each=8)
    words = ["--data", "own", "--n_epochs", "1", "--batch_size", "5", "--image_size", "8", "--save", "run"]
    done = demo("cp_demo.py", *TINY, *words, "--workers", "0", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "other").mkdir()
    for goes_on in ("--evaluate", "--resume"):
        done = demo("cp_demo.py", goes_on, "--save", "../run", "--workers", "0", cwd=tmp_path / "other")
        assert "test error" in done.stdout, done.stderr
    (tmp_path / "own").rename(tmp_path / "moved")
    refused(
        demo("cp_demo.py", "--resume", "--save", "run", cwd=tmp_path), f"{tmp_path / 'own'} is absent or empty, but"
    )
    words = ["--save", "run", "--data", "moved", "--stream", "--workers", "0"]
    assert "test error" in demo("cp_demo.py", "--resume", *words, cwd=tmp_path).stdout
