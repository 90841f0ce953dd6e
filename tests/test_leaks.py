"""Many steps with every engine and changing batch sizes leak no tensors and no memory."""

import ctypes
import gc
import os
from pathlib import Path

import pytest
import torch
from helpers import MEMORY_EFFICIENT, live_tensors, small_model


def _resident_bytes() -> int:
    """Resident memory, after the C library has returned its free memory to the system, if it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc/self/statm")
def test_steps_with_changing_batch_sizes_and_engines_do_not_leak():
    """Tensors are counted without garbage collection, so that reference cycles are detected too."""
    model = small_model("bc", block_config=(2, 1), growth_rate=8, drop_rate=0.1).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    engines = (*MEMORY_EFFICIENT, "shared", "plain", True)

    def run(steps: int) -> tuple[int, int]:
        for i in range(steps):
            model.set_engine(engines[i % len(engines)])
            x = torch.randn(1 + i * 5 % 23, 3, 8 + i % 5, 9, requires_grad=i % 3 == 0)
            loss = model(x).square().mean()
            if i % 7:  # some forwards are never followed by a backward
                loss.backward()
                optimizer.step()
            optimizer.zero_grad(set_to_none=i % 2 == 0)
        optimizer.zero_grad()
        del x, loss
        return live_tensors(), _resident_bytes()

    run(80)  # the allocator's own pools grow by some MiB meanwhile
    gc.collect()
    gc.disable()
    try:
        (tensors, resident), (tensors_later, resident_later) = run(1), run(40)
    finally:
        gc.enable()
    assert tensors_later == tensors
    assert resident_later < resident + 4 * 2**20
