"""What runs on a GPU: the script, CUDA graphs as methods, the check of gradients and the profile of a step."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import gradient_check
import profile_step
import pytest
import rows as results
import torch
import worker
from methods import METHODS, choose
from settings import Setting
from test_benchmarks import _restore_threads_and_precision  # noqa: F401 (a fixture)
from torch.autograd import DeviceType

from efficient_densenet import kernels

ROOT = Path(__file__).parents[1]
TINY = Setting("densenet_bc_10_4", 2, 8, "float32", "contiguous", "cpu", 1)
TINY_OPTIONS = {"model": TINY.model, "batch_size": 2, "image_size": 8, "device": "cpu"}


def test_cuda_graphs_are_left_out_without_a_gpu(capsys):
    names = ["shared", "graph_plain", "graph_shared"]
    assert choose(names, "densenet121") == ["plain", "shared"]
    assert "graph_shared left out: CUDA graphs need a GPU, and the device is cpu" in capsys.readouterr().out
    assert choose(names, "densenet121", "cuda:0") == ["plain", *names]
    assert all(METHODS[name].as_cuda_graph == name.startswith("graph") for name in METHODS)


def test_a_row_names_the_kernels_that_theshared_engine_runs(monkeypatch):
    assert worker.Training("plain", TINY).prepare()["kernels"] == ""
    with_numba = kernels.numba_supports(torch.empty(1))
    assert worker.Training("shared", TINY).prepare()["kernels"] == ("Numba" if with_numba else "portable")
    monkeypatch.setattr(kernels, "numba_supports", lambda values: False)
    assert worker.Training("torchvision_converted", TINY).prepare()["kernels"] == "portable"


def test_a_timed_step_makes_gradients_anew_and_one_for_memory_adds_them_up():
    training = worker.Training("plain", TINY)
    training.step()
    first = training.model.classifier.weight.grad.clone()
    training.step()
    torch.testing.assert_close(training.model.classifier.weight.grad, first)
    training._backward(training.images, training.labels, 1.0)
    torch.testing.assert_close(training.model.classifier.weight.grad, 2 * first)


def test_a_cuda_graph_is_prepared_by_its_first_steps_and_the_capture(monkeypatch):
    class Graph:
        def __init__(self, backward, parameters):
            self.backward, self.parameters = backward, list(parameters)

        def __call__(self, images, labels, loss_scale):
            calls.append([parameter.grad for parameter in self.parameters])
            return self.backward(images, labels, loss_scale)

    calls = []
    monkeypatch.setattr(worker, "CudaGraphBackward", Graph)
    training = worker.Training("graph_shared", TINY)
    answer = training.prepare()
    assert len(calls) == worker.WARM_UP_STEPS + 2
    assert all(grad is None for grads in calls for grad in grads)
    size = sum(parameter.numel() * 4 for parameter in training.model.parameters())
    assert answer["tensor_peak"] > worker.Training("shared", TINY).prepare()["tensor_peak"] + size / 2
    assert answer["first_step_s"] > training.last_seconds > 0


def test_files_without_the_column_of_kernels_are_read(tmp_path):
    columns = [name for name in results.COLUMNS if name != "kernels"]
    path = tmp_path / "old.csv"
    path.write_text(",".join(columns) + "\n" + ",".join(f"a {name}" for name in columns) + "\n")
    (row,) = results.read(path)
    assert (row["method"], row["kernels"], row["commit"]) == ("a method", "", "a commit")
    results.merge(path, [row])
    assert results.read(path) == [row]
    path.write_text(",".join(columns[1:]) + "\n")
    assert results.read(path) == []


def test_gradients_that_differ_by_more_than_rounding_fail(monkeypatch, capsys):
    gradient_check.check(**TINY_OPTIONS, precision="float32,bf16")
    assert capsys.readouterr().out.count("error of shared's gradients") == 2

    def gradients(method, setting, double=False):
        found = correct(method, setting, double)
        return [each * 1.01 for each in found] if method == "shared" else found

    correct = gradient_check._gradients
    monkeypatch.setattr(gradient_check, "_gradients", gradients)
    with pytest.raises(SystemExit, match="gradients differ by more than rounding: shared in float32"):
        gradient_check.check(**TINY_OPTIONS)


def test_gradients_are_compared_with_plain_where_float64_does_not_fit(monkeypatch, capsys):
    def double(self):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.nn.Module, "double", double)
    gradient_check.check(**TINY_OPTIONS)
    assert "of plain's 0.00e+00 (float64 did not fit: beside plain)" in capsys.readouterr().out


def test_a_profile_lists_what_takes_longest(tmp_path):
    profile_step.profile(**TINY_OPTIONS, methods="shared", folder=str(tmp_path))
    texts = {path.stem.rpartition("_")[2]: path.read_text() for path in tmp_path.iterdir()}
    assert texts.keys() == {"plain", "shared"}
    for text in texts.values():
        heading, times, _, total, *lines = text.splitlines()
        assert "densenet_bc_10_4, batch 2, float32" in heading
        assert re.fullmatch(r"a step: [\d.]+ ms, of which the host takes [\d.]+ ms until .*", times)
        assert re.fullmatch(r"\d+ operations a step, together [\d.]+ ms:", total)
        assert len(lines) == profile_step.NUM_KERNELS
        shares = [float(re.search(r"([\d.]+)%", line)[1]) for line in lines]
        assert shares == sorted(shares, reverse=True)


def test_a_profile_of_a_gpu_lists_kernels_and_not_what_launched_them():
    class Event(SimpleNamespace):
        __hash__ = object.__hash__

    times = {"aten::mm": (DeviceType.CPU, 400), "sgemm": (DeviceType.CUDA, 100), "copy": (DeviceType.CUDA, 300)}
    events = [
        Event(key=key, device_type=device, count=2, self_device_time_total=time, self_cpu_time_total=9)
        for key, (device, time) in times.items()
    ]
    total, *lines = profile_step.longest(events, on_gpu=True)
    assert total == "4 kernels a step, together 0.40 ms:"
    assert [line.split() for line in lines] == [
        ["0.300", "ms", "75.0%", "2", "×", "copy"],
        ["0.100", "ms", "25.0%", "2", "×", "sgemm"],
    ]


def _run_on_gpu_sh(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    script = ["bash", str(ROOT / "benchmarks" / "on_gpu.sh"), *arguments]
    environment = os.environ | {"PYTHON": sys.executable} | environment
    return subprocess.run(script, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.exhaustive
def test_a_dry_run_of_the_gpu_script(tmp_path):
    done = _run_on_gpu_sh("--dry-run", OUT=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    plain, shared, channels_last = results.read(
        tmp_path / f"cpu_torch{torch.__version__.split('+')[0]}_{TINY.model}_2.csv"
    )
    assert channels_last["layout"] == "channels_last"
    assert len(list(tmp_path.glob("profile_cpu_*.txt"))) == 2
    assert (plain["method"], plain["tensor_peak_over_plain"], plain["note"]) == ("plain", "1.000", "")
    assert float(shared["tensor_peak_over_plain"]) < 1
    assert float(shared["step_s_median"]) > 0
    assert float(shared["process_peak_mib"]) > 0


def test_the_gpu_script_needs_a_gpu():
    done = _run_on_gpu_sh(CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "error: no CUDA device" in done.stderr
    assert "--dry-run" in done.stderr
    assert _run_on_gpu_sh("--dry").returncode == 2


def test_an_interpreter_is_found_or_its_lack_is_a_sentence(tmp_path):
    for tool in ("bash", "dirname", "env"):
        (tmp_path / tool).symlink_to(f"/usr/bin/{tool}")
    done = _run_on_gpu_sh("--dry-run", PATH=str(tmp_path), PYTHON="")
    assert (done.returncode, "found neither python3 nor python" in done.stderr) == (1, True)
    (tmp_path / "python3").write_text("#!/bin/sh\nexit 7\n")
    (tmp_path / "python3").chmod(0o755)
    assert "error: no CUDA device that" in _run_on_gpu_sh(PATH=str(tmp_path), PYTHON="").stderr


def test_the_gpu_script_names_tests_methods_and_options_that_exist():
    script = (ROOT / "benchmarks" / "on_gpu.sh").read_text()
    assert (ROOT / re.search(r"tests/test_\w+\.py", script)[0]).exists()
    lists = re.findall(r"(?:^(?:graphs|compiled|others)=|--methods )([\w,]+)", script, re.MULTILINE)
    assert len(lists) > 5
    assert {name for names in lists for name in names.split(",") if name} <= METHODS.keys()
