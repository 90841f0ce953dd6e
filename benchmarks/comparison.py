"""Interleaved measurement of methods: each runs in a process of its own, and the processes take one step each in turn.

All methods are then affected alike if the machine becomes faster or slower during the measurement.
"""

import contextlib
import glob
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
from typing import IO, Any

from methods import Setting

WORKER = Path(__file__).parent / "worker.py"
PAUSE = 0.05
"""Seconds between steps. OpenMP threads spin for some milliseconds after their work, which would slow the next step."""
OUT_OF_MEMORY = "out of memory"
FOLDERS = ("/usr/lib/*", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/opt/homebrew/lib", f"{sys.prefix}/lib")
"""Folders that are searched for an allocator's library."""


class MethodError(Exception):
    """A method could not be measured. The message becomes the note of its row."""


class WorkerProcess:
    """The process that runs one method. It answers each command by one line of JSON, and ends with the context.

    Its compiler keeps nothing from earlier processes, so that everything is compiled in the first step, unless it is
    given a directory of what they kept.
    """

    def __init__(
        self, method: str, setting: Setting, preload: str = "", timeout: float = 300, compiler_cache: str = ""
    ) -> None:
        self.timeout = timeout
        self.stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by stop)
        self.temporary_cache = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        preloaded = " ".join(filter(None, (preload, os.environ.get("LD_PRELOAD", ""))))
        environment = {"TORCHINDUCTOR_CACHE_DIR": compiler_cache or self.temporary_cache.name}
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), method, json.dumps(asdict(setting))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            text=True,
            env=os.environ | environment | ({"LD_PRELOAD": preloaded} if preloaded else {}),
        )

    def __enter__(self) -> "WorkerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        if self.stderr.closed:
            return
        self.process.kill()
        self.process.communicate()
        self.stderr.close()
        self.temporary_cache.cleanup()

    def request(self, command: str) -> dict[str, Any]:
        """Send a command and return its answer."""
        stdin = _pipe(self.process.stdin)
        with contextlib.suppress(BrokenPipeError):
            stdin.write(command + "\n")
            stdin.flush()
        return self.receive()

    def receive(self) -> dict[str, Any]:
        """Return the next answer. `select` works on a buffered pipe here, because each answer is a single line."""
        stdout = _pipe(self.process.stdout)
        if not select.select([stdout], [], [], self.timeout)[0]:
            raise MethodError(f"no answer within {self.timeout:g} s")
        line = stdout.readline()
        if not line:
            raise MethodError(self._exit_reason())
        answer = json.loads(line)
        if "failure" in answer:
            raise MethodError(answer["failure"])
        return answer

    def _exit_reason(self) -> str:
        code = self.process.wait()
        self.stderr.seek(0)
        lines = self.stderr.read().strip().splitlines() or ["it printed nothing"]
        if code == -9:
            return OUT_OF_MEMORY  # killed by the system
        return f"the process ended with code {code}: {lines[-1]}"


def _is_compiled(method: str) -> bool:
    """Whether the method's preparation may take minutes. It then begins after all methods before it were measured."""
    return method.startswith("compile_")


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def ask(method: str, setting: Setting, command: str, preload: str = "", timeout: float = 300) -> dict[str, Any]:
    """Send a command to a process of its own, and return the answer."""
    try:
        with WorkerProcess(method, setting, preload, timeout) as worker:
            worker.receive()
            return worker.request(command)
    except MethodError as exc:
        raise ValueError(f"{method} could not be measured: {exc}") from exc


def find_allocator(name: str) -> str:
    """Return the path of the library called `name`, such as "tcmalloc". A path is returned as it is.

    Returns "" for "system" and "", which preload nothing.
    """
    if not name or name == "system":
        return ""
    if "/" in name:
        if not Path(name).is_file():
            raise ValueError(f"no file at {name}: --allocator takes a name such as tcmalloc, or the path of a library")
        return name
    paths = [path for folder in FOLDERS for path in glob.glob(f"{folder}/lib{name}*.so*") if "debug" not in path]
    if not paths:
        raise ValueError(
            f"no lib{name}*.so in {', '.join(FOLDERS)}: install it (Debian and Ubuntu: apt-get install "
            f"libtcmalloc-minimal4, or libjemalloc2) or give its path, --allocator /where/it/is/lib{name}.so"
        )
    return min(paths, key=len)


@dataclass
class Measurement:
    """The measurements of one method. `ratios` are its times divided by plain's in the same round."""

    tensor_peak: int | None = None
    process_peak: int | None = None
    step_peak: int | None = None
    first_step_s: float | None = None
    device_name: str = ""
    allocator: str = ""
    kernels: str = ""
    times: list[float] = field(default_factory=list)
    host_times: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    note: str = ""


class Comparison:
    """Measures several methods relative to plain.

    Plain's process lives throughout. The other methods are measured in groups that fit in memory together, because
    some allocators never return memory to the system.
    """

    def __init__(self, methods: list[str], rounds: int) -> None:
        self.measurements = {method: Measurement() for method in methods}
        self.rounds = rounds
        self.workers: dict[str, WorkerProcess] = {}

    def run(
        self, setting: Setting, preload: str = "", timeout: float = 300, compiler_cache: str = ""
    ) -> dict[str, Measurement]:
        with contextlib.ExitStack() as stack:
            for method in self.measurements:
                worker = WorkerProcess(method, setting, preload, timeout, compiler_cache)
                self.workers[method] = stack.enter_context(worker)
            for method in self.measurements:  # the workers import in parallel; after this, one computes at a time
                self._try(method, WorkerProcess.receive)
            self._prepare("plain")
            waiting = [method for method in self.measurements if method != "plain"]
            while True:
                group = []
                while waiting and (not group or (not _is_compiled(waiting[0]) and self._fits_another())):
                    group.append(waiting.pop(0))
                    self._prepare(group[-1])
                self._run_rounds(["plain", *group])
                for method in group:
                    self._stop(method)
                if not waiting:
                    return self.measurements

    def _prepare(self, method: str) -> None:
        for name, value in self._try(method, lambda worker: worker.request("prepare")).items():
            setattr(self.measurements[method], name, value)

    def _run_rounds(self, methods: list[str]) -> None:
        for _ in range(self.rounds):
            answers = {method: self._step(method) for method in methods}
            plain = answers["plain"].get("seconds")
            for method, answer in answers.items():
                seconds = answer.get("seconds")
                if seconds is not None:
                    self.measurements[method].times.append(seconds)
                    self.measurements[method].host_times.append(answer["host_seconds"])
                if seconds is not None and plain is not None:
                    self.measurements[method].ratios.append(seconds / plain)

    def _step(self, method: str) -> dict[str, Any]:
        time.sleep(PAUSE)
        return self._try(method, lambda worker: worker.request("step"))

    def _fits_another(self) -> bool:
        """Return True if another method fits in memory. No method is known to need more than plain."""
        plain = self.measurements["plain"]
        free = self._try("plain", lambda worker: worker.request("free")).get("free")
        return free is None or free > 1.1 * max(plain.process_peak or 0, plain.tensor_peak or 0)

    def _try(self, method: str, action: Callable[[WorkerProcess], dict[str, Any]]) -> dict[str, Any]:
        """Return the answer of a method's worker. If the method fails, note why, stop it, and return an empty dict."""
        if method not in self.workers:
            return {}
        try:
            return action(self.workers[method])
        except MethodError as exc:
            self.measurements[method].note = str(exc)
            self._stop(method)
            return {}

    def _stop(self, method: str) -> None:
        if method in self.workers:
            self.workers.pop(method).stop()
