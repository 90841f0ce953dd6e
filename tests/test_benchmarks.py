"""Each command of benchmarks/ runs on something tiny, and what is committed is what it made."""

import contextlib
import itertools
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import again
import communication
import comparison
import convergence
import crossover
import gpu_counts
import plot
import pytest
import rows as results
import run as benchmark
import table
import torch
import worker
from comparison import Measurement
from methods import LAYOUTS, Setting, architecture
from options import parse_arguments
from PIL import Image

from efficient_densenet import DenseNet
from efficient_densenet.engine.recording import programs, slab
from efficient_densenet.memory import tensor_peak

ROOT = Path(__file__).parents[1]
TINY = Setting("densenet_bc_10_4", 2, 8, "float32", "contiguous", "cpu", 1)
TINY_OPTIONS = {"model": TINY.model, "batch_size": 2, "image_size": 8, "device": "cpu", "threads": 1}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def _workers_import_the_package_and_settings_are_restored(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "demos"))))
    monkeypatch.setattr(results, "commit", lambda: "1234567")
    precision, cudnn = torch.get_float32_matmul_precision(), torch.backends.cudnn
    flags = cudnn.benchmark, cudnn.benchmark_limit, cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(precision)
    cudnn.benchmark, cudnn.benchmark_limit, cudnn.allow_tf32 = flags


@pytest.mark.exhaustive
def test_a_run_measures_and_its_file_is_shown_and_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    benchmark.run(**TINY_OPTIONS, methods="shared", rounds=1, folder=str(tmp_path))
    (path,) = tmp_path.iterdir()
    plain, shared = results.read(path)
    assert (plain["method"], plain["tensor_peak_over_plain"], plain["note"]) == ("plain", "1.000", "")
    assert 0 < float(shared["tensor_peak_over_plain"]) < 1
    assert float(shared["process_peak_mib"]) > 0
    ratio = float(shared["step_s_median"]) / float(plain["step_s_median"])
    assert float(shared["time_over_plain_median"]) == pytest.approx(ratio, rel=0.05)
    measured = f"{table.devices(plain)}, with PyTorch {torch.__version__.partition('+')[0]}, {plain['date']}"
    shown = table.render([str(path)])
    assert f"Measured on {plain['device_name']}, {measured}, commit {plain['commit'].removesuffix('+')}" in shown
    assert "| model, batch | method | memory | time |" in shown
    page = f"<!-- python benchmarks/table.py {path} -->\n{shown}\n\nText | that is no table\n"
    assert table.outdated(page) == []
    assert table.outdated(page.replace("`shared`", "`plain`")) == [str(path)]
    assert table.refreshed(page.replace("`shared`", "`plain`")) == page == table.refreshed(page.replace(shown, ""))
    benchmark.run(**TINY_OPTIONS, methods="shared", rounds=1, missing=True, folder=str(tmp_path))
    assert capsys.readouterr().out.endswith("  measured at this commit\n")
    plot.save(path, tmp_path)
    assert plot.fingerprint(path) in path.with_suffix(".svg").read_text()


def test_the_crossover_is_measured(tmp_path):
    path, point = tmp_path / "cpu_crossover.csv", "densenet_bc_10_4 2 x 4^2"
    with contextlib.suppress(ValueError):  # two tiny steps may take any time
        crossover.crossover(point, seconds=0.01, file=str(path))
    rows = results.read_others(path, "point")
    assert {row["point"] for row in rows} == {point}
    results.write(path, [row | {"time": "1.01"} for row in rows])
    with pytest.raises(ValueError, match=r"slower than plain: densenet_bc_10_4 2 x 4\^2 \w+ 1.01"):
        crossover.crossover(point, missing=True, file=str(path))


def test_what_a_commit_has_measured_is_not_measured_again(tmp_path, monkeypatch):
    path, methods = tmp_path / "cpu.csv", ["plain", "shared"]
    name = worker.device_name(torch.device("cpu"))
    here = Measurement(tensor_peak=8, times=[0.1, 0.2], ratios=[1.0, 1.0], device_name=name)
    measured = {method: replace(here) for method in methods}
    results.merge(path, results.make(TINY, {"plain": replace(here, device_name="another")}), missing=True)
    assert not results.has(path, TINY, ["plain"], rounds=2)
    results.merge(path, results.make(TINY, measured), missing=True)
    assert [row["device_name"] for row in results.read(path)] == [name] * 2  # the other processor's is gone
    assert results.has(path, TINY, methods, rounds=2)
    assert not results.has(path, TINY, methods, rounds=3)
    assert not results.has(path, TINY, [*methods, "official"], rounds=2)
    assert not results.has(path, replace(TINY, devices=2), methods, rounds=2)
    monkeypatch.setattr(results, "commit", lambda: "7654321")
    assert not results.has(path, TINY, methods, rounds=2)
    measured["shared"].note = f"{results.INTERRUPTED}: the run was ended before"
    results.merge(path, results.make(replace(TINY, batch_size=3), measured), missing=True)
    assert [row["commit"] for row in results.read(path)] == ["7654321"] * 2  # no row of another commit stays
    assert not results.has(path, replace(TINY, batch_size=3), methods, rounds=2)


