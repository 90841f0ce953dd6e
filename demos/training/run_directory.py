"""The directory of a run: what may be done there, its lock and log, and the state that --resume goes on from."""

import os
import socket
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from efficient_densenet._extras import need
from efficient_densenet.weights.named import TRAINED

from . import files
from .loop import TrainingPosition
from .models import CONFIG, WEIGHTS, ModelConfig
from .options import CHANGEABLE, PER_CALL, Options, RunOptions, check_option
from .results import Row

FORMAT = "efficient_densenet run 5"
LAST, LOCK, LOG = "last.pt", "run.lock", "run_log.txt"
RUN_FILES = (LAST, WEIGHTS, "results.csv", CONFIG)


def run_folder(options: RunOptions) -> Path:
    if options.save is not None:
        return Path(options.save)
    data = "digits" if options.data is None else Path(options.data).absolute().name
    model = options.model or f"densenet_bc_{options.depth}_{options.growth_rate}"
    if options.weights is not None:
        weights = Path(options.weights).absolute()
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
        has_run = self._has_run()
        if has_run:
            self._acquire()
        if options.resume and has_run:
            return read_state(self.folder)
        if options.resume is True:
            raise ValueError(
                f"found --resume, but {self.folder} contains no run to resume: name the run with --save, or leave "
                "--resume out to begin one (--resume auto begins or resumes)"
            )
        if has_run and not options.overwrite:
            raise self._contains_a_run()
        for name, weights in TRAINED.items():
            if weights.folder.resolve() == self.folder.resolve():
                raise ValueError(f"{self.folder} has the weights called {name}: give another --save")
        return None

    def prepare(self, options: RunOptions) -> None:
        """Make the directory ready for the files of a run."""
        if self._lock is None:
            self._acquire()
            if self._has_run():  # of another process, in the meantime
                raise self._contains_a_run()
        if options.overwrite:
            for name in (*RUN_FILES, "curves.png", LOG):
                (self.folder / name).unlink(missing_ok=True)

    def save(self, state: dict[str, Any], position: TrainingPosition, rows: list[Row], record: dict[str, Any]) -> None:
        """Save all that resuming needs. Learning rates and random numbers follow from the seed and the position."""
        content = {"format": FORMAT, **record, "position": asdict(position), "rows": rows, "state": state}
        self.write(LAST, files.saved_bytes(content))

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
        """Add a line with the time in UTC."""
        with (self.folder / LOG).open("a") as file:
            file.write(f"{datetime.now(timezone.utc).isoformat(timespec='seconds')} {event}\n")

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _has_run(self) -> bool:
        return any((self.folder / name).exists() for name in RUN_FILES)

    def _acquire(self) -> None:
        filelock, path = need("filelock", extra="demos"), self.folder / LOCK
        lock = filelock.FileLock(path, timeout=0.5)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except filelock.Timeout as exc:
            raise FileExistsError(
                f"{self.folder} is in use, as the last line of its {LOG} may say: wait until that run ends, or end it, "
                "or give another --save"
            ) from exc
        except (OSError, NotImplementedError) as exc:
            raise OSError(
                f"{path} cannot be written and locked ({getattr(exc, 'strerror', None) or exc}), as one run a "
                "directory needs: give a --save in another place"
            ) from exc
        self._lock, self._locked = lock, path.stat().st_ino

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
    changed = [name for name in now if name not in ("name", "fingerprint") and then[name] != now[name]]
    changes = [
        f"found {now[name]!r} for {name.replace('_', ' ')} of the data, but the run was started with {then[name]!r}"
        for name in changed
    ]
    if not changes and then["fingerprint"] != now["fingerprint"]:
        changes = ["found other images than the run was started with, though as many"]
    needed = "give the same --data, or start over with --overwrite"
    if {"image_size", "classes"} & set(changed):
        raise ValueError(f"{'; '.join(changes)}: {needed}")
    if changes and not accepted:
        raise ValueError(f"{changes[0]}: {needed}, or --accept_changed_data to go on with these images")
    return changes
