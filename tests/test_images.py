"""Decoding, prefetching, augmenting and normalizing images."""

import contextlib
import gc
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from samples import DEMOS, write_folder
from training.data import Images, load
from training.data.augment import Transform, generator_for, transform_for
from training.data.decode import decode


def test_streamed_images_equal_those_in_memory(tmp_path):
    write_folder(tmp_path)
    in_memory, streamed = (load(str(tmp_path), stream=stream).train for stream in (False, True))
    indices = torch.randperm(24).split(7)
    state = torch.get_rng_state()
    for ours, theirs in zip(streamed.fetch(indices), in_memory.fetch(indices), strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("stream", [False, True])
def test_colors_become_gray_as_in_pillow(stream, tmp_path):
    write_folder(tmp_path)
    dataset = load(str(tmp_path), stream=stream)
    indices = torch.arange(24).split(7)
    gray = dataset.with_channels(1)
    assert (dataset.channels, gray.channels, gray.valid) == (3, 1, None)
    for (colors, _), (found, _) in zip(dataset.test.fetch(indices), gray.test.fetch(indices), strict=True):
        expected = [np.array(Image.fromarray(each.permute(1, 2, 0).numpy()).convert("L")) for each in colors]
        assert torch.equal(found, torch.from_numpy(np.stack(expected))[:, None])


def test_gray_images_are_repeated_as_views_of_the_same_memory():
    digits = load(None)
    repeated = digits.with_channels(3)
    assert repeated.channels == 3
    assert repeated.train.images.data_ptr() == digits.train.images.data_ptr()
    assert torch.equal(repeated.test.images, torch.cat([digits.test.images] * 3, 1))
    assert torch.equal(digits.with_channels(1).train.images, digits.train.images)


def _ramp(folder: Path) -> tuple[Path, Image.Image]:
    path, gray = folder / "image.png", torch.linspace(0, 255, 24 * 24).round().byte().view(24, 24)
    return path, Image.fromarray(gray.numpy())


@pytest.mark.parametrize("dtype", ["uint16", ">u2"])
def test_sixteen_bits_are_scaled_to_eight(tmp_path, dtype):
    path, ramp = _ramp(tmp_path)
    path = path.with_suffix(".tif")
    deep = (np.asarray(ramp).astype(int) * 257).astype(dtype)
    Image.frombytes("I;16B" if dtype == ">u2" else "I;16", ramp.size, deep.tobytes()).save(path)
    with Image.open(path) as opened:
        assert opened.mode.startswith("I;16")
    assert torch.equal(decode(path, 24, channels=1), torch.from_numpy(np.array(ramp))[None])


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pixels_without_a_known_white_level_are_refused(tmp_path, mode):
    path = tmp_path / "image.tif"
    Image.new(mode, (9, 9)).save(path)
    with pytest.raises(ValueError, match=f"its pixels are of mode {mode}, whose white level is not known"):
        decode(path, 8)


def test_the_exif_orientation_is_applied(tmp_path):
    path, ramp = _ramp(tmp_path)
    exif = Image.Exif()
    exif[0x112] = 6  # rotated by 90 degrees
    ramp.save(path, exif=exif)
    assert torch.equal(decode(path, 24, channels=1)[0], torch.from_numpy(np.array(ramp)).rot90(-1))


def test_transparent_colors_of_a_palette_give_no_warning(tmp_path):
    path, ramp = _ramp(tmp_path)
    ramp.convert("P").save(path, transparency=bytes([0, 255] * 128))
    assert torch.equal(decode(path, 24, channels=1)[0], torch.from_numpy(np.array(ramp)))


def test_each_image_is_cropped_and_flipped_on_its_own():
    images = torch.randint(256, (64, 2, 8, 8), dtype=torch.uint8)
    transform = Transform((0.0,) * 2, (1.0,) * 2, padding=2, horizontal_flip=True)
    drawn = transform.sample_params(64, generator_for(0))
    augmented = transform.augment(images, drawn)
    padded = torch.nn.functional.pad(images, (2,) * 4)
    seen = set()
    for i, (actual, original) in enumerate(zip(augmented, padded, strict=True)):
        params = [(row, column, flip) for row in range(5) for column in range(5) for flip in (False, True)]
        crops = {p: original[:, p[0] : p[0] + 8, p[1] : p[1] + 8] for p in params}
        matching = [p for p in params if torch.equal(crops[p].flip(2) if p[2] else crops[p], actual)]
        assert matching == [(*drawn.offsets[:, i].tolist(), bool(drawn.flips[i]))]
        seen.update(matching)
    assert len(seen) > 25
    assert {flip for _, _, flip in seen} == {False, True}


def test_a_part_of_a_batch_is_augmented_as_in_the_whole_batch():
    images = torch.randint(256, (10, 3, 8, 8), dtype=torch.uint8)
    transform = Transform((0.0,) * 3, (1.0,) * 3, padding=1, horizontal_flip=True)
    params = transform.sample_params(10, generator_for(3, 1))
    part = slice(4, 9)
    assert torch.equal(transform.augment(images[part], params[part]), transform.augment(images, params)[part])


def test_normalized_images_have_mean_zero_and_std_one():
    images = Images(torch.randint(30, 90, (50, 3, 8, 8), dtype=torch.uint8), torch.zeros(50, dtype=torch.long))
    values = (
        transform_for(images, horizontal_flip=False).normalize(images.images, torch.float64).transpose(0, 1).flatten(1)
    )
    assert values.mean(1).abs().max() < 1e-12
    assert (values.std(1) - 1).abs().max() < 1e-3
    flat = Images(torch.full((2, 1, 8, 8), 7, dtype=torch.uint8), torch.zeros(2, dtype=torch.long))
    assert transform_for(flat, horizontal_flip=False).normalize(flat.images).abs().max() == 0


@pytest.mark.parametrize("number", [0, 3])
def test_a_killed_worker_is_reported_in_a_sentence(tmp_path, number):
    batches = load(str(write_folder(tmp_path)), stream=True).train.fetch(torch.arange(24).split(1))
    for _ in range(number):
        next(batches)
    next(batches)
    for each in multiprocessing.active_children():
        each.kill()
    with pytest.raises(ChildProcessError, match="a process that decodes images was killed"):
        list(batches)


def test_too_little_shared_memory_is_reported_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "share_memory_", _no_space)
    batches = load(str(write_folder(tmp_path)), stream=True).train.fetch(torch.arange(24).split(24))
    with pytest.raises(MemoryError, match="too little shared memory for prefetched batches of 0 MiB"):
        next(batches)


