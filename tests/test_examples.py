"""The programs of examples/ on small generated data: what they write, engines that agree, resuming, and bad input.

Their libraries are an extra of their own, which the first tier does without. Processes that run this file as a script
train a small model by the programs' `Run`.
"""

import argparse
import importlib
import inspect
import json
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from forks import ForkedDemo, fork_processes
from PIL import Image

from efficient_densenet import FCDenseNet

EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = [pytest.mark.exhaustive, pytest.mark.filterwarnings("default")]


class Program(NamedTuple):
    """Options beside --data and --out; the files of a run; its table, and columns of numbers of the predictions, or
    of the table where there are none."""

    words: tuple[str, ...]
    files: tuple[str, ...]
    table: str
    scores: tuple[str, ...]


PROGRAMS = {
    "chest_xray": Program(
        ("--image_size", "160", "--epochs", "2", "--batch_size", "8", "--resamples", "20"),
        ("predictions.csv", "roc.png", "gradcam/Effusion.png", "gradcam/Nodule.png", "config.json"),
        "auroc.csv",
        ("Cardiomegaly", "Effusion", "Nodule"),
    ),
    "segmentation": Program(
        ("--model", "fc_densenet56", "--crop", "64", "--epochs", "1", "--whole_epochs", "1", "--overlays", "1"),
        ("confusion.png", "overlays/0000.png"),
        "iou.csv",
        ("iou", "accuracy"),
    ),
    "segment_volumes": Program(
        ("--patch", "32", "32", "32", "--epochs", "2", "--patches", "1", "--pictures", "1"),
        ("labels/*.nii.gz", "labels/*.png", "config.json"),
        "dice.csv",
        ("dice", "least"),
    ),
    "volumes": Program(
        # At 1e-4 two threads and one differ by 0.008, and plain and shared by 0.015: rounding grows with AdamW's steps.
        (
            *("--patch", "32", "32", "32", "--epochs", "2", "--accumulate", "2"),
            *("--maps", "1", "--resamples", "20", "--learning_rate", "2e-5"),
        ),
        ("predictions.csv", "confusion.png", "maps/*.nii.gz", "maps/*.png"),
        "results.csv",
        ("p few spots", "p many spots"),
    ),
}


@pytest.fixture(autouse=True)
def _examples_are_importable(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))


def load(name: str) -> ModuleType:
    for needed in ("pandas", "torchmetrics", "pytorch_grad_cam", "nibabel", "monai"):
        pytest.importorskip(needed)
    return importlib.import_module(name)


def write_data(name: str, folder: Path) -> Path:
    generated = load("generated")
    if name == "segmentation":
        return generated.streets(folder / "streets", {"train": 4, "val": 2, "test": 2})
    if name == "segment_volumes":
        return generated.organs(folder / "organs", count=4, size=32)
    if name == "volumes":
        return generated.volumes(folder / "volumes", patients=20, size=34)
    return generated.xrays(folder / "xrays", patients=20, size=64)


def run(monkeypatch, name: str, data: Path, out: Path, *words: str):
    """The table of a run, without the seconds that planning for a card takes."""
    program, common = load(name), load("common")
    signature = inspect.signature(common.print_what_fits)
    monkeypatch.setattr(common, "print_what_fits", lambda *given: signature.bind(*given))
    return program.main(["--data", str(data), "--out", str(out), *PROGRAMS[name].words, *words])


def refuse(monkeypatch, name: str, data: Path, out: Path, *words: str) -> str:
    """The sentence with which a program refuses its input, before anything is built."""
    program = load(name)
    with monkeypatch.context() as patched:
        patched.setattr(program, "create_model", None)
        with pytest.raises(SystemExit) as stopped:
            program.main(["--data", str(data), "--out", str(out), *words])
    return str(stopped.value)


