"""All kernels for a dtype are compiled at its first use, in several processes, with one line that says so."""

import functools
import logging
import subprocess
import sys

import pytest
import torch
from helpers import kernel_modules

from efficient_densenet import kernels
from efficient_densenet.kernels import disk_cache, python_process
from efficient_densenet.kernels.numba_cpu.host import openmp

pytest.importorskip("numba", reason="the kernels are compiled by Numba")
if not openmp.available():
    pytest.skip("this PyTorch has no GNU OpenMP threads", allow_module_level=True)
compilation, compile_ahead, numba_kernels, launch = kernel_modules(
    "numba_cpu", "compilation", "compile_ahead", "kernels", "launch"
)
NAMES = ["batch_norm_grad_input", "batch_statistics"]
"""The two kernels that take the shortest time to compile."""


@pytest.fixture
def first_use(monkeypatch, tmp_path):
    """The first use of float32 in a process, which has two processors and no other kernels than `NAMES`."""

    def use() -> bool:
        monkeypatch.setattr(compilation, "load_or_compile", functools.cache(load_or_compile))
        return kernels._numba_compiles.__wrapped__(torch.float32)

    requests, load_or_compile = compile_ahead._requests, compilation.load_or_compile.__wrapped__
    monkeypatch.setattr(compilation, "load_or_compile", load_or_compile)
    monkeypatch.setattr(compile_ahead, "_requests", lambda dtype: {name: requests(dtype)[name] for name in NAMES})
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(python_process, "num_processors", lambda: 2)
    return use


@pytest.fixture
def started(monkeypatch):
    """The kernels for which processes are started."""
    found, command = [], python_process.command
    monkeypatch.setattr(
        python_process, "command", lambda module, *words: found.append(words[1:]) or command(module, *words)
    )
    return found


def stored() -> set[str]:
    directory = disk_cache.directory()
    return set() if directory is None else {file.name.split("-")[0] for file in directory.glob("*.kernel")}


def test_the_first_use_compiles_in_processes_and_says_so(first_use, started, caplog, capfd):
    assert first_use()
    assert started == [(NAMES[1],)]
    assert stored() == set(NAMES)
    (record,) = caplog.records
    assert record.getMessage().startswith("compiling kernels for float32 once")
    assert record.name == "efficient_densenet"
    assert record.levelno >= logging.lastResort.level  # shown without any configuration
    assert first_use()
    assert len(caplog.records) == len(started) == 1


@pytest.mark.parametrize("program", ["import time; time.sleep(600)", None])
def test_whatever_processes_fail_to_compile_is_compiled_here(program, first_use, monkeypatch):
    def start(*arguments, **streams):
        if program is None:
            raise OSError("no more processes")
        started.append(popen([sys.executable, "-c", program]))
        return started[-1]

    started, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(compile_ahead, "_MOST_SECONDS", 0)
    assert first_use()
    assert stored() == set(NAMES)
    assert all(process.poll() is not None for process in started)
