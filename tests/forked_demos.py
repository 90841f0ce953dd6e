"""Demos in forks of one process that has imported everything: words in, the fork's number and its status out."""

import os
import runpy
import sys

import matplotlib.figure  # noqa: F401
import torch._dynamo
from samples import DEMOS

import efficient_densenet.training  # noqa: F401
from efficient_densenet.engines import kernels

kernels.numba_supports(torch.empty(1))  # which imports Numba where it is installed, and has it make or find a program

for line in sys.stdin:
    script, *words = line.split()
    number = os.fork()
    if number == 0:
        sys.stdin.close()
        printed = os.open("printed.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        sys.argv = [script, *words]
        runpy.run_path(str(DEMOS / script), run_name="__main__")
        sys.stdout.flush()
        os._exit(0)
    print(number, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]), flush=True)
