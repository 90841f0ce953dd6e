"""The directory of a run: whose it is, and how a run in it is gone on with."""

import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import files
from .loop import Position, Trainer
from .options import FREE, Options
from .results import Row

LAST = "last.pt"
FORMAT = "efficient_densenet run 1"
OF_THE_CALL = {"efficient", "engine", "device", "resume", "overwrite", "evaluate"}
"""Options that a run which is gone on with takes from the call, and not from how it was begun."""
OURS = (LAST, "model.pt", "results.csv", "config.json")


def refuse_occupied(folder: Path, options: Options) -> None:
    """One that holds a run is left alone unless it is to be gone on with or started over."""
    files.refuse_unwritable(folder)
    if options.resume or options.overwrite or not any((folder / name).exists() for name in OURS):
        return
    how_far = "a run"
    if (folder / LAST).exists():
        how_far = _how_far(read(folder))
    raise FileExistsError(
        f"{folder} holds {how_far}: give --resume to go on with it, --overwrite to start over, or another --save"
    )


def read(folder: Path) -> dict[str, Any] | None:
    """The last state of the run in `folder`; None where none was begun."""
    path = folder / LAST
    if not path.exists():
        foreign = next((name for name in ("model.pt", "results.csv") if (folder / name).exists()), None)
        if foreign:
            raise ValueError(
                f"{path} is missing, but {folder / foreign} is there: copy it back, or start over with --overwrite"
            )
        return None
    saved = files.read_tensors(path)
    if not isinstance(saved, dict) or saved.get("format") != FORMAT:
        raise ValueError(
            f"{path} is no state of a run of these demos, and was left as it is: give another --save, or --overwrite"
        )
    return saved


def _how_far(saved: dict[str, Any]) -> str:
    position, n_epochs = saved["position"], saved["options"]["n_epochs"]
    if position["epoch"] > n_epochs:
        return f"a finished run of {n_epochs} epochs"
    after = f" after step {position['step']}" if position["step"] else ""
    return f"a run that stopped in epoch {position['epoch']} of {n_epochs}{after}"


def write(folder: Path, trainer: Trainer, position: Position, rows: list[Row], facts: dict[str, Any]) -> None:
    """Everything needed to go on. The learning rate and every random number follow from the seed and the position."""
    content = {
        "format": FORMAT,
        **facts,
        "position": asdict(position),
        "rows": rows,
        "state": trainer.state(),
    }
    files.write_whole(folder / LAST, files.tensors(content))


def restore(saved: dict[str, Any], trainer: Trainer, folder: Path) -> tuple[Position, list[Row]]:
    try:
        trainer.load_state(saved["state"])
        return Position(**saved["position"]), list(saved["rows"])
    except (KeyError, TypeError, RuntimeError, ValueError) as exc:
        raise ValueError(
            f"{folder / LAST} does not fit this run ({str(exc).splitlines()[0]}), and was left as it is: "
            "give the options that it was begun with, or another --save"
        ) from exc


def options_of(saved: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """What the run was begun with, and in the place of it what is given now where that changes no number."""
    begun = Options().as_dict() | saved["options"]  # earlier versions had fewer
    for name, value in given.items():
        if name not in FREE and name in begun and value != begun[name]:
            raise ValueError(
                f"{name} is {value!r}, but the run was begun with {begun[name]!r}: leave it out to go on, "
                "or start over with --overwrite"
            )
    kept = {name: value for name, value in begun.items() if name not in OF_THE_CALL}
    engine = {} if given.keys() & {"efficient", "engine"} else {"engine": begun["engine"]}
    return kept | engine | given


def check_same_data(saved: dict[str, Any], facts: dict[str, Any]) -> None:
    """Counts, classes and the like; then the pictures themselves, by their colours and their fingerprint."""
    remedy = "give the same --data, or start over with --overwrite"
    begun = {"fingerprint": facts["data"]["fingerprint"]} | saved["data"]  # runs of earlier versions have none
    for name, value in facts["data"].items():
        if name not in ("name", "fingerprint") and begun.get(name) != value:
            raise ValueError(
                f"found {value!r} for {name.replace('_', ' ')} of the data, but the run was begun with "
                f"{begun.get(name)!r}: {remedy}"
            )
    colours = (zip(facts["model"][name], saved["model"][name], strict=False) for name in ("mean", "std"))
    alike = all(math.isclose(now, then, rel_tol=1e-6) for pairs in colours for now, then in pairs)
    if not alike or begun["fingerprint"] != facts["data"]["fingerprint"]:
        raise ValueError(f"found other pictures than the run was begun with, if as many: {remedy}")
