"""What a directory of pictures holds, what is wrong with it, and how batches are made."""

import contextlib
import errno
import gzip
import hashlib
import multiprocessing
import os
import pickle
import re
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import urllib.request
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from forks import forked_demo
from PIL import Image
from samples import CIFAR10_CLASSES, demo, refused, write_cifar10, write_cifar100, write_folder

from efficient_densenet.training.data import Pictures, Streamed, digits, load
from efficient_densenet.training.data import prefetch as ahead
from efficient_densenet.training.data.augment import Preparation, generator_for, preparation_for
from efficient_densenet.training.data.decode import decode


def test_the_digits_are_all_there_with_their_source():
    pictures = digits.load_digits()
    assert pictures.images.shape == (1797, 1, 32, 32)
    assert pictures.images.dtype == torch.uint8
    assert pictures.images.max() == 255
    assert pictures.labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    folder = resources.files("efficient_densenet.training")
    checksum = hashlib.sha256((folder / "digits.csv.gz").read_bytes()).hexdigest()
    assert checksum in (folder / "digits_source.txt").read_text()


def test_the_digits_are_split_without_loss_and_not_mirrored():
    source = load(None).with_validation(None)
    assert [len(source.train), len(source.valid), len(source.test)] == [1294, 144, 359]
    assert not source.mirror
    whole = torch.cat([source.train.images, source.valid.images, source.test.images]).flatten(1)
    expected = digits.load_digits().images.flatten(1)
    assert torch.equal(whole.double().sum(1).sort().values, expected.double().sum(1).sort().values)
    assert torch.equal(load(None).test.images, source.test.images)


@pytest.mark.parametrize("below", ["", "cifar-10-batches-py"])
def test_cifar10_in_the_layout_of_torchvision(tmp_path, below):
    source = load(str(write_cifar10(tmp_path) / below)).with_validation(None)
    assert source.name == "CIFAR-10"
    assert source.classes == tuple(CIFAR10_CLASSES)
    assert [len(source.train), len(source.valid), len(source.test)] == [90, 10, 20]
    assert "not the original files: the checksums of data_batch_1" in source.note
    entries = pickle.loads((tmp_path / "cifar-10-batches-py" / "test_batch").read_bytes())
    assert torch.equal(source.test.images, torch.from_numpy(entries["data"]).view(-1, 3, 32, 32))
    assert source.test.labels.tolist() == entries["labels"]


def test_original_checksums_are_not_remarked_on(tmp_path, monkeypatch):
    datasets = pytest.importorskip("torchvision").datasets
    place = write_cifar10(tmp_path) / "cifar-10-batches-py"
    for which in ("train_list", "test_list"):
        known = [
            [name, hashlib.md5((place / name).read_bytes()).hexdigest()] for name, _ in getattr(datasets.CIFAR10, which)
        ]
        monkeypatch.setattr(datasets.CIFAR10, which, known)
    assert load(str(tmp_path)).note == ""


def test_cifar100_has_its_fine_classes(tmp_path):
    source = load(str(write_cifar100(tmp_path)))
    assert source.name == "CIFAR-100"
    assert len(source.classes) == 100
    assert source.classes[99] == "fine99"


def test_fashion_mnist_packed_and_not(tmp_path):
    def idx(*shape):
        values = torch.arange(torch.Size(shape).numel()) % 10
        return struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape) + bytes(values.tolist())

    for name in ("train", "t10k"):
        (tmp_path / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(4, 28, 28)))
        (tmp_path / f"{name}-labels-idx1-ubyte").write_bytes(idx(4))
    source = load(str(tmp_path))
    assert (source.name, source.channels, source.image_size) == ("Fashion-MNIST", 1, 28)
    assert source.train.labels.tolist() == [0, 1, 2, 3]
    (tmp_path / "t10k-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(4, 28, 28))[:-20])
    with pytest.raises(ValueError, match=r"t10k-images-idx3-ubyte is damaged \(.*\): copy it again"):
        load(str(tmp_path))


def test_svhn_through_torchvision(tmp_path, monkeypatch):
    scipy_io = pytest.importorskip("scipy.io")
    svhn = pytest.importorskip("torchvision").datasets.SVHN
    images = torch.randint(256, (32, 32, 3, 5), dtype=torch.uint8).numpy()
    known = {}
    for split in ("train", "test"):
        path = tmp_path / f"{split}_32x32.mat"
        scipy_io.savemat(path, {"X": images, "y": [[10], [1], [2], [3], [9]]})
        known[split] = ["", path.name, hashlib.md5(path.read_bytes()).hexdigest()]
    monkeypatch.setattr(svhn, "split_list", known)
    source = load(str(tmp_path))
    assert (source.name, source.mirror, len(source.test)) == ("SVHN", False, 5)
    assert source.train.labels.tolist() == [0, 1, 2, 3, 9]
    assert torch.equal(source.train.images, torch.from_numpy(images).permute(3, 2, 0, 1))
    path.write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"is damaged .* remove it so that SVHN is downloaded again"):
        load(str(tmp_path))


