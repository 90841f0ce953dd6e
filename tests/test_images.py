"""Decoding, streaming, augmenting and normalizing images."""

import json
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from samples import DIGITS, TINY, demo, write_folder
from training.data import Images, load
from training.data.augment import Transform, generator_for, transform_for
from training.data.folder import decode

from efficient_densenet._images import UndecodableImage
from efficient_densenet.weights.transforms import ImageTransform


def test_streamed_images_equal_those_in_memory_in_any_number_of_processes(tmp_path):
    write_folder(tmp_path)
    batches = torch.randperm(24).split([3, 1, 5, 2, 4, 1, 1, 7])
    expected = list(load(str(tmp_path), stream=False, workers=0).train.fetch(batches))
    state = torch.get_rng_state()
    for workers in (0, 1, 3):
        streamed = load(str(tmp_path), stream=True, workers=workers).train
        for ours, theirs in zip(streamed.fetch(batches), expected, strict=True):
            assert torch.equal(ours[0], theirs[0])
            assert torch.equal(ours[1], theirs[1])
        assert list(streamed.fetch([])) == []
    assert torch.equal(state, torch.get_rng_state())


def test_images_come_in_the_channels_of_a_network(tmp_path):
    write_folder(tmp_path)
    colors = load(str(tmp_path), workers=0).test.images
    expected = [np.array(Image.fromarray(each.permute(1, 2, 0).numpy()).convert("L")) for each in colors]
    for stream in (False, True):
        gray = load(str(tmp_path), stream=stream, workers=0, channels=1)
        assert gray.channels == 1
        ((found, _),) = gray.test.fetch([torch.arange(24)])
        assert (
            found[:, 0].int() - torch.from_numpy(np.stack(expected)).int()
        ).abs().max() <= 2  # resized before or after
    digits, repeated = load(None), load(None, channels=3)
    assert repeated.channels == 3
    assert torch.equal(repeated.test.images, torch.cat([digits.test.images] * 3, 1))


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"


def test_a_file_of_another_format_than_its_name_s_starts_no_program(tmp_path, monkeypatch):
    """Pillow gives an EPS to Ghostscript, whatever its file is called; a JPEG may be called PNG."""
    started = []
    monkeypatch.setattr(
        "PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: started.append(1) or Image.new("RGB", (9, 9))
    )
    (tmp_path / "x.png").write_bytes(EPS)
    done = demo("predict.py", "x.png", "--model", str(DIGITS), cwd=tmp_path)
    assert "note: x.png is not an image that can be decoded (it cannot be identified): replace or remove" in done.stderr
    assert (done.returncode, done.stderr.count("\n")) == (1, 2), done.stderr
    assert started == []
    path, ramp = _ramp(tmp_path)
    ramp.save(path, format="JPEG", quality=100)
    assert (decode(path, 24, channels=1)[0].int() - torch.from_numpy(np.array(ramp)).int()).abs().max() < 5


def _ramp(folder: Path) -> tuple[Path, Image.Image]:
    path, gray = folder / "image.png", torch.linspace(0, 255, 24 * 24).round().byte().view(24, 24)
    return path, Image.fromarray(gray.numpy())


def _deep_folder(folder: Path, name: str, images: dict[str, Image.Image]) -> Path:
    for split in ("train", "test"):
        for label, image in images.items():
            (folder / split / label).mkdir(parents=True)
            for i in range(4):
                image.save(folder / split / label / f"{i}{name}")
    return folder