@pytest.mark.parametrize("name", PROGRAMS)
def test_engines_agree_and_an_interrupted_run_ends_like_a_whole_one(name, tmp_path, monkeypatch, capsys):
    program, data = PROGRAMS[name], write_data(name, tmp_path)
    import pandas as pd

    whole = run(monkeypatch, name, data, tmp_path / "whole")
    for pattern in program.files:
        (file,) = (tmp_path / "whole").glob(pattern)
        assert file.stat().st_size > 100, file
        if file.suffix == ".png":
            assert np.asarray(Image.open(file)).std() > 10, file  # not blank
    written = pd.read_csv(tmp_path / "whole" / program.table)
    assert list(written) == list(whole)
    assert whole.iloc[:, 0].astype(str).tolist()[-1] in capsys.readouterr().out.splitlines()[-1]

    common, save = load("common"), load("common").Run.save

    def save_and_stop(*args) -> None:
        save(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(common.Run, "save", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            run(patched, name, data, tmp_path / "parts", "--engine", "plain")
    with pytest.raises(SystemExit, match="add --resume"):
        run(monkeypatch, name, data, tmp_path / "parts")
    with pytest.raises(SystemExit, match=r"--learning_rate is 0.5, but the run in .* began with"):
        run(monkeypatch, name, data, tmp_path / "parts", "--resume", "--learning_rate", "0.5")
    parts = run(monkeypatch, name, data, tmp_path / "parts", "--resume", "--engine", "plain")
    print(whole.to_string(), parts.to_string())
    if "predictions.csv" in program.files:  # ranks of so few images change with the last digits
        whole, parts = (pd.read_csv(tmp_path / run / "predictions.csv") for run in ("whole", "parts"))
        assert len(whole) > 1
    for column in program.scores:
        np.testing.assert_allclose(whole[column], parts[column], atol=0.01)
    assert not list(tmp_path.rglob("*.tmp"))
    _predicting_gives_the_run_s_own_numbers(name, data, tmp_path / "whole")


def _predicting_gives_the_run_s_own_numbers(name: str, data: Path, out: Path) -> None:
    import pandas as pd

    folders = {"segmentation": data / "test", "segment_volumes": data / "imagesTr"}
    folder = folders.get(name, data.parent)
    predicted = load(name).main(["--predict", str(folder), "--out", str(out)]).set_index("file")
    predicted.index = [Path(file).name for file in predicted.index]
    np.testing.assert_allclose(pd.read_csv(out / "predicted.csv").iloc[:, 1:], predicted, atol=1e-6)
    if name == "segmentation":  # of the masks, the classes' shares of all test pictures
        shares = [
            np.bincount(np.asarray(Image.open(mask)).ravel(), minlength=5) for mask in out.glob("predicted/*.png")
        ]
        np.testing.assert_allclose(predicted.mean(), np.sum(shares, 0) / np.sum(shares), atol=1e-4)
        return
    if name == "segment_volumes":
        import nibabel

        for own in out.glob("labels/*.nii.gz"):
            ours, theirs = (np.asarray(nibabel.load(path).dataobj) for path in (out / "predicted" / own.name, own))
            np.testing.assert_array_equal(ours, theirs)
        return
    own = pd.read_csv(out / "predictions.csv").set_index("image" if name == "chest_xray" else "volume")
    own.index = [Path(file).name for file in own.index]
    for label in predicted:
        column = own[label if name == "chest_xray" else f"p {label}"]
        np.testing.assert_allclose(predicted.loc[own.index, label], column, atol=2e-4)


def test_what_fits_is_printed_before_anything_runs(tmp_path, monkeypatch, capsys):
    program, data = load("segmentation"), write_data("segmentation", tmp_path)

    def stop(*_, **__) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "Run", stop)
    words = "--model", "fc_densenet56", "--crop", "64", "--out", str(tmp_path / "out"), "--card", "2GB"
    (data / "train" / "._0000.png").write_bytes(b"of macOS")
    with pytest.raises(KeyboardInterrupt):
        program.main(["--data", str(data), *words])
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith(("plain", "shared"))]
    assert [row[0] for row in rows] == ["plain", "shared"] * 2  # of crops, and of whole pictures
    for plain, shared in (rows[:2], rows[2:]):
        assert float(shared[1]) < float(plain[1])
        assert int(shared[-1].replace(",", "")) > 2 * int(plain[-1].replace(",", ""))
    with pytest.raises(SystemExit, match="--card is 'big', but must be a number above 0"):
        program.main(["--data", str(data), *words[:-1], "big"])


@pytest.mark.parametrize("cache", ["0", "1"])
def test_odd_volumes_keep_their_voxels_and_spoilt_ones_are_left_out(cache, tmp_path, monkeypatch, capsys):
    """Volumes smaller than a window are predicted on their own voxels; NaN and unknown labels are named."""
    common, program = load("common"), load("segment_volumes")
    import nibabel
    import pandas as pd

    monkeypatch.setattr(program, "create_model", lambda _, **given: FCDenseNet(4, (1, 1, 1), 8, **given))
    data, out = write_data("segment_volumes", tmp_path), tmp_path / "out"
    for sample in json.loads((data / "dataset.json").read_text())["training"]:
        for file in sample.values():
            volume = nibabel.load(data / file)
            nibabel.save(volume.slicer[:30, :, :31], data / file)
    words = "--pictures", "2", "--cache", cache, "--epochs", "1"
    table = run(monkeypatch, "segment_volumes", data, out, *words)
    assert table["volumes"].tolist() == [1, 1]
    program.main(["--predict", str(data / "imagesTr"), "--out", str(out)])
    shares = pd.read_csv(out / "predicted.csv").set_index("file")
    for path in [*(out / "predicted").iterdir(), *(out / "labels").glob("*.nii.gz")]:
        found, image = nibabel.load(path), nibabel.load(data / "imagesTr" / path.name)
        assert found.shape == image.shape == (30, 32, 31)
        np.testing.assert_allclose(found.affine, image.affine)
        counts = np.bincount(np.asarray(found.dataobj).ravel(), minlength=3) / (30 * 32 * 31)
        np.testing.assert_allclose(shares.loc[str(data / "imagesTr" / path.name)], counts, atol=1e-4)

    settings = {"patch": [32] * 3, "patches": 1, "spacing": None, "window": None, "cache": 0.0, "workers": 0}
    rows = pd.DataFrame({"image": [str(data / "imagesTr/organ_000.nii.gz")]})
    (sample,) = load("volume_tables").make_data(rows, argparse.Namespace(**settings))
    assert sample["image"].shape == (1, 30, 32, 31)

    for place, name, value in (("imagesTr", "organ_001", np.nan), ("labelsTr", "organ_002", 7)):
        path = data / place / f"{name}.nii.gz"
        volume = nibabel.load(path)
        values = np.array(volume.dataobj)
        values[3, 4, 5] = value
        nibabel.save(nibabel.Nifti1Image(values, volume.affine), path)
    capsys.readouterr()
    run(monkeypatch, "segment_volumes", data, tmp_path / "spoilt", *words)
    assert common.Run.latest.broken.keys() == {str(data / f"imagesTr/organ_00{i}.nii.gz") for i in (1, 2)}
    printed = capsys.readouterr().out
    assert "it has voxels that are NaN or infinite" in printed
    assert "its label has the value 7, but dataset.json has 0 to 2" in printed


def table_of(folder: Path, columns: str, *rows: str) -> Path:
    path = folder / "table.csv"
    path.write_text("\n".join([columns, *rows]) + "\n")
    return path


Change = Callable[[Path], Path | None]
CHEXPERT = "Path,Sex,Age,Frontal/Lateral,AP/PA,No Finding,Edema"