@pytest.mark.parametrize("stream", [False, True])
def test_an_image_folder_of_any_sizes(tmp_path, stream):
    source = load(str(write_folder(tmp_path)), image_size=24, stream=stream).with_validation(4)
    assert isinstance(source.train, Streamed if stream else Pictures)
    assert source.classes == ("cat", "dog")
    assert [len(source.train), len(source.valid), len(source.test)] == [20, 4, 24]
    order = torch.tensor([23, 0, 5])
    ((images, labels),) = source.test.fetch([order])
    assert images.shape == (3, 3, 24, 24)
    assert labels.tolist() == [1, 0, 0]
    assert images[0].float().mean() > 200 > 60 > images[1].float().mean()


def test_streamed_pictures_are_the_ones_in_memory(tmp_path):
    write_folder(tmp_path)
    in_memory, streamed = (load(str(tmp_path), stream=stream).train for stream in (False, True))
    indices = torch.randperm(24).split(7)
    state = torch.get_rng_state()
    for ours, theirs in zip(streamed.fetch(indices), in_memory.fetch(indices), strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])
    assert torch.equal(state, torch.get_rng_state())


def test_the_folders_val_is_the_test_set_unless_there_is_one(tmp_path):
    alone = load(str(write_folder(tmp_path / "a", splits=("train", "val"))))
    assert alone.valid is None
    assert len(alone.test) == 24
    both = load(str(write_folder(tmp_path / "b", splits=("train", "val", "test"))))
    with pytest.raises(ValueError, match=r"valid_size is 3, but image folder .*/b has val/ to validate by: leave it"):
        both.with_validation(3)
    assert [len(both.with_validation(None).train), len(both.valid)] == [24, 24]


def _empty_class(place: Path) -> str:
    (place / "train" / "bird").mkdir()
    return "train/bird holds no pictures: put some there, or remove the class"


def _truncated(place: Path) -> str:
    path = place / "train" / "cat" / "0.jpg"
    path.write_bytes(path.read_bytes()[:200])
    return "train/cat/0.jpg is not a picture that can be decoded"


def _no_picture(place: Path) -> str:
    (place / "test" / "dog" / "1.png").write_text("no picture")
    return "test/dog/1.png is not a picture that can be decoded (it cannot be identified): replace it or remove it"


def _unknown_class(place: Path) -> str:
    (place / "test" / "dgo").mkdir()
    return "test/dgo is a class that train/ does not have: rename it"


def _no_test(place: Path) -> str:
    (place / "test").rename(place / "tset")
    return "has train/ but neither test/ nor val/"


def _one_class(place: Path) -> str:
    (place / "train" / "dog").rename(place / "dog")
    return "train has 1 class folders, but a classifier needs at least two"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("harm", [_empty_class, _truncated, _no_picture, _unknown_class, _no_test, _one_class])
def test_what_is_wrong_with_an_image_folder_is_named(tmp_path, harm, stream):
    message = harm(write_folder(tmp_path))
    with pytest.raises(ValueError) as caught:  # noqa: PT011, PT012 - streamed pictures are opened by the second part
        source = load(str(tmp_path), stream=stream)
        for pictures in (source.train, source.test):
            list(pictures.fetch(torch.arange(len(pictures)).split(5)))
    assert message in str(caught.value)


def _ramp(folder: Path) -> tuple[Path, Image.Image]:
    path, grey = folder / "picture.png", torch.linspace(0, 255, 24 * 24).round().byte().view(24, 24)
    return path, Image.fromarray(grey.numpy())


