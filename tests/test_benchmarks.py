"""The benchmarks: taking turns, the files they write, the README's table and the figures; the script for GPUs, dry."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import allocator as allocators
import options
import plot
import pytest
import rows as results
import run as benchmark
import table
import torch
import turns
import worker
from methods import METHODS, choose, hindrance
from settings import Setting, architecture, expand, many

from efficient_densenet import DenseNet

ROOT = Path(__file__).parents[1]
TINY = Setting("densenet_bc_10_4", 2, 8, "float32", "contiguous", "cpu", 1)
MIB = 2**20


@pytest.fixture(autouse=True)
def _the_package_is_found(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


class FakeWorker:
    """Answers as a worker does, from a script; what is asked of all of them is in `log`."""

    log: tuple[tuple[str, str], ...] = ()
    free = 10_000
    errors: dict[str, str] = {}  # noqa: RUF012 (each test sets its own)

    def __init__(self, method: str, *_: object) -> None:
        self.method = method

    def __enter__(self):
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def answer(self) -> dict:
        return {}

    def end(self) -> None:
        pass

    def ask(self, command: str) -> dict:
        type(self).log += ((self.method, command),)
        if command in self.errors.get(self.method, ""):
            raise turns.MethodError(turns.OUT_OF_MEMORY)
        if command == "free":
            return {"free": self.free}
        if command == "step":
            return {"seconds": 2.0 if self.method == "plain" else 1.0}
        return {"tensor_peak": 1000 * MIB, "process_peak": 8000, "first_step_s": 0.5, "allocator": "system"}


@pytest.fixture
def fake(monkeypatch):
    fresh = type("Fake", (FakeWorker,), {"log": (), "errors": {}})
    monkeypatch.setattr(turns, "Worker", fresh)
    monkeypatch.setattr(turns, "PAUSE", 0)
    return fresh


def test_methods_take_turns_after_all_are_prepared(fake):
    fake.free = 10**12
    measured = turns.Comparison(["plain", "shared", "timm"], rounds=2).run(TINY)
    assert [method for method, command in fake.log if command == "prepare"] == ["plain", "shared", "timm"]
    assert [method for method, command in fake.log if command == "step"] == ["plain", "shared", "timm"] * 2
    assert measured["shared"].times == [1.0, 1.0]
    assert measured["shared"].ratios == [0.5, 0.5]


def test_where_memory_has_no_room_for_another_they_join_plain_in_groups(fake):
    fake.free = 1000
    measured = turns.Comparison(["plain", "shared", "timm"], rounds=1).run(TINY)
    steps = [method for method, command in fake.log if command in ("prepare", "step")]
    assert steps == ["plain", "shared", "plain", "shared", "timm", "plain", "timm"]
    assert len(measured["plain"].times) == 2


@pytest.mark.parametrize("command", ["prepare", "step"])
def test_out_of_memory_is_a_row_that_says_so_and_no_end(fake, command):
    fake.errors = {"shared": command}
    measured = turns.Comparison(["plain", "shared", "timm"], rounds=2).run(TINY)
    assert measured["shared"].note == "out of memory"
    assert measured["timm"].ratios == [0.5, 0.5]
    row = results.make(TINY, measured)[1]
    assert (row["note"], row["step_s_median"], row["device"]) == ("out of memory", "", "cpu")


def test_without_plain_the_others_still_have_times(fake):
    fake.errors = {"plain": "prepare"}
    measured = turns.Comparison(["plain", "shared"], rounds=2).run(TINY)
    assert (measured["shared"].times, measured["shared"].ratios) == ([1.0, 1.0], [])
    assert results.make(TINY, measured)[1]["time_over_plain_median"] == ""


def test_preparing_the_compiled_one_does_not_keep_the_others_waiting(fake):
    fake.free = 10**12
    turns.Comparison(["plain", "shared", "compile"], rounds=1).run(TINY)
    asked = [(method, command) for method, command in fake.log if command != "free"]
    assert asked.index(("shared", "step")) < asked.index(("compile", "prepare"))


def test_a_sweep_measures_memory_into_one_file(fake, tmp_path):
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


def test_a_run_that_is_ended_writes_what_it_knows(fake, monkeypatch, tmp_path):
    def ended(self, method):
        raise SystemExit

    monkeypatch.setattr(turns.Comparison, "_has_room", lambda self: False)
    monkeypatch.setattr(turns.Comparison, "_step", ended)
    with pytest.raises(SystemExit):
        benchmark.run(TINY.model, 2, methods="plain,shared,checkpoint", device="cpu", folder=str(tmp_path))
    (path,) = tmp_path.iterdir()
    plain, shared, checkpoint = results.read(path)
    assert plain["tensor_peak_mib"] == shared["tensor_peak_mib"] == "1000.0"
    assert (plain["note"], checkpoint["note"]) == ("", "not measured: the run was ended before")


def test_a_worker_measures_and_says_what_goes_wrong():
    training = worker.Training("shared", TINY)
    answer = training.prepare()
    assert 0 < answer["tensor_peak"] < 10 * MIB
    assert answer["first_step_s"] > 0
    assert training.seconds() > 0
    too_small = Setting(TINY.model, 2, 1, "float32", "channels_last", "cpu", 1)
    with turns.Worker("plain", too_small, patience=60) as process:
        assert process.answer() == {}
        assert process.ask("free")["free"] > MIB
        with pytest.raises(turns.MethodError, match="ValueError: found pictures of 1×1"):
            process.ask("prepare")
        process.patience = 0.1
        with pytest.raises(turns.MethodError, match=r"no answer within 0\.1 s"):
            process.answer()
        process.patience = 60
        process.process.kill()
        with pytest.raises(turns.MethodError, match="out of memory"):
            process.ask("free")


@pytest.mark.parametrize(("precision", "layout"), [("bf16", "contiguous"), ("fp16", "channels_last")])
def test_precision_and_layout_are_the_training_s(precision, layout):
    training = worker.Training("plain", Setting("densenet_bc_10_4", 2, 8, precision, layout, "cpu", 1))
    kept: list[torch.Tensor] = []
    training.model.classifier.register_forward_hook(lambda module, args, output: kept.append(output))
    training.step()
    assert kept[0].dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    assert training.images.is_contiguous(memory_format=worker.LAYOUTS[layout])


@pytest.fixture(autouse=True)
def _threads_and_precision_stay():
    threads, precision, cudnn = torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.backends.cudnn
    flags = cudnn.benchmark, cudnn.allow_tf32
    yield
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)
    cudnn.benchmark, cudnn.allow_tf32 = flags


def test_out_of_memory_is_recognised():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**55)
    assert worker.is_out_of_memory(raised.value)
    assert worker.is_out_of_memory(torch.OutOfMemoryError())
    assert not worker.is_out_of_memory(ValueError())


@pytest.mark.parametrize(
    "method", ["torchvision", "torchvision_efficient", "torchvision_converted", "timm", "timm_efficient"]
)
@pytest.mark.parametrize("small_inputs", [True, False])
def test_other_libraries_densenets_are_the_same_network(method, small_inputs):
    pytest.importorskip(METHODS[method].package)
    arguments = architecture("densenet_bc_16_4") | {"small_inputs": small_inputs}
    theirs, ours = METHODS[method].build(arguments).double(), DenseNet(**arguments, efficient="plain").double()
    values = iter(ours.state_dict().values())
    theirs.load_state_dict({name: next(values) for name in theirs.state_dict()})
    assert next(values, None) is None
    images = torch.randn(2, 3, 32, 32, dtype=torch.double)
    torch.testing.assert_close(theirs(images), ours(images))


def test_what_cannot_run_is_left_out_with_a_line(monkeypatch, capsys):
    assert choose(["timm", "shared"], "densenet_40_12") == ["plain", "shared"]
    assert "timm left out: timm" in capsys.readouterr().out
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchvision" else True)
    assert hindrance("torchvision", "densenet121") == "torchvision is not installed"
    assert hindrance("shared", "densenet121") is None
    with pytest.raises(ValueError, match="unknown method 'share': there are plain, shared"):
        choose(["share"], "densenet121")


def test_settings_are_every_combination():
    settings = expand("densenet_bc_40_12,densenet121", (8, 64), precision="float32,bf16", layout="channels_last")
    assert len(settings) == 8
    assert {setting.image_size for setting in settings if setting.model == "densenet121"} == {224}
    assert (settings[0].batch_size, settings[0].image_size, settings[0].threads) == (8, 32, torch.get_num_threads())
    assert many("a, b") == ["a", "b"]
    assert many(8) == [8]


def test_bc_networks_of_any_depth():
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
def test_what_cannot_be_measured_is_said_in_a_sentence(arguments, message):
    with pytest.raises(ValueError, match=message):
        benchmark.run(**arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_no_cuda_device_is_said_in_a_sentence():
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


def _measured(mib: float, *times: float, **others: str) -> turns.Measured:
    facts = {"tensor_peak": int(mib * MIB), "process_peak": int(mib * 2 * MIB), "first_step_s": 0.5}
    names = {"device_name": "A processor", "allocator": "system"} | others
    return turns.Measured(**facts, **names, times=list(times), ratios=[seconds / 2 for seconds in times])


@pytest.fixture
def file(tmp_path):
    """A file of measurements with two allocators, and one of a depth sweep."""
    for name in ("system", "tcmalloc"):
        plain, shared = _measured(2000, 1, 2, 3, allocator=name), _measured(171.4, 0.5, 0.25, 1, allocator=name)
        rows = results.make(TINY, {"plain": plain, "shared": shared, "timm": turns.Measured(note="out of memory")})
        results.merge(tmp_path / "cpu_torch0_densenet_bc_10_4_2.csv", rows)
    for depth in (10, 16, 22):
        setting = Setting(f"densenet_bc_{depth}_12", 8, 32, "float32", "contiguous", "cpu", 2)
        rows = results.make(setting, {"plain": _measured(depth**2), "shared": _measured(depth)})
        results.merge(tmp_path / "cpu_torch0_depth_sweep.csv", rows)
    return tmp_path / "cpu_torch0_densenet_bc_10_4_2.csv"


def test_rows_carry_quartiles_ratios_and_provenance(file):
    rows = results.read(file)
    assert [(row["method"], row["allocator"]) for row in rows[:4]] == [
        ("plain", "system"),
        ("shared", "system"),
        ("timm", "system"),
        ("plain", "tcmalloc"),
    ]
    shared = rows[1]
    assert (shared["tensor_peak_mib"], shared["tensor_peak_over_plain"]) == ("171.4", "0.086")
    assert (shared["step_s_q1"], shared["step_s_median"], shared["step_s_q3"]) == ("0.37500", "0.50000", "0.75000")
    assert (shared["time_over_plain_median"], shared["rounds"]) == ("0.250", "3")
    assert (shared["device_name"], shared["torch"]) == ("A processor", torch.__version__)
    assert shared["commit"] == results.commit()


def test_a_file_keeps_the_rows_of_other_configurations(file):
    again = results.make(TINY, {"plain": _measured(3000)})
    results.merge(file, again)
    rows = results.read(file)
    assert len(rows) == 6
    assert [row["tensor_peak_mib"] for row in rows if row["method"] == "plain"] == ["3000.0", "2000.0"]


def test_files_are_named_by_device_torch_model_and_batch():
    version = torch.__version__.split("+")[0]
    assert results.file_name(TINY, "A processor") == f"cpu_torch{version}_densenet_bc_10_4_2.csv"
    on_gpu = Setting("densenet121", 64, 224, "tf32", "contiguous", "cuda", 8)
    assert results.file_name(on_gpu, "NVIDIA H200") == f"nvidia_h200_torch{version}_densenet121_64.csv"
    assert results.file_name(TINY, "", "depth") == f"cpu_torch{version}_depth_sweep.csv"
    assert results.file_name(TINY, "", "batch") == f"cpu_torch{version}_densenet_bc_10_4_batch_sweep.csv"


def test_the_table_shows_what_the_file_holds(file):
    text = table.render([str(file)], allocator="tcmalloc")
    assert text.splitlines()[2:] == [
        "| `plain`: torch modules, everything kept | 1 CPU thread, tcmalloc | 2 | 2,000 MiB (1.00×) | 2.00 s (1.00×) |",
        "| `shared`: the features once, nothing concatenated | 1 CPU thread, tcmalloc | 2 | 171 MiB (0.09×) "
        "| 500 ms (0.25×) |",
        "| `timm`: timm's DenseNet | 1 CPU thread, tcmalloc | 2 | out of memory | – |",
    ]
    assert len(table.render([str(file)], methods="plain,shared").splitlines()) == 6
    with pytest.raises(ValueError, match="no row with"):
        table.render([str(file)], precision="bf16")


def test_a_table_in_a_readme_is_compared_with_its_file(file, tmp_path):
    command = f"{file} --allocator system --methods plain,shared"
    shown = table.render([str(file)], allocator="system", methods="plain,shared")
    readme = f"# Title\n\n<!-- python benchmarks/table.py {command} -->\n{shown}\n\nText | that is no table\n"
    assert table.outdated(readme) == []
    assert table.outdated(readme.replace("171", "170")) == [command]
    (tmp_path / "README.md").write_text(readme.replace("171", "170"))
    with pytest.raises(SystemExit, match=r"differs from: python benchmarks/table\.py"):
        table.table(check=str(tmp_path / "README.md"))


def test_the_readme_s_tables_are_what_was_measured():
    assert table.outdated((ROOT / "README.md").read_text()) == []


def test_figures_are_small_and_name_their_data(file, tmp_path):
    pytest.importorskip("matplotlib")
    sweep = tmp_path / "cpu_torch0_depth_sweep.csv"
    for path in (file, sweep):
        plot.save(path, tmp_path)
        drawn = (tmp_path / f"{path.stem}.svg").read_text()
        assert plot.fingerprint(path) in drawn
        assert len(drawn) < 100_000
        assert ">plain</text>" in drawn
        assert ">shared</text>" in drawn
    lines = plot.draw(sweep).axes[0].lines
    assert [list(line.get_xdata()) for line in lines] == [[10, 16, 22]] * 2
    assert list(lines[0].get_ydata()) == [100.0, 256.0, 484.0]
    assert len(plot.draw(file).axes) == 2  # one for each allocator


def test_every_committed_figure_is_drawn_from_its_committed_file():
    for figure in plot.FIGURES.glob("*.svg"):
        assert plot.fingerprint(results.RESULTS / f"{figure.stem}.csv") in figure.read_text()
    assert set(plot.COLOURS) == set(METHODS)


def test_options_are_read_without_fire(monkeypatch, capsys):
    words, read = options.read(benchmark.run, ["--batch_size", "8,64", "--model=densenet121", "--rounds", "3"])
    assert words == []
    assert (read["batch_size"], read["model"], read["rounds"], read["device"]) == ((8, 64), "densenet121", 3, "")
    assert options.read(table.table, ["a.csv", "b.csv"])[0] == ["a.csv", "b.csv"]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["run.py", "--sweep", "width"])
    with pytest.raises(SystemExit, match="error: unknown sweep 'width'"):
        options.start(benchmark.run)
    assert "fire is not installed" in capsys.readouterr().out


def _on_gpu(*words: str, **environment: str) -> subprocess.CompletedProcess:
    script = ["bash", str(ROOT / "benchmarks" / "on_gpu.sh"), *words]
    environment = os.environ | {"PYTHON": sys.executable} | environment
    return subprocess.run(script, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.exhaustive
def test_the_gpu_script_runs_dry_on_the_cpu(tmp_path):
    done = _on_gpu("--dry-run", OUT=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.iterdir()
    plain, shared = results.read(path)
    assert (plain["method"], plain["tensor_peak_over_plain"], plain["note"]) == ("plain", "1.000", "")
    assert float(shared["tensor_peak_over_plain"]) < 1
    assert float(shared["step_s_median"]) > 0
    assert float(shared["process_peak_mib"]) > 0


def test_the_gpu_script_says_that_it_needs_a_gpu():
    done = _on_gpu(CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert "error: no CUDA device" in done.stderr
    assert "--dry-run" in done.stderr
    assert _on_gpu("--dry").returncode == 2