def _no_space(tensor):
    raise RuntimeError("unable to allocate shared memory")


DECODING = """
import multiprocessing, sys, time
import torch
from training.data import load
batches = load(sys.argv[1], stream=True).train.fetch(torch.arange(24).split(2))
next(batches)
print(*(each.pid for each in multiprocessing.active_children()), flush=True)
time.sleep(60)
"""


def test_workers_end_with_the_process_that_they_decode_for(tmp_path):
    words = [sys.executable, "-c", DECODING, str(write_folder(tmp_path))]
    with subprocess.Popen(words, cwd=DEMOS, stdout=subprocess.PIPE, text=True) as main:
        workers = [Path(f"/proc/{number}/cmdline") for number in main.stdout.readline().split()]
        assert [path.read_bytes() != b"" for path in workers] == [True, True]
        main.kill()
    deadline = time.monotonic() + 20
    while any(_runs(path) for path in workers):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _runs(command_line: Path) -> bool:
    try:
        return command_line.read_bytes() != b""  # empty in a zombie, until its parent waits for it
    except OSError:
        return False


def test_streamed_batches_of_any_size_use_the_same_number_of_open_files(tmp_path):
    """Files that other tests left open may be closed meanwhile, here one at each batch."""
    dataset = load(str(write_folder(tmp_path)), stream=True)
    others, counts = [os.open(os.devnull, os.O_RDONLY) for _ in range(2)], []
    for size in (1, 12):
        before = _open_files()
        for _ in dataset.train.fetch([torch.arange(size)]):
            os.close(others.pop())
            counts.append(len(_open_files() - before))
        gc.collect()  # a DataLoader iterator is part of a cycle
        deadline = time.monotonic() + 20
        while not _open_files() <= before:  # threads of its queues close theirs
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert counts[0] == counts[1] > 0


def _open_files() -> set[tuple[str, str]]:
    """Their numbers, and what they are: a number that was closed may be used again."""
    files = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            files.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return files


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_streamed_batches_come_in_order_from_any_number_of_processes(tmp_path, workers):
    dataset = load(str(write_folder(tmp_path)), stream=True, workers=workers)
    sizes = [3, 1, 5, 2, 4, 1, 1, 7]
    batches = list(dataset.train.fetch(torch.arange(24).split(sizes)))
    assert [len(images) for images, _ in batches] == sizes
    single = torch.cat([images for images, _ in load(str(tmp_path)).train.fetch(torch.arange(24).split(24))])
    assert torch.equal(torch.cat([images for images, _ in batches]), single)
    assert list(dataset.train.fetch([])) == []
