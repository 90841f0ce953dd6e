"""Data sets in every layout, what is wrong with one, and downloads."""

import contextlib
import errno
import gzip
import hashlib
import os
import pickle
import re
import struct
import tarfile
import tempfile
import threading
import urllib.request
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path

import pytest
import torch
from forks import forked_demo
from samples import (
    CIFAR10_CLASSES,
    TINY,
    PrintsWhenUnpickled,
    refused,
    write_cifar10,
    write_cifar100,
    write_folder,
)
from torchvision import datasets
from training.data import Images, StreamedImages, digits, load


def test_the_digits_are_all_there_with_their_source():
    loaded = digits.load_digits()
    assert loaded.images.shape == (1797, 1, 32, 32)
    assert loaded.images.dtype == torch.uint8
    assert loaded.images.max() == 255
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
    assert torch.equal(load(None).test.images, dataset.test.images)


@pytest.mark.parametrize("below", ["", "cifar-10-batches-py"])
def test_cifar10_in_the_layout_of_torchvision(tmp_path, below):
    dataset = load(str(write_cifar10(tmp_path) / below)).with_validation(None)
    assert dataset.name == "CIFAR-10"
    assert dataset.classes == tuple(CIFAR10_CLASSES)
    assert [len(dataset.train), len(dataset.valid), len(dataset.test)] == [90, 10, 20]
    entries = pickle.loads((tmp_path / "cifar-10-batches-py" / "test_batch").read_bytes())
    assert torch.equal(dataset.test.images, torch.from_numpy(entries["data"]).view(-1, 3, 32, 32))
    assert dataset.test.labels.tolist() == entries["labels"]


def test_cifar100_has_its_fine_classes(tmp_path):
    dataset = load(str(write_cifar100(tmp_path)))
    assert dataset.name == "CIFAR-100"
    assert len(dataset.classes) == 100
    assert dataset.classes[99] == "fine99"


def _write_idx(folder: Path, labels: list[int]) -> None:
    """The same images and labels for training and test."""
    folder.mkdir(parents=True)
    for split in ("train", "t10k"):
        images = struct.pack(">HBB3I", 0, 8, 3, len(labels), 28, 28) + bytes(len(labels) * 28 * 28)
        (folder / f"{split}-images-idx3-ubyte").write_bytes(images)
        (folder / f"{split}-labels-idx1-ubyte").write_bytes(struct.pack(">HBBI", 0, 8, 1, len(labels)) + bytes(labels))


def test_fashion_mnist_packed_and_not(tmp_path):
    folder = tmp_path / "fashion"
    _write_idx(folder, [0, 1, 2, 3])
    for name in ("train", "t10k"):
        images = folder / f"{name}-images-idx3-ubyte"
        packed = gzip.compress(images.read_bytes())
        images.with_suffix(".gz").write_bytes(packed)
        images.unlink()
    dataset = load(str(folder))
    assert (dataset.name, dataset.channels, dataset.image_size) == ("Fashion-MNIST", 1, 28)
    assert dataset.train.labels.tolist() == [0, 1, 2, 3]
    images.with_suffix(".gz").write_bytes(packed[:-20])
    with pytest.raises(ValueError, match=r"t10k-images-idx3-ubyte is damaged \(.*\): copy it again"):
        load(str(folder))


def test_svhn_through_torchvision(tmp_path, monkeypatch):
    scipy_io = pytest.importorskip("scipy.io")
    images = torch.randint(256, (32, 32, 3, 5), dtype=torch.uint8).numpy()
    known = {}
    for split in ("train", "test"):
        path = tmp_path / f"{split}_32x32.mat"
        scipy_io.savemat(path, {"X": images, "y": [[10], [1], [2], [3], [9]]})
        known[split] = ["", path.name, hashlib.md5(path.read_bytes()).hexdigest()]
    monkeypatch.setattr(datasets.SVHN, "split_list", known)
    dataset = load(str(tmp_path))
    assert (dataset.name, dataset.horizontal_flip, len(dataset.test)) == ("SVHN", False, 5)
    assert dataset.train.labels.tolist() == [0, 1, 2, 3, 9]
    assert torch.equal(dataset.train.images, torch.from_numpy(images).permute(3, 2, 0, 1))
    path.write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"is damaged .* remove it so that SVHN is downloaded again"):
        load(str(tmp_path))


