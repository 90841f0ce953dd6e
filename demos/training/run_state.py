"""The state of a run on disk: last.pt, what it must agree with when the run is resumed, and what overwriting removes.

`run_format` says what last.pt contains.
"""

import difflib
import math
import time
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn

from efficient_densenet._archive import to_archive
from efficient_densenet.weights.trained import TRAINED

from . import files, finetune, run_format
from .data import SplitDataset
from .loop import Trainer, TrainingPosition
from .models import CONFIG, WEIGHTS, ModelConfig, check_weights, read_config
from .options import Options, RunOptions
from .results import Row
from .run_log import LOG

LAST = "last.pt"
RUN_FILES = (LAST, WEIGHTS, "results.csv", CONFIG)
WRITTEN = (*RUN_FILES, "curves.png", LOG)

PER_CALL = {
    *("efficient", "engine", "device", "parallel", "cuda_graph"),
    *("resume", "accept_changed_data", "overwrite", "evaluate"),
}
"""Options that a resumed run takes from the present call; the engine only if it is given."""
CHANGEABLE = PER_CALL | {
    *("data", "dataset", "save", "keep_bottleneck", "channels_last", "compile", "workers", "stream", "tensorboard"),
    *("memory",),
}
"""Options that may change when a run is resumed: they change no number, or only its rounding. (With dropout,
`channels_last` and `compile` draw other random numbers.)"""


def run_directory(options: RunOptions) -> Path:
    if options.save is not None:
        return Path(options.save)
    data = "digits" if options.data is None else Path(options.data).absolute().name
    model = options.model or f"densenet_bc_{options.depth}_{options.growth_rate}"
    if options.weights is not None:
        model = finetune.directory_name(options.weights)
    engine = "" if options.engine == "best" else f"_{options.engine}"
    return Path("checkpoints") / f"{data}_{model}{engine}"


SECONDS_OF_CACHES = 60
"""How long a network file system may show a directory as it was."""
FileVersions = dict[str, tuple[int, int, int]]


def file_versions(folder: Path) -> FileVersions:
    """What tells whether a file of a run was written anew, for each that exists."""
    found = {name: (folder / name).stat() for name in RUN_FILES if (folder / name).exists()}
    return {name: (stat.st_ino, stat.st_mtime_ns, stat.st_size) for name, stat in found.items()}


def position_number(state: dict[str, Any] | None) -> int:
    """Another one for each place where a run may begin or go on."""
    position = TrainingPosition(**state.get("position", {"epoch": 0})) if state else TrainingPosition(-1)
    return (position.epoch << 32) + position.step


def check_position(folder: Path, state: dict[str, Any] | None, needed: int) -> None:
    """Raise unless `state`, which this process has read, is at the main process's position."""
    if position_number(state) != needed:
        raise _not_shared(folder)


def version_number(folder: Path) -> int:
    """What tells last.pt in `folder` from that of another run or time, on every node; 0 if there is none."""
    stat = (folder / LAST).stat() if (folder / LAST).exists() else None
    return stat.st_mtime_ns + stat.st_size if stat else 0


def check_version(folder: Path, needed: int) -> None:
    """Raise unless last.pt is what the main process has just written, or is soon."""
    deadline = time.monotonic() + SECONDS_OF_CACHES
    while version_number(folder) != needed:
        if time.monotonic() > deadline:
            raise _not_shared(folder)
        time.sleep(0.1)


def _not_shared(folder: Path) -> FileNotFoundError:
    return FileNotFoundError(
        f"{folder} is another directory here than for the main process: give a --save that all nodes share"
    )


def check_unchanged(folder: Path, versions: FileVersions) -> None:
    """Raise unless the files are those of before: what was read of them then decides how the run goes on."""
    if file_versions(folder) != versions:
        raise FileExistsError(
            f"another process has written to {folder} since this one began: start again, from what is there now"
        )


