"""A long run in every engine and of many batch sizes leaves nothing behind."""

import ctypes
import gc
import os
from pathlib import Path

import pytest
import torch
from helpers import SAVING, small_model

from efficient_densenet.engines.shared import stage as shared

MIB = 2**20


@pytest.fixture(autouse=True)
def _a_layer_at_a_time(monkeypatch):
    """Small networks would go a stage at a time, in one node of the graph."""
    monkeypatch.setattr(shared, "PORTION_BYTES", 0)


def _live_tensors() -> int:
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def _resident_bytes() -> int:
    """With what the C library keeps for later given back, where it can be asked to."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system does not tell resident memory")
@pytest.mark.parametrize("steps", [100, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_steps_in_changing_batches_and_engines_leave_nothing(steps):
    """Tensors are counted without a garbage collection in between: none may wait for one in a cycle."""
    model = small_model("bc", block_config=(3, 2), growth_rate=8, drop_rate=0.1).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    engines = (*SAVING, "shared", "plain", True)

    def step(i: int) -> None:
        model.set_engine(engines[i % len(engines)])
        x = torch.randn(1 + i * 5 % 23, 3, 8 + i % 5, 9, requires_grad=i % 3 == 0)
        loss = model(x).square().mean()
        if i % 7:  # some forwards are never followed by a backward
            loss.backward()
            optimizer.step()
        optimizer.zero_grad(set_to_none=i % 2 == 0)

    for i in range(200):
        step(i)
    optimizer.zero_grad()
    gc.collect()
    tensors, resident = _live_tensors(), _resident_bytes()
    gc.disable()
    try:
        for i in range(steps):
            step(i)
        optimizer.zero_grad()
        assert _live_tensors() == tensors
        assert _resident_bytes() < resident + 4 * MIB
    finally:
        gc.enable()
