"""Run demos in forks of one process that has imported everything.

Reads a command line from each line of standard input; prints the process id of the fork, then its exit status.
"""

import os
import runpy
import sys

import matplotlib.figure  # noqa: F401
import torch._dynamo
from samples import DEMOS

import efficient_densenet.training  # noqa: F401
from efficient_densenet.engines import kernels

kernels.numba_supports(torch.empty(1))  # imports Numba where it is installed, and compiles or loads a kernel

for line in sys.stdin:
    script, *arguments = line.split()
    pid = os.fork()
    if pid == 0:
        sys.stdin.close()
        output = os.open("printed.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = [script, *arguments]
        runpy.run_path(str(DEMOS / script), run_name="__main__")
        sys.stdout.flush()
        os._exit(0)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
