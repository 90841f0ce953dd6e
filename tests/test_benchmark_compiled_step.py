"""The benchmark of a compiled step beside an eager one: its rows, and a real one."""

import csv

import compiled_step as benchmark
import pytest
import torch
import worker


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """A function that runs the benchmark and returns its rows; a worker's settings of PyTorch are taken back."""
    monkeypatch.setattr(benchmark.rows, "RESULTS", tmp_path)
    threads, flags = torch.get_num_threads(), torch.backends.cudnn.flags(benchmark=False, allow_tf32=False)

    def measure(**options):
        benchmark.measure("densenet_bc_10_4", batch_size=2, rounds=2, **options)
        (path,) = tmp_path.glob(f"compiled_step_torch*_densenet_bc_10_4_2_{options.get('precision', 'float32')}.csv")
        with path.open(newline="") as file:
            return list(csv.DictReader(file))

    with flags:
        yield measure
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("highest")


def test_rows_of_both_steps(measured, monkeypatch):
    built = []

    class Training(worker.Training):
        def __init__(self, method, setting):
            built.append(method)
            super().__init__("shared", setting)

    monkeypatch.setattr(benchmark, "Training", Training)
    eager, compiled = measured(precision="bf16", threads=1)
    assert built == ["shared", "compile_shared"]
    assert [eager["step"], compiled["step"]] == ["eager", "compiled"]
    assert (eager["over_eager_median"], compiled["precision"], compiled["threads"]) == ("1.000", "bf16", "1")
    assert float(compiled["over_eager_median"]) > 0
    assert 0 < float(eager["tensor_peak_mib"]) <= float(eager["step_peak_mib"]) < 10


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_a_compiled_step_is_measured(measured):
    eager, compiled = measured()
    assert (eager["kernels"], float(compiled["over_eager_median"]) > 0) == (compiled["kernels"], True)
    assert float(compiled["step_peak_mib"]) < 2 * float(eager["step_peak_mib"])