def check_save_directory(folder: Path, options: RunOptions) -> None:
    """Raise if `folder` contains a run that is neither resumed nor overwritten, or directories where files belong."""
    for name in WRITTEN:
        if (folder / name).is_dir() and not (options.resume and name == LAST):  # which reading reports
            raise IsADirectoryError(
                f"{folder / name} is a directory, but a run writes a file of that name: remove it, or give another "
                "--save"
            )
    if options.overwrite and folder.resolve() in (entry.folder.resolve() for entry in TRAINED.values()):
        raise FileExistsError(
            f"{folder} contains weights that have a name, which --overwrite would remove: give another --save"
        )
    if options.resume or options.overwrite or not any((folder / name).exists() for name in RUN_FILES):
        return
    state = read(folder) if (folder / LAST).exists() else None
    found = "a run" if state is None else _describe_progress(state)
    raise FileExistsError(
        f"{folder} contains {found}: give --resume to resume it, --overwrite to start over, or another --save"
    )


def read_to_resume(folder: Path, resume: bool | str) -> dict[str, Any] | None:
    """The state that `resume` goes on from, or the config of a run that was ended before it had a state.

    None where a run begins: without `resume`, or with "auto" in a directory without a run.
    """
    if not resume:
        return None
    state = read(folder)
    if state is None and (folder / CONFIG).exists():
        state = read_config(folder)
    if state is None and resume != "auto":
        raise ValueError(
            f"found --resume, but {folder} contains no run to resume: {_describe_runs_near(folder)}; name the run with "
            "--save, or leave --resume out to begin one (--resume auto begins or resumes)"
        )
    return state


def _describe_runs_near(folder: Path) -> str:
    """The runs in the directory, beside it, or one level below either, those of a similar name first."""
    existing = next(path for path in (*folder.parents, *folder.absolute().parents) if path.is_dir())
    states = chain(folder.glob(f"*/{LAST}"), existing.glob(f"*/{LAST}"), existing.glob(f"*/*/{LAST}"))
    names = sorted({str(path.parent) for path in states})
    names.sort(key=lambda name: -difflib.SequenceMatcher(None, name, str(folder)).ratio())
    return f"nearby are {', '.join(names[:3])}{', …' if len(names) > 3 else ''}" if names else "no run is nearby"


def read(folder: Path) -> dict[str, Any] | None:
    """The state of the run in `folder`, or None if there is no run."""
    path = folder / LAST
    if not path.exists():
        other = next((name for name in (WEIGHTS, "results.csv") if (folder / name).exists()), None)
        if other:
            raise ValueError(
                f"{path} is missing, but {folder / other} exists: copy it back, or start over with --overwrite"
            )
        return None
    state = files.load_torch(path)
    if not isinstance(state, dict) or "format" not in state:
        raise ValueError(
            f"{path} is not the state of a run of these demos, and was left unchanged: give another --save, "
            "or --overwrite"
        )
    run_format.check_last(path, state)
    return state


def _describe_progress(state: dict[str, Any]) -> str:
    position, n_epochs = state["position"], state["options"]["n_epochs"]
    if position["epoch"] > n_epochs:
        return f"a finished run of {n_epochs} epochs"
    after = f" after step {position['step']}" if position["step"] else ""
    return f"a run that stopped in epoch {position['epoch']} of {n_epochs}{after}"


def run_record(options: RunOptions, config: ModelConfig, dataset: SplitDataset) -> dict[str, Any]:
    """What describes a run in config.json and last.pt."""
    data = options.data and str(Path(options.data).absolute())  # so that it can be resumed from any directory
    return {
        "options": asdict(options) | {"data": data},
        "model": config.as_dict(),
        "data": {
            "name": dataset.name,
            "train_pictures": len(dataset.train),
            "valid_pictures": len(dataset.valid),
            "test_pictures": len(dataset.test),
            "image_size": dataset.image_size,
            "classes": list(dataset.classes),
            "fingerprint": dataset.fingerprint,
            "statistics": [*config.mean, *config.std],
        },
    }


