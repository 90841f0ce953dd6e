"""The rows, CSV files, tables and figures of the benchmarks."""

from dataclasses import replace
from pathlib import Path

import comparison
import plot
import pytest
import rows as results
import table
import torch
from methods import METHODS, Setting

ROOT = Path(__file__).parents[1]
TINY = Setting("densenet_bc_10_4", 2, 8, "float32", "contiguous", "cpu", 1)
MIB = 2**20


def _measurement(mib: float, *times: float, **others: str) -> comparison.Measurement:
    numbers = {"tensor_peak": int(mib * MIB), "process_peak": int(mib * 2 * MIB), "first_step_s": 0.5}
    names = {"device_name": "A processor", "allocator": "system"} | others
    return comparison.Measurement(**numbers, **names, times=list(times), ratios=[seconds / 2 for seconds in times])


@pytest.fixture
def file(tmp_path):
    """A file of measurements with two allocators, and one of a depth sweep."""
    for name in ("system", "tcmalloc"):
        plain, shared = _measurement(2000, 1, 2, 3, allocator=name), _measurement(171.4, 0.5, 0.25, 1, allocator=name)
        rows = results.make(
            TINY, {"plain": plain, "shared": shared, "timm": comparison.Measurement(note="out of memory")}
        )
        results.merge(tmp_path / "cpu_torch0_densenet_bc_10_4_2.csv", rows)
    for depth in (10, 16, 22):
        setting = Setting(f"densenet_bc_{depth}_12", 8, 32, "float32", "contiguous", "cpu", 2)
        rows = results.make(setting, {"plain": _measurement(depth**2), "shared": _measurement(depth)})
        results.merge(tmp_path / "cpu_torch0_depth_sweep.csv", rows)
    return tmp_path / "cpu_torch0_densenet_bc_10_4_2.csv"


def test_rows_carry_quartiles_ratios_and_provenance(file):
    rows = results.read(file)
    assert [row["method"] for row in rows] == ["plain", "shared", "timm"] * 2
    assert [row["allocator"] for row in rows[:4]] == ["system"] * 3 + ["tcmalloc"]
    shared = rows[1]
    assert (shared["tensor_peak_mib"], shared["tensor_peak_over_plain"]) == ("171.4", "0.086")
    assert (shared["step_s_q1"], shared["step_s_median"], shared["step_s_q3"]) == ("0.37500", "0.50000", "0.75000")
    assert (shared["time_over_plain_median"], shared["rounds"]) == ("0.250", "3")
    assert (shared["device_name"], shared["torch"]) == ("A processor", torch.__version__)
    assert shared["commit"] == results.commit()


def test_a_file_keeps_the_rows_of_other_configurations(file):
    again = results.make(TINY, {"plain": _measurement(3000)})
    results.merge(file, again)
    rows = results.read(file)
    assert len(rows) == 6
    assert [row["tensor_peak_mib"] for row in rows if row["method"] == "plain"] == ["3000.0", "2000.0"]


def test_files_of_earlier_versions_are_read(file):
    """With a method's old name, and without the column of kernels; one without other columns is written anew."""
    file.write_text(file.read_text().replace(",timm,", ",compile,"))
    assert [row["method"] for row in results.read(file)] == ["plain", "shared", "compile_plain"] * 2
    old = file.with_name("old.csv")
    columns = [name for name in results.COLUMNS if name != "kernels"]
    old.write_text(",".join(columns) + "\n" + ",".join(f"a {name}" for name in columns) + "\n")
    assert [(row["method"], row["kernels"]) for row in results.read(old)] == [("a method", "")]
    old.write_text(",".join(columns[1:]) + "\n")
    assert results.read(old) == []
    assert table.render([str(file)], methods="compile_plain").count("`compile_plain`") == 2


