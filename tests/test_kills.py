"""Runs that are killed at any moment."""

import random
import signal
import time
from pathlib import Path

import pytest
import torch
from forks import ForkedDemo
from samples import TINY, same_run, write_cifar10


@pytest.mark.parametrize(("kills", "num_epochs"), [(2, 30), pytest.param(30, 150, marks=pytest.mark.exhaustive)])
def test_a_run_killed_many_times_ends_with_the_same_results(kills, num_epochs, tmp_path):
    """Every restart resumes what the last kill left. An epoch is a few steps, so that many kills hit a write; they come
    within the time that a run of one epoch takes here."""
    words = f"cp_demo.py {' '.join(TINY)} --data {write_cifar10(tmp_path / 'cifar')} --batch_size 45".split()
    words += ["--recipe", "one_cycle", "--device", "cpu"]
    long = [*words, "--n_epochs", str(num_epochs), "--save"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    _run(*long, "whole", cwd=tmp_path)
    epoch_seconds = min(_run(*words, "--n_epochs", "1", "--save", f"short{i}", cwd=tmp_path) for i in range(2))
    rng, epochs = random.Random(0), []
    for _ in range(kills):
        process = ForkedDemo(*long, "killed", "--resume", "auto", cwd=tmp_path)
        time.sleep(rng.uniform(0.15, 1.0) * epoch_seconds)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        for path in killed.glob("*.pt"):
            torch.load(path, weights_only=True)
        if (killed / "last.pt").exists():
            epochs.append(torch.load(killed / "last.pt", weights_only=True)["position"]["epoch"])
    _run(*long, "killed", "--resume", cwd=tmp_path)
    assert epochs == sorted(epochs)
    assert len(set(epochs)) >= kills // 3
    same_run(killed, whole)
    assert list(killed.glob(".*")) == []


def _run(*words: str, cwd: Path) -> float:
    """Run a demo; returns the seconds that it took."""
    start = time.perf_counter()
    process = ForkedDemo(*words, cwd=cwd)
    assert process.wait() == 0, process.communicate()
    return time.perf_counter() - start
