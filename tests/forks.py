"""Demos in processes of their own that start fast: forks of one process that has imported everything."""

import atexit
import contextlib
import functools
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from samples import DEMOS


class ForkedDemo:
    """A running demo, with the part of the interface of `subprocess.Popen` that the tests need."""

    def __init__(
        self,
        script: str | Path,
        *arguments: str,
        cwd: Path,
        new_session: bool = False,
        max_file_bytes: int | None = None,
        **environment: str,
    ) -> None:
        server, folder = _server()
        directory = Path(tempfile.mkdtemp(dir=folder))
        self._stdout, self._stderr, report = directory / "stdout", directory / "stderr", directory / "report"
        os.mkfifo(report)
        request = {"report": str(report), "stdout": str(self._stdout), "stderr": str(self._stderr)}
        request |= {"script": str(script), "arguments": arguments, "cwd": str(cwd), "environment": environment}
        request |= {"new_session": new_session, "max_file_bytes": max_file_bytes}
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        self._report = report.open()
        self.pid, self.returncode = int(self._report.readline()), None

    def poll(self, timeout: float = 0) -> int | None:
        if self.returncode is None and select.select([self._report], [], [], timeout)[0]:
            self.returncode = int(self._report.readline())
            self._report.close()
        return self.returncode

    def wait(self, timeout: float = 300) -> int:
        if self.poll(timeout) is None:
            os.kill(self.pid, 9)
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return self.returncode

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        self.wait(timeout)
        return tuple(path.read_text() if path.exists() else "" for path in (self._stdout, self._stderr))

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it may have ended already
            os.kill(self.pid, number)


def forked_demo(script: str | Path, *arguments: str, cwd: Path, **options) -> subprocess.CompletedProcess:
    """Run a demo in a process of its own to its end."""
    process = ForkedDemo(script, *arguments, cwd=cwd, **options)
    stdout, stderr = process.communicate()
    return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)


def fork_processes(processes: int, script: Path, *words: str, cwd: Path | list[Path]) -> list[ForkedDemo]:
    """Processes with the environment variables that torchrun sets, in one directory or each in its own."""
    folders = [cwd] * processes if isinstance(cwd, Path) else cwd
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(processes)}
        common |= {"TORCHELASTIC_RUN_ID": "none", "OMP_NUM_THREADS": "1"}
    ranks = [{"RANK": str(i), "LOCAL_RANK": str(i), "LOCAL_WORLD_SIZE": str(processes)} for i in range(processes)]
    return [ForkedDemo(script, *words, cwd=each, **common, **rank) for each, rank in zip(folders, ranks, strict=True)]


def torchrun(*words: str, cwd: Path, **environment: str) -> subprocess.Popen:
    """torchrun itself, which takes seconds to start its processes."""
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths} | environment
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=cwd, env=environment, stdout=pipe, stderr=pipe, text=True)


def outcomes_of_processes(cases: list[str], processes: int, script: Path, folder: Path) -> list[Any]:
    """What each process of a script that takes a file of cases writes for them. One group of processes runs all, since
    starting them is what takes time; a single one is without the environment variables of torchrun."""
    (folder / "cases").write_text(json.dumps(cases))
    words = script, "cases", "outcomes"
    running = fork_processes(processes, *words, cwd=folder) if processes > 1 else [ForkedDemo(*words, cwd=folder)]
    for process in running:
        assert process.wait() == 0, process.communicate()
    return [json.loads((folder / f"outcomes.{rank}").read_text()) for rank in range(processes)]


def await_file(path: Path, process: ForkedDemo | subprocess.Popen) -> None:
    """Wait until the process has written the file `path`."""
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


@functools.cache
def _server() -> tuple[subprocess.Popen, str]:
    """The server, and a folder for its output."""
    script = Path(__file__).parent / "forked_demos.py"
    paths = str(script.parent), str(DEMOS), os.environ.get("PYTHONPATH", "")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    server = subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, text=True, env=environment)
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    atexit.register(server.communicate)
    return server, folder