@pytest.mark.parametrize("stream", [False, True])
def test_an_image_folder_of_any_sizes(tmp_path, stream):
    dataset = load(str(write_folder(tmp_path)), image_size=24, stream=stream).with_validation(4)
    assert isinstance(dataset.train, StreamedImages if stream else Images)
    assert dataset.classes == ("cat", "dog")
    assert [len(dataset.train), len(dataset.valid), len(dataset.test)] == [20, 4, 24]
    order = torch.tensor([23, 0, 5])
    ((images, labels),) = dataset.test.fetch([order])
    assert images.shape == (3, 3, 24, 24)
    assert labels.tolist() == [1, 0, 0]
    assert images[0].float().mean() > 200 > 60 > images[1].float().mean()


def test_the_folders_val_is_the_test_set_unless_there_is_one(tmp_path):
    alone = load(str(write_folder(tmp_path / "a", splits=("train", "val"))))
    assert alone.valid is None
    assert len(alone.test) == 24
    both = load(str(write_folder(tmp_path / "b", splits=("train", "val", "test"))))
    with pytest.raises(ValueError, match=r"valid_size is 3, but image folder .*/b has val/ to validate by: leave it"):
        both.with_validation(3)
    assert [len(both.with_validation(None).train), len(both.valid)] == [24, 24]


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:200])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda own: (own / "train/bird").mkdir(), "train/bird contains no images: put some there, or remove the"),
        (lambda own: _truncate(own / "train/cat/0.jpg"), "train/cat/0.jpg is not an image that can be decoded"),
        (
            lambda own: (own / "test/dog/1.png").write_text("no"),
            "dog/1.png is not an image that can be decoded (it",
        ),
        (lambda own: (own / "test/dgo").mkdir(), "test/dgo is a class that train/ does not have: rename it"),
        (lambda own: (own / "test").rename(own / "tset"), "has train/ but neither test/ nor val/"),
        (lambda own: (own / "train/dog").rename(own / "dog"), "train has 1 class folders, but a classifier needs at"),
    ],
)
def test_what_is_wrong_with_an_image_folder_is_named(tmp_path, harm, message, stream):
    harm(write_folder(tmp_path))
    with pytest.raises(ValueError) as caught:  # noqa: PT011, PT012 - streamed images are opened by the second part
        dataset = load(str(tmp_path), stream=stream)
        for images in (dataset.train, dataset.test):
            list(images.fetch(torch.arange(len(images)).split(5)))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("data_batch_3", None, "is missing: copy it again, or remove"),
        ("data_batch_2", b"cut", "is damaged (its checksum is not the published one): copy it again, or remove"),
        ("batches.meta", pickle.dumps({"label_names": ["cat"]}), "is damaged (its checksum is not the published one)"),
        ("data_batch_1", pickle.dumps(PrintsWhenUnpickled()), "is damaged (its checksum is not the published one)"),
    ],
    ids=["missing", "cut", "other classes", "hostile"],
)
def test_what_is_wrong_with_a_cifar_file_is_named_and_nothing_in_it_is_run(tmp_path, name, content, message, capsys):
    path = write_cifar10(tmp_path) / "cifar-10-batches-py" / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"{name} {message}")):
        load(str(tmp_path))
    assert "code in a pickle was run" not in capsys.readouterr().out


