"""The demos' parts on a few pictures: data, loop, files, command line."""

import hashlib
import subprocess
import sys
from importlib import resources
from pathlib import Path

import pytest
import torch
from helpers import assert_close

from efficient_densenet import DenseNet
from efficient_densenet.training import data, files, loop

DEMOS = Path(__file__).parents[1] / "demos"


def _demo(script: str, *words: str, cwd: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-W", "error::UserWarning", str(DEMOS / script), *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False)


def test_the_digits_are_all_there_with_their_source():
    digits = data.load_digits()
    assert digits.images.shape == (1797, 1, 32, 32)
    assert digits.images.dtype == torch.uint8
    assert digits.images.max() == 255
    assert digits.labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    folder = resources.files("efficient_densenet.training")
    checksum = hashlib.sha256((folder / "digits.csv.gz").read_bytes()).hexdigest()
    assert checksum in (folder / "digits_source.txt").read_text()


def test_splits_share_nothing_and_lose_nothing():
    digits = data.load_digits()
    numbered = data.Pictures(torch.arange(len(digits)), digits.labels)
    parts = data.split(numbered)
    indices = torch.cat([parts.train.images, parts.valid.images, parts.test.images])
    assert sorted(indices.tolist()) == list(range(1797))
    assert [len(parts.train), len(parts.valid), len(parts.test)] == [1294, 144, 359]
    assert torch.equal(data.split(numbered).test.images, parts.test.images)


def test_shift_moves_each_picture_and_keeps_its_values():
    images = torch.randn(64, 2, 8, 8)
    moved = data.shift(images, 2, torch.Generator().manual_seed(0))
    places = set()
    padded = torch.nn.functional.pad(images, (2,) * 4, value=-1.0)
    for picture, before in zip(moved, padded, strict=True):
        found = [(r, c) for r in range(5) for c in range(5) if torch.equal(before[:, r : r + 8, c : c + 8], picture)]
        assert len(found) == 1
        places.update(found)
    assert len(places) > 15


def test_batches_in_order_cover_everything_and_shuffled_ones_are_full():
    pictures = data.Pictures(torch.zeros(10, 1, 4, 4, dtype=torch.uint8), torch.arange(10))
    assert torch.cat([labels for _, labels in data.batches(pictures, 4)]).tolist() == list(range(10))
    shuffled = [labels for _, labels in data.batches(pictures, 4, torch.Generator().manual_seed(0))]
    assert [len(labels) for labels in shuffled] == [4, 4]
    assert len(set(torch.cat(shuffled).tolist())) == 8


def _few() -> data.Splits:
    parts = data.split(data.load_digits())
    return data.Splits(parts.train[:64], parts.valid[:32], parts.test[:32])


@pytest.mark.parametrize("engine", ["plain", "official", "checkpoint", "shared"])
def test_same_seed_same_run_with_every_engine(engine):
    runs = []
    for efficient in (engine, "plain"):
        torch.manual_seed(0)
        model = DenseNet(4, (1, 1), in_channels=1, efficient=efficient).double()
        model.register_forward_pre_hook(lambda _, args: (args[0].double(),))
        runs.append([e.train_loss for e in loop.train(model, _few(), n_epochs=2, batch_size=16)])
    assert_close(torch.tensor(runs[0]), torch.tensor(runs[1]), 1e-9)


def test_training_learns_and_evaluation_leaves_the_model_alone():
    torch.manual_seed(0)
    model = DenseNet(8, (2, 2), in_channels=1)
    parts = data.split(data.load_digits())
    parts = data.Splits(parts.train[:512], parts.valid, parts.test)
    epochs = list(loop.train(model, parts, n_epochs=6, batch_size=16))
    assert epochs[-1].valid_error < 0.6 < 0.8 < epochs[0].valid_error  # chance is 0.9
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    loop.evaluate(model, _few().test)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_loss_that_is_not_finite_stops_with_a_sentence():
    model = DenseNet(4, (1,), in_channels=1)
    model.classifier.weight.data.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match=r"the loss became nan in epoch 1: use a smaller lr than 0.1"):
        next(loop.train(model, _few(), n_epochs=1))


def test_a_failed_write_leaves_the_old_file_whole(tmp_path):
    path = tmp_path / "model.pt"
    files.save_weights(path, {"a": torch.ones(2)})
    with pytest.raises((AttributeError, TypeError, RuntimeError)):
        files.save_weights(path, {"a": lambda: None})
    assert files.load_weights(path)["a"].tolist() == [1, 1]
    assert [p.name for p in tmp_path.iterdir()] == ["model.pt"]


@pytest.mark.parametrize("script", ["cp_demo.py", "original_demo.py"])
def test_a_short_run_of_each_demo(script, tmp_path):
    words = ["--depth", "10", "--growth_rate", "4", "--n_epochs", "1", "--batch_size", "256", "--save", "out/run"]
    done = _demo(script, *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "test error" in done.stdout
    assert ("official" if script == "original_demo.py" else "engine best") in done.stdout
    assert sorted(p.name for p in (tmp_path / "out" / "run").iterdir()) == ["model.pt", "results.csv"]
    header, row = (tmp_path / "out/run/results.csv").read_text().split()
    assert header.startswith("epoch,train_loss,train_error,valid_loss,valid_error")
    assert row.startswith("1,")
    again = _demo(script, *words, cwd=tmp_path)
    assert again.returncode == 1
    assert "holds a run already: give --overwrite" in again.stderr
    assert "Traceback" not in again.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dept", "22"], "unknown option --dept: did you mean --depth?"),
        (["--depth", "23"], "depth is 23, but must be 6n + 4"),
        (["--efficient", "fast"], "unknown engine 'fast'"),
        (["--growth_rate", "-1"], "growth_rate is -1"),
        (["--batch_size", "0"], "batch_size is 0, but must be a whole number of at least 1"),
        (["--n_epochs", "1.5"], "n_epochs is 1.5"),
        (["--lr", "abc"], "lr is 'abc', but must be a number in (0, inf]"),
        (["--depth", "abc"], "depth is 'abc'"),
    ],
)
def test_bad_options_get_a_sentence_and_leave_nothing(words, message, tmp_path):
    done = _demo("cp_demo.py", *words, cwd=tmp_path)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_help_lists_every_option(tmp_path):
    done = _demo("cp_demo.py", "--help", cwd=tmp_path)
    for option in ("efficient", "depth", "growth_rate", "n_epochs", "batch_size", "lr", "seed", "save", "overwrite"):
        assert f"--{option}" in done.stdout + done.stderr
