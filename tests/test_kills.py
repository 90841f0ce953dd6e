"""Runs that are killed, at any moment."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from samples import TINY, same_run, write_cifar10


@pytest.mark.exhaustive
def test_killed_at_thirty_moments_the_run_comes_to_the_same_end(tmp_path):
    """Every restart goes on from what the last kill left. An epoch is a few steps, so that many kills hit a write; they
    come within the time that a run of one epoch, up to its report, takes here."""
    words = f"cp_demo.py {' '.join(TINY)} --data {write_cifar10(tmp_path / 'cifar')} --batch_size 45".split()
    words += ["--recipe", "one_cycle", "--device", "cpu"]
    long = [*words, "--n_epochs", "150", "--save", "run"]
    whole, killed = _made(tmp_path / "whole"), _made(tmp_path / "killed")
    with _forks(whole) as forks:
        assert forks(long) == 0, (whole / "printed.txt").read_text()
    chance, epochs = random.Random(0), []
    with _forks(killed) as forks:
        usual = min(_seconds(forks, [*words, "--n_epochs", "1", "--save", f"short{i}"]) for i in range(3))
        for _ in range(30):
            assert forks([*long, "--resume"], kill_after=chance.uniform(0.15, 1.0) * usual) == -signal.SIGKILL
            for path in (killed / "run").glob("*.pt"):
                torch.load(path, weights_only=True)
            if (killed / "run" / "last.pt").exists():
                epochs.append(torch.load(killed / "run" / "last.pt", weights_only=True)["position"]["epoch"])
        assert forks([*long, "--resume"]) == 0, (killed / "printed.txt").read_text()
    assert epochs == sorted(epochs)
    assert len(set(epochs)) > 10
    same_run(killed / "run", whole / "run")
    assert list((killed / "run").glob(".*")) == []


def _seconds(forks: Callable[[list[str]], int], words: list[str]) -> float:
    start = time.perf_counter()
    assert forks(words) == 0
    return time.perf_counter() - start


@contextlib.contextmanager
def _forks(folder: Path):
    """Run demos in `folder`, and tell their exit status."""
    script = Path(__file__).parent / "forked_demos.py"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(script.parent), os.environ.get("PYTHONPATH", "")])}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, str(script)], cwd=folder, stdin=pipe, stdout=pipe, text=True, env=environment
    ) as server:

        def run(words: list[str], kill_after: float | None = None) -> int:
            server.stdin.write(" ".join(words) + "\n")
            server.stdin.flush()
            number = int(server.stdout.readline())
            if kill_after is not None:
                time.sleep(kill_after)
                os.kill(number, signal.SIGKILL)
            return int(server.stdout.readline())

        yield run
        server.stdin.close()


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