NOWHERE = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("dataset", "existing"), [("cifar10", ""), ("cifar100", "cifar"), ("svhn", ""), ("fashion_mnist", "cifar")]
)
def test_without_a_network_a_download_leaves_nothing_behind(tmp_path, dataset, existing, monkeypatch):
    for name, value in NOWHERE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(urllib.request, "_opener", None)  # which caches proxies
    (tmp_path / existing).mkdir(exist_ok=True)
    with pytest.raises(ConnectionError, match="leave --data out for the digits"):
        load(str(tmp_path / "cifar"), dataset)
    left = [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")]
    assert left == ([existing] if existing else [])


def test_a_failed_download_ends_the_command_with_a_sentence(tmp_path):
    done = forked_demo("cp_demo.py", "--data", "new/cifar", "--save", "model", cwd=tmp_path, **NOWHERE)
    refused(done, "could not be downloaded")
    assert list(tmp_path.iterdir()) == []


@contextlib.contextmanager
def _serving(folder: Path):
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_download_fills_an_absent_directory(tmp_path, monkeypatch, capsys):
    """From an archive served on this machine, with its checksums in the folder of the published ones."""
    folder = write_cifar10(tmp_path / "origin") / "cifar-10-batches-py"
    archive = tmp_path / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(folder, folder.name)

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(urllib.request, "_opener", None)  # which caches proxies
    monkeypatch.setattr(datasets.CIFAR10, "tgz_md5", hashlib.md5(archive.read_bytes()).hexdigest())
    with _serving(tmp_path) as address:
        monkeypatch.setattr(datasets.CIFAR10, "url", f"{address}/{archive.name}")
        dataset = load(str(tmp_path / "a" / "cifar"))
    assert len(dataset.train) == 100
    assert "downloading CIFAR-10" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["cifar"]


def test_a_download_into_an_unwritable_directory(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda dir: _refuse(dir))
    with pytest.raises(OSError, match=r"cifar is absent or has no images, and nothing can be .* \(Permission denied\)"):
        load(str(tmp_path / "cifar"))


@pytest.mark.parametrize("unreadable", ["train/dog", "train/dog/more", "test/cat"])
def test_an_unreadable_directory_is_an_error_not_fewer_images(unreadable, tmp_path, monkeypatch):
    write_folder(tmp_path)
    (tmp_path / "train" / "dog" / "more").mkdir()
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: _refuse(path) if str(path).endswith(unreadable) else scandir(path))
    with pytest.raises(PermissionError, match=f"{unreadable} cannot be read: change its permissions"):
        load(str(tmp_path))


def _refuse(path: Path = Path(), **_):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


@pytest.mark.parametrize("below", ["", "MNIST/raw"])
def test_mnist_is_not_taken_for_fashion_mnist(below, tmp_path):
    """The files of both have the same names; their labels differ."""
    _write_idx(tmp_path / "sets" / below, [5, 0, 4, 1, 9, 2, 1, 3, 1, 4, 3, 5])
    dataset = load(str(tmp_path / "sets"))
    assert (dataset.name, dataset.classes[5], dataset.horizontal_flip) == ("MNIST", "5", False)
    with pytest.raises(ValueError, match="but --dataset fashion_mnist needs Fashion-MNIST there"):
        load(str(tmp_path / "sets"), "fashion_mnist")


