"""The directory of a run: what may be done there, its lock and log, and the state that --resume goes on from."""

import os
import socket
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from torch import nn

from efficient_densenet._archive import to_archive
from efficient_densenet._extras import need

from . import files
from .loop import TrainingPosition
from .models import CONFIG, WEIGHTS, ModelConfig, read_weights
from .options import CHANGEABLE, PER_CALL, Options, RunOptions, check_option
from .report import may_fail
from .results import Row

FORMAT = "efficient_densenet run 2"
LAST, LOCK, LOG = "last.pt", "run.lock", "run_log.txt"
RUN_FILES = (LAST, WEIGHTS, "results.csv", CONFIG)
WRITTEN = (*RUN_FILES, "curves.png", LOG)


def run_folder(options: RunOptions) -> Path:
    if options.save is not None:
        return Path(options.save)
    data = "digits" if options.data is None else Path(options.data).absolute().name
    model = options.model or f"densenet_bc_{options.depth}_{options.growth_rate}"
    if options.weights is not None:
        weights = Path(options.weights)
        model = f"from_{weights.parent.name if weights.name == WEIGHTS else weights.stem}"
    engine = "" if options.engine == "best" else f"_{options.engine}"
    return Path("checkpoints") / f"{data}_{model}{engine}"


class RunDirectory:
    """A directory that one process at a time trains in: it holds the lock from `open`, or `prepare`, until `close`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._lock, self._locked = folder, None, None

    def open(self, options: RunOptions) -> dict[str, Any] | None:
        """The state that a run goes on from. None where one begins: without --resume, or with auto where there is none.

        Nothing is written but the file of the lock.
        """
        found = [name for name in RUN_FILES if (self.folder / name).exists()]
        if found:
            self._acquire()
        if not options.resume:
            if found and not options.overwrite:
                raise self._contains_a_run()
            return None
        if found and LAST not in found:
            raise ValueError(
                f"{self.folder / LAST} is missing, but {self.folder / found[0]} exists: copy it back, or start over "
                "with --overwrite"
            )
        if found:
            return read_state(self.folder)
        if options.resume == "auto":
            return None
        raise ValueError(
            f"found --resume, but {self.folder} contains no run to resume: name the run with --save, or leave "
            "--resume out to begin one (--resume auto begins or resumes)"
        )

    def prepare(self, options: RunOptions) -> None:
        """Make the directory ready for the files of a run."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise OSError(f"nothing can be written to {self.folder} ({exc.strerror}): give another --save") from exc
        if self._lock is None:
            self._acquire()
            if any((self.folder / name).exists() for name in RUN_FILES):  # of another process, in the meantime
                raise self._contains_a_run()
        files.remove_temporary_files(self.folder)
        if options.overwrite:
            for name in WRITTEN:
                (self.folder / name).unlink(missing_ok=True)

    def save(self, state: dict[str, Any], position: TrainingPosition, rows: list[Row], record: dict[str, Any]) -> None:
        """Save all that resuming needs. Learning rates and random numbers follow from the seed and the position."""
        content = {"format": FORMAT, **record, "position": asdict(position), "rows": rows, "state": state}
        self.write(LAST, to_archive(content))

    def save_rows(self, rows: list[Row]) -> None:
        """Replace the rows in last.pt, and nothing else: its weights remain those of the last epoch."""
        self.write(LAST, to_archive(files.load_torch(self.folder / LAST) | {"rows": rows}))

    def write(self, name: str, content: bytes) -> None:
        """Write a file, unless the lock was removed or replaced, since another process may then have another one."""
        path = self.folder / LOCK
        if not path.exists() or path.stat().st_ino != self._locked:
            raise FileNotFoundError(
                f"{path} was removed or replaced during the run, so that another run may write there: "
                "nothing more was saved; start again with another --save"
            )
        files.write_atomic(self.folder / name, content)

    def log(self, event: str) -> None:
        """Add a line with the time in UTC. Where that fails, the run goes on."""
        path, line = self.folder / LOG, f"{datetime.now(timezone.utc).isoformat(timespec='seconds')} {event}\n"
        with may_fail(LOG):
            lines = path.read_bytes() if path.is_file() else b""
            files.write_atomic(path, lines + line.encode())

    def check_best_weights(self, model: nn.Module) -> None:
        """Raise unless model.pt is there and fits `model`: the end of a run that has finished an epoch needs it."""
        path = self.folder / WEIGHTS
        if not path.exists():
            raise ValueError(
                f"{path} is missing, but the run has finished an epoch, whose weights it had: copy it back, or start "
                "over with --overwrite"
            )
        read_weights(path, model)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _acquire(self) -> None:
        filelock = need("filelock", extra="demos")
        path = self.folder / LOCK
        lock = filelock.FileLock(path, timeout=0.5, mode=0o666)
        try:
            lock.acquire()
        except filelock.Timeout as exc:
            raise FileExistsError(
                f"{self.folder} is in use{self._holder()}: wait until that run ends, or end it, or give another --save"
            ) from exc
        except (OSError, NotImplementedError) as exc:
            raise OSError(
                f"{path} cannot be locked ({getattr(exc, 'strerror', None) or exc}), so that two runs could mix "
                "there: give a --save on another file system"
            ) from exc
        self._lock, self._locked = lock, path.stat().st_ino

    def _holder(self) -> str:
        """Who holds the lock since when, as the log has it."""
        try:
            lines = (self.folder / LOG).read_text().splitlines()
        except (OSError, ValueError):
            return ""
        begun = [line.partition(";")[0] for line in lines if " by process " in line]
        return f" ({begun[-1]})" if begun else ""

    def _contains_a_run(self) -> FileExistsError:
        return FileExistsError(
            f"{self.folder} contains a run: give --resume to resume it, --overwrite to start over, or another --save"
        )


