"""Data sets in every layout, what is wrong with one, and downloads."""

import hashlib
import multiprocessing
import pickle
import urllib.request
from importlib import resources
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from samples import (
    CIFAR10_CLASSES,
    PrintsWhenUnpickled,
    write_cifar10,
    write_folder,
)
from training.data import Dataset, Images, StreamedImages, digits, load
from training.data.sources import download_if_absent


def _load(path: Path, dataset: str | None = None, **options) -> Dataset:
    """As a run does that begins."""
    download_if_absent(str(path), dataset)
    return load(str(path), dataset, **options)


def test_the_digits_are_all_there_with_their_source():
    loaded = digits.load_digits()
    assert (loaded.images.shape, loaded.images.dtype) == ((1797, 1, 32, 32), torch.uint8)
    assert loaded.labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    folder = resources.files("training")
    checksum = hashlib.sha256((folder / "digits.csv.gz").read_bytes()).hexdigest()
    assert checksum in (folder / "digits_source.txt").read_text()


def test_the_digits_are_split_without_loss_and_not_flipped():
    dataset = load(None).with_validation(None)
    assert [len(dataset.train), len(dataset.valid), len(dataset.test)] == [1294, 144, 359]
    assert not dataset.horizontal_flip
    whole = torch.cat([dataset.train.images, dataset.valid.images, dataset.test.images]).flatten(1)
    expected = digits.load_digits().images.flatten(1)
    assert torch.equal(whole.double().sum(1).sort().values, expected.double().sum(1).sort().values)


def test_cifar_in_the_layout_of_torchvision(tmp_path):
    dataset = _load(write_cifar10(tmp_path)).with_validation(None)
    assert (dataset.name, dataset.classes, dataset.horizontal_flip) == ("CIFAR-10", tuple(CIFAR10_CLASSES), True)
    assert [len(dataset.train), len(dataset.valid), len(dataset.test)] == [90, 10, 20]
    entries = pickle.loads((tmp_path / "cifar-10-batches-py" / "test_batch").read_bytes())
    assert torch.equal(dataset.test.images, torch.from_numpy(entries["data"]).view(-1, 3, 32, 32))
    assert dataset.test.labels.tolist() == entries["labels"]


@pytest.mark.parametrize(
    ("place", "title", "shape", "flips"),
    [
        ("cifar-100-python", "CIFAR-100", (4, 32, 32, 3), True),
        ("MNIST", "MNIST", (4, 28, 28), False),
        ("FashionMNIST", "Fashion-MNIST", (4, 28, 28), True),
    ],
)
def test_other_sets_are_told_apart_by_their_places_in_each_layout_of_torchvision(
    place, title, shape, flips, tmp_path, monkeypatch
):
    """With a stand-in for torchvision's reading."""
    pixels, labels = torch.randint(256, shape, dtype=torch.uint8), [5, 0, 4, 1]
    split = SimpleNamespace(data=pixels, targets=labels, classes=list("0123456789"))
    monkeypatch.setattr("training.data.published._class", lambda name: lambda *_, **__: split)
    (tmp_path / place).mkdir()
    dataset = _load(tmp_path)
    assert (dataset.name, dataset.horizontal_flip, dataset.classes) == (title, flips, tuple("0123456789"))
    expected = pixels[:, None] if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2)
    assert torch.equal(dataset.train.images, expected)
    assert dataset.test.labels.tolist() == labels


@pytest.mark.parametrize("stream", [False, True])
def test_an_image_folder_of_any_sizes(tmp_path, stream):
    dataset = _load(write_folder(tmp_path), image_size=24, stream=stream).with_validation(4)
    assert isinstance(dataset.train, StreamedImages if stream else Images)
    assert dataset.classes == ("cat", "dog")
    assert [len(dataset.train), len(dataset.valid), len(dataset.test)] == [20, 4, 24]
    ((images, labels),) = dataset.test.fetch([torch.tensor([23, 0, 5])])
    assert images.shape == (3, 3, 24, 24)
    assert labels.tolist() == [1, 0, 0]
    assert images[0].float().mean() > 200 > 60 > images[1].float().mean()


