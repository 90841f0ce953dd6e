"""Small image data sets in the layouts that the demos read, and the demos themselves, in this process or another."""

import contextlib
import csv
import hashlib
import io
import os
import pickle
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from torchvision import datasets
from training.data.augment import Transform
from training.distributed import DistributedContext
from training.loop import Trainer
from training.options import parse
from training.run import Run
from training.signals import TrainingInterrupted

from efficient_densenet import DenseNet

DEMOS = Path(__file__).parents[1] / "demos"
DIGITS = DEMOS.parent / "checkpoints" / "digits"
IMAGE = str(DEMOS / "pictures" / "digit_3.png")
CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
TIMES = ("seconds", "images_per_second", "peak_memory_mib")
TINY = ("--depth", "10", "--growth_rate", "4")
RUN = (*TINY, "--save", "run", "--batch_size", "128")


def write_cifar10(folder: Path, each: int = 20) -> Path:
    """Five training batches and a test batch of `each` images, pickled like the originals; torchvision accepts them."""
    place = folder / "cifar-10-batches-py"
    place.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        data = rng.integers(0, 256, (each, 3072), dtype=np.uint8)
        entries = {
            "batch_label": name,
            "labels": [i % 10 for i in range(each)],
            "data": data,
            "filenames": ["a"] * each,
        }
        (place / name).write_bytes(pickle.dumps(entries, protocol=2))
    (place / "batches.meta").write_bytes(pickle.dumps({"label_names": CIFAR10_CLASSES}, protocol=2))
    publish(datasets.CIFAR10, place)
    return folder


def publish(published: type[datasets.CIFAR10], place: Path) -> None:
    """Let the published checksums of a CIFAR be those of the files in `place`, in this process."""

    def checksum(name: str) -> str:
        path = place / name
        return hashlib.md5(path.read_bytes()).hexdigest() if path.exists() else "none"

    for each in (*published.train_list, *published.test_list):
        each[1] = checksum(each[0])
    published.meta["md5"] = checksum(published.meta["filename"])


def write_folder(
    folder: Path, classes: Sequence[str] = ("cat", "dog"), each: int = 12, splits: Sequence[str] = ("train", "test")
) -> Path:
    """Images of many sizes, the first class dark and the last bright."""
    rng = np.random.default_rng(0)
    for split in splits:
        for number, name in enumerate(classes):
            place = folder / split / name
            place.mkdir(parents=True)
            for i in range(each):
                size = (int(rng.integers(20, 60)), int(rng.integers(20, 60)), 3)
                low = 200 * number // max(len(classes) - 1, 1)
                pixels = rng.integers(low, low + 56, size, dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{i}.{'png' if i % 2 else 'jpg'}")
    return folder


def demo(script: str, *words: str, cwd: Path) -> subprocess.CompletedProcess:
    """Run a demo in this process, which saves the seconds that importing torch takes, and those of drawing curves."""
    printed, errors, code = io.StringIO(), io.StringIO(), 0
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)}
    before, arguments, search_path = Path.cwd(), sys.argv, sys.path[:]
    os.chdir(cwd)
    sys.argv = [script, *words]
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors), _undrawn_figures():
            runpy.run_path(str(DEMOS / script), run_name="__main__")
    except SystemExit as exc:  # like the interpreter: print a message, with exit status 1
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
        if isinstance(exc.code, str):
            errors.write(f"{exc.code}\n")
    finally:
        os.chdir(before)
        sys.argv, sys.path[:] = arguments, search_path
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return subprocess.CompletedProcess(words, code, printed.getvalue(), errors.getvalue())


def _undrawn_figures() -> contextlib.AbstractContextManager:
    """Figures are made, but not drawn; those of forked demos are."""
    return mock.patch.object(Figure, "savefig", lambda _, file, **__: file.write(b"not drawn"))


def demo_stopped(epoch: int, step: int, *words: str, cwd: Path) -> None:
    """Train by cp_demo.py as far as a step, after which the run is stopped as by SIGTERM."""

    def stop(run: Run) -> None:
        if (run.position.epoch, run.position.step) == (epoch, step):
            raise TrainingInterrupted(signal.SIGTERM)

    with mock.patch.object(Run, "_raise_if_stopped", stop):
        done = demo("cp_demo.py", *words, cwd=cwd)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr


def stopped_in_middle(*words: str, cwd: Path) -> Path:
    """The directory of a run of three epochs, stopped after two steps of the second."""
    demo_stopped(2, 2, *words, "--n_epochs", "3", cwd=cwd)
    return cwd / "run"


class PrintsWhenUnpickled:
    """What a hostile file may hold."""

    def __reduce__(self):
        return print, ("code in a pickle was run",)


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a run, to see that nothing was changed."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refused(done: subprocess.CompletedProcess, message: str) -> None:
    """Check that the demo failed with one sentence, exit status 1 and no traceback."""
    assert done.returncode == 1, done.stderr
    assert message in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().count("\n") == 0, done.stderr


def global_batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    images = torch.randint(256, (11, 3, 8, 8), generator=generator, dtype=torch.uint8)
    return images, torch.randint(10, (11,), generator=generator)


def tiny_trainer(engine: str, context: DistributedContext, dtype: torch.dtype = torch.double, **given) -> Trainer:
    """A small network, by default in float64, the same in every process."""
    torch.manual_seed(0)
    model = DenseNet(3, (2, 1), num_init_features=4, efficient=True if engine == "best" else engine).to(dtype)
    options = parse({"batch_size": 11, "weights": "any", **given}, engine)
    return Trainer(model, Transform((120.0,) * 3, (60.0,) * 3, padding=1, horizontal_flip=True), options, context)


def read_rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{name: value for name, value in row.items() if name not in TIMES} for row in rows]


def log_of(folder: Path) -> list[str]:
    """The events in the log of a run, without their times and what comes behind them."""
    lines = (folder / "run_log.txt").read_text().splitlines()
    return [re.split("[;:] | by process", line.partition(" ")[2])[0] for line in lines]


def flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def same_run(ours: Path, theirs: Path) -> None:
    """Check that tables, weights and optimizer states are equal bit for bit."""
    assert read_rows(ours) == read_rows(theirs)
    for name in ("model.pt", "last.pt"):
        actual, expected = (torch.load(folder / name, weights_only=True) for folder in (ours, theirs))
        actual, expected = (s.get("state", s) for s in (actual, expected))
        same_content(actual, expected)


def same_content(actual, expected) -> None:
    """Check that what two files hold is equal bit for bit."""
    assert type(actual) is type(expected)
    if isinstance(actual, dict):
        assert actual.keys() == expected.keys()
        for key in actual:
            same_content(actual[key], expected[key])
    elif isinstance(actual, list):
        for ours, theirs in zip(actual, expected, strict=True):
            same_content(ours, theirs)
    elif isinstance(actual, torch.Tensor):
        assert torch.equal(actual, expected)
    else:
        assert actual == expected