LEVELS = np.arange(4096).reshape(64, 64)
ABOVE = LEVELS + 1000
DEEP = {
    "twelve bits.png": Image.fromarray(ABOVE.astype(np.uint16)),
    "twelve bits of big endian.tif": Image.frombytes("I;16B", (64, 64), ABOVE.astype(">u2").tobytes()),
    "fractions.tif": Image.fromarray((ABOVE / 4095).astype(np.float32)),
    "32 bits.tif": Image.fromarray((100_000 * ABOVE).astype(np.int32)),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", DEEP)
def test_all_levels_of_deep_images_are_kept_between_black_and_white_of_the_training_images(name, stream, tmp_path):
    dark = np.asarray(DEEP[name]).copy()
    dark[32:] = dark[0, 0]
    _deep_folder(tmp_path, name, {"dark": Image.fromarray(dark), "light": DEEP[name]})
    loaded = load(str(tmp_path), image_size=64, stream=stream, workers=0, channels=1)
    assert loaded.value_range == DEEP[name].convert("F").getextrema()
    ((images, _),) = loaded.test.fetch([torch.tensor([0, 7])])
    expected = torch.arange(4096).view(1, 64, 64) * (255 / 4095)
    torch.testing.assert_close(images[1], expected, rtol=0, atol=1e-3)
    assert len(images[1].unique()) == 4096
    assert images[0][:, 32:].abs().max() < 1e-3
    prepare = ImageTransform(64, (0.0,), (1.0,), loaded.value_range)
    with Image.open(tmp_path / "test" / "light" / f"0{name}") as image:
        assert torch.equal(prepare(image), images[1])
    other = load(str(tmp_path), image_size=64, stream=stream, workers=0, value_range=(0, 1e6))
    assert other.train.fetch([torch.tensor([7])]).__next__()[0].shape == (1, 3, 64, 64)
    assert other.value_range == (0, 1e6)  # of the run that goes on


def test_a_run_on_twelve_bits_saves_their_range_and_predicts_with_it(tmp_path):
    rng = np.random.default_rng(0)
    images = {name: rng.integers(low, low + 400, (20, 20)) for name, low in (("dark", 500), ("light", 3000))}
    _deep_folder(tmp_path / "own", ".png", {k: Image.fromarray(v.astype(np.uint16)) for k, v in images.items()})
    low, high = images["dark"].min(), images["light"].max()
    words = "--n_epochs 20 --batch_size 4 --lr 0.05 --valid_size 0 --recipe one_cycle --data own --save run"
    done = demo("cp_demo.py", *TINY, *words.split(), cwd=tmp_path)
    assert f"images of more than 8 bits: {low} is black and {high} is white" in done.stdout, done.stderr
    config = json.loads((tmp_path / "run" / "config.json").read_text())["model"]
    assert config["value_range"] == [low, high]
    assert "test error 0.00%" in done.stdout
    done = demo("predict.py", "own/test", "--model", "run", cwd=tmp_path)
    for line in done.stdout.splitlines():
        assert re.match(r"own/test/(\w+)/\d.png: \1 \(", line), done.stdout
    (tmp_path / "own" / "train").rename(tmp_path / "away")
    for label, image in images.items():  # other files with other ends
        (tmp_path / "own" / "train" / label).mkdir(parents=True)
        Image.fromarray((4 * image).astype(np.uint16)).save(tmp_path / "own" / "train" / label / "0.png")
    assert "test error 0.00%" in demo("cp_demo.py", "--evaluate", "run", cwd=tmp_path).stdout


def test_sixteen_bits_that_a_file_declares_are_kept_in_predicting(tmp_path):
    path = tmp_path / "deep.png"
    Image.fromarray(LEVELS.astype(np.uint16) * 16).save(path)
    with Image.open(path) as image:
        found = ImageTransform(64, (0.0,) * 3, (1.0,) * 3)(image)
    assert found.shape == (3, 64, 64)
    torch.testing.assert_close(found[0], torch.arange(4096).view(64, 64) * 16 / 257, rtol=1e-6, atol=1e-5)


def test_deep_images_without_a_known_range_are_refused(tmp_path):
    paths = [tmp_path / name for name in ("float.tif", "color.png", "deep.png")]
    Image.new("F", (9, 9)).save(paths[0])
    raw = b"".join(b"\0" + bytes(6 * 9) for _ in range(9))
    chunks = (b"IHDR", struct.pack(">IIBBBBB", 9, 9, 16, 2, 0, 0, 0)), (b"IDAT", zlib.compress(raw)), (b"IEND", b"")
    signed = [struct.pack(">I", len(c)) + name + c + struct.pack(">I", zlib.crc32(name + c)) for name, c in chunks]
    paths[1].write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(signed))
    Image.fromarray(LEVELS.astype(np.uint16)).save(paths[2])
    done = demo("predict.py", "float.tif", "color.png", "--model", str(DIGITS), cwd=tmp_path)
    first, second, _ = done.stderr.splitlines()
    assert "float.tif is not an image that can be decoded (its pixels are of mode F, whose white level" in first
    assert "(it has 16 bits a channel in color, of which Pillow reads 8: convert it to 8 bits or to gray)" in second
    with pytest.raises(UndecodableImage, match=r"deep.png .* more than 8 bits a channel, unlike the training images"):
        decode(paths[2], 8)


def test_the_exif_orientation_and_the_colors_of_a_palette_are_applied(tmp_path):
    path, ramp = _ramp(tmp_path)
    exif = Image.Exif()
    exif[0x112] = 6  # rotated by 90 degrees
    ramp.save(path, exif=exif)
    assert torch.equal(decode(path, 24, channels=1)[0], torch.from_numpy(np.array(ramp)).rot90(-1))
    ramp.convert("P").save(path, transparency=bytes([0, 255] * 128))
    assert torch.equal(decode(path, 24, channels=1)[0], torch.from_numpy(np.array(ramp)))


def test_the_central_square_is_what_is_resized(tmp_path):
    wide = torch.zeros(3, 10, 30, dtype=torch.uint8)
    wide[:, :, 10:20] = torch.randint(256, (3, 10, 10), dtype=torch.uint8)
    wide[:, :, :10] = 255
    Image.fromarray(wide.permute(1, 2, 0).numpy()).save(tmp_path / "wide.png")
    assert torch.equal(decode(tmp_path / "wide.png", 10), wide[:, :, 10:20])
    half = decode(tmp_path / "wide.png", 5).float()
    expected = torch.nn.functional.interpolate(wide[None, :, :, 10:20].float(), size=5, mode="bilinear", antialias=True)
    assert (half - expected[0]).abs().max() < 1.1


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
        assert matching == [tuple(drawn[:, i].tolist())]
        seen.update(matching)
    assert len(seen) > 25
    assert {flip for _, _, flip in seen} == {False, True}
    part = slice(4, 9)
    assert torch.equal(transform.augment(images[part], drawn[:, part]), augmented[part])


def test_normalized_images_have_mean_zero_and_std_one():
    images = Images(torch.randint(30, 90, (50, 3, 8, 8), dtype=torch.uint8), torch.zeros(50, dtype=torch.long))
    transform = transform_for(images, horizontal_flip=False)
    values = transform.normalize(images.images, torch.float64).transpose(0, 1).flatten(1)
    assert values.mean(1).abs().max() < 1e-12
    assert (values.std(1) - 1).abs().max() < 1e-3
    flat = Images(torch.full((2, 1, 8, 8), 7, dtype=torch.uint8), torch.zeros(2, dtype=torch.long))
    assert transform_for(flat, horizontal_flip=False).normalize(flat.images).abs().max() == 0
