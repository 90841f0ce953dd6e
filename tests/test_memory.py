"""Bytes saved for backward, counted on the meta device and compared with formulas; and measured peaks of memory."""

import json
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from efficient_densenet import DenseNet, create_model
from efficient_densenet.kernels import numba_supports
from efficient_densenet.memory import measure, peaks, saved_bytes, tensor_peak

MIB = 2**20


def _saved(engine: str, batch: int = 256, **overrides) -> int:
    model = create_model("densenet_bc_100_12", efficient=engine, **overrides).to("meta")
    images, labels = torch.empty(batch, 3, 32, 32, device="meta"), torch.empty(batch, dtype=torch.long, device="meta")
    return saved_bytes(lambda: F.cross_entropy(model(images), labels))


def test_plain_saves_what_the_well_known_code_saves():
    """gpleiss/efficient_densenet_pytorch saves 8,507 MiB, so the reference is not wasteful."""
    assert _saved("plain") == pytest.approx(8507 * MIB, rel=0.01)


@pytest.mark.parametrize("engine", ["official", "checkpoint"])
def test_growth_with_depth_is_linear(engine):
    """A layer saves its k new channels and twice its bottleneck of 4k channels, whatever its number of inputs."""
    sizes = [_saved(engine, block_config=(depth,)) for depth in (8, 16, 24, 32)]
    steps = [later - earlier for earlier, later in pairwise(sizes)]
    pixels, k = 256 * 32 * 32 * 4, 12
    # The output of the block, and the last norm's output, save each layer's channels once more.
    expected = 8 * pixels * (k + 2 * 4 * k + 2 * k)
    assert steps == pytest.approx([expected] * 3, rel=0.01)


@pytest.mark.parametrize("keep", [False, True])
def test_layers_share_the_memory_of_their_bottlenecks_and_gradients(keep, tmp_path):
    """Where each allocated its own, glibc's heap grew: what lay beside one kept the next from taking its place."""
    if not numba_supports(torch.empty(1)):
        pytest.skip("PyTorch's operations allocate their results themselves")

    def allocated(depth: int) -> tuple[int, int]:
        """How many memories of a bottleneck's size the step allocates, and of the size of a layer's output."""
        model = DenseNet(growth_rate=8, block_config=(depth,), efficient="shared", keep_bottleneck=keep)
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
            model(torch.randn(4, 3, 16, 16)).sum().backward()
        profile.export_chrome_trace(str(tmp_path / "trace.json"))
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        sizes = [event["args"]["Bytes"] for event in events if event.get("name") == "[memory]"]
        return sizes.count(4 * 16 * 16 * (4 * 8) * 4) - keep * depth, sizes.count(4 * 16 * 16 * 8 * 4) - depth

    assert allocated(2) == allocated(7) > (0, 0)


def test_each_storage_counts_once():
    x = torch.ones(1000, requires_grad=True)
    assert saved_bytes(lambda: (x * x, x[:500] * x[500:])) == 4000
    assert saved_bytes(lambda: x + 1) == 0


def test_the_tensor_peak_is_the_maximum_of_allocated_memory():
    before = [torch.empty(1000, 250)]

    def function():
        first = torch.empty(1000, 1000)
        second = torch.empty(500, 1000)
        del first
        return second + torch.empty(250, 1000).sum() + len(before)

    assert tensor_peak(function) == pytest.approx(6 * 10**6, rel=0.01)
    assert tensor_peak(lambda: None) == 0
    assert tensor_peak(lambda: (before.clear(), torch.empty(1000, 250))) == 10**6


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


def test_the_high_water_mark_where_there_is_no_proc(monkeypatch):
    """The mark of getrusage counts; without that there is none."""
    monkeypatch.setattr(peaks.Path, "exists", lambda path: False)
    assert 10**7 < peaks.high_water_mark() < 10**12
    monkeypatch.setitem(sys.modules, "resource", None)
    assert peaks.high_water_mark() is None
    assert measure(lambda: torch.ones(1000)).process is None
