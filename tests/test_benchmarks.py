"""The benchmarks: methods, options, interleaved steps and workers."""

import importlib.util
import sys
from pathlib import Path

import allocator as allocators
import comparison
import options
import plot
import pytest
import rows as results
import run as benchmark
import table
import torch
import worker
from methods import METHODS, choose, unavailable_reason
from settings import Setting, architecture, as_list, expand

from efficient_densenet import DenseNet

ROOT = Path(__file__).parents[1]
TINY = Setting("densenet_bc_10_4", 2, 8, "float32", "contiguous", "cpu", 1)
MIB = 2**20


@pytest.fixture(autouse=True)
def _workers_import_the_package(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


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
        self.stop()

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
            return {"seconds": 2.0 if self.method == "plain" else 1.0}
        return {"tensor_peak": 1000 * MIB, "process_peak": 8000, "first_step_s": 0.5, "allocator": "system"}


@pytest.fixture
def fake(monkeypatch):
    fresh = type("Fake", (FakeWorker,), {"log": (), "errors": {}})
    monkeypatch.setattr(comparison, "WorkerProcess", fresh)
    monkeypatch.setattr(comparison, "PAUSE", 0)
    return fresh


def test_steps_are_interleaved_after_all_methods_are_prepared(fake):
    fake.free = 10**12
    measurements = comparison.Comparison(["plain", "shared", "timm"], rounds=2).run(TINY)
    assert [method for method, command in fake.log if command == "prepare"] == ["plain", "shared", "timm"]
    assert [method for method, command in fake.log if command == "step"] == ["plain", "shared", "timm"] * 2
    assert measurements["shared"].times == [1.0, 1.0]
    assert measurements["shared"].ratios == [0.5, 0.5]


def test_methods_that_do_not_fit_in_memory_together_are_measured_in_groups(fake):
    fake.free = 1000
    measurements = comparison.Comparison(["plain", "shared", "timm"], rounds=1).run(TINY)
    steps = [method for method, command in fake.log if command in ("prepare", "step")]
    assert steps == ["plain", "shared", "plain", "shared", "timm", "plain", "timm"]
    assert len(measurements["plain"].times) == 2


@pytest.mark.parametrize("command", ["prepare", "step"])
def test_out_of_memory_is_noted_in_the_row(fake, command):
    fake.errors = {"shared": command}
    measurements = comparison.Comparison(["plain", "shared", "timm"], rounds=2).run(TINY)
    assert measurements["shared"].note == "out of memory"
    assert measurements["timm"].ratios == [0.5, 0.5]
    row = results.make(TINY, measurements)[1]
    assert (row["note"], row["step_s_median"], row["device"]) == ("out of memory", "", "cpu")


def test_if_plain_fails_the_others_have_times(fake):
    fake.errors = {"plain": "prepare"}
    measurements = comparison.Comparison(["plain", "shared"], rounds=2).run(TINY)
    assert (measurements["shared"].times, measurements["shared"].ratios) == ([1.0, 1.0], [])
    assert results.make(TINY, measurements)[1]["time_over_plain_median"] == ""


def test_compiled_methods_are_prepared_after_the_others_are_measured(fake):
    fake.free = 10**12
    comparison.Comparison(["plain", "shared", "compile_plain", "compile_shared"], rounds=1).run(TINY)
    commands = [(method, command) for method, command in fake.log if command != "free"]
    assert commands.index(("shared", "step")) < commands.index(("compile_plain", "prepare"))
    assert commands.index(("compile_plain", "step")) < commands.index(("compile_shared", "prepare"))


def test_a_sweep_writes_memory_to_one_file(fake, tmp_path):
    benchmark.run(sweep="depth", device="cpu", folder=str(tmp_path))
    (path,) = tmp_path.iterdir()
    rows = results.read(path)
    assert path.name.endswith("_depth_sweep.csv")
    assert {plot.depth(row) for row in rows} == {40, 70, 100, 130, 160, 190, 220, 250}
    assert {row["batch_size"] for row in rows} == {"8"}
    assert {row["rounds"] for row in rows} == {"0"}
    benchmark.run(sweep="batch", batch_size=(2, 4), methods="plain", device="cpu", folder=str(tmp_path))
    batches = next(tmp_path.glob("*_densenet_bc_100_12_batch_sweep.csv"))
    assert [row["batch_size"] for row in results.read(batches)] == ["2", "4"]


def test_an_interrupted_run_writes_its_measurements(fake, monkeypatch, tmp_path):
    def interrupted(self, method):
        raise SystemExit

    monkeypatch.setattr(comparison.Comparison, "_fits_another", lambda self: False)
    monkeypatch.setattr(comparison.Comparison, "_step", interrupted)
    with pytest.raises(SystemExit):
        benchmark.run(TINY.model, 2, methods="plain,shared,checkpoint", device="cpu", folder=str(tmp_path))
    (path,) = tmp_path.iterdir()
    plain, shared, checkpoint = results.read(path)
    assert plain["tensor_peak_mib"] == shared["tensor_peak_mib"] == "1000.0"
    assert (plain["note"], checkpoint["note"]) == ("", "not measured: the run was ended before")


def test_a_worker_measures_and_reports_errors():
    training = worker.Training("shared", TINY)
    answer = training.prepare()
    gradients = 4 * sum(parameter.numel() for parameter in training.model.parameters())
    assert gradients < answer["tensor_peak"] < answer["step_peak"] <= answer["tensor_peak"] + gradients < 10 * MIB
    assert answer["first_step_s"] > 0
    assert training.time_step() > 0
    too_small = Setting(TINY.model, 2, 1, "float32", "channels_last", "cpu", 1)
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
def test_a_worker_trains_with_the_precision_and_layout(precision, layout):
    training = worker.Training("plain", Setting("densenet_bc_10_4", 2, 8, precision, layout, "cpu", 1))
    outputs: list[torch.Tensor] = []
    training.model.classifier.register_forward_hook(lambda module, args, output: outputs.append(output))
    training.step()
    assert outputs[0].dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert training.images.is_contiguous(memory_format=worker.LAYOUTS[layout])


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_compiled_methods_train():
    peaks = {
        method: worker.Training(method, TINY).prepare()["tensor_peak"] for method in METHODS if "compile" in method
    }
    assert 0 < peaks["compile_shared"] < peaks["compile_plain"]


@pytest.fixture(autouse=True)
def _restore_threads_and_precision():
    threads, precision, cudnn = torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.backends.cudnn
    flags = cudnn.benchmark, cudnn.benchmark_limit, cudnn.allow_tf32
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    cudnn.benchmark, cudnn.benchmark_limit, cudnn.allow_tf32 = flags


def test_out_of_memory_errors_are_recognized():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**55)
    assert worker.is_out_of_memory(raised.value)
    assert worker.is_out_of_memory(torch.OutOfMemoryError())
    assert not worker.is_out_of_memory(ValueError())


