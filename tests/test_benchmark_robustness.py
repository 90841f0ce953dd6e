"""The benchmark of a trained model that is run in other ways."""

import csv

import pytest
import robustness
import torch


def _measured(folder, ways):
    robustness.measure(ways=ways, folder=str(folder))
    with (folder / "robustness_digits.csv").open(newline="") as file:
        return {row["way"]: row for row in csv.DictReader(file)}


@pytest.mark.parametrize(
    "ways", ["shared,channels_last,torchvision", pytest.param("bf16,onnxruntime", marks=pytest.mark.exhaustive)]
)
def test_the_digits_have_the_same_classes(ways, tmp_path, capsys):
    if "onnxruntime" in ways:
        for module in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(module)
    measured = _measured(tmp_path, ways)
    assert list(measured) == ["plain", *ways.split(",")]
    for way, row in measured.items():
        assert (row["images"], row["test_error"], row["other_classes"]) == ("359", "0.0223", "0"), way
        assert float(row["largest_difference"]) < (2e-2 if way == "bf16" else 1e-5), way
    assert f"| `{way}` | 2.23% | 0 | " in capsys.readouterr().out


def test_other_classes_and_differences_are_counted():
    labels, plain = torch.tensor([0, 1, 1]), torch.tensor([[2.0, 1], [0, 1], [0, 1]])
    logits = torch.tensor([[2.0, 1], [0, 1], [1.5, 1]])
    row = robustness._row("run", "bf16", logits, plain, labels)
    assert (row["test_error"], row["other_classes"], row["largest_difference"]) == ("0.3333", 1, "7.5e-01")
