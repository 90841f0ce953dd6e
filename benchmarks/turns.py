"""Methods as processes that take turns: a step each, so that a drift of the machine's speed meets them alike."""

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from settings import Setting

WORKER = Path(__file__).parent / "worker.py"
# OpenMP's threads spin for some milliseconds after their last work: the next process waits until they sleep.
PAUSE = 0.05
OUT_OF_MEMORY = "out of memory"
SLOW = ("compile",)  # to prepare: minutes, perhaps, in which the others are already measured


class MethodError(Exception):
    """A method that could not be measured; the message is the row's note."""


class Worker:
    """The process of one method. Asked with a command, it answers; leaving the context ends it."""

    def __init__(self, method: str, setting: Setting, preload: str = "", patience: float = 300) -> None:
        self.patience = patience
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (end closes it)
        preloaded = " ".join(filter(None, (preload, os.environ.get("LD_PRELOAD", ""))))
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), method, json.dumps(asdict(setting))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=os.environ | ({"LD_PRELOAD": preloaded} if preloaded else {}),
        )

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        if self.errors.closed:
            return
        self.process.kill()
        self.process.communicate()
        self.errors.close()

    def ask(self, command: str) -> dict[str, Any]:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(command + "\n")
            self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """The next line it writes; every answer is one line, so none is left behind in the buffer."""
        if not select.select([self.process.stdout], [], [], self.patience)[0]:
            raise MethodError(f"no answer within {self.patience:g} s")
        line = self.process.stdout.readline()
        if not line:
            raise MethodError(self._why_it_ended())
        answer = json.loads(line)
        if "error" in answer:
            raise MethodError(answer["error"])
        return answer

    def _why_it_ended(self) -> str:
        code = self.process.wait()
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines() or ["it said nothing"]
        if code == -9:
            return OUT_OF_MEMORY  # the system's own end to it
        return f"the process ended with code {code}: {lines[-1]}"


@dataclass
class Measured:
    """What is known of one method: bytes, seconds, and its times relative to plain's in the same round."""

    tensor_peak: int | None = None
    process_peak: int | None = None
    first_step_s: float | None = None
    device_name: str = ""
    allocator: str = ""
    times: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    note: str = ""


class Comparison:
    """Plain is alive throughout; the others join it in groups that memory has room for, as some allocators keep all."""

    def __init__(self, methods: list[str], rounds: int) -> None:
        self.measured = {method: Measured() for method in methods}
        self.rounds = rounds
        self.workers: dict[str, Worker] = {}

    def run(self, setting: Setting, preload: str = "", patience: float = 300) -> dict[str, Measured]:
        with contextlib.ExitStack() as stack:
            for method in self.measured:
                self.workers[method] = stack.enter_context(Worker(method, setting, preload, patience))
            for method in self.measured:  # they import side by side; after this only one computes at a time
                self._attempt(method, Worker.answer)
            self._prepare("plain")
            waiting = [method for method in self.measured if method != "plain"]
            while True:
                group = []
                while waiting and (not group or (waiting[0] not in SLOW and self._has_room())):
                    group.append(waiting.pop(0))
                    self._prepare(group[-1])
                self._take_turns(["plain", *group])
                for method in group:
                    self._end(method)
                if not waiting:
                    return self.measured

    def _prepare(self, method: str) -> None:
        for name, value in self._attempt(method, lambda worker: worker.ask("prepare")).items():
            setattr(self.measured[method], name, value)

    def _take_turns(self, methods: list[str]) -> None:
        for _ in range(self.rounds):
            seconds = {method: self._step(method) for method in methods}
            for method, taken in seconds.items():
                if taken is not None:
                    self.measured[method].times.append(taken)
                if taken is not None and seconds["plain"] is not None:
                    self.measured[method].ratios.append(taken / seconds["plain"])

    def _step(self, method: str) -> float | None:
        time.sleep(PAUSE)
        return self._attempt(method, lambda worker: worker.ask("step")).get("seconds")

    def _has_room(self) -> bool:
        """Whether another method fits in: none is known to need more than plain."""
        plain = self.measured["plain"]
        free = self._attempt("plain", lambda worker: worker.ask("free")).get("free")
        return free is None or free > 1.1 * max(plain.process_peak or 0, plain.tensor_peak or 0)

    def _attempt(self, method: str, action: Callable[[Worker], dict[str, Any]]) -> dict[str, Any]:
        """What the method's process answers; nothing once it has failed, which its row then says."""
        if method not in self.workers:
            return {}
        try:
            return action(self.workers[method])
        except MethodError as exc:
            self.measured[method].note = str(exc)
            self._end(method)
            return {}

    def _end(self, method: str) -> None:
        if method in self.workers:
            self.workers.pop(method).end()