def test_files_are_named_by_device_torch_model_and_batch():
    version = torch.__version__.split("+")[0]
    assert results.stem(TINY, "A processor") == f"cpu_torch{version}_densenet_bc_10_4_2"
    assert results.stem(replace(TINY, inference=True), "") == f"cpu_torch{version}_inference_densenet_bc_10_4_2"
    on_gpu = Setting("densenet121", 64, 224, "tf32", "contiguous", "cuda", 8)
    assert results.stem(on_gpu, "NVIDIA H200") == f"nvidia_h200_torch{version}_densenet121_64"
    assert results.stem(TINY, "", "depth") == f"cpu_torch{version}_depth_sweep"
    assert results.stem(TINY, "", "batch") == f"cpu_torch{version}_densenet_bc_10_4_batch_sweep"


def test_the_table_shows_the_rows_of_the_file(file):
    text = table.render([str(file)], allocator="tcmalloc")
    assert text.splitlines()[2:5] == [
        "| densenet_bc_10_4, 2 | `plain` | 1 CPU thread, tcmalloc | 2,000 MiB (1.00×) | 2.00 s (1.00×) |",
        "| densenet_bc_10_4, 2 | `shared` | 1 CPU thread, tcmalloc | 171 MiB (0.09×) | 500 ms (0.25×) |",
        "| densenet_bc_10_4, 2 | `timm` | 1 CPU thread, tcmalloc | out of memory | – |",
    ]
    assert text.endswith(
        f"\n\nMeasured on A processor with PyTorch {torch.__version__.partition('+')[0]}, "
        f"{results.read(file)[0]['date']}, commit {results.commit().replace('+', ' with uncommitted changes')}."
    )
    assert len(table.render([str(file)], methods="plain,shared").splitlines()) == 8
    with pytest.raises(ValueError, match="no row with"):
        table.render([str(file)], precision="bf16")


def test_a_table_in_a_readme_is_compared_with_its_file(file, tmp_path):
    command = f"{file} --allocator system --methods plain,shared"
    shown = table.render([str(file)], allocator="system", methods="plain,shared")
    readme = f"# Title\n\n<!-- python benchmarks/table.py {command} -->\n{shown}\n\nText | that is no table\n"
    assert table.outdated(readme) == []
    assert table.outdated(readme.replace("171", "170")) == [command]
    assert table.outdated(readme.replace("A processor", "Another")) == [command]
    (tmp_path / "README.md").write_text(readme.replace("171", "170"))
    with pytest.raises(SystemExit, match=r"differs from: python benchmarks/table\.py"):
        table.table(check=str(tmp_path / "README.md"))


def test_figures_are_small_and_contain_their_fingerprint(file, tmp_path):
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


def test_every_committed_figure_is_drawn_from_its_committed_files():
    for figure in plot.FIGURES.glob("*.svg"):
        runs = results.RESULTS / figure.stem
        files = list(runs.glob("*.csv")) or [runs.parent / f"{figure.stem}.csv"]
        assert all(plot.fingerprint(path) in figure.read_text() for path in files)
    assert set(plot.COLORS) == set(METHODS)


def test_a_table_of_runs_shows_medians_and_ranges(tmp_path):
    header = "epoch,valid_error,test_error,seconds,peak_memory_mib\n"
    rows = header + "1,0.5,,1200,100.5\n2,0.4,,9000,100.5\n3,0.2,{},1100,120.2\n"
    for name, error in ("shared_seed0", 0.2), ("shared_seed1", 0.1), ("shared_seed2", 0.3), ("plain_seed0", 0.2):
        (tmp_path / f"{name}.csv").write_text(rows.format(error))
    runs = plot.read_runs(tmp_path)
    assert list(runs) == ["plain", "shared"]
    assert "| `shared` | 3 | 20.00% (10.00% to 30.00%) | 120 MiB | 1.00 |" in plot.table_of_runs(runs)
    with pytest.raises(ValueError, match="copy the results"):
        plot.read_runs(tmp_path / "nothing")