@pytest.mark.parametrize(
    "method", ["torchvision", "torchvision_efficient", "torchvision_converted", "timm", "timm_efficient"]
)
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


def test_methods_that_cannot_run_are_left_out_with_a_reason(monkeypatch, capsys):
    assert choose(["timm", "shared"], "densenet_40_12") == ["plain", "shared"]
    assert "timm left out: timm" in capsys.readouterr().out
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchvision" else True)
    assert unavailable_reason("torchvision", "densenet121") == "torchvision is not installed"
    assert unavailable_reason("shared", "densenet121") is None
    with pytest.raises(ValueError, match="unknown method 'share': there are plain, shared"):
        choose(["share"], "densenet121")


def test_expand_returns_all_combinations():
    settings = expand("densenet_bc_40_12,densenet121", (8, 64), precision="float32,bf16", layout="channels_last")
    assert len(settings) == 8
    assert {setting.image_size for setting in settings if setting.model == "densenet121"} == {224}
    assert (settings[0].batch_size, settings[0].image_size, settings[0].threads) == (8, 32, torch.get_num_threads())
    assert as_list("a, b") == ["a", "b"]
    assert as_list(8) == [8]


def test_architectures_of_any_depth():
    assert architecture("densenet_bc_250_12") == architecture("densenet_bc_100_12") | {"block_config": (41,) * 3}
    assert DenseNet(**architecture("densenet_bc_16_4")).features.conv0.out_channels == 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": "densenet_bc_101_12"}, "unknown model 'densenet_bc_101_12': .* depth of 6n"),
        ({"precision": "tf32", "device": "cpu"}, "'tf32' needs a CUDA device, found 'cpu'"),
        ({"precision": "int8"}, "unknown precision 'int8': there are float32"),
        ({"layout": "NHWC"}, "unknown layout 'NHWC': there are contiguous, channels_last"),
        ({"sweep": "width"}, "unknown sweep 'width': there are depth, batch"),
        ({"allocator": "nonesuch"}, "no libnonesuch.*install it"),
        ({"allocator": "/nowhere/libtcmalloc.so"}, "no file at /nowhere"),
    ],
)
def test_invalid_options_are_errors(arguments, message):
    with pytest.raises(ValueError, match=message):
        benchmark.run(**arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_cuda_device_is_an_error():
    with pytest.raises(ValueError, match="no CUDA device for --device cuda: run it on a machine with one"):
        benchmark.run(device="cuda")


def test_an_allocator_is_found_by_name(monkeypatch, tmp_path):
    for name in ("libtcmalloc_minimal.so.4.5.10", "libtcmalloc_minimal.so.4", "libtcmalloc_minimal_debug.so"):
        (tmp_path / name).touch()
    monkeypatch.setattr(allocators, "FOLDERS", (str(tmp_path),))
    assert allocators.find("tcmalloc") == str(tmp_path / "libtcmalloc_minimal.so.4")
    assert allocators.find(str(tmp_path / "libtcmalloc_minimal.so.4")).endswith(".so.4")
    assert allocators.find("") == allocators.find("system") == ""
    assert worker.allocator() in ("system", "tcmalloc", "jemalloc", "mimalloc")


def test_options_are_parsed_without_fire(monkeypatch, capsys):
    positional, parsed = options.parse_arguments(
        benchmark.run, ["--batch_size", "8,64", "--model=densenet121", "--rounds", "3"]
    )
    assert positional == []
    assert (parsed["batch_size"], parsed["model"], parsed["rounds"], parsed["device"]) == (
        (8, 64),
        "densenet121",
        3,
        "",
    )
    assert options.parse_arguments(table.table, ["a.csv", "b.csv"])[0] == ["a.csv", "b.csv"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["run.py", "--sweep", "width"])
    with pytest.raises(SystemExit, match="error: unknown sweep 'width'"):
        options.run_command(benchmark.run)
    assert "fire is not installed" in capsys.readouterr().out