def test_the_folders_val_is_the_test_set_unless_there_is_one(tmp_path):
    alone = _load(write_folder(tmp_path / "a", splits=("train", "val")))
    assert alone.valid is None
    assert len(alone.test) == 24
    both = _load(write_folder(tmp_path / "b", splits=("train", "val", "test")))
    with pytest.raises(ValueError, match=r"valid_size is 3, but image folder .*/b has val/ to validate by: leave it"):
        both.with_validation(3)
    assert [len(both.with_validation(None).train), len(both.valid)] == [24, 24]


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:200])


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda own: (own / "train/bird").mkdir(), "Found no valid file for the classes bird"),
        (lambda own: _truncate(own / "train/cat/0.jpg"), "train/cat/0.jpg is not an image that can be decoded"),
        (lambda own: (own / "test/cat/a.jpg").symlink_to("nowhere"), "cat/a.jpg is not an image that can be decoded ("),
        (lambda own: (own / "test/dgo").mkdir(), "test/dgo is a class that train/ does not have: rename it"),
        (lambda own: (own / "test").rename(own / "tset"), "has train/ but neither test/ nor val/"),
        (lambda own: (own / "train/dog").rename(own / "dog"), "train has 1 class folders, but a classifier needs at"),
        (lambda own: (own / "train").rename(own / "tarin"), "contains tarin, test, but torchvision's files, or train/"),
    ],
)
def test_what_is_wrong_with_an_image_folder_is_named(tmp_path, harm, message):
    harm(write_folder(tmp_path, each=2))
    with pytest.raises((ValueError, OSError)) as caught:
        _load(tmp_path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_streamed_image_that_cannot_be_decoded_is_named_and_ends_the_workers(tmp_path, workers):
    (write_folder(tmp_path, each=2) / "test/dog/1.png").write_text("no")
    test = _load(tmp_path, stream=True, workers=workers).test
    with pytest.raises(ValueError, match=r"^\S+dog/1.png is not an image that can be decoded \(it .*remove it$"):
        list(test.fetch(torch.arange(4).split(1)))
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("harm", ["missing", "cut", "hostile"])
def test_a_damaged_cifar_is_named_and_nothing_in_it_is_run(tmp_path, harm, capsys):
    path = write_cifar10(tmp_path) / "cifar-10-batches-py" / "data_batch_3"
    path.write_bytes(pickle.dumps(PrintsWhenUnpickled()) if harm == "hostile" else b"cut")
    if harm == "missing":
        path.unlink()
    with pytest.raises(ValueError, match=r"cifar-10-batches-py is incomplete or damaged \(Dataset not found or corr"):
        _load(tmp_path)
    assert "code in a pickle was run" not in capsys.readouterr().out


# Downloads

NOWHERE = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")


def test_without_a_network_a_download_ends_in_a_sentence(tmp_path, monkeypatch):
    for name, value in NOWHERE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(urllib.request, "_opener", None)  # which caches proxies
    for _ in range(2):
        with pytest.raises(ConnectionError, match="leave --data out for the digits"):
            _load(tmp_path / "cifar")


def test_a_named_data_set_is_downloaded_beside_other_files(tmp_path, monkeypatch):
    """By a stand-in for torchvision's download."""
    fetched = []

    def published(folder: Path, train: bool, download: bool = False) -> None:
        fetched.append(train)
        if train:
            write_cifar10(Path(folder))

    monkeypatch.setattr("training.data.published._class", lambda name: published)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"contains notes.txt, but .* or a --dataset to download beside what is there"):
        _load(tmp_path)
    download_if_absent(str(tmp_path), "cifar10")
    download_if_absent(str(tmp_path), "cifar10")
    assert fetched == [True, False]
    with pytest.raises(ValueError, match=r"mistyped is absent or empty, .* or a --dataset to download into it$"):
        _load(tmp_path / "mistyped")
    assert not (tmp_path / "mistyped").exists()
    with pytest.raises(ValueError, match=r"contains cifar-10-batches-py, notes.txt, but --dataset mnist needs MNIST t"):
        _load(tmp_path, "mnist")
    for name, dataset in (("cifar", None), ("absent", "cifar10")):
        download_if_absent(str(tmp_path / name), dataset)
        assert [path.name for path in (tmp_path / name).iterdir()] == ["cifar-10-batches-py"]
