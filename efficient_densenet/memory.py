"""Measuring memory: what autograd keeps, the most that tensors hold, and how far a process grows."""

import itertools
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Peaks(NamedTuple):
    """The most memory that a function needed, in bytes.

    Attributes:
        tensor: the most that tensors held while it ran, above what they held before.
        process: the growth of the process's high-water mark: of its resident memory, or of what PyTorch has reserved
            on a GPU. None where the system does not tell.
    """

    tensor: int
    process: int | None


def measure(function: Callable[[], Any], device: torch.device | str = "cpu") -> Peaks:
    """Run `function` twice and tell how much memory on `device` it needed.

    The first run gives the process peak, and is the warm-up in which gradients are allocated; the second gives the
    tensor peak. A high-water mark never falls: the process peak means something in a fresh process only, in which
    nothing larger has run before.
    """
    before = high_water_mark(device)
    function()
    after = high_water_mark(device)
    process = None if before is None or after is None else after - before
    return Peaks(tensor_peak(function, device), process)


def high_water_mark(device: torch.device | str = "cpu") -> int | None:
    """The most bytes this process ever had resident or, on CUDA, PyTorch reserved; None where the system keeps none."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_reserved(device)
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage's figure, which on Linux a process inherits from the one that started it.
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource  # not on Windows
    except ModuleNotFoundError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def saved_bytes(function: Callable[[], Any]) -> int:
    """The bytes that autograd holds for the backward of what `function` computes.

    Counted by saved-tensor hooks, each storage once, parameters and inputs that are saved included. Works on the meta
    device, where a model of any size costs nothing to count.
    """
    storages: dict[int, torch.UntypedStorage] = {}

    def note(tensor: Tensor) -> Tensor:
        parts = (tensor._indices(), tensor._values()) if tensor.layout == torch.sparse_coo else (tensor,)
        for storage in (part.untyped_storage() for part in parts):
            storages[storage._cdata] = storage  # kept alive, so that no later storage takes its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        function()
    return sum(storage.nbytes() for storage in storages.values())


def tensor_peak(function: Callable[[], Any], device: torch.device | str = "cpu") -> int:
    """The most bytes that tensors on `device` hold while `function` runs, above what they held before.

    On CUDA the allocator's own count; on the CPU the sum of the allocator's events as the profiler records them.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    # One cycle only, so accumulating its events changes nothing but the warning that PyTorch 2.11 gives without it.
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        function()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [event for event in events if event["name"] == "[memory]" and event["args"]["Device Id"] == -1]
    held = itertools.accumulate(event["args"]["Bytes"] for event in sorted(changes, key=lambda event: event["ts"]))
    return max(held, default=0)
