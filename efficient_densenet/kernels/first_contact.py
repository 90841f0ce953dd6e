"""The first contact of the Triton kernels with a device: there they are compared with PyTorch's operations.

A process of its own compares them (`check_on_device`), so that a kernel that aborts, never ends or breaks the CUDA
context harms no training run, and no check runs inside of a graph capture. What it finds is kept on disk, for the
device, the versions, the sources and the dtype.
"""

import functools
import hashlib
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import torch

from . import convolution, disk_cache

VARIABLE = "EFFICIENT_DENSENET_TRITON"
MODES = {
    "check": "compare the kernels with PyTorch's operations at the first use (the default)",
    "trust": "run the kernels unchecked",
    "off": "run PyTorch's operations instead",
}

SECONDS = 300
"""The most time of a comparison. It is killed then, and no verdict is kept."""

COULD_NOT_CHECK = 3
"""The exit status of a comparison that has said nothing about the kernels, such as for lack of memory."""

_NAME = "triton_verdict"
_NO_FAULT = b"none"


def may_run(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the Triton kernels may run on a CUDA device for features of `dtype`; compares them there if that is not
    known."""
    chosen = mode()
    if chosen != "check":
        return chosen == "trust"
    index = torch.cuda.current_device() if device.index is None else device.index
    return _fault(index, dtype, precision_of(dtype)) is None


def precision_of(dtype: torch.dtype) -> str:
    """The precision of products, on which the kernels for float32 depend: "tf32" or "ieee"."""
    return convolution.precision() if dtype is torch.float32 else "ieee"


def mode() -> str:
    """What the user chooses by the environment variable."""
    chosen = os.environ.get(VARIABLE, "check")
    if chosen not in MODES:
        raise ValueError(f"{VARIABLE} is {chosen!r}, but must be one of {', '.join(MODES)}")
    return chosen


def stored_verdict(index: int, dtype: torch.dtype, precision: str) -> str | None:
    """The fault that an earlier comparison has found, "" if it has found none, or None if there was none."""
    content = disk_cache.load(_NAME, _key(index, dtype, precision))
    return None if content is None else "" if content == _NO_FAULT else content.decode()


@functools.cache
def _fault(index: int, dtype: torch.dtype, precision: str) -> str | None:
    """What keeps the kernels from running, with a warning; or None."""
    with disk_cache.lock(_NAME):  # of several processes on one device, one compares and the others wait
        fault = stored_verdict(index, dtype, precision)
        is_certain = True
        if fault is None:
            fault, is_certain = _compare(index, dtype, precision)
            if is_certain:
                disk_cache.store(_NAME, _key(index, dtype, precision), fault.encode() or _NO_FAULT)
    if not fault:
        return None
    found, report = "could not compare them with PyTorch's operations", ""
    if is_certain:
        found, report = "found", "; please report it with what `python -m efficient_densenet.doctor` prints"
    warnings.warn(
        f"the Triton kernels for {_name(dtype)} do not run on {torch.cuda.get_device_name(index)}: {found}: {fault}. "
        f"The shared engine uses PyTorch's operations instead, which are slower. {VARIABLE}=trust runs the kernels "
        f"unchecked{report}",
        stacklevel=2,
    )
    return fault


def _compare(index: int, dtype: torch.dtype, precision: str) -> tuple[str, bool]:
    """The fault that the comparison finds, or ""; and whether that is certain, and not for lack of something else."""
    if not sys.executable or getattr(sys, "frozen", False):
        return "there is no Python interpreter to start, as in a frozen application", False
    command = [sys.executable, "-m", f"{__package__}.check_on_device", f"cuda:{index}", _name(dtype), precision]
    root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"the comparison took more than {SECONDS} s", False
    except OSError as error:
        return f"the comparison could not be started ({error})", False
    last_words = " ".join(done.stderr.split())[-300:]
    if done.returncode in (0, COULD_NOT_CHECK):
        return done.stdout.strip().rpartition("\n")[2] or "", done.returncode == 0
    killed = done.returncode == -9  # by the system for lack of memory, or by a user
    return f"the comparison ended with status {done.returncode}: {last_words or 'without a message'}", not killed


def _key(index: int, dtype: torch.dtype, precision: str) -> bytes:
    """All on which the verdict depends."""
    driver = Path("/proc/driver/nvidia/version")
    parts = [
        torch.cuda.get_device_name(index),
        torch.cuda.get_device_capability(index),
        driver.read_text() if driver.exists() else "",
        torch.__version__,
        str(torch.version.cuda),
        _triton_version(),
        _sources(),
        _name(dtype),
        precision,
    ]
    return json.dumps(parts).encode()


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
