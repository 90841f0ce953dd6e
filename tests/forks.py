"""Demos as processes of their own that need not import anything first: forks of one that has."""

import atexit
import functools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from samples import RUN


class ForkedDemo:
    """A running demo, with what these tests use of `subprocess.Popen`."""

    def __init__(
        self,
        script: str,
        *words: str,
        cwd: Path,
        stderr: str | None = None,
        session: bool = False,
        largest_file: int | None = None,
        **environment: str,
    ) -> None:
        server, folder = _server()
        own = Path(tempfile.mkdtemp(dir=folder))
        self._stdout, self._stderr, report = own / "stdout", own / "stderr", own / "report"
        os.mkfifo(report)
        request = {"report": str(report), "stdout": str(self._stdout), "stderr": stderr or str(self._stderr)}
        request |= {"script": script, "words": words, "cwd": str(cwd), "environment": environment}
        request |= {"session": session, "largest_file": largest_file}
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
        os.kill(self.pid, number)


def forked_demo(script: str, *words: str, cwd: Path, **how) -> subprocess.CompletedProcess:
    """A demo in a process of its own, to its end."""
    process = ForkedDemo(script, *words, cwd=cwd, **how)
    printed, errors = process.communicate()
    return subprocess.CompletedProcess(words, process.returncode, printed, errors)


def start_run(*words: str, cwd: Path) -> ForkedDemo:
    """A training run of a tiny model on the digits."""
    return ForkedDemo("cp_demo.py", *RUN, *words, cwd=cwd)


def await_file(path: Path, process: ForkedDemo | subprocess.Popen) -> None:
    """Wait until the process has written a file."""
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


@functools.cache
def _server() -> tuple[subprocess.Popen, str]:
    """And a folder for what it is asked."""
    script = Path(__file__).parent / "forked_demos.py"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(script.parent), os.environ.get("PYTHONPATH", "")])}
    server = subprocess.Popen([sys.executable, str(script)], stdin=subprocess.PIPE, text=True, env=environment)
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    atexit.register(server.communicate)
    return server, folder