@pytest.mark.parametrize("kind", ["uint16", ">u2"])
def test_sixteen_bits_are_scaled_to_eight(tmp_path, kind):
    path, ramp = _ramp(tmp_path)
    path = path.with_suffix(".tif")
    deep = (np.asarray(ramp).astype(int) * 257).astype(kind)
    Image.frombytes("I;16B" if kind == ">u2" else "I;16", ramp.size, deep.tobytes()).save(path)
    with Image.open(path) as opened:
        assert opened.mode.startswith("I;16")
    assert torch.equal(decode(path, 24, channels=1), torch.from_numpy(np.array(ramp))[None])


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_without_a_known_white_are_refused(tmp_path, mode):
    path = tmp_path / "picture.tif"
    Image.new(mode, (9, 9)).save(path)
    with pytest.raises(ValueError, match=f"its pixels are of mode {mode}, whose white is not known"):
        decode(path, 8)


def test_a_camera_held_sideways_is_turned_back(tmp_path):
    path, ramp = _ramp(tmp_path)
    exif = Image.Exif()
    exif[0x112] = 6  # to be turned by a quarter
    ramp.save(path, exif=exif)
    assert torch.equal(decode(path, 24, channels=1)[0], torch.from_numpy(np.array(ramp)).rot90(-1))


def test_transparent_colours_of_a_palette_give_no_warning(tmp_path):
    path, ramp = _ramp(tmp_path)
    ramp.convert("P").save(path, transparency=bytes([0, 255] * 128))
    assert torch.equal(decode(path, 24, channels=1)[0], torch.from_numpy(np.array(ramp)))


def _missing(place: Path) -> str:
    (place / "data_batch_3").unlink()
    return "data_batch_3 is missing"


def _cut(place: Path) -> str:
    path = place / "data_batch_2"
    path.write_bytes(path.read_bytes()[:-1000])
    return "data_batch_2 is damaged"


def _other_shape(place: Path) -> str:
    (place / "test_batch").write_bytes(
        pickle.dumps({"data": torch.zeros(2, 5).byte().numpy(), "labels": [0, 1]}, protocol=2)
    )
    return "test_batch is damaged (pictures of uint8 (2, 5) with 2 labels)"


def _other_labels(place: Path) -> str:
    (place / "test_batch").write_bytes(
        pickle.dumps({"data": torch.zeros(1, 3072).byte().numpy(), "labels": [10]}, protocol=2)
    )
    return "test_batch is damaged (labels other than 0 to 9)"


class _Runs:
    def __reduce__(self):
        return print, ("code in a pickle was run",)


def _hostile(place: Path) -> str:
    (place / "data_batch_1").write_bytes(pickle.dumps(_Runs()))
    return "it asks for builtins.print, which no batch of pictures needs"


@pytest.mark.parametrize("harm", [_missing, _cut, _other_shape, _other_labels, _hostile])
def test_what_is_wrong_with_a_cifar_file_is_named_and_nothing_in_it_is_run(tmp_path, harm, capsys):
    message = harm(write_cifar10(tmp_path) / "cifar-10-batches-py")
    with pytest.raises(ValueError, match=re.escape(message)):
        load(str(tmp_path))
    assert "code in a pickle was run" not in capsys.readouterr().out


def test_a_bad_picture_ends_the_command_with_a_sentence(tmp_path):
    message = _truncated(write_folder(tmp_path / "own"))
    done = demo("cp_demo.py", "--data", "own", "--stream", "--device", "cpu", cwd=tmp_path)
    refused(done, message)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["own"]


def test_something_else_than_pictures_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("no pictures")
    with pytest.raises(ValueError, match=r"holds notes.txt, but a directory of pictures needs"):
        load(str(tmp_path))
    with pytest.raises(ValueError, match=r"notes.txt is a file, but --data needs a directory"):
        load(str(tmp_path / "notes.txt"))


NOWHERE = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")


