"""The first contact of the Triton kernels with a device: there they are compared with PyTorch's operations.

A process of its own compares them (`check_on_device`), so that a kernel that aborts, never ends or breaks the CUDA
context harms no training run, and no comparison runs inside of a graph capture. On cards that were never measured it
times them too, and the faster of both run. What it finds about the kernels is kept on disk, for the device, the
versions, the sources and the dtype; where it finds nothing about them, the next process tries again. Activations other
than ReLU are compared when they are first used.
"""

import functools
import hashlib
import json
import os
import signal
import subprocess
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

from . import convolution, disk_cache, python_process
from .check_on_device import STARTED, VERDICT

VARIABLE = "EFFICIENT_DENSENET_TRITON"
MODES = {
    "check": "compare the kernels with PyTorch's operations at the first use (the default)",
    "trust": "run the kernels unchecked",
    "off": "run PyTorch's operations instead",
}

SECONDS = 120
"""The most time of a comparison."""

_CRASHES = [-each for each in signal.Signals if each.name in ("SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV")]


class Verdict(NamedTuple):
    """The fault of the kernels, "" if there is none; or, if it is not `certain`, why they were not compared; and their
    times where they are slower than PyTorch's operations."""

    fault: str
    certain: bool = True
    slower: str = ""

    @property
    def passed(self) -> bool:
        return not (self.fault or self.slower)


def may_run(device: torch.device, dtype: torch.dtype, activation: str = "relu") -> bool:
    """Whether the Triton kernels may run on a CUDA device for features of `dtype`, and apply `activation`; compares
    them there if that is not known."""
    chosen = mode()
    if chosen != "check":
        return chosen == "trust"
    index = torch.cuda.current_device() if device.index is None else device.index
    return verdict(index, dtype, precision_of(dtype), activation=activation).passed


def precision_of(dtype: torch.dtype) -> str:
    """The precision of products, on which the kernels for float32 depend: "tf32" or "ieee"."""
    return convolution.precision() if dtype is torch.float32 else "ieee"


def mode() -> str:
    """The user's choice by the environment variable."""
    chosen = os.environ.get(VARIABLE, "check")
    if chosen not in MODES:
        raise ValueError(f"{VARIABLE} is {chosen!r}, but must be one of {', '.join(MODES)}")
    return chosen


@functools.cache
def verdict(index: int, dtype: torch.dtype, precision: str, *, activation: str) -> Verdict:
    """The verdict on disk, or a new one; with a warning where there is a fault."""
    compared = index, dtype, precision, activation
    kind = _name(dtype) if activation == "relu" else f"{_name(dtype)} and {activation}"
    device = torch.cuda.get_device_name(index)
    found = stored_verdict(*compared)
    if found is None:
        python_process.logger.warning(
            "comparing the Triton kernels for %s with PyTorch's operations on %s once, about 15 s", kind, device
        )
        found = _compare(*compared)
        if found.certain:
            disk_cache.store(_file_name(*compared[1:]), _key(*compared), json.dumps(found).encode())
        if found.slower:
            python_process.logger.warning("PyTorch's operations run for %s on %s: %s", kind, device, found.slower)
    if found.fault:
        cause = "of what a comparison has found" if found.certain else "they could not be compared"
        report = ". Please report it with what `python -m efficient_densenet.doctor` prints" if found.certain else ""
        warnings.warn(
            f"PyTorch's operations, which are slower, run in the place of the Triton kernels for {kind} on {device}, "
            f"since {cause}: {found.fault}. {VARIABLE}=trust runs the kernels unchecked{report}",
            stacklevel=2,
        )
    return found


def stored_verdict(index: int, dtype: torch.dtype, precision: str, activation: str) -> Verdict | None:
    """The verdict of an earlier comparison, or None."""
    content = disk_cache.load(_file_name(dtype, precision, activation), _key(index, dtype, precision, activation))
    return None if content is None else Verdict(*json.loads(content))


def _file_name(dtype: torch.dtype, precision: str, activation: str) -> str:
    return f"triton_{_name(dtype)}_{precision}" + ("" if activation == "relu" else f"_{activation}")


def _compare(index: int, dtype: torch.dtype, precision: str, activation: str) -> Verdict:
    try:
        return _verdict_of(_run(index, dtype, precision, activation), torch.cuda.get_device_name(index))
    except Exception as error:  # whatever it is, training goes on
        return Verdict(f"the comparison could not be run ({error})", certain=False)


def _run(index: int, dtype: torch.dtype, precision: str, activation: str) -> subprocess.CompletedProcess:
    arguments = f"cuda:{index}", _name(dtype), precision, activation, str(SECONDS)
    command = python_process.command(f"{__package__}.check_on_device", *arguments)
    environment = os.environ | {VARIABLE: "off"}  # whatever it starts compares nothing
    streams = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True, "errors": "replace"}
    return subprocess.run(command, env=environment, timeout=SECONDS + 10, check=False, **streams)


def _verdict_of(done: subprocess.CompletedProcess, device_name: str) -> Verdict:
    """The verdict that the process has printed. Where it says nothing about the kernels, nothing is certain."""
    said = [line.removeprefix(VERDICT) for line in done.stdout.splitlines() if line.startswith(VERDICT)]
    if not said:
        fault = f"the comparison ended with status {done.returncode}: {' '.join(done.stderr.split())[-300:]}"
        return Verdict(fault, STARTED in done.stdout and done.returncode in _CRASHES)
    content = json.loads(said[-1])
    if content["lacks"] is not None:
        return Verdict(content["lacks"], certain=False)
    if content["device"] != device_name:
        found = f"the process that compares finds {content['device']} in the place of {device_name}"
        return Verdict(f"{found}: set CUDA_VISIBLE_DEVICES before Python starts", certain=False)
    return Verdict(content["fault"] or "", slower=content["slower"] or "")


def _key(index: int, dtype: torch.dtype, precision: str, activation: str) -> bytes:
    """A key of everything that the verdict depends on."""
    parts = [
        torch.cuda.get_device_name(index),
        torch.cuda.get_device_capability(index),
        _driver_version(),
        torch.__version__,
        str(torch.version.cuda),
        _triton_version(),
        _sources(),
        _name(dtype),
        precision,
        activation,
    ]
    return json.dumps(parts).encode()


def _driver_version() -> str:
    """The version that the driver's kernel module names; nothing where the module is the host system's, as in WSL2."""
    file = Path("/proc/driver/nvidia/version")
    return file.read_text() if file.exists() else ""


def _triton_version() -> str:
    import triton  # here, since machines without GPUs may lack it

    return triton.__version__


@functools.cache
def _sources() -> str:
    """A checksum of the kernels and of their comparison."""
    folder = Path(__file__).parent
    files = [*folder.glob("*.py"), *(folder / "triton_gpu").rglob("*.py")]
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in sorted(files))).hexdigest()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
