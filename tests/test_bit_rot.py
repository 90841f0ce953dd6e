"""Files in which a bit has flipped: the damage is noticed, or it is where nothing is read."""

import json
import random
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from samples import IMAGE, RUN, contents, demo, refused, same_content
from training.files import load_torch
from training.models import read_config

from efficient_densenet import DenseNet, load_weights
from efficient_densenet._archive import to_archive

DAMAGED = "is truncated, damaged or contains more than tensors and plain data"


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    assert demo("cp_demo.py", *RUN, "--n_epochs", "1", cwd=folder).returncode == 0
    return folder / "run"


def _network() -> DenseNet:
    """That of the run."""
    return DenseNet(4, (1, 1, 1), num_init_features=8, in_channels=1)


def _flipped(content: bytes, bit: int) -> bytes:
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


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
            same_content(loaded, expected)
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
    before = contents(path.parent)
    done = demo(*words, cwd=tmp_path)
    refused(done, f"run/{name} {DAMAGED} (the checksum of its record")
    assert contents(path.parent) == before


def test_load_weights_refuses_a_weight_that_changed_on_disk(damaged, finished):
    model = _network()
    load_weights(model, finished / "model.pt")
    with pytest.raises(ValueError, match=r"model.pt is truncated, damaged .*\(the checksum of its record .* is wr"):
        load_weights(model, damaged("model.pt"))


def _rezip(path: Path, change) -> None:
    """Write an archive anew, with right checksums of its records, after `change` of their contents by name."""
    with zipfile.ZipFile(path) as archive:
        records = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    change(records)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in records.items():
            archive.writestr(f"archive/{name}", content)


def _flip_a_weight(records: dict[str, bytes]) -> None:
    records["data/0"] = _flipped(records["data/0"], 0)


def _swap_two_weights(records: dict[str, bytes]) -> None:
    """Of one shape: norm0's scale and shift."""
    records["data/1"], records["data/2"] = records["data/2"], records["data/1"]


@pytest.mark.parametrize("name", ["model.pt", "last.pt"])
@pytest.mark.parametrize("change", [_flip_a_weight, _swap_two_weights])
def test_a_changed_tensor_in_an_archive_whose_own_checksums_are_right_is_noticed(change, name, finished, tmp_path):
    path = Path(shutil.copy(finished / name, tmp_path))
    _rezip(path, lambda records: None)
    same_content(load_torch(path), load_torch(finished / name))
    _rezip(path, change)
    assert zipfile.ZipFile(path).testzip() is None
    with pytest.raises(AssertionError):
        same_content(torch.load(path, weights_only=True), load_torch(finished / name))
    message = rf"{DAMAGED} \(its tensor \S+ has the checksum \w{{16}}, but was saved with \w{{16}}\), and was left unch"
    with pytest.raises(ValueError, match=message):
        load_torch(path)
    if name == "model.pt":
        with pytest.raises(ValueError, match=r"its tensor \S+ has the checksum \w+, but was saved with \w+\): copy it"):
            load_weights(_network(), path)


@pytest.mark.parametrize(
    "content",
    [
        torch.randn(3, 4).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(6, dtype=torch.bfloat16)[::2],
        torch.tensor(3),
        torch.zeros(0, 2),
        torch.tensor([True, False]),
    ],
)
def test_tensors_of_any_layout_pass_and_have_the_checksum_of_their_values(content, tmp_path):
    path = tmp_path / "some.pt"
    path.write_bytes(to_archive({"some": [content, content.contiguous()]}))
    checksums = json.loads(zipfile.ZipFile(path).read("archive/checksums.json"))
    assert list(checksums) == ["some.0", "some.1"]
    assert len(set(checksums.values())) == 1
    assert torch.equal(load_torch(path)["some"][0], content)


def test_files_of_torch_save_and_of_earlier_versions_load(finished, tmp_path):
    for name in ("model.pt", "last.pt"):
        torch.save(load_torch(finished / name), tmp_path / name)
        same_content(load_torch(tmp_path / name), load_torch(finished / name))
    config = json.loads((finished / "config.json").read_text())
    del config["checksum"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path) == read_config(finished)


def test_a_flipped_bit_in_the_config_is_noticed_or_harmless_and_edits_are_possible(finished, tmp_path):
    content, expected = (finished / "config.json").read_bytes(), read_config(finished)
    path, noticed = tmp_path / "config.json", 0
    for bit in random.Random(0).sample(range(8 * len(content)), 200):
        path.write_bytes(_flipped(content, bit))
        try:
            assert read_config(tmp_path) == expected, bit
        except ValueError:
            noticed += 1
    assert noticed > 150
    edited = content.replace(b'"name": "', b'"name": "edited')
    path.write_bytes(edited)
    with pytest.raises(ValueError, match=r"config.json: its content has the checksum \w+, but .* remove the line \"ch"):
        read_config(tmp_path)
    path.write_bytes(b"".join(line for line in edited.splitlines() if b'"checksum"' not in line))
    assert read_config(tmp_path)["data"]["name"] == f"edited{expected['data']['name']}"


def test_files_without_checksums_of_archives_are_saved_and_loaded(tmp_path):
    model, path = _network(), tmp_path / "model.pt"
    torch.save(model.state_dict(), path, _use_new_zipfile_serialization=False)
    load_weights(model, path)
    torch.serialization.set_crc32_options(False)
    path.write_bytes(to_archive({"some": torch.ones(2)}))
    torch.save(model.state_dict(), tmp_path / "theirs.pt")
    torch.serialization.set_crc32_options(True)
    assert torch.equal(load_torch(path)["some"], torch.ones(2))
    load_weights(model, tmp_path / "theirs.pt")
