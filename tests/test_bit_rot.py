"""Files in which a bit has flipped: the damage is noticed, or it is where nothing is read."""

import random
import shutil
from pathlib import Path

import pytest
import torch
from samples import DEMOS, RUN, demo, refused

from efficient_densenet import DenseNet, load_weights
from efficient_densenet.training.files import load_torch

IMAGE = str(DEMOS / "pictures" / "digit_3.png")
DAMAGED = "is truncated, damaged or contains more than tensors and plain data"


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    assert demo("cp_demo.py", *RUN, "--n_epochs", "1", cwd=folder).returncode == 0
    return folder / "run"


def _flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _equal(actual, expected) -> bool:
    if isinstance(expected, torch.Tensor):
        return actual.dtype == expected.dtype and torch.equal(actual, expected)
    if isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(_equal(actual[name], expected[name]) for name in expected)
    if isinstance(expected, list):
        return len(actual) == len(expected) and all(map(_equal, actual, expected))
    return type(actual) is type(expected) and actual == expected


@pytest.mark.parametrize("name", ["model.pt", "last.pt"])
@pytest.mark.parametrize("flips", [100, pytest.param(5000, marks=pytest.mark.exhaustive)])
def test_a_flipped_bit_is_noticed_or_harmless(name, flips, finished, tmp_path):
    content, expected = (finished / name).read_bytes(), load_torch(finished / name)
    path, noticed = tmp_path / name, 0
    for bit in random.Random(0).sample(range(8 * len(content)), flips):
        path.write_bytes(_flipped(content, bit))
        try:
            loaded = load_torch(path)
        except ValueError:
            noticed += 1
        else:
            assert _equal(loaded, expected), bit
    assert noticed > flips / 3


def test_a_record_that_became_a_directory_is_noticed(finished, tmp_path):
    """PyTorch reads no data for it, and returns memory as it was."""
    content = (finished / "model.pt").read_bytes()
    header = content.rindex(b"PK\x01\x02", 0, content.rindex(b"/data/3P"))  # where the next header follows
    (tmp_path / "model.pt").write_bytes(_flipped(content, 8 * (header + 38) + 4))
    with pytest.raises(ValueError, match=r"/data/3 says that it is a directory"):
        load_torch(tmp_path / "model.pt")


@pytest.fixture
def damaged(finished, tmp_path):
    """A function that flips a low bit of a weight in a file of a copy of the run."""

    def flip(name: str) -> Path:
        shutil.copytree(finished, tmp_path / "run")
        path = tmp_path / "run" / name
        content, weight = path.read_bytes(), load_torch(path)
        weight = weight if name == "model.pt" else weight["state"]["model"]
        place = content.index(weight["features.conv0.weight"].numpy().tobytes())
        path.write_bytes(_flipped(content, 8 * place))
        assert len(torch.load(path, weights_only=True)) == len(torch.load(finished / name, weights_only=True))
        return path

    return flip


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.pt", ["cp_demo.py", "--evaluate", "run"]),
        ("model.pt", ["predict.py", IMAGE, "--model", "run"]),
        ("last.pt", ["cp_demo.py", "--save", "run", "--resume"]),
    ],
)
def test_a_weight_that_changed_on_disk_is_refused(name, words, damaged, tmp_path):
    path = damaged(name)
    before = {each.name: each.read_bytes() for each in path.parent.iterdir()}
    done = demo(*words, cwd=tmp_path)
    refused(done, f"run/{name} {DAMAGED} (the checksum of its record")
    assert {each.name: each.read_bytes() for each in path.parent.iterdir()} == before


def test_load_weights_refuses_a_weight_that_changed_on_disk(damaged, finished):
    model = DenseNet(4, (1, 1, 1), num_init_features=8, in_channels=1)
    load_weights(model, finished / "model.pt")
    with pytest.raises(ValueError, match=r"model.pt is truncated, damaged .*BadZipFile"):
        load_weights(model, damaged("model.pt"))


@pytest.mark.parametrize("changed", [{"_use_new_zipfile_serialization": False}, "without checksums"])
def test_load_weights_takes_files_without_checksums(changed, tmp_path):
    model = DenseNet(4, (1, 1, 1), num_init_features=8, in_channels=1)
    torch.serialization.set_crc32_options(isinstance(changed, dict))
    torch.save(model.state_dict(), tmp_path / "model.pt", **(changed if isinstance(changed, dict) else {}))
    torch.serialization.set_crc32_options(True)
    load_weights(model, tmp_path / "model.pt")
