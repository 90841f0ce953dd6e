"""Parts that the programs share: options, what fits the card, checkpoints, splits, and AUROC with an interval."""

import argparse
import os
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn
from torchmetrics.functional.classification import binary_auroc

from efficient_densenet.memory.card import describe_card, what_fits

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
MAY_CHANGE = {"out", "resume", "workers", "card", "engine", "resamples"}
"""Options that may differ between a run and its continuation."""


def stop(sentence: str) -> NoReturn:
    raise SystemExit(f"error: {sentence}")


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the description's lines, and shows defaults that are values."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


def make_parser(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """The options that every program has, with its own defaults."""

    parser = argparse.ArgumentParser(description=description, formatter_class=_Help, allow_abbrev=False)
    add = parser.add_argument
    add("--out", required=True, type=Path, help="folder for checkpoints, tables and pictures")
    add("--resume", action="store_true", help="continue the run in --out after its last whole epoch")
    add("--epochs", type=int, help="passes over the training data")
    add("--batch_size", type=int, help="samples in a training step")
    add("--learning_rate", type=float, help="the optimizer's learning rate")
    add(
        "--precision", choices=list(DTYPES), default="float32", help="dtype of automatic mixed precision; fp16 for GPUs"
    )
    add("--engine", choices=["shared", "plain"], default="shared", help="shared saves memory, plain is for comparison")
    add("--card", metavar="8GB", help="memory to plan for; by default this GPU's, or 8GB without one")
    add("--workers", type=int, default=0, help="processes that read data")
    add("--seed", type=int, default=0, help="seed of the split, the first weights and the order of the data")
    parser.set_defaults(**defaults)
    return parser


def parse_options(parser: argparse.ArgumentParser, words: list[str] | None, **of_generated: Any) -> argparse.Namespace:
    """The options; where the data are generated, options that are not given have defaults for a quick first run."""
    options = parser.parse_args(words)
    if options.data == "generated":
        parser.set_defaults(**of_generated)
        options = parser.parse_args(words)
        used = (f"--{name} {str(getattr(options, name)).strip('[]').replace(',', '')}" for name in of_generated)
        print(f"generated data, for a quick first run: {' '.join(used)}")
    return options


def autocast(options: argparse.Namespace) -> torch.autocast:
    dtype = DTYPES[options.precision]
    return torch.autocast(DEVICE.type, dtype, enabled=dtype is not None)


def print_what_fits(
    model: nn.Module, batch_size: int, sample: tuple[int, ...], optimizer: str, options: argparse.Namespace
) -> None:
    """Print the memory of a training step and the largest batch by each engine, from sizes alone: nothing runs."""
    card = options.card or (f"{torch.cuda.mem_get_info()[1]}B" if DEVICE.type == "cuda" else "8GB")
    settings: dict[str, Any] = {"optimizer": optimizer, "precisions": [options.precision], "batch_size": batch_size}
    try:
        print(f"A training step on {'×'.join(map(str, sample))} in {options.precision}; {describe_card(card)}")
    except ValueError as error:
        stop(f"--{error}")
    print(f"{'engine':<8}{f'a batch of {batch_size}':>18}{'largest batch':>16}", flush=True)
    for fit in what_fits(model, sample[1:], card, **settings):
        largest = f"{fit.largest_batch:,}" if fit.largest_batch else "none"
        if fit.refused:
            stop(f"engine {fit.engine} cannot run the model: {fit.refused}")
        print(f"{fit.engine:<8}{f'{fit.sizes[batch_size] / 2**30:.2f} GiB':>18}{largest:>16}", flush=True)
    print(flush=True)


class Run:
    """A model's training: the steps of its optimizer, and its checkpoints in a folder.

    checkpoint.pt is what a run continues from, best.pt the model of the epoch with the best validation. Each is written
    under another name and then renamed, so that an interruption never leaves half of one.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
    ) -> None:
        self.options, self.folder, self.best_score = options, options.out, float("-inf")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.scaler = torch.amp.GradScaler(DEVICE.type, enabled=options.precision == "fp16")
        self.parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": self.scaler}
        self.settings = {name: str(value) for name, value in vars(options).items() if name not in MAY_CHANGE}

    def step(self, loss: Tensor, update: bool = True) -> None:
        """Add the gradients of a loss; change the weights if `update`."""
        self.scaler.scale(loss).backward()
        if update:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()

    def resume(self) -> int:
        """Load the checkpoint, if the run has one; return the number of the next epoch."""
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return 0
        if not self.options.resume:
            stop(f"{self.folder} holds a run: add --resume to continue it, or give another --out")
        state = torch.load(path, map_location="cpu", weights_only=True)
        for name, value in self.settings.items():
            if (then := state["settings"].get(name)) != value:
                stop(f"--{name} is {value}, but the run in {self.folder} began with {then}: give that to continue it")
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        self.best_score = state["best_score"]
        print(f"continuing after epoch {state['epoch']}", flush=True)
        return state["epoch"]

    def save(self, epochs_done: int, score: float) -> None:
        """Write the checkpoint after an epoch, and the best model first if no score was higher."""
        if not score < self.best_score:  # also where validation gives no number
            self.best_score = score
            self._write("best.pt", self.model.state_dict())
        states = {name: part.state_dict() for name, part in self.parts.items()}
        self._write("checkpoint.pt", {**states, "epoch": epochs_done, "best_score": self.best_score,
                                      "settings": self.settings})  # fmt: skip

    def load_best(self) -> None:
        self.model.load_state_dict(torch.load(self.folder / "best.pt", map_location="cpu", weights_only=True))

    def _write(self, name: str, content: dict[str, Any]) -> None:
        temporary = self.folder / f"{name}.tmp"
        torch.save(content, temporary)
        os.replace(temporary, self.folder / name)


def split_by_patient(patients: pd.Series, seed: int, valid: float = 0.1, test: float = 0.2) -> np.ndarray:
    """The names train, valid and test, so that all samples of a patient have the same."""
    order = np.random.default_rng(seed).permutation(patients.unique())
    place = patients.map({patient: i / len(order) for i, patient in enumerate(order)})
    return np.select([place < 1 - valid - test, place < 1 - test], ["train", "valid"], "test")


def auroc(scores: Tensor, targets: Tensor) -> float:
    """NaN where every sample is positive, or none is."""
    is_defined = 0 < targets.sum() < len(targets)
    return min(1.0, float(binary_auroc(scores, targets))) if is_defined else float("nan")  # float32 rounds it above 1


def auroc_interval(
    scores: Tensor, targets: Tensor, patients: np.ndarray, options: argparse.Namespace
) -> tuple[float, float]:
    """The 95 % interval by a bootstrap over patients: samples of a patient are alike, and are drawn together."""
    generator, (names, codes) = np.random.default_rng(options.seed), np.unique(patients, return_inverse=True)
    values = []
    for _ in range(options.resamples):
        times_drawn = np.bincount(generator.integers(len(names), size=len(names)), minlength=len(names))
        rows = torch.from_numpy(np.repeat(np.arange(len(codes)), times_drawn[codes]))
        values.append(auroc(scores[rows], targets[rows]))
    if np.isnan(values).all():
        return float("nan"), float("nan")
    low, high = np.nanquantile(values, [0.025, 0.975])
    return float(low), float(high)
