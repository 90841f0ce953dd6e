"""The benchmark of inference: its methods compute the same, the shared engine's by its operator, and its rows."""

import csv

import inference
import pytest
import rows as results
import torch
from inference import METHODS, forward_of

from efficient_densenet.engine.stage import operator

MODEL = "densenet_bc_16_4"


def _run(name: str) -> torch.Tensor:
    torch.manual_seed(0)
    return forward_of(METHODS[name], MODEL, torch.randn(2, 3, 16, 16))()


@pytest.mark.parametrize("name", ["plain", "shared", "shared_channels_last"])
def test_theshared_engine_runs_where_it_is_the_method(name, monkeypatch):
    stages, run_stage = [], operator.run_forward
    monkeypatch.setattr(operator, "run_forward", lambda *arguments: stages.append(arguments) or run_stage(*arguments))
    output = _run(name)
    assert bool(stages) == name.startswith("shared")
    assert not output.requires_grad
    torch.testing.assert_close(output, _run("plain"), rtol=1e-4, atol=1e-5)


def test_rows_are_written_and_shown(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    inference.measure(MODEL, 2, 16, methods="shared", rounds=2, threads=1)
    (path,) = tmp_path.iterdir()
    assert path.name == f"inference_torch{torch.__version__.split('+')[0]}.csv"
    with path.open(newline="") as file:
        plain, shared = csv.DictReader(file)
    assert (plain["method"], plain["time_over_plain"], plain["batch_size"]) == ("plain", "1.0", "2")
    assert shared["method"] == "shared"
    assert 0 < float(shared["tensor_peak_mib"]) < 10
    assert f"| {MODEL} | 2 | `shared` | " in capsys.readouterr().out


def test_bf16_has_a_file_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    inference.measure(MODEL, 2, 16, methods="shared", rounds=1, threads=1, precision="bf16")
    assert [path.name for path in tmp_path.iterdir()] == [f"inference_torch{torch.__version__.split('+')[0]}_bf16.csv"]


def test_what_cannot_be_measured_is_an_error(monkeypatch):
    with pytest.raises(ValueError, match="unknown method 'share': there are plain, "):
        inference.measure(methods="share")
    with pytest.raises(ValueError, match="unknown precision 'fp8': there are float32, bf16"):
        inference.measure(precision="fp8")
    monkeypatch.setattr(inference, "TOLERANCE", {"float32": 0})
    with pytest.raises(RuntimeError, match=r"found an error of .* in the outputs of plain, needed less than 0"):
        inference.measure(MODEL, 2, 16, methods="plain", rounds=1)