def write(
    folder: Path, state: dict[str, Any], position: TrainingPosition, rows: list[Row], record: dict[str, Any]
) -> None:
    """Save all that resuming needs: the `state` of the trainer, and what follows here.

    Learning rates and random numbers follow from the seed and the position.
    """
    content = {
        "format": run_format.FORMAT,
        **record,
        "position": asdict(position),
        "rows": rows,
        "state": state,
    }
    files.write_atomic(folder / LAST, to_archive(content))


def update_rows(folder: Path, rows: list[Row]) -> None:
    """Replace the rows in last.pt, and nothing else: its weights remain those of the last epoch."""
    state = files.load_torch(folder / LAST)
    files.write_atomic(folder / LAST, to_archive(state | {"rows": rows}))


def restore(state: dict[str, Any], trainer: Trainer) -> tuple[TrainingPosition, list[Row]]:
    """Load a checked `state` into `trainer`; returns the position and the rows."""
    trainer.load_state(state["state"])
    return TrainingPosition(**state["position"]), list(state["rows"])


def merge_options(state: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The options that the run was started with, overridden by those `given` now; raises if one must not change."""
    started = asdict(Options()) | state["options"]  # earlier versions had fewer options
    if given.get("seed", 0) is None:  # no seed in particular: the run's
        given = {name: value for name, value in given.items() if name != "seed"}
    for name, value in given.items():
        if name not in CHANGEABLE and name in started and value != started[name]:
            raise ValueError(
                f"{name} is {value!r}, but the run was started with {started[name]!r}: leave it out to resume, "
                "or start over with --overwrite"
            )
    inherited = {name: value for name, value in started.items() if name not in PER_CALL}
    if "data" in given or started["data"] is None:  # another directory may lack it; earlier versions named one always
        del inherited["dataset"]
    engine = {} if given.keys() & {"efficient", "engine"} else {"engine": started["engine"]}
    return inherited | engine | given


def data_changes(state: dict[str, Any], record: dict[str, Any], accepted: bool) -> list[str]:
    """How the data differ from what the run was started with, in sentences; raises unless that is `accepted`.

    What the network depends on, classes and the shape of images, must not change.
    """
    remedy = "give the same --data, {}or start over with --overwrite"
    or_accept = remedy.format("or --accept_changed_data to go on with these images, ")
    # Earlier versions had no fingerprint, and no statistics apart from those that normalize the images.
    absent = {
        "fingerprint": record["data"]["fingerprint"],
        "statistics": [*state["model"]["mean"], *state["model"]["std"]],
    }
    started = absent | state["data"]
    changes = []
    for name, value in record["data"].items():
        if name in ("name", "fingerprint", "statistics") or started.get(name) == value:
            continue
        words = name.replace("_pictures", " images").replace("_", " ")
        change = f"found {value!r} for {words} of the data, but the run was started with {started.get(name)!r}"
        fixed = name in ("image_size", "classes")
        if fixed or not accepted:
            raise ValueError(f"{change}: {remedy.format('') if fixed else or_accept}")
        changes.append(change)
    now, then = record["data"]["statistics"], started["statistics"]
    if len(now) != len(then):
        channels = f"found images of {len(now) // 2} channels, but the run was started with {len(then) // 2}"
        raise ValueError(f"{channels}: {remedy.format('')}")
    same = all(math.isclose(*pair, rel_tol=1e-6) for pair in zip(now, then, strict=True))
    if not changes and not (same and started["fingerprint"] == record["data"]["fingerprint"]):
        changes.append("found other images than the run was started with, though as many")
        if not accepted:
            raise ValueError(f"{changes[0]}: {or_accept}")
    return changes


def check_weights_of_best_epoch(folder: Path, state: dict[str, Any], model: nn.Module) -> None:
    """Raise unless model.pt is there and fits `model`, once an epoch has been saved: the end of the run needs it."""
    path = folder / WEIGHTS
    if not state["rows"]:
        return
    if not path.exists():
        raise ValueError(
            f"{path} is missing, but the run has finished an epoch, whose weights it had: copy it back, or start over "
            "with --overwrite"
        )
    check_weights(model, files.load_torch(path), path)