def this_process() -> str:
    return f"by process {os.getpid()} on {socket.gethostname()}"


def read_state(folder: Path) -> dict[str, Any]:
    """The content of last.pt, with valid options, model and position; tensors are checked where they are loaded."""
    path = folder / LAST
    content = files.load_torch(path)
    with files.damage_named(path):
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']!r}, but must be {FORMAT!r}")
        for name, value in content["options"].items():
            check_option(name, value)
        ModelConfig.of(content["model"])
        TrainingPosition(**content["position"])
        _ = content["data"], content["rows"], content["state"]
    return content


def merge_options(state: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The options that the run was started with, overridden by those `given` now; raises if one must not change."""
    started = asdict(Options()) | state["options"]
    if given.get("seed", 0) is None:  # no seed in particular: the run's
        given = {name: value for name, value in given.items() if name != "seed"}
    for name, value in given.items():
        if name not in CHANGEABLE and value != started[name]:
            raise ValueError(
                f"{name} is {value!r}, but the run was started with {started[name]!r}: leave it out to resume, "
                "or start over with --overwrite"
            )
    inherited = {name: value for name, value in started.items() if name not in PER_CALL}
    if "data" in given:  # which may lack the data set of that name
        del inherited["dataset"]
    engine = {} if given.keys() & {"efficient", "engine"} else {"engine": started["engine"]}
    return inherited | engine | given


def data_changes(then: dict[str, Any], now: dict[str, Any], accepted: bool) -> list[str]:
    """How the data differ from what the run was started with, in sentences; raises unless that is `accepted`.

    Classes and the size of images, on which the network depends, must not change.
    """
    remedy = "give the same --data, or start over with --overwrite"
    changes = []
    for name, value in now.items():
        if name in ("name", "fingerprint") or then[name] == value:
            continue
        words = name.replace("_", " ")
        changes.append(f"found {value!r} for {words} of the data, but the run was started with {then[name]!r}")
        if name in ("image_size", "classes"):
            raise ValueError(f"{changes[-1]}: {remedy}")
    if not changes and then["fingerprint"] != now["fingerprint"]:
        changes.append("found other images than the run was started with, though as many")
    if changes and not accepted:
        raise ValueError(f"{changes[0]}: {remedy}, or --accept_changed_data to go on with these images")
    return changes
