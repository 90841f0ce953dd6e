"""What autograd keeps, as arithmetic with models on the meta device; and the peaks, measured on real tensors."""

import subprocess
import sys
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from efficient_densenet import create_model, memory
from efficient_densenet.checkpoint import checkpoint
from efficient_densenet.memory import measure, saved_bytes, tensor_peak

MIB = 2**20


def _saved(engine: str, batch: int = 256, **overrides) -> int:
    model = create_model("densenet_bc_100_12", efficient=engine, **overrides).to("meta")
    pictures, labels = torch.empty(batch, 3, 32, 32, device="meta"), torch.empty(batch, dtype=torch.long, device="meta")
    return saved_bytes(lambda: F.cross_entropy(model(pictures), labels))


def test_plain_keeps_what_the_well_known_code_keeps():
    """8,507 MiB is the figure of gpleiss/efficient_densenet_pytorch, so the reference is not a wasteful one."""
    assert _saved("plain") == pytest.approx(8507 * MIB, rel=0.01)


@pytest.mark.parametrize("engine", ["official", "checkpoint"])
def test_recomputation_keeps_less_than_half(engine):
    assert _saved(engine) <= 0.45 * _saved("plain")


@pytest.mark.parametrize("engine", ["official", "checkpoint"])
def test_growth_with_depth_is_linear(engine):
    """A layer costs its k new features and twice its 4k-wide bottleneck, whatever came before it."""
    sizes = [_saved(engine, block_config=(depth,)) for depth in (8, 16, 24, 32)]
    steps = [later - earlier for earlier, later in pairwise(sizes)]
    pixels, k = 256 * 32 * 32 * 4, 12
    # A layer's features are counted once more where the block's output joins them for the last norm and its ReLU.
    expected = 8 * pixels * (k + 2 * 4 * k + 2 * k)
    assert steps == pytest.approx([expected] * 3, rel=0.01)


def test_plain_grows_quadratically():
    sizes = [_saved("plain", block_config=(depth,)) for depth in (8, 16, 24, 32)]
    steps = [later - earlier for earlier, later in pairwise(sizes)]
    assert steps[2] - steps[1] == pytest.approx(steps[1] - steps[0], rel=0.01)
    assert steps[2] > 1.3 * steps[1] > 1.69 * steps[0] * 0.9


def test_each_storage_counts_once():
    x = torch.ones(1000, requires_grad=True)
    assert saved_bytes(lambda: (x * x, x[:500] * x[500:])) == 4000
    assert saved_bytes(lambda: x + 1) == 0


def test_the_tensor_peak_is_the_most_held_at_once():
    before = [torch.empty(1000, 250)]

    def function():
        first = torch.empty(1000, 1000)
        second = torch.empty(500, 1000)
        del first
        return second + torch.empty(250, 1000).sum() + len(before)

    assert tensor_peak(function) == pytest.approx(6 * 10**6, rel=0.01)
    assert tensor_peak(lambda: None) == 0
    assert tensor_peak(lambda: (before.clear(), torch.empty(1000, 250))) == 10**6


def test_checkpointing_s_peak_is_torch_s():
    layers = [nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh()]
    chain = [nn.Sequential(*layers) for _ in range(8)]
    x = torch.randn(1024, 256, requires_grad=True)

    def step(run):
        y = x
        for module in chain:
            y = run(module, y)
        y.sum().backward()

    def theirs(module, y):
        return torch_checkpoint(module, y, use_reentrant=False)

    step(theirs)
    peaks = [tensor_peak(lambda run=run: step(run)) for run in (checkpoint, theirs)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.02)


def test_the_process_peak_is_the_growth_of_a_fresh_process():
    code = """
import torch
from efficient_densenet.memory import measure
torch.ones(2 * 10**6).sum()
print(*measure(lambda: torch.ones(10**7).sum()), *measure(lambda: torch.ones(10**7).sum()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    tensor, process, tensor_again, process_again = map(int, done.stdout.split())
    assert tensor == tensor_again == pytest.approx(4 * 10**7, rel=0.01)
    assert process == pytest.approx(4 * 10**7, rel=0.3)
    assert process_again < 10**7  # the mark was there already


def test_the_first_run_is_the_warm_up():
    held = []
    peaks = measure(lambda: held or held.append(torch.ones(10**6)))
    assert peaks.tensor == 0
    assert peaks == (peaks.tensor, peaks.process)


def test_no_process_peak_where_the_system_does_not_tell(monkeypatch):
    monkeypatch.setattr(memory, "high_water_mark", lambda device: None)
    assert measure(lambda: torch.ones(1000)).process is None


def test_without_a_proc_file_system_the_high_water_mark_is_getrusage_s(monkeypatch):
    monkeypatch.setattr(memory.Path, "exists", lambda path: False)
    assert 10**7 < memory.high_water_mark() < 10**12
    monkeypatch.setitem(sys.modules, "resource", None)
    assert memory.high_water_mark() is None