def test_a_named_data_set_is_downloaded_beside_other_files(tmp_path, monkeypatch):
    fetched = []

    def fetch(folder: Path, dataset: str) -> None:
        fetched.append(dataset)
        write_cifar10(folder)

    monkeypatch.setattr("training.data.published._fetch", fetch)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"notes.txt is a file, but --data needs a directory"):
        load(str(tmp_path / "notes.txt"))
    with pytest.raises(
        ValueError,
        match=r"contains notes.txt, but .* or a --dataset to download beside what is there",
    ):
        load(str(tmp_path))
    assert load(str(tmp_path), "cifar10").name == load(str(tmp_path)).name == "CIFAR-10"
    assert fetched == ["cifar10"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cifar-10-batches-py", "notes.txt"]


def test_what_has_the_name_of_an_image_or_of_a_cifar_file_only_is_left_out(tmp_path):
    before = load(str(write_folder(tmp_path)), image_size=8)
    assert before.name == f"image folder {tmp_path}"
    (tmp_path / "meta").write_text("a name of one of CIFAR-100's files")
    os.mkfifo(tmp_path / "train" / "cat" / "pipe.jpg")
    (tmp_path / "test" / "dog" / "folder.png").mkdir()
    dataset = load(str(tmp_path), image_size=8)
    assert torch.equal(dataset.train.images, before.train.images)
    assert (dataset.name, dataset.fingerprint) == (before.name, before.fingerprint)


def test_a_dangling_link_is_named_rather_than_left_out(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "train" / "cat" / "gone.jpg").symlink_to("nowhere")
    with pytest.raises(ValueError, match=r"train/cat/gone.jpg is not an image that can be decoded \(.*No such file"):
        load(str(tmp_path), image_size=8)


def test_a_class_whose_name_is_no_utf8_is_named(tmp_path):
    write_folder(tmp_path / "own")
    for split in ("train", "test"):
        (tmp_path / "own" / split / "cat").rename(os.fsdecode(os.fsencode(tmp_path / "own" / split) + b"/caf\xe9"))
    done = forked_demo("cp_demo.py", "--data", "own", cwd=tmp_path)
    refused(done, r"own/train/caf\udce9 is a class whose name is no valid UTF-8, which --save needs: rename it")


def test_paths_that_are_no_utf8_are_used_and_shown_escaped(tmp_path):
    own = os.fsdecode(b"own\xe9")
    write_folder(tmp_path / own)
    image = next((tmp_path / own).rglob("1.png"))
    image.rename(image.with_name(os.fsdecode(b"\xff.png")))
    words = [*TINY, "--image_size", "8", "--batch_size", "8", "--n_epochs", "1", "--save", os.fsdecode(b"run\xe9")]
    done = forked_demo("cp_demo.py", *words, "--data", own, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert r"in run\udce9: model.pt" in done.stdout
    done = forked_demo("cp_demo.py", "--evaluate", "--save", os.fsdecode(b"run\xe9"), cwd=tmp_path)
    assert "test error" in done.stdout, done.stderr


def test_a_download_into_an_empty_directory_keeps_the_directory(tmp_path, monkeypatch):
    """It may be a file system of its own, as a container mounts one."""
    folder = tmp_path / "mounted"
    folder.mkdir()
    before = folder.stat().st_ino
    monkeypatch.setattr("training.data.published._fetch", lambda to, name: write_cifar10(to))
    assert load(str(folder)).name == "CIFAR-10"
    assert [path.name for path in tmp_path.rglob("cifar-10-batches-py")] == ["cifar-10-batches-py"]
    assert folder.stat().st_ino == before


@pytest.mark.parametrize("error", [RuntimeError("File not found or corrupted."), KeyboardInterrupt(), SystemExit(143)])
def test_a_download_that_ends_in_the_middle_leaves_what_was_there(error, tmp_path, monkeypatch):
    def fetch(folder: Path, dataset: str) -> None:
        write_cifar10(folder)
        raise error

    (tmp_path / "notes.txt").write_text("mine")
    monkeypatch.setattr("training.data.published._fetch", fetch)
    for folder in (tmp_path, tmp_path / "new" / "cifar"):
        with pytest.raises(ConnectionError if isinstance(error, RuntimeError) else type(error)):
            load(str(folder), "cifar10")
        assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_classes_without_a_split_are_recognized(tmp_path):
    write_folder(tmp_path)
    with pytest.raises(
        ValueError, match=r"but no train/: move the folders of the classes into .*train/train, and some"
    ):
        load(str(tmp_path / "train"))