@pytest.mark.parametrize("dataset", ["cifar10", "cifar100", "svhn", "fashion_mnist"])
@pytest.mark.parametrize("existing", ["", "cifar"])
def test_without_a_network_a_download_leaves_nothing_behind(tmp_path, dataset, existing, monkeypatch):
    for name, value in NOWHERE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(urllib.request, "_opener", None)  # it remembers proxies
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
    """From an archive that this computer serves, with checksums of its own."""
    datasets = pytest.importorskip("torchvision").datasets
    place = write_cifar10(tmp_path / "origin") / "cifar-10-batches-py"
    archive = tmp_path / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(place, place.name)

    def md5(path):
        return hashlib.md5(path.read_bytes()).hexdigest()

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(urllib.request, "_opener", None)  # it remembers proxies
    for which in ("train_list", "test_list"):
        known = [[name, md5(place / name)] for name, _ in getattr(datasets.CIFAR10, which)]
        monkeypatch.setattr(datasets.CIFAR10, which, known)
    meta = datasets.CIFAR10.meta | {"md5": md5(place / "batches.meta")}
    monkeypatch.setattr(datasets.CIFAR10, "meta", meta)
    monkeypatch.setattr(datasets.CIFAR10, "tgz_md5", md5(archive))
    with _serving(tmp_path) as address:
        monkeypatch.setattr(datasets.CIFAR10, "url", f"{address}/{archive.name}")
        source = load(str(tmp_path / "a" / "cifar"))
    assert len(source.train) == 100
    assert source.note == ""
    assert "downloading CIFAR-10" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["cifar"]


def _padded(images: torch.Tensor, distance: int) -> torch.Tensor:
    return torch.nn.functional.pad(images, (distance,) * 4)


def test_crops_and_mirrors_are_of_each_picture_on_its_own():
    images = torch.randint(256, (64, 2, 8, 8), dtype=torch.uint8)
    preparation = Preparation((0.0,) * 2, (1.0,) * 2, distance=2, mirror=True)
    moved = preparation.vary(images, preparation.draw(64, generator_for(0)))
    seen = set()
    for picture, before in zip(moved, _padded(images, 2), strict=True):
        places = [(r, c, m) for r in range(5) for c in range(5) for m in (False, True)]
        cut = {(r, c, m): before[:, r : r + 8, c : c + 8] for r, c, m in places}
        found = [p for p in places if torch.equal(cut[p].flip(2) if p[2] else cut[p], picture)]
        assert len(found) == 1
        seen.update(found)
    assert len(seen) > 25
    assert {mirrored for _, _, mirrored in seen} == {False, True}


def test_a_share_of_a_draw_varies_its_pictures_as_the_whole_does():
    images = torch.randint(256, (10, 3, 8, 8), dtype=torch.uint8)
    preparation = Preparation((0.0,) * 3, (1.0,) * 3, distance=1, mirror=True)
    draw = preparation.draw(10, generator_for(3, 1))
    part = slice(4, 9)
    assert torch.equal(preparation.vary(images[part], draw[part]), preparation.vary(images, draw)[part])


def test_normalised_pictures_have_mean_zero_and_spread_one():
    pictures = Pictures(torch.randint(30, 90, (50, 3, 8, 8), dtype=torch.uint8), torch.zeros(50, dtype=torch.long))
    values = (
        preparation_for(pictures, mirror=False).normalise(pictures.images, torch.float64).transpose(0, 1).flatten(1)
    )
    assert values.mean(1).abs().max() < 1e-12
    assert (values.std(1) - 1).abs().max() < 1e-3
    flat = Pictures(torch.full((2, 1, 8, 8), 7, dtype=torch.uint8), torch.zeros(2, dtype=torch.long))
    assert preparation_for(flat, mirror=False).normalise(flat.images).abs().max() == 0


def test_augmenting_50000_pictures_takes_under_three_seconds():
    images = torch.randint(256, (50_000, 3, 32, 32), dtype=torch.uint8)
    pictures = Pictures(images, torch.zeros(50_000, dtype=torch.long))
    preparation = Preparation((127.0,) * 3, (64.0,) * 3, distance=4, mirror=True)
    started = time.perf_counter()
    for number, (batch, _) in enumerate(pictures.fetch(torch.randperm(50_000).split(64))):
        preparation.normalise(preparation.vary(batch, preparation.draw(len(batch), generator_for(0, number))))
    assert time.perf_counter() - started < 3


