"""The model of a step on a GPU: what it estimates from the counts, what it measures where it can, and its program."""

import csv
import dataclasses
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import gpu_devices
import gpu_measured
import gpu_model
import gpu_trace
import pytest
import torch
from gpu_devices import DEVICES, Estimate, estimate, estimate_graph, fused
from gpu_kernels import Traffic
from gpu_model import COUNTING_DEVICE
from gpu_step import trace_step
from gpu_trace import Computation, StepTrace, TracingMode
from options import parse_arguments
from settings import Setting
from test_benchmarks import _restore_threads_and_precision  # noqa: F401 (a fixture)

pytest.importorskip("triton", reason="needs Triton")

ROOT = Path(__file__).parents[1]
TINY = Setting("densenet_bc_16_4", 3, 8, "float32", "contiguous", "cuda", 1)
L2 = COUNTING_DEVICE.l2_bytes
LIMITS = "multiprocessors", "shared_memory", "shared_memory_of_a_block"


def computation(name, nbytes, launches=1, flops=0, dtype=torch.float32):
    return Computation(name, "forward", False, launches, (Traffic(nbytes),), flops, dtype if flops else None)


def test_the_time_of_a_step_is_that_of_the_slower_side():
    device = DEVICES["A100"]
    moving, multiplying, small = 2.039e9, 156e9, 1
    trace = StepTrace(
        [computation("copy_", moving), computation("mm", 1, flops=multiplying), computation("add", small)], 10
    )
    expected = 1e-3 / gpu_devices.BANDWIDTH_FRACTION + 1e-3 / gpu_devices.FLOPS_FRACTION["tf32"]
    estimated = estimate(trace, device, "tf32")
    assert estimated.device == pytest.approx(expected + 2.5e-6)
    assert estimated.host == pytest.approx(3 * 7e-6 + 10 * 2e-6)
    assert estimate_graph(trace, device, "tf32").device == pytest.approx(expected + 1.5e-6)
    assert Estimate(1, 2).seconds == Estimate(2, 1).seconds == 2


def test_products_of_float32_are_exact_under_autocast_too():
    trace = StepTrace([computation("mm", 1, flops=67e12)])
    assert estimate(trace, DEVICES["H200"], "bf16").device == pytest.approx(1 / 0.6)


def test_compiled_plain_moves_less():
    names = "convolution", "relu_", "threshold_backward", "native_batch_norm", "add_", "cat"
    trace = StepTrace([computation(name, 1000) for name in names])
    trace.computations[4] = Computation("add_", "backward", False, 1, (Traffic(1000),) * 3)
    compiled = fused(trace)
    assert [each.name for each in compiled.computations] == ["convolution", "native_batch_norm", "add_", "cat"]
    assert compiled.launches() == 4
    assert compiled.bytes(L2) == 4000


def test_the_program_prints_tables_and_writes_a_file(capsys, tmp_path):
    gpu_model.model_gpu(TINY.model, 2, 8, precision="tf32", kernels=True, folder=str(tmp_path))
    printed = capsys.readouterr().out
    assert "| counted | ATen | Triton | launches |" in printed
    assert "| `shared`, counted | launches | traffic | of the step |" in printed
    assert "| estimated step | H200 | A100 SXM 80GB | RTX 4090 | T4 |" in printed
    with (tmp_path / f"gpu_model_{TINY.model}_2_tf32.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 4 * 5
    assert [row["method"] for row in rows[:5]] == list(gpu_model.LABELS)
    assert all(float(row["estimated_ms"]) > 0 for row in rows)
    here = gpu_model.device_here()
    assert {row["device_name"] for row in rows if row["measured_ms"]} == ({here.name} if here else set())


@pytest.mark.parametrize(("words", "expected"), [(["--kernels"], True), (["--kernels", "False"], False), ([], False)])
def test_the_list_of_kernels_is_a_flag_without_fire_too(words, expected):
    assert parse_arguments(gpu_model.model_gpu, words)[1]["kernels"] is expected


def test_a_device_without_the_precision_is_left_out():
    rows = gpu_model.times(dataclasses.replace(TINY, precision="bf16"), trace_step(TINY, "plain"))
    assert {row.device.name for row in rows} == {"H200", "A100 SXM 80GB", "RTX 4090"}


def test_the_tables_of_a_page_are_written_again(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_model, "DEVICES", {"A100": DEVICES["A100"]})
    options, page = f"--model {TINY.model} --batch_size 2,3 --image_size 8", tmp_path / "page.md"
    command, end = f"<!-- python benchmarks/gpu_model.py {options} -->\n", "<!-- end of the estimates -->\n\nText.\n"
    page.write_text(f"# Title\n\n{command}An old table.\n{end}")
    gpu_model.model_gpu(page=str(page))
    written = page.read_text()
    assert written.startswith(f"# Title\n\n{command}\n{TINY.model}, batch 2, images of 8×8, tf32, contiguous:\n\n| ")
    assert written.endswith(f" |\n\n{end}")
    assert written.count("| counted |") == written.count("| estimated step | A100 SXM 80GB |") == 2
    assert "An old table" not in written


@pytest.mark.exhaustive
def test_the_estimates_in_the_docs_are_what_the_program_prints():
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    assert gpu_model.COMMAND.search(text)
    assert gpu_model.rewritten(text) == text


def test_the_kernels_choose_their_tiles_for_the_device(monkeypatch):
    """Where they ask for its limits by `device_limits`."""
    module, seen = gpu_trace.triton_modules()[0], []
    limits = NamedTuple("DeviceLimits", [(name, int) for name in LIMITS])
    monkeypatch.setattr(module, "DeviceLimits", limits, raising=False)
    monkeypatch.setattr(module, "device_limits", lambda device: None, raising=False)
    launch = TracingMode.add_launch
    monkeypatch.setattr(
        TracingMode,
        "add_launch",
        lambda *each, **constants: seen.append(module.device_limits(0)) or launch(*each, **constants),
    )
    trace_step(TINY, "shared", device=DEVICES["A100"])
    assert set(seen) == {limits(108, 164 * 1024, 163 * 1024)}


class StubbedCuda:
    """What a measurement asks of CUDA, on the CPU: every step takes two milliseconds, a replay calls what was
    captured."""

    def __init__(self, monkeypatch):
        self.captures, self.replays = 0, 0
        stubs = {"Event": self.event, "Stream": self.stream, "CUDAGraph": self.cuda_graph, "graph": self.graph}
        stubs |= {"stream": nullcontext, "current_stream": self.stream, "synchronize": lambda: None}
        for name, stub in stubs.items():
            monkeypatch.setattr(torch.cuda, name, stub)

    def event(self, enable_timing):
        assert enable_timing
        return SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda end: 2.0)

    def stream(self):
        return SimpleNamespace(wait_stream=lambda stream: None)

    def cuda_graph(self):
        def replay():
            self.replays += 1

        return SimpleNamespace(replay=replay)

    def graph(self, graph):
        self.captures += 1
        return nullcontext()


@pytest.mark.parametrize("method", ["plain", "graph_plain"])
def test_measurements_on_a_gpu(method, monkeypatch):
    cuda, setting = StubbedCuda(monkeypatch), dataclasses.replace(TINY, device="cpu")
    seconds, peak = gpu_measured.measure_method(method, setting)
    assert seconds == 0.002
    if method == "plain":
        assert (cuda.captures, cuda.replays) == (0, 0)
        assert peak > 100_000
    else:
        assert (cuda.captures, cuda.replays, peak) == (1, gpu_measured.TIMED_STEPS, None)
