"""The commands of benchmarks/: measuring by alternating processes, checking, profiling, and the script for a GPU."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import comparison
import options
import pytest
import rows as results
import run as benchmark
import table
import torch
import worker
from methods import METHODS, Setting, architecture, as_list, choose, expand, unavailable_reason

from efficient_densenet import DenseNet, kernels

ROOT = Path(__file__).parents[1]
TINY = Setting("densenet_bc_10_4", 2, 8, "float32", "contiguous", "cpu", 1)
TINY_OPTIONS = {"model": TINY.model, "batch_size": 2, "image_size": 8, "device": "cpu", "threads": 1}
MIB = 2**20


@pytest.fixture(autouse=True)
def _workers_import_the_package(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "demos"))))


@pytest.fixture(autouse=True)
def _restore_threads_and_precision():
    threads, precision, cudnn = torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.backends.cudnn
    flags = cudnn.benchmark, cudnn.benchmark_limit, cudnn.allow_tf32
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    cudnn.benchmark, cudnn.benchmark_limit, cudnn.allow_tf32 = flags


class FakeWorker:
    """Answers as a worker does, with fixed numbers. `log` lists the commands to all workers."""

    log: tuple[tuple[str, str], ...] = ()
    free = 10_000
    errors: dict[str, str] = {}  # noqa: RUF012 (each test sets its own)

    def __init__(self, method: str, *_: object) -> None:
        self.method = method

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def receive(self) -> dict:
        return {}

    def stop(self) -> None:
        pass

    def request(self, command: str) -> dict:
        type(self).log += ((self.method, command),)
        if command in self.errors.get(self.method, ""):
            raise comparison.MethodError(comparison.OUT_OF_MEMORY)
        if command == "free":
            return {"free": self.free}
        if command == "step":
            return {"seconds": 2.0 if self.method == "plain" else 1.0, "host_seconds": 0.5}
        return {"tensor_peak": 1000 * MIB, "process_peak": 8000, "first_step_s": 0.5, "allocator": "system"}


@pytest.fixture
def fake(monkeypatch):
    fresh = type("Fake", (FakeWorker,), {"log": (), "errors": {}})
    monkeypatch.setattr(comparison, "WorkerProcess", fresh)
    monkeypatch.setattr(comparison, "PAUSE", 0)
    return fresh


@pytest.mark.parametrize(
    ("free", "groups"),
    [
        (10**12, [["plain", "shared", "timm"], ["plain", "compile_plain"]]),
        (1000, [["plain", "shared"], ["plain", "timm"], ["plain", "compile_plain"]]),
    ],
)
def test_methods_that_fit_in_memory_together_take_steps_in_turn(free, groups, fake):
    """A method with a compiler is prepared after the others are measured."""
    fake.free = free
    measurements = comparison.Comparison(["plain", "shared", "timm", "compile_plain"], rounds=2).run(TINY)
    prepared: set[str] = set()
    expected = []
    for group in groups:
        expected += [(method, "prepare") for method in group if method not in prepared]
        expected += [(method, "step") for method in group] * 2
        prepared.update(group)
    assert [entry for entry in fake.log if entry[1] != "free"] == expected
    assert (measurements["shared"].times, measurements["shared"].ratios) == ([1.0, 1.0], [0.5, 0.5])
    assert len(measurements["plain"].times) == 2 * len(groups)


@pytest.mark.parametrize("command", ["prepare", "step"])
@pytest.mark.parametrize("method", ["plain", "shared"])
def test_out_of_memory_is_noted_in_the_row_and_the_others_have_times(method, command, fake):
    fake.errors = {method: command}
    measurements = comparison.Comparison(["plain", "shared", "timm"], rounds=2).run(TINY)
    rows = {row["method"]: row for row in results.make(TINY, measurements)}
    assert (rows[method]["note"], rows[method]["step_s_median"], rows[method]["device"]) == ("out of memory", "", "cpu")
    assert measurements["timm"].times == [1.0, 1.0]
    assert rows["timm"]["time_over_plain_median"] == ("" if method == "plain" else "0.500")


def test_a_run_measures_and_writes_rows(tmp_path):
    benchmark.run(**TINY_OPTIONS, methods="shared", rounds=1, folder=str(tmp_path))
    (path,) = tmp_path.iterdir()
    plain, shared = results.read(path)
    assert (plain["method"], plain["tensor_peak_over_plain"], plain["note"]) == ("plain", "1.000", "")
    ratio = float(shared["step_s_median"]) / float(plain["step_s_median"])
    assert float(shared["time_over_plain_median"]) == pytest.approx(ratio, abs=0.05 * ratio)
    assert 0 < float(shared["tensor_peak_over_plain"]) < 1
    assert float(shared["process_peak_mib"]) > 0


def test_a_task_counts_gradients_where_a_step_makes_them():
    task = worker.Task("shared", TINY)
    answer = task.prepare()
    gradients = 4 * sum(parameter.numel() for parameter in task.model.parameters())
    assert gradients < answer["tensor_peak"] < answer["step_peak"] <= answer["tensor_peak"] + gradients < 10 * MIB
    assert answer["first_step_s"] > 0
    assert 0 < task.time_step()["host_seconds"] <= task.last_seconds
    task.step()
    first = task.model.classifier.weight.grad.clone()
    task.step()
    torch.testing.assert_close(task.model.classifier.weight.grad, first)
    task._accumulate()
    torch.testing.assert_close(task.model.classifier.weight.grad, 2 * first)


def test_a_worker_reports_errors():
    too_small = replace(TINY, image_size=1, layout="channels_last")
    with comparison.WorkerProcess("plain", too_small, timeout=60) as process:
        assert process.receive() == {}
        assert process.request("free")["free"] > MIB
        with pytest.raises(comparison.MethodError, match=r"ValueError: found \w+ of 1×1"):
            process.request("prepare")
        process.timeout = 0.1
        with pytest.raises(comparison.MethodError, match=r"no answer within 0\.1 s"):
            process.receive()
        process.timeout = 60
        process.process.kill()
        with pytest.raises(comparison.MethodError, match="out of memory"):
            process.request("free")


@pytest.mark.parametrize(("precision", "layout"), [("bf16", "contiguous"), ("fp16", "channels_last")])
def test_a_task_has_the_precision_and_layout(precision, layout):
    task = worker.Task("plain", replace(TINY, precision=precision, layout=layout))
    outputs: list[torch.Tensor] = []
    task.model.classifier.register_forward_hook(lambda module, args, output: outputs.append(output))
    task.step()
    assert outputs[0].dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert task.images.is_contiguous(memory_format=worker.LAYOUTS[layout])
    task = worker.Task("plain_channels_last", TINY)
    assert task.images.is_contiguous(memory_format=torch.channels_last)


def test_a_row_names_the_kernels_that_the_shared_engine_runs(monkeypatch):
    assert worker.Task("plain", TINY).prepare()["kernels"] == ""
    with_numba = kernels.numba_supports(torch.empty(1))
    assert worker.Task("shared", TINY).prepare()["kernels"] == ("Numba" if with_numba else "portable")
    monkeypatch.setattr(kernels, "numba_supports", lambda values: False)
    assert worker.Task("torchvision_converted", TINY).prepare()["kernels"] == "portable"


@pytest.mark.parametrize("method", [name for name in METHODS if name.startswith(("torchvision", "timm"))])
@pytest.mark.parametrize("small_inputs", [True, False])
def test_other_libraries_densenets_compute_the_same(method, small_inputs):
    pytest.importorskip(METHODS[method].package)
    arguments = architecture("densenet_bc_16_4") | {"small_inputs": small_inputs}
    theirs, ours = METHODS[method].build(arguments).double(), DenseNet(**arguments, efficient="plain").double()
    values = iter(ours.state_dict().values())
    theirs.load_state_dict({name: next(values) for name in theirs.state_dict()})
    assert next(values, None) is None
    images = torch.randn(2, 3, 32, 32, dtype=torch.double)
    torch.testing.assert_close(theirs(images), ours(images))


# Checks and profiles


def test_methods_are_checked(monkeypatch, capsys, tmp_path):
    answers = iter(
        {"error": error, "error_of_plain": 1e-3, "truth": "float64"} for error in (1e-3, 2.2e-3, float("nan"))
    )
    monkeypatch.setattr(benchmark, "ask", lambda *_, **__: next(answers))
    with pytest.raises(ValueError, match="by more than rounding: checkpoint in float32, official in float32"):
        benchmark.run(**TINY_OPTIONS, what="check", methods="shared,checkpoint,official")
    assert "shared: error 1.00e-03, plain's 1.00e-03, beside plain in float64" in capsys.readouterr().out


@pytest.mark.parametrize("inference", [False, True])
def test_an_error_is_relative_to_plain_in_float64(inference, monkeypatch):
    setting = replace(TINY, inference=inference)
    answer = worker.check("shared", setting)
    assert answer["truth"] == "float64"
    assert 0 < answer["error"] < 1e-5
    assert 0 < answer["error_of_plain"] < 1e-5
    truth = [torch.tensor([3.0]), torch.tensor([0.0, 4.0])]
    assert worker._distance([torch.tensor([3.0]), torch.tensor([0.0, 4.5])], truth) == pytest.approx(0.1)
    monkeypatch.setattr(worker, "_distance", lambda found, truth: [len(found), len(truth)])
    counts = worker.check("shared", setting)
    num_gradients = len(list(worker.Task("plain", setting).model.parameters()))
    assert counts["error"] == ([1, 1] if inference else [num_gradients] * 2)


def test_a_profile_lists_what_takes_longest(monkeypatch, tmp_path):
    def ask(method, setting, command, **_):
        task = worker.Task(method, setting)
        return task.prepare() | {command: task.profile()}

    monkeypatch.setattr(benchmark, "ask", ask)  # in this process
    benchmark.run(**TINY_OPTIONS, what="profile", methods="plain", folder=str(tmp_path))
    (path,) = tmp_path.glob("profile_cpu_*_plain.txt")
    heading, times, _, total, *lines = path.read_text().splitlines()
    assert "densenet_bc_10_4, batch 2, float32" in heading
    assert re.fullmatch(r"a step: [\d.]+ ms, of which the host takes [\d.]+ ms until .*", times)
    assert re.fullmatch(r"\d+ operations a step, together [\d.]+ ms:", total)
    shares = [float(re.search(r"([\d.]+)%", line)[1]) for line in lines]
    assert shares == sorted(shares, reverse=True)


# Options


def test_methods_that_cannot_run_are_left_out_with_a_reason(monkeypatch, capsys):
    large = replace(TINY, model="densenet121")
    assert choose(["timm", "shared"], replace(TINY, model="densenet_40_12")) == ["plain", "shared"]
    assert "timm left out: timm" in capsys.readouterr().out
    assert choose(["graph_shared"], large) == ["plain"]
    assert "graph_shared left out: CUDA graphs need a GPU, and the device is cpu" in capsys.readouterr().out
    assert choose(["graph_shared"], replace(large, device="cuda:0")) == ["plain", "graph_shared"]
    assert choose(["graph_shared"], replace(large, device="cuda:0", inference=True)) == ["plain"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert unavailable_reason("torchvision", large) == "torchvision is not installed"
    with pytest.raises(ValueError, match="unknown method 'share': there are plain, shared"):
        choose(["share"], large)


def test_expand_returns_all_combinations():
    settings = expand("densenet_bc_40_12,densenet121", (8, 64), precision="float32,bf16", layout="channels_last")
    assert len(settings) == 8
    assert {setting.image_size for setting in settings if setting.model == "densenet121"} == {224}
    assert (settings[0].batch_size, settings[0].image_size, settings[0].threads) == (8, 32, torch.get_num_threads())
    assert Setting(**asdict(settings[0])) == settings[0]
    assert as_list("a, b") == ["a", "b"]
    assert as_list(8) == [8]
    assert architecture("densenet_bc_250_12") == architecture("densenet_bc_100_12") | {"block_config": (41,) * 3}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "densenet_bc_101_12"}, "unknown model 'densenet_bc_101_12': .* depth of 6n"),
        ({"precision": "tf32", "device": "cpu"}, "'tf32' needs a CUDA device, found 'cpu'"),
        ({"precision": "int8"}, "unknown precision 'int8': there are float32"),
        ({"device": "cuda"}, "no CUDA device for --device cuda: run it on a machine with one"),
        ({"layout": "NHWC"}, "unknown layout 'NHWC': there are contiguous, channels_last"),
        ({"sweep": "width"}, "unknown sweep 'width': there are depth, batch"),
        ({"what": "speed"}, "unknown measurement 'speed': there are time, check, profile"),
        ({"allocator": "nonesuch"}, "no libnonesuch.*install it"),
        ({"allocator": "/nowhere/libtcmalloc.so"}, "no file at /nowhere"),
    ],
)
def test_invalid_options_are_errors(arguments, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=message):
        benchmark.run(**arguments)


def test_options_are_parsed(monkeypatch, capsys):
    words = ["--batch_size", "8,64", "--model=densenet121", "--rounds", "3", "--inference"]
    positional, parsed = options.parse_arguments(benchmark.run, words)
    expected = {"batch_size": (8, 64), "model": "densenet121", "rounds": 3, "device": "", "inference": True}
    assert (positional, parsed | expected) == ([], parsed)
    assert options.parse_arguments(table.table, ["a.csv", "b.csv"])[0] == ["a.csv", "b.csv"]
    monkeypatch.setattr(sys, "argv", ["run.py", "--sweep", "width"])
    with pytest.raises(SystemExit, match="error: unknown sweep 'width'"):
        options.run_command(benchmark.run)


# The script for a GPU


def _run_on_gpu_sh(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    script = ["bash", str(ROOT / "benchmarks" / "on_gpu.sh"), *arguments]
    environment = os.environ | {"PYTHON": sys.executable} | environment
    return subprocess.run(script, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.exhaustive
def test_a_dry_run_of_the_gpu_script(tmp_path):
    done = _run_on_gpu_sh("--dry-run", OUT=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["on_gpu.tar.gz", "summary.txt"]
    parts = (tmp_path / "summary.txt").read_text().splitlines()
    assert len(parts) == 8
    assert all(": done in " in part or " passed, 0 lines of failures; " in part for part in parts), parts
    unpacked = tmp_path / "unpacked"
    shutil.unpack_archive(tmp_path / "on_gpu.tar.gz", unpacked, filter="data")
    path = unpacked / f"cpu_torch{torch.__version__.split('+')[0]}_{TINY.model}_2.csv"
    assert [row["layout"] for row in results.read(path)] == ["contiguous", "contiguous", "channels_last"]
    assert len(list(unpacked.glob("profile_cpu_*.txt"))) == 2
    assert len(list((unpacked / "on_gpu").iterdir())) == 9  # what each part has printed, and the summary


def test_the_gpu_script_says_what_a_killed_part_had_finished(tmp_path):
    script = (ROOT / "benchmarks" / "on_gpu.sh").read_text()
    functions = script[: script.index("measure() {")].replace('cd "$(dirname "$0")/.."', f"cd {tmp_path}")
    part = 'part "a part" 1 bash -c "echo first; sleep 60"\npart another 5 bash -c "exit 4"\nmv "$logs" out'
    (tmp_path / "script").write_text(f"{functions}\n{part}")
    done = subprocess.run(["bash", "script"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "a part: killed after 1 s; its last line: first\n" in done.stdout
    assert "another: failed with status 4" in done.stdout
    assert (tmp_path / "out" / "1_a_part.txt").read_text() == "first\n"


def test_the_gpu_script_needs_a_gpu(tmp_path):
    """And an interpreter: the one named in PYTHON, or python3 or python."""
    assert _run_on_gpu_sh("--dry").returncode == 2
    for tool in ("bash", "dirname", "env"):
        (tmp_path / tool).symlink_to(f"/usr/bin/{tool}")
    done = _run_on_gpu_sh("--dry-run", PATH=str(tmp_path), PYTHON="")
    assert (done.returncode, "found neither python3 nor python" in done.stderr) == (1, True)
    (tmp_path / "python3").write_text("#!/bin/sh\nexit 7\n")
    (tmp_path / "python3").chmod(0o755)
    done = _run_on_gpu_sh(PATH=str(tmp_path), PYTHON="")
    assert done.returncode == 1
    assert "error: no CUDA device that" in done.stderr
    assert "--dry-run" in done.stderr


def test_the_gpu_script_names_tests_methods_and_options_that_exist():
    script = (ROOT / "benchmarks" / "on_gpu.sh").read_text()
    assert all((ROOT / path).exists() for path in re.findall(r"tests/test_\w+\.py", script))
    lists = re.findall(r"(?:^(?:graphs|compiled|others)=|--methods )([\w,]+)", script, re.MULTILINE)
    assert len(lists) > 5
    assert {name for names in lists for name in names.split(",") if name} <= METHODS.keys()