def test_tables_of_uncommitted_code_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(results, "commit", lambda: "1234567+")
    path, page = tmp_path / "cpu.csv", tmp_path / "page.md"
    measured = {"plain": Measurement(tensor_peak=8, device_name=worker.device_name(torch.device("cpu")))}
    results.merge(path, results.make(TINY, measured))
    assert not results.has(path, TINY, ["plain"], rounds=0)
    page.write_text(text := f"<!-- python benchmarks/table.py {path} -->\n")
    with pytest.raises(ValueError, match="rows were measured with uncommitted changes: measure them at a clean tree"):
        table.table(write=str(page))
    assert page.read_text() == text
    with pytest.raises(ValueError, match="found uncommitted changes of what is measured"):
        again.again()


def test_one_command_measures_every_row_of_a_processor(capsys):
    made = set()
    for command in again.MEASUREMENTS:
        program, *words = shlex.split(command)
        if program == "run.py":
            benchmark.run(
                **parse_arguments(benchmark.run, words)[1] | {"what": "plan", "allocator": "", "device": "cpu"}
            )
            made |= set(re.findall(r"^  (\S+\.csv): plain, ", capsys.readouterr().out, re.MULTILINE))
        else:
            assert list(results.RESULTS.glob(f"*{Path(program).stem}*.csv")), program
    assert made == {path.name for path in results.RESULTS.glob("cpu_*.csv") if results.read(path)}


@pytest.mark.exhaustive
def test_runs_of_several_engines_are_kept_once_a_commit(tmp_path, monkeypatch):
    for split, label in itertools.product(("train", "test"), "ab"):
        (tmp_path / "data" / split / label).mkdir(parents=True)
        for i in range(12):
            Image.new("RGB", (32, 32), (20 * i, 0, 0)).save(tmp_path / "data" / split / label / f"{i}.png")
    monkeypatch.setattr(convergence, "SETTINGS", convergence.SETTINGS.replace("40", "10"))
    monkeypatch.setattr(convergence, "FOLDER", tmp_path / "kept")
    settings = {"epochs": 2, "seeds": 1, "images": 10, "allocator": "system", "runs": str(tmp_path / "runs")}
    convergence.converge(str(tmp_path / "data"), **settings)
    (tmp_path / "data" / "train").rename(tmp_path / "gone")
    convergence.converge(str(tmp_path / "data"), **settings)  # reads nothing
    kept = {path.name: path.read_text() for path in (tmp_path / "kept").iterdir()}
    assert kept.keys() == {"measured.csv", *(f"{name}_seed0.csv" for name in convergence.ENGINES)}
    assert [len(text.splitlines()) for name, text in kept.items() if "seed" in name] == [3] * 3
    assert "1234567" in kept["measured.csv"]
    monkeypatch.setattr(results, "commit", lambda: "7654321")
    with pytest.raises(ValueError, match=r"data has no train/: give a folder with train/<class>/ and test/<class>/"):
        convergence.converge(str(tmp_path / "data"))


def test_the_memory_of_a_card_is_a_limit(tmp_path, monkeypatch):
    """Plain takes more than the card has; what is reserved is what PyTorch says, parameters included."""
    fractions = []
    replaced = {
        "get_device_properties": lambda _: SimpleNamespace(total_memory=160e9),
        "max_memory_reserved": lambda: 2**23,
    }
    replaced |= {"set_per_process_memory_fraction": fractions.append, "reset_peak_memory_stats": lambda: None}
    for name, function in replaced.items():
        monkeypatch.setattr(torch.cuda, name, function)
    prepare = worker.Task.prepare

    def run_out(task):
        if all(getattr(module, "engine", None) != "shared" for module in task.model.modules()):
            raise torch.OutOfMemoryError
        return prepare(task)

    monkeypatch.setattr(worker.Task, "prepare", run_out)
    benchmark.run(**TINY_OPTIONS, methods="shared", rounds=1, card_gb=8, folder=str(tmp_path))
    (path,) = tmp_path.iterdir()
    plain, shared = results.read(path)
    assert fractions == [0.05]
    assert (plain["note"], plain["step_s_median"]) == (comparison.OUT_OF_MEMORY, "")
    assert (shared["note"], shared["process_peak_mib"], shared["card_gb"]) == ("", "8.0", "8")
    assert "at most 8 GB" in table.render([str(path)])


def test_gradients_are_checked(monkeypatch):
    assert worker.check("shared", TINY)["error"] < 1e-5
    monkeypatch.setattr(benchmark, "ask", lambda *_, **__: worker.check("shared", TINY) | {"error": float("nan")})
    with pytest.raises(ValueError, match="by more than rounding: shared in float32"):
        benchmark.run(**TINY_OPTIONS, what="check", methods="shared")


# Without a GPU


