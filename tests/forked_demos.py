"""The server of `forks`: imports everything once, then runs each demo it is asked for in a fork of itself.

A fork of this process starts the fork that runs the demo, waits for it, and writes its number and its exit status.
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
from samples import DEMOS

import efficient_densenet.training  # noqa: F401
from efficient_densenet.engines import kernels


def serve() -> None:
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _run_and_report(**json.loads(line))
        os.waitpid(child, 0)


def _run_and_report(report: str, **request) -> None:
    if os.fork():  # the server goes on
        os._exit(0)
    with open(report, "w") as file:
        number = os.fork()
        if number == 0:
            file.close()
            _run(**request)
        print(number, file=file, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]), file=file, flush=True)
    os._exit(0)


def _run(
    script: str,
    words: list[str],
    cwd: str,
    stdout: str,
    stderr: str,
    environment: dict[str, str],
    session: bool,
    largest_file: int | None,
) -> None:
    """As the interpreter runs a script: a message is printed, and its status is 1."""
    os.chdir(cwd)
    for number, path in enumerate((os.devnull, stdout, stderr)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOCTTY, 0o666), number)
    os.environ.update(environment)
    if session:
        os.setsid()
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    warnings.simplefilter("error", UserWarning)
    sys.argv, status = [script, *words], 0
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
    kernels.numba_supports(torch.empty(1))  # which imports Numba where it is installed, and loads a kernel
    serve()
