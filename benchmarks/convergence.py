"""Train a small DenseNet by several engines from several seeds, to see whether they converge alike.

    python benchmarks/convergence.py --data cifar      a folder with train/<class>/ and test/<class>/

Two runs at a time, of one thread each. A second call goes on where an interrupted one was, and does nothing where all
was measured at this commit.
"""

import itertools
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import rows as results
import torch
from comparison import find_allocator
from options import run_command
from worker import device_name

FOLDER = results.RESULTS / "convergence"
ENGINES = {"plain": "--engine plain", "shared": "--engine shared", "shared_bf16": "--engine shared --amp bf16"}
SETTINGS = "--depth 40 --recipe one_cycle --weight_decay 5e-4 --device cpu --resume auto"


def converge(
    data: str,
    epochs: int = 20,
    seeds: int = 3,
    images: int = 500,
    allocator: str = "tcmalloc",
    runs: str = "checkpoints/convergence",
) -> None:
    """Train, test on all images of test/, and keep the errors and times of each run's epochs.

    Args:
        data: a folder of images, such as CIFAR-10's.
        epochs: passes over the training images.
        seeds: runs of each engine.
        images: training images of a class, the first in the order of their names.
        allocator: of CPU memory, as in `run.py`.
        runs: where the runs of each commit are, which this command continues.
    """
    if results.of_this_commit(results.read_others(FOLDER / "measured.csv", "commit")):
        return
    folder = results.ROOT / runs / results.commit()
    subset = _subset(Path(data).resolve(), folder / "images", images)

    def train(seed_and_name: tuple[int, str]) -> None:
        seed, name = seed_and_name
        options = f"{ENGINES[name]} --seed {seed} --n_epochs {epochs} {SETTINGS}"
        command = [sys.executable, "demos/cp_demo.py", "--data", subset, "--save", folder / f"{name}_seed{seed}"]
        preload = {"LD_PRELOAD": find_allocator(allocator), "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*command, *options.split()], cwd=results.ROOT, env=os.environ | preload, check=False)
        if done.returncode:
            raise ValueError(f"found that {name} of seed {seed} failed: its reason stands above")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, itertools.product(range(seeds), ENGINES)))
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*_seed*.csv"):
        old.unlink()
    for run in folder.glob("*_seed*"):
        shutil.copy(run / "results.csv", FOLDER / f"{run.name}.csv")
    results.write(FOLDER / "measured.csv", [{"device_name": device_name(torch.device("cpu")), **results.provenance()}])


def _subset(data: Path, folder: Path, images: int) -> Path:
    """A folder with the first training images of each class, and all test images."""
    for split in ("train", "test"):
        if not (data / split).is_dir():
            raise ValueError(f"{data} has no {split}/: give a folder with train/<class>/ and test/<class>/")
    shutil.rmtree(folder, ignore_errors=True)
    for label in (data / "train").iterdir():
        (folder / "train" / label.name).mkdir(parents=True)
        for image in sorted(label.iterdir())[:images]:
            shutil.copy(image, folder / "train" / label.name)
    (folder / "test").symlink_to(data / "test")
    return folder


if __name__ == "__main__":
    run_command(converge)