def test_counts_of_a_step_on_a_gpu(capsys):
    pytest.importorskip("triton", reason="needs Triton")
    gpu_counts.count("densenet_bc_40_12", 64)
    plain, shared, portable = (line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:])
    ratios = [[float(re.search(r"\((.*)×\)", cell)[1]) for cell in each[4:]] for each in (shared, portable)]
    assert (plain[3], ratios[0][0] < 0.45, ratios[0][1] < 0.2) == ("0", True, True)
    assert (portable[3], ratios[1][0] < 1.5, ratios[1][1] < 0.3) == ("0", True, True)


@pytest.mark.exhaustive
def test_a_step_on_the_meta_device_launches_what_one_that_runs_does():
    pytest.importorskip("triton", reason="needs Triton")
    setting = Setting("densenet_bc_16_4", 2, 8, "float32", "channels_last", "cuda", 1)
    network = DenseNet(**architecture(setting.model), efficient="shared")
    network.to(DEVICE, memory_format=LAYOUTS[setting.layout])
    images = torch.randn(2, 3, 8, 8, device=DEVICE).contiguous(memory_format=LAYOUTS[setting.layout])
    launched = gpu_counts.trace_step(network, images, run_kernels=True).launches
    assert all(parameter.grad.isfinite().all() for parameter in network.parameters())
    assert gpu_counts.trace(setting, "shared").launches == launched
    assert len(launched) > 20


@pytest.mark.exhaustive
def test_the_host_s_time_of_a_step_on_a_gpu(tmp_path, capsys):
    pytest.importorskip("triton", reason="needs Triton")
    import gpu_host

    path = tmp_path / "host.csv"
    for turn in (1, 3, 3):
        gpu_host.measure(TINY.model, batch_size=2, image_size=8, turn=turn, rounds=2, file=str(path))
    assert capsys.readouterr().out.startswith(f"{TINY.model}, ")
    rows = results.read_others(path, "turn")
    assert [row["turn"] for row in rows] == ["1", "3"]
    assert all(0 < float(row["time_over_plain_median"]) < 2 for row in rows)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_replayed_step_on_a_gpu_takes_the_memory_of_a_direct_one(dtype):
    """The second step is direct, the third is replayed. Before both there are gradients, which they replace."""
    pytest.importorskip("triton", reason="needs Triton")
    import gpu_host

    network, images = DenseNet(**architecture("densenet_bc_22_12"), efficient="shared"), torch.randn(128, 3, 32, 32)
    for function in lambda: gpu_host.step(network, images), lambda: network(images):
        programs.forget()
        with gpu_host.idle_launches(), torch.autocast("cpu", dtype, enabled=dtype is not None):
            function()
            peaks = [tensor_peak(function, torch.device("cpu")) for _ in range(3)]
        assert max(peaks[1:]) <= slab.SLACK * peaks[0] + slab.SMALL_SLACK


@pytest.mark.parametrize("wrapping", communication.WRAPPINGS)
def test_the_shared_engine_exchanges_no_more_than_plain(wrapping):
    with communication._processes(64):
        counts = [communication.count("densenet_bc_16_4", wrapping, engine, 8) for engine in ("shared", "plain")]
    assert 0 < counts[0].collectives <= counts[1].collectives
    assert 0 < counts[0].bytes <= counts[1].bytes
    if wrapping == "DDP":  # a ring reduces and gathers each gradient
        gradients = sum(parameter.nbytes for parameter in DenseNet(**architecture("densenet_bc_16_4")).parameters())
        assert counts[0].bytes == pytest.approx(2 * 63 / 64 * gradients)


def _on_gpu_sh(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    script = ["bash", str(ROOT / "benchmarks" / "on_gpu.sh"), *arguments]
    environment = os.environ | {"PYTHON": sys.executable} | environment
    return subprocess.run(script, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.exhaustive
def test_a_dry_run_of_the_gpu_script(tmp_path):
    """Every command is imported and parsed, and a wrong one is an error."""
    done = _on_gpu_sh("--dry-run", OUT=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": done in ") == done.stdout.count("\n== ") + 1 > 11
    assert "densenet121, batch 64, bf16, channels_last, 1 × cuda\n  cuda_torch" in done.stdout
    done = _on_gpu_sh("--dry-run", "fp16", "compiled", "check", "tiles", "train", OUT=str(tmp_path), EPOCHS="0")
    assert done.returncode == 1
    assert done.stderr == "did not succeed: train\n"
    assert "error: n_epochs is 0" in (tmp_path / "summary.txt").read_text()


def test_every_committed_figure_is_drawn_from_its_committed_files(tmp_path):
    pytest.importorskip("matplotlib")
    plot.plot(folder=str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in plot.FIGURES.glob("*.svg")}
    for figure in plot.FIGURES.glob("*.svg"):
        runs = results.RESULTS / figure.stem
        files = list(runs.glob("*_seed*.csv")) or [runs.parent / f"{figure.stem}.csv"]
        assert all(plot.fingerprint(path) in figure.read_text() for path in files)
