"""Measuring what autograd keeps."""

import itertools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


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
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [event for event in events if event["name"] == "[memory]" and event["args"]["Device Id"] == -1]
    held = itertools.accumulate(event["args"]["Bytes"] for event in sorted(changes, key=lambda event: event["ts"]))
    return max(held, default=0)
