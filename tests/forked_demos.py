"""The server of `forks`: imports everything once, then runs each requested demo in a fork of itself.

Requests are lines of JSON on standard input. For each, a fork of this process starts the fork that runs the demo, waits
for it, and writes its process id and its exit status.
"""

import atexit
import json
import os
import resource
import runpy
import sys
import traceback
import warnings

import matplotlib.figure  # noqa: F401
import torch._dynamo
import torch.distributed.run
import torchvision.datasets.cifar
import training  # noqa: F401
from samples import DEMOS

from efficient_densenet import kernels


def serve() -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run_and_report(**json.loads(line))
        os.waitpid(child, 0)


def _run_and_report(report: str, **request) -> None:
    if os.fork():  # returns control to the server
        os._exit(0)
    with open(report, "w") as file:
        pid = os.fork()
        if pid == 0:
            file.close()
            _run(**request)
        print(pid, file=file, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=file, flush=True)
    os._exit(0)


def _run(
    script: str,
    arguments: list[str],
    cwd: str,
    stdout: str,
    stderr: str,
    environment: dict[str, str],
    new_session: bool,
    max_file_bytes: int | None,
) -> None:
    """Like the interpreter: an exit with a message prints it, with exit status 1."""
    os.chdir(cwd)
    for descriptor, path in enumerate((os.devnull, stdout, stderr)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOCTTY, 0o666), descriptor)
    os.environ.update(environment)
    if new_session:
        os.setsid()
    if max_file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (max_file_bytes, max_file_bytes))
    warnings.simplefilter("error", UserWarning)
    sys.argv, status = [script, *arguments], 0
    try:
        runpy.run_path(str(DEMOS / script), run_name="__main__")
    except SystemExit as exc:
        status = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
        if isinstance(exc.code, str):
            print(exc.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    torchvision.datasets.cifar.check_integrity = lambda path, md5: os.path.exists(path)  # the tests' images are others
    kernels.numba_supports(torch.empty(1))  # imports Numba where it is installed, and loads a kernel
    serve()