def test_chexpert_s_labels_uncertain_ones_and_the_split_by_patient(tmp_path, capsys):
    tables, chest_xray = load("xray_tables"), load("chest_xray")
    rows = []
    for i in range(20):
        (tmp_path / f"patient{i:02}").mkdir()
        for view in ("a", "b"):
            Image.new("L", (8, 8)).save(tmp_path / f"patient{i:02}" / f"{view}.png")
            rows.append(f"patient{i:02}/{view}.png,F,60,Frontal, AP, , {['1.0', '0.0', '-1.0', ''][i % 4]}")
    data = table_of(tmp_path, CHEXPERT, *rows)
    for uncertain, value in (("ignore", np.nan), ("ones", 1), ("zeros", 0)):
        words = ["--data", str(data), "--out", str(tmp_path / "out"), "--seed", "1", "--uncertain", uncertain]
        table, labels, name = tables.read_table(chest_xray.parse(words))
        printed = capsys.readouterr().out
        assert "50 blank labels are taken as negative (--blank zeros)" in printed
        assert f"10 uncertain labels are {tables.MEANINGS[uncertain]} (--uncertain {uncertain})" in printed
        assert (labels, name) == (["No Finding", "Edema"], "CheXpert")
        np.testing.assert_equal(table["Edema"].to_numpy()[::2], [1, 0, value, 0] * 5)
        assert (table.groupby("patient")["split"].nunique() == 1).all()
        assert table["split"].value_counts().to_dict() == {"train": 28, "valid": 4, "test": 8}
    for blank, value in (("ignore", np.nan), ("ones", 1), ("zeros", 0)):
        edema = tables.read_table(chest_xray.parse([*words, "--blank", blank]))[0]["Edema"]
        np.testing.assert_equal(edema.to_numpy()[::2], [1, 0, 0, value] * 5)
    for names, sentence in (
        ("a.png", r"has some pictures of patient patient\d\d but not all"),
        ("A.png", r"test.txt names no picture of .*table.csv: give names such as a.png"),
        ("a.png b.png c.png d.png", "none is left for "),
    ):
        (tmp_path / "test.txt").write_text(names)
        with pytest.raises(SystemExit, match=sentence):
            tables.read_table(chest_xray.parse([*words, "--test_list", str(tmp_path / "test.txt")]))
    printed = capsys.readouterr().out
    assert "note: No Finding cannot be learned: no two pictures for train differ in it" in printed
    assert "note: 2 of the 4 names in " in printed
    assert "table.csv, such as c.png" in printed


def xray_options(folder: Path, *words: str):
    return load("chest_xray").parse(["--data", "x", "--out", str(folder), *words])


def write_dicom(path: Path, values: np.ndarray, **tags) -> None:
    pydicom = pytest.importorskip("pydicom")
    data = pydicom.Dataset()
    data.file_meta = pydicom.dataset.FileMetaDataset()
    data.file_meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
    data.file_meta.MediaStorageSOPClassUID = data.SOPClassUID = pydicom.uid.SecondaryCaptureImageStorage
    data.file_meta.MediaStorageSOPInstanceUID = data.SOPInstanceUID = pydicom.uid.generate_uid()
    data.Rows, data.Columns = values.shape
    data.SamplesPerPixel, data.BitsAllocated, data.BitsStored, data.HighBit = 1, 16, 12, 11
    data.PixelRepresentation, data.PhotometricInterpretation = 0, "MONOCHROME2"
    data.PixelData = values.astype(np.uint16).tobytes()
    data.update(tags)
    for name, value in tags.items():
        setattr(data, name, value)
    data.save_as(path, enforce_file_format=True)


RAMP = np.arange(4096).reshape(64, 64)


