"""Measuring memory: bytes saved for backward, the peak of tensor memory, and the peak of process memory."""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Peaks(NamedTuple):
    """The peak memory of a function, in bytes.

    Attributes:
        tensor: the maximum of allocated tensor memory while it ran, minus the memory allocated before.
        process: the growth of the process's high-water mark of resident memory or, on CUDA, of the memory that PyTorch
            reserved. None if the system has no such mark.
    """

    tensor: int
    process: int | None


def measure(function: Callable[[], Any], device: torch.device | str = "cpu") -> Peaks:
    """Call `function` twice and return its peak memory on `device`.

    The first call measures the process peak, and is the warm-up in which gradients are allocated. The second call
    measures the tensor peak. A high-water mark never falls, so the process peak is valid only in a fresh process that
    has not used more memory before.
    """
    before = high_water_mark(device)
    function()
    after = high_water_mark(device)
    process = None if before is None or after is None else after - before
    return Peaks(tensor_peak(function, device), process)


def high_water_mark(device: torch.device | str = "cpu") -> int | None:
    """Return the process's maximum of resident memory so far or, on CUDA, of reserved memory, in bytes.

    Returns None if the system has no such mark.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_reserved(device)
    status = Path("/proc/self/status")
    if status.exists():
        # Not getrusage: on Linux, a process inherits its ru_maxrss from the parent process.
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
    """Return the bytes that autograd saves for the backward of `function`.

    Saved-tensor hooks count each storage once, including saved parameters and inputs. On the meta device, this counts
    a model of any size without allocating it.
    """
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        tensors = (tensor._indices(), tensor._values()) if tensor.layout == torch.sparse_coo else (tensor,)
        for storage in (each.untyped_storage() for each in tensors):
            storages[storage._cdata] = storage  # keeps the storage alive, so that its address is not reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return sum(storage.nbytes() for storage in storages.values())


def tensor_peak(function: Callable[[], Any], device: torch.device | str = "cpu") -> int:
    """Return the maximum of allocated tensor memory while `function` runs, minus the memory allocated before.

    On CUDA, the caching allocator counts. On the CPU, the allocation events of the profiler are accumulated.
    """
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler logs an error where there is no GPU
    # There is only one profiling cycle, so acc_events only avoids a warning of PyTorch 2.11.
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        function()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    memory = [event for event in events if event.get("name") == "[memory]" and event["args"]["Device Id"] == -1]
    memory.sort(key=lambda event: event["ts"])
    return max(accumulate((event["args"]["Bytes"] for event in memory), initial=0))