@pytest.mark.parametrize("number", range(8))
def test_a_process_that_the_system_ends_is_told_in_a_sentence(tmp_path, number):
    batches = load(str(write_folder(tmp_path)), stream=True).train.fetch(torch.arange(24).split(1))
    for _ in range(number):
        next(batches)
    next(batches)
    for each in multiprocessing.active_children():
        each.kill()
    with pytest.raises(ChildProcessError, match="a process that decodes pictures was ended"):
        list(batches)


def test_too_little_shared_memory_is_told_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "share_memory_", _no_space)
    batches = load(str(write_folder(tmp_path)), stream=True).train.fetch(torch.arange(24).split(24))
    with pytest.raises(MemoryError, match="too little shared memory for 0 MiB of pictures"):
        next(batches)


def _no_space(tensor):
    raise RuntimeError("unable to allocate shared memory")


def test_what_was_asked_for_is_not_decoded_once_it_is_over(tmp_path):
    room, over = torch.zeros(1, 2, 3, 8, 8, dtype=torch.uint8), torch.zeros(1, dtype=torch.bool)
    task = [tmp_path / "absent.png"], room, over, 0, [0, 0]
    with pytest.raises(ValueError, match=r"absent.png is not a picture"):
        ahead._fill(*task)
    batches = ahead._filled_by_processes(1, ([write_folder(tmp_path)], room, over), iter([]))
    assert list(batches) == []
    assert ahead._fill(*task) == (0, 2)


DECODING = """
import multiprocessing, sys, time
import torch
from efficient_densenet.training.data import load
batches = load(sys.argv[1], stream=True).train.fetch(torch.arange(24).split(2))
next(batches)
print(*(each.pid for each in multiprocessing.active_children()), flush=True)
time.sleep(60)
"""


def test_processes_end_with_the_one_that_they_decode_for(tmp_path):
    words = [sys.executable, "-c", DECODING, str(write_folder(tmp_path))]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as main:
        decoding = [Path(f"/proc/{number}/cmdline") for number in main.stdout.readline().split()]
        assert [path.read_bytes() != b"" for path in decoding] == [True, True]
        main.kill()
    deadline = time.monotonic() + 20
    while any(_runs(path) for path in decoding):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _runs(command_line: Path) -> bool:
    try:
        return command_line.read_bytes() != b""  # as it is once it has ended, until somebody asks for how
    except OSError:
        return False


def test_streamed_batches_of_any_size_take_the_same_number_of_open_files(tmp_path):
    source = load(str(write_folder(tmp_path)), stream=True)
    taken = [len(os.listdir("/proc/self/fd")) for size in (1, 12) for _ in source.train.fetch([torch.arange(size)])]
    assert taken[0] == taken[1]


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_streamed_batches_come_in_order_from_any_number_of_processes(tmp_path, workers):
    source = load(str(write_folder(tmp_path)), stream=True, workers=workers)
    sizes = [3, 1, 5, 2, 4, 1, 1, 7]
    batches = list(source.train.fetch(torch.arange(24).split(sizes)))
    assert [len(images) for images, _ in batches] == sizes
    single = torch.cat([images for images, _ in load(str(tmp_path)).train.fetch(torch.arange(24).split(24))])
    assert torch.equal(torch.cat([images for images, _ in batches]), single)
    assert list(source.train.fetch([])) == []


def test_a_download_where_nothing_may_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "mkdtemp", _may_not)
    with pytest.raises(OSError, match=r"cifar is absent or empty, and nothing can be .* \(Permission denied\)"):
        load(str(tmp_path / "cifar"))


def test_a_directory_that_may_not_be_read(tmp_path, monkeypatch):
    write_folder(tmp_path)
    (tmp_path / "train" / "dog").rename(tmp_path / "dog")
    (tmp_path / "train" / "dog").mkdir()
    usual = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: _may_not(path) if path.name == "dog" else usual(path))
    with pytest.raises(PermissionError, match="train/dog may not be read: change its permissions"):
        load(str(tmp_path))


def _may_not(path: Path = Path(), **_):
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def test_a_folder_with_a_file_named_as_cifars_is_a_folder(tmp_path):
    write_folder(tmp_path)
    (tmp_path / "meta").write_text("notes")
    assert load(str(tmp_path)).name == f"image folder {tmp_path}"