def test_xrays_of_sixteen_bits_keep_their_levels(tmp_path, capsys):
    images, options = load("xray_images"), xray_options(tmp_path)
    Image.fromarray((RAMP + 500).astype(np.uint16)).save(tmp_path / "a.png")
    Image.fromarray(((RAMP + 500) / 7).astype(np.float32)).save(tmp_path / "b.tif")
    for name, scale in (("a.png", 1), ("b.tif", 7)):
        options.range = None
        images.measure([str(tmp_path / name)], options)
        np.testing.assert_allclose(options.range, [500 / scale, 4595 / scale], rtol=1e-6)
        found = images.read(tmp_path / name, options)
        np.testing.assert_allclose(found[0].numpy(), RAMP / 4095, atol=1e-6)
        assert len(found.unique()) == 4096
    assert "pixels: 1 file of 16 bits from 500 (black) to 4595 (white); 0.0% are black" in capsys.readouterr().out
    gray = Image.fromarray((RAMP // 16).astype(np.uint8))
    gray.save(tmp_path / "c.png")
    assert images.read(tmp_path / "c.png", options).dtype.itemsize == 1
    clipping = xray_options(tmp_path, "--window", "0", "3000")
    with pytest.raises(
        SystemExit, match=r"39% of the pixels have different values in the files, but would all be white"
    ):
        images.measure([str(tmp_path / "a.png")], clipping)
    clipping.max_clipped = 0.4
    images.measure([str(tmp_path / "a.png")], clipping)
    saturated = np.where(RAMP < 2000, 500, RAMP)  # in the file itself: nothing is lost here
    Image.fromarray(saturated.astype(np.uint16)).save(tmp_path / "d.png")
    images.measure([str(tmp_path / "d.png")], xray_options(tmp_path))
    assert "48.8% are black" in capsys.readouterr().out


def test_dicom_files_are_scaled_windowed_and_inverted(tmp_path, monkeypatch):
    images, options = load("xray_images"), xray_options(tmp_path)
    cases = {
        "plain": ({}, RAMP / 4095),
        "rescaled": ({"RescaleSlope": 2, "RescaleIntercept": -1000}, RAMP / 4095),
        "inverted": ({"PhotometricInterpretation": "MONOCHROME1"}, 1 - RAMP / 4095),
        "windowed": (
            {"WindowCenter": 2000, "WindowWidth": 1001},
            ((RAMP - 1999.5) / 1000 + 0.5).clip(0, 1),
        ),
    }
    for name, (tags, expected) in cases.items():
        write_dicom(tmp_path / f"{name}.dcm", RAMP, **tags)
        images.check_header(tmp_path / f"{name}.dcm")
        found = images.read(tmp_path / f"{name}.dcm", options)[0].numpy()
        np.testing.assert_allclose(found, expected, atol=1e-6, err_msg=name)
    given = xray_options(tmp_path, "--window", "1000", "3000")
    found = images.read(tmp_path / "windowed.dcm", given)[0].numpy()
    np.testing.assert_allclose(found, ((RAMP - 1000) / 2000).clip(0, 1), atol=1e-6)
    with pytest.raises(SystemExit, match="but would all be"):
        images.measure([str(tmp_path / "windowed.dcm")], options)
    write_dicom(tmp_path / "frames.dcm", RAMP, NumberOfFrames=2)
    with pytest.raises(ValueError, match="2 frames, but one picture a file is needed"):
        images.check_header(tmp_path / "frames.dcm")
    write_dicom(tmp_path / "color.dcm", RAMP, PhotometricInterpretation="PALETTE COLOR")
    with pytest.raises(ValueError, match="is PALETTE COLOR, but must be MONOCHROME1"):
        images.read(tmp_path / "color.dcm", options)
    pydicom = importlib.import_module("pydicom")
    compressed = pydicom.dcmread(tmp_path / "plain.dcm")
    compressed.compress(pydicom.uid.RLELossless)
    compressed.save_as(tmp_path / "rle.dcm")
    images.check_header(tmp_path / "rle.dcm")
    np.testing.assert_allclose(images.read(tmp_path / "rle.dcm", options)[0].numpy(), RAMP / 4095, atol=1e-6)
    monkeypatch.setattr("pydicom.pixels.get_decoder", lambda syntax: argparse.Namespace(is_available=False))
    with pytest.raises(ValueError, match="compressed as RLE Lossless, for which no decoder is installed"):
        images.check_header(tmp_path / "rle.dcm")


def _table(columns: str, *rows: str) -> Change:
    return lambda data: table_of(data.parent, columns, *rows)


def _findings(*findings: str) -> Change:
    """These labels for the pictures, again and again."""

    def change(data: Path) -> None:
        rows = [line.split(",") for line in data.read_text().splitlines()]
        lines = [f"{name},{findings[i % len(findings)]},{patient}" for i, (name, _, patient) in enumerate(rows[1:])]
        data.write_text("\n".join([NIH, *lines]))

    return change


def _file(name: str, content: bytes | None) -> Change:
    """Another content of a file, or none."""
    return lambda data: ((data if data.is_dir() else data.parent) / name).write_bytes(content or b"") and None


def _replaced(name: str, old: str, new: str) -> Change:
    return lambda data: (data / name).write_text((data / name).read_text().replace(old, new)) and None


def _image(name: str, mode: str, size: tuple[int, int], color: Any = 0) -> Change:
    return lambda data: Image.new(mode, size, color).save(data / name)


def _flat_volume(name: str, *shape: int) -> Change:
    def change(data: Path) -> None:
        nibabel = pytest.importorskip("nibabel")
        nibabel.save(nibabel.Nifti1Image(np.zeros(shape, np.uint8), np.eye(4)), data / name)

    return change


NIH = "Image Index,Finding Labels,Patient ID"
MASK, LABEL, VOLUMES = "val_labels/0001_L.png", "labelsTr/organ_002.nii.gz", "volume,label"
REFUSED: dict[str, list[tuple[Change, str]]] = {
    "chest_xray": [
        (_table("Image Index,Finding Labels", "a.png,Mass"), "has the columns Image Index, Finding Labels, but needs"),
        (_table(CHEXPERT, "patient01/a.png,F,60,Frontal,AP,,maybe"), "line 2: Edema is maybe, but must be 1, 0, -1 or"),
        (_table(CHEXPERT, "a.png,F,60,Frontal,AP,,1"), "line 2: no patient is named"),
        (_table(CHEXPERT, "patient01/a.png,F,60,Frontal,AP,,1"), "1 of 1 pictures are not in "),
        (lambda data: data.parent, "cannot be read as a CSV"),
        (_file("images/00000001_001.png", b"no image"), "00000001_001.png cannot be read"),
        (_table(CHEXPERT, "a.png,F,60,Frontal,AP,,1"), "by whom the data is split: add a column patient"),
        (_table(f"{CHEXPERT},patient", "a.png,F,60,Frontal,AP,,1,"), "by whom the data is split: fill in its patient"),
        (_table(NIH), "has no line of a picture: it needs one for each"),
        (_table(NIH, "00000001_001.png,No Finding,1"), "has no label: it needs one, beside No Finding"),
        (_table(NIH, *["00000001_001.png,Mass,1"] * 2), "line 3: 00000001_001.png has a line above as well"),
        (_table(NIH.replace(",", ";"), "a.png;Mass;1"), "seems to be separated by semicolons: save it again with"),
        (_table(NIH.replace(",", "\t"), "a.png\tMass\t1"), "seems to be separated by tabs: save it again with"),
        (_file("xrays.csv", NIH.encode("utf-16")), "is not in UTF-8 (invalid start byte): save it again as a CSV in"),
        (_findings("Mass"), "has no label of 0 and 1 among the pictures for train, so that none can be learned"),
        (_findings(*["Mass"] * 2, *["No Finding"] * 38), "so that none can be "),
    ],
    "segmentation": [
        (_image(MASK, "L", (90, 64)), "has 96 × 64 pixels, but its mask 0001_L.png 90 × 64"),
        (lambda data: (data / MASK).unlink(), "has no mask 0001.png or 0001_L.png"),
        (_image(MASK, "RGB", (96, 64), (1, 2, 3)), "has pixels of [1, 2, 3], which no line of"),
        (_file("val/0001.png", b"no image"), "val/0001.png or its mask"),
        (_image("val/0001.png", "I;16", (96, 64)), "(more than 8 bits a channel: convert it to 8)"),
        (_image("val/0001.png", "RGB", (96, 20)), "(96 × 20 pixels, but the network needs 32 × 32 at least"),
        (_replaced("classes.csv", "64,0,128", "64,x,128"), "line 5: r, g and b must be whole numbers"),
        (lambda data: (data / "classes.csv").unlink(), "classes.csv is missing, with the column name"),
        (_file("classes.csv", b"name\nCar\nVoid\n"), "has ['Car'] beside --ignore, but two classes or more are needed"),
        (lambda data: data / "typo", "typo is missing: give --data in CamVid's layout"),
        (lambda data: data / "classes.csv", "classes.csv is no folder: give --data in CamVid's layout"),
    ],
    "volumes": [
        (_table("volume,class", "000.nii.gz,1"), "lacks the column label: it has volume, class"),
        (_table(VOLUMES, "000.nii.gz,1", "001.nii.gz,"), "line 3: the label is blank"),
        (_table(VOLUMES, "b.nii.gz,1"), "b.nii.gz is missing"),
        (_file("000.nii.gz", b"no volume"), "000.nii.gz cannot be read (File "),
        (_table(VOLUMES, "000.nii.gz,1"), "has the label 1 alone: give volumes of two classes"),
        (_table(VOLUMES, "000.nii.gz,1", "001.nii.gz,2"), "no volume of "),
        (_table(f"{VOLUMES},split", "000.nii.gz,1,val", "001.nii.gz,2,train"), "line 2: split is val, but must be tr"),
    ],
    "segment_volumes": [
        (_flat_volume(LABEL, 4, 4, 4), "the image's shape is (32, 32, 32) and the label's (4, 4, 4)"),
        (_flat_volume(LABEL, 32, 32, 32), "the image and the label lie in other places, by their affines"),
        (_flat_volume(LABEL.replace("labels", "images"), 32, 32, 32, 2), "but must have three dimensions"),
        (_replaced("dataset.json", '"0": "CT"', '"0": "T1", "1": "T2"'), "three dimensions, and 2 modalities in a"),
        (lambda data: (data / LABEL).unlink(), "organ_002.nii.gz is missing, the label of a training volume"),
        (
            _replaced("dataset.json", '"2": "tumor"', '"3": "tumor"'),
            "has the labels [0, 1, 3], but must have 0",
        ),
        (_replaced("dataset.json", '"training"', '"train"'), "dataset.json cannot be read ('training')"),
    ],
}
"""Changes of the data, of which some return other data, and sentences."""


@pytest.mark.parametrize("name", REFUSED)
def test_data_that_do_not_fit_are_refused(name, tmp_path, monkeypatch):
    for i, (change, sentence) in enumerate(REFUSED[name]):
        data = write_data(name, tmp_path / str(i))
        found = refuse(monkeypatch, name, change(data) or data, tmp_path / "out")
        assert sentence in found, found


def test_options_that_cannot_be_are_refused(tmp_path, monkeypatch, capsys):
    data, run_folder, other = write_data("chest_xray", tmp_path), tmp_path / "run", tmp_path / "other"
    for folder in (run_folder, other):
        folder.mkdir()
        (folder / "checkpoint.pt").touch()
    begun = load("common")._settings(xray_options(tmp_path, "--lr", "0.5")) | {"data": str(data)}
    load("torch").save({"settings": begun}, other / "checkpoint.pt")
    for sentence, out, *words in (
        ("argument --batch_size: 0 is no whole number of 1 or more", "out", "--batch_size", "0"),
        *(
            (f"argument --learning_rate/--lr: {text} is no number above 0", "out", "--lr", text)
            for text in ("-1", "nan", "inf", "x")
        ),
        ("lacks the label Hernia", "out", "--labels", "Hernia"),
        ("test_list", "out", "--no_check", "--test_list", str(tmp_path)),
        ("cannot be written", "run/checkpoint.pt"),
        ("holds a run: add --resume", "run"),
        ("--learning_rate is 0.0001, but the run in ", "other", "--resume", "--images", str(tmp_path / "typo")),
        ("--window 400 -1000 must begin with the smaller one", "out", "--window", "400", "-1000"),
        (", did you mean densenet121?", "out", "--model", "densenet12"),
        ("out has no run to resume: give the --out of one that has ended an epoch", "out", "--resume"),
        ("checkpoint.pt is damaged, or of another model than this run's", "run", "--resume"),
    ):
        assert sentence in refuse(monkeypatch, "chest_xray", data, tmp_path / out, *words)
    common = load("common")
    assert common.make_parser(None).parse_args(["--out", "x", "--resume", "auto"]).resume == "auto"
    common._check_folder(argparse.Namespace(out=tmp_path / "out", resume="auto"))  # begins a run
    assert [common.share(text) for text in ("0", "0.5")] == [0, 0.5]
    for text in ("-0.1", "1", "nan", "x"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"{text} is no share from 0 to below 1"):
            common.share(text)
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        load("chest_xray").main(["--out", "x"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "error: --data is missing (--help explains each option)\n"


def test_a_file_that_breaks_later_is_named_and_left_out(tmp_path, monkeypatch, capsys):
    data = write_data("chest_xray", tmp_path)
    image = sorted((data.parent / "images").iterdir())[3]
    pixels = image.read_bytes()
    image.write_bytes(pixels[: len(pixels) // 2])  # whose header is sound
    words = "--epochs", "1", "--image_size", "32", "--labels", "Effusion"
    run(monkeypatch, "chest_xray", data, tmp_path / "out", *words)
    printed = capsys.readouterr().out
    assert f"left out 1 file that could not be read:\n  {image}: " in printed
    assert "labels Effusion 1" in printed


def test_ctrl_c_says_where_and_how_to_go_on(tmp_path):
    code = "import sys; sys.argv[0] = 'x'; import chest_xray as p; from common import Run, script\n"
    code += "def stop(*_): raise KeyboardInterrupt\n"
    code += "class Half: epoch, steps = 2, 5\nRun.latest = Half\nscript(stop)"
    done = subprocess.run([sys.executable, "-c", code], cwd=EXAMPLES, capture_output=True, text=True, check=False)
    assert done.stderr.strip().endswith(
        "stopped in epoch 2 after step 5: continue with --resume, after the last whole epoch"
    )
    assert done.returncode == 130


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_program_says_so_after_ctrl_c(name, monkeypatch, capsys):
    load(name)

    def interrupt(*_, **__) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(load("common"), "make_parser", interrupt)
    monkeypatch.setattr(load("common").Run, "latest", None)
    with pytest.raises(SystemExit, match="130"):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert "stopped before the first epoch: give the same command again" in capsys.readouterr().err
    monkeypatch.setattr(load("common").Run, "latest", argparse.Namespace(epoch=1, steps=5))
    with pytest.raises(SystemExit, match="130"):
        load("common").script(interrupt)
    assert "stopped in epoch 1 after step 5: give the same command again" in capsys.readouterr().err


def test_predicting_by_another_run_or_a_damaged_one_is_refused(tmp_path, capsys):
    import pickle

    import torch

    from efficient_densenet import create_model

    out, pictures = tmp_path / "run", tmp_path / "pictures"
    for folder in (out, pictures):
        folder.mkdir()
    Image.new("L", (64, 64)).save(pictures / "a.png")
    config = '{"program": "chest_xray.py", "options": {"image_size": 32}, "labels": ["a", "b"]}'
    best, foreign = out / "best.pt", create_model("densenet169", in_channels=1, num_classes=2).state_dict()
    torch.save(create_model("densenet121", in_channels=1, num_classes=2).state_dict(), best)

    def predict(name: str = "chest_xray", folder: Path = pictures) -> str:
        with pytest.raises(SystemExit) as stopped:
            load(name).main(["--predict", str(folder), "--out", str(out)])
        assert stopped.value.code == 2
        err = capsys.readouterr().err
        assert "weights_only" not in err
        assert re.search("(^|\r)error: ", err), err  # not behind a bar
        return str(stopped.value)

    for name in ("segmentation", "volumes", "segment_volumes"):
        (out / "config.json").write_text(config)
        assert f"is a run of chest_xray.py: predict by it, or give a run of {name}.py" in predict(name)
    for content, sentence in (
        (config[:-30], "config.json is damaged ("),
        ("[1]", "config.json is damaged ("),
        ("{}", "config.json has no options: it is damaged, or of another program"),
        ('{"options": 1}', "config.json is damaged ("),
        ('{"options": {}, "classes": ["a", "b"]}', "config.json has no labels: it is damaged, or of another program"),
    ):
        (out / "config.json").write_text(content)
        assert sentence in predict()
    (out / "config.json").write_text(config)
    assert len(load("chest_xray").main(["--predict", str(pictures), "--out", str(out)])) == 1
    for content in (
        lambda: best.write_bytes(best.read_bytes()[:-1000]),
        lambda: best.write_bytes(b""),
        lambda: best.write_bytes(pickle.dumps(Path("x"))),
        lambda: torch.save(foreign, best),
        lambda: torch.save([1, 2], best),
    ):
        content()
        assert predict() == f"{best} is damaged, or of another model than this run's: bring back the run's own, or " + (
            "train anew in another --out"
        )
    (pictures / "._a.png").write_bytes(b"of macOS")
    assert [path.name for path in load("common").files_in(pictures, (".png",))] == ["a.png"]
    (pictures / "b.png").write_bytes(b"no image")
    assert "replace it, take it out, or give --no_check, which leaves it out" in predict()
    assert "typo is missing: give a folder of .png" in predict(folder=tmp_path / "typo")
    assert "a.png is no folder: give a folder of .png" in predict(folder=pictures / "a.png")


def test_a_batch_of_one_is_left_out_where_the_model_needs_more(tmp_path, capsys):
    common = load("common")
    import torch

    from efficient_densenet import DenseNet

    def train(side: int, batch_size: int, num_samples: int = 7, broken: int = -1, accumulate: int = 1):
        class Samples:
            def __len__(self) -> int:
                return num_samples

            def __getitem__(self, i: int):
                if i == broken:
                    raise ValueError("step 1 of 2") from OSError("half a file")
                return torch.randn(3, side, side), i % 2

        torch.manual_seed(0)
        model = DenseNet(3, (2, 2), num_init_features=4, num_classes=2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        options = argparse.Namespace(out=tmp_path, precision="float32", workers=0, sync_bn=False, program="")
        run = common.Run(options, model, optimizer)
        names = [f"sample {i}" for i in range(num_samples)]
        for i, (_, (x, y)) in enumerate(run.batches(Samples(), names, "training", batch_size, shuffle=True), start=1):
            run.step(torch.nn.functional.cross_entropy(run.network(x), y), i % accumulate == 0, accumulate)
        assert model.features.norm5.num_batches_tracked == run.steps
        assert all(parameter.grad is None for parameter in model.parameters())  # no gradient waits
        return run.steps

    smallest = DenseNet(3, (2, 2), num_init_features=4).smallest_input
    assert (train(2 * smallest, 3), train(2 * smallest, 1)) == (3, 7)
    assert "left out" not in capsys.readouterr().err
    assert train(smallest, 3) == 2
    assert capsys.readouterr().err.count("note: a batch of one, another in each epoch, is left out (found a batch") == 1
    assert train(smallest, 2, num_samples=4, broken=1) == 1
    assert "note: sample 1 cannot be read and is left out (half a file)" in capsys.readouterr().err
    assert train(smallest, 2, accumulate=2) == train(smallest, 2, accumulate=4) == 3
    with pytest.raises(
        SystemExit, match=r"no batch can be trained on \(found a batch of one .*: give a larger --batch"
    ):
        train(smallest, 1)
    with pytest.raises(SystemExit, match="no file for training can be read: give others"):
        train(smallest, 1, num_samples=1, broken=0)


def test_scores_are_written_with_all_their_digits(tmp_path):
    chest_xray, common = load("chest_xray"), load("common")
    import pandas as pd
    import torch

    scores = 0.5 + torch.arange(6)[:, None] * 2**-24
    truth = torch.tensor([0.0, 1, 0, 1, 1, 1])
    test = pd.DataFrame({"image": list("abcdef"), "patient": range(6), "Edema": truth})
    data = argparse.Namespace(targets=truth[:, None])
    options = xray_options(tmp_path, "--resamples", "20")
    table = chest_xray.report(scores, test, data, ["Edema"], "name", options)
    read = torch.tensor(pd.read_csv(tmp_path / "predictions.csv")["Edema"].to_numpy(), dtype=torch.float32)
    assert read.tolist() == scores[:, 0].tolist()
    assert common.auroc(read, truth.int()) == table["auroc"][0] == 0.875
    common.write_predicted(common.Run(options, torch.nn.Linear(1, 1)), list("abcdef"), ["Edema"], scores)
    assert pd.read_csv(tmp_path / "predicted.csv")["Edema"].astype("float32").tolist() == scores[:, 0].tolist()


def train_a_small_model(folder: Path, num_samples: int) -> None:
    """Two epochs in float64, on samples with random noise, of which one is broken; write what this process has then."""
    import common
    import torch

    from efficient_densenet import DenseNet

    class Samples:
        def __len__(self) -> int:
            return num_samples

        def __getitem__(self, i: int):
            if i == 4:
                raise ValueError("broken")
            generator = torch.Generator().manual_seed(i)
            noise = torch.rand(3, 8, 8, dtype=torch.float64)
            return noise + torch.randn(3, 8, 8, dtype=torch.float64, generator=generator), i % 2

    def main() -> None:
        torch.manual_seed(0)
        model = DenseNet(3, (2, 2), num_init_features=4, num_classes=2).double()
        sync_bn = common.WORLD_SIZE > 1
        options = argparse.Namespace(out=folder, precision="float32", workers=0, sync_bn=sync_bn, program="")
        run = common.Run(options, model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
        names, scores = [f"sample {i}" for i in range(num_samples)], torch.full((num_samples, 2), torch.nan)
        for _ in range(2):
            for _, (x, y) in run.batches(Samples(), names, "training", 4, shuffle=True):
                run.step(torch.nn.functional.cross_entropy(run.network(x), y))
        steps, run.broken = run.steps, {}  # in evaluation the first process alone reads the broken sample
        model.eval()
        for rows, (x, _) in run.batches(Samples(), names, "predicting", 2):
            scores[rows] = model(x).detach().float()
        found = {"state": model.state_dict(), "scores": common.join_rows(scores), "steps": steps, "broken": run.broken}
        torch.save(found, folder / f"{common.WORLD_SIZE}_{common.RANK}.pt")

    common.script(main)


@pytest.mark.parametrize("num_samples", [11, 9])
def test_two_processes_train_like_one(num_samples, tmp_path):
    load("common")
    import torch

    words = __file__, "small", str(tmp_path), str(num_samples)
    for process in (ForkedDemo(*words, cwd=tmp_path), *fork_processes(2, *words, cwd=tmp_path)):
        assert process.wait() == 0, process.communicate()
    one, first, second = (torch.load(tmp_path / f"{name}.pt") for name in ("1_0", "2_0", "2_1"))
    assert first.pop("broken") == second.pop("broken") == one.pop("broken") == {"sample 4": "broken"}
    torch.testing.assert_close(first, second, rtol=0, atol=0, equal_nan=True)
    assert first["scores"].isnan().any(1).nonzero().tolist() == [[4]]
    if num_samples == 9:  # batches of 4, 4 and 1, of which the last leaves nothing to the second process
        assert (one["steps"], first["steps"]) == (6, 4)
        return
    torch.testing.assert_close(first, one, rtol=1e-9, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_program_runs_in_two_processes(name, tmp_path):
    program, data = PROGRAMS[name], write_data(name, tmp_path)
    words = "--data", str(data), "--out", "out", "--sync_bn", *program.words, "--epochs", "1"
    first, second = fork_processes(2, Path(__file__), name, *words, cwd=tmp_path)
    for process in (first, second):
        assert process.wait() == 0, process.communicate()
    assert "the best epoch's model" in first.communicate()[0]
    if name == "segmentation":  # four pictures: crops three and one, the latter too few for two, and whole ones in twos
        optimizer = load("common")._use_saved(tmp_path / "out" / "checkpoint.pt", lambda state: state["optimizer"])
        assert optimizer["state"][0]["step"] == 3
    assert second.communicate()[0] == ""
    for pattern in (program.table, *program.files):
        assert len(list((tmp_path / "out").glob(pattern))) == 1, pattern
    predict = "--predict", str(data if data.is_dir() else data.parent), "--out", "out"
    for process in fork_processes(2, Path(__file__), name, *predict, cwd=tmp_path):
        assert process.wait() == 0, process.communicate()
    import pandas as pd

    assert pd.read_csv(tmp_path / "out" / "predicted.csv").iloc[:, 1:].notna().all(axis=None)
    _predicting_gives_the_run_s_own_numbers(name, data, tmp_path / "out")


@pytest.mark.parametrize("absent", ["pandas", "nibabel", "pytorch_grad_cam"])
def test_a_package_that_is_not_installed_is_named(absent, tmp_path):
    hidden = "import importlib.util as u, runpy, sys; find = u.find_spec"
    hidden += f"; u.find_spec = lambda name: None if name == {absent!r} else find(name)"
    for name, needs in (("chest_xray", "pandas pytorch_grad_cam"), ("volumes", "pandas nibabel")):
        code = f"{hidden}; sys.argv = ['{name}.py', '--help']; runpy.run_path('{name}.py', run_name='__main__')"
        done = subprocess.run([sys.executable, "-c", code], cwd=EXAMPLES, capture_output=True, text=True, check=False)
        if absent in needs.split():
            assert done.stderr == f"error: {absent} is not installed: pip install -e '.[examples]'\n"
            assert done.returncode == 2
        else:
            assert "--resume" in done.stdout, done.stderr


def test_splits_are_stratified_and_by_patient():
    split = load("common").split_by_patient
    import pandas as pd

    patients = pd.Series(np.repeat(np.arange(60), 2))
    labels = pd.Series(np.where(patients < 3, "rare", np.where(patients < 20, "some", "many")))
    for seed in range(5):
        parts = pd.Series(split(patients, seed, strata=labels))
        assert (parts.groupby(patients).nunique() == 1).all()
        counts = pd.crosstab(labels, parts)
        assert (counts > 0).all(axis=None)
        assert counts.loc["many"].to_dict() == {"test": 16, "train": 56, "valid": 8}
    assert set(split(patients, 0, valid=0.125, test=0)) == {"train", "valid"}


def test_masks_of_numbers_and_rows_of_one_name(tmp_path):
    masks = load("masks")
    (tmp_path / "classes.csv").write_text("name,r,g,b\nCar,1,0,0\nTruck,2,0,0\nCar,3,0,0\nVoid,0,0,0\n")
    classes = masks.Classes(tmp_path, ["Void"])
    assert classes.names == ["Car", "Truck"]
    Image.fromarray(np.array([[0, 1, 2, 3, 255]], np.uint8)).save(tmp_path / "a.png")
    assert classes.read(tmp_path / "a.png").tolist() == [[0, 1, 0, 255, 255]]
    Image.fromarray(np.array([[(1, 0, 0), (2, 0, 0), (3, 0, 0), (0, 0, 0)]], np.uint8)).save(tmp_path / "b.png")
    assert classes.read(tmp_path / "b.png").tolist() == [[0, 1, 0, 255]]
    Image.fromarray(np.array([[0, 1, 2, 3, 255]], np.uint16)).save(tmp_path / "a.png")
    assert classes.read(tmp_path / "a.png").tolist() == [[0, 1, 0, 255, 255]]
    Image.fromarray(np.array([[0, 256]], np.uint16)).save(tmp_path / "a.png")
    with pytest.raises(SystemExit, match=r"has pixels of 256, which no line of"):
        classes.read(tmp_path / "a.png")
    (tmp_path / "names.csv").write_text("name\nCar\nTruck\n")  # numbered masks need no colors
    named = masks.Classes(tmp_path, [], tmp_path / "names.csv")
    Image.fromarray(np.array([[0, 1, 255]], np.uint8)).save(tmp_path / "a.png")
    assert named.read(tmp_path / "a.png").tolist() == [[0, 1, 255]]
    camvid = masks.Classes(tmp_path, ["Void"], masks.CAMVID)
    assert (len(camvid.names), camvid.names[3], camvid.names[-1]) == (11, "Road", "Bicyclist")
    Image.fromarray(np.array([[(128, 0, 192), (64, 128, 192), (0, 0, 0)]], np.uint8)).save(tmp_path / "b.png")
    assert camvid.read(tmp_path / "b.png").tolist() == [[3, 8, 255]]  # lane markings are road, a pickup is a car
    weights = masks.median_frequency_weights(np.array([[10, 30, 0], [20, 0, 0]]))
    np.testing.assert_allclose(weights, [0.675 / 0.5 * 1, 0.625 / 0.75, 0], atol=0.3)


@pytest.mark.parametrize(
    ("name", "words"), [("chest_xray", ("--model", "torchxrayvision")), ("volumes", ("--model", "monai"))]
)
def test_models_of_other_libraries_are_converted(name, words, capsys):
    program = load(name)
    import torch

    model = program.build(program.parse(["--data", "x", "--out", "x", *words]), 3).eval()
    assert "4 dense blocks changed" in capsys.readouterr().out
    assert model(torch.rand(1, 1, *[32] * (2 if name == "chest_xray" else 3))).shape == (1, 3)


def test_weights_of_a_file_three_channels_low_precision_and_workers(tmp_path, monkeypatch):
    program, data = load("chest_xray"), write_data("chest_xray", tmp_path)
    import torch
    import torchvision

    theirs = torchvision.models.densenet121(num_classes=7)
    torch.save(theirs.state_dict(), tmp_path / "theirs.pth")
    words = ["--data", "x", "--out", "x", "--weights", str(tmp_path / "theirs.pth"), "--channels"]
    for channels in (1, 3):
        model = program.build(program.parse([*words, str(channels)]), 3)
        first, expected = model.features.conv0.weight, theirs.features.conv0.weight
        torch.testing.assert_close(first, expected if channels == 3 else expected.sum(1, keepdim=True))
    words = "--channels", "3", "--precision", "bf16", "--workers", "1", "--epochs", "1", "--labels", "Effusion"
    table = run(monkeypatch, "chest_xray", data, tmp_path / "out", *words)
    assert table["label"].tolist() == ["Effusion"]
    with pytest.raises(SystemExit, match="torchvision has no weights for 'densenet264'"):
        run(monkeypatch, "chest_xray", data, tmp_path / "264", "--weights", "DEFAULT", "--model", "densenet264")


@pytest.mark.parametrize("loss", ["cross_entropy", "dice", "focal", "lovasz", "tversky"])
def test_losses_do_not_see_ignored_pixels(loss, tmp_path):
    segmentation = load("segmentation")
    import torch

    options = segmentation.parse(["--data", "x", "--out", "x", "--loss", loss])
    loss_of = segmentation.make_loss(options, torch.ones(3))
    logits, masks = torch.randn(2, 3, 8, 8, requires_grad=True), torch.randint(3, (2, 8, 8))
    masks[:, :2] = segmentation.IGNORE
    loss_of(logits, masks).backward()
    assert logits.grad[:, :, 2:].abs().max() > 0
    assert logits.grad[:, :, :2].abs().max() == 0


if __name__ == "__main__":
    sys.path.insert(0, str(EXAMPLES))
    if sys.argv[1] == "small":
        train_a_small_model(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        sys.argv = sys.argv[1:]
        warnings.simplefilter("default")  # of other libraries
        runpy.run_path(str(EXAMPLES / f"{sys.argv[0]}.py"), run_name="__main__")
