"""Small data sets that are drawn here, in the layouts that the programs read: a first run needs no download."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image


def _grid(*sizes: int) -> list[np.ndarray]:
    """Coordinates from -1 to 1 along each dimension."""
    return np.meshgrid(*(np.linspace(-1, 1, size) for size in sizes), indexing="ij")


def xrays(folder: Path, patients: int = 60, size: int = 72) -> Path:
    """Two pictures a patient: lungs, and findings that can be seen, in NIH ChestX-ray14's layout. Return its CSV."""
    rng, (y, x), rows = np.random.default_rng(0), _grid(size, size), []
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for i in range(2 * patients):
        has = dict(zip(("Cardiomegaly", "Effusion", "Nodule"), rng.random(3) < 0.4, strict=True))
        lungs = ((np.abs(x) - 0.45) / 0.33) ** 2 + (y / 0.8) ** 2 < 1
        heart = ((x - 0.12) / (0.48 if has["Cardiomegaly"] else 0.25)) ** 2 + ((y - 0.35) / 0.35) ** 2 < 1
        image = np.where(heart, 0.7, np.where(lungs, 0.25, 0.6))
        image += 0.45 * (has["Effusion"] & lungs & (y > 0.3))
        image += 0.5 * (has["Nodule"] & ((x + 0.45) ** 2 + (y - rng.uniform(-0.6, 0.1)) ** 2 < 0.02))
        image += rng.normal(0, 0.05, image.shape)
        name = f"{i // 2:08}_{i % 2:03}.png"
        Image.fromarray((image.clip(0, 1) * 255).astype(np.uint8)).save(folder / "images" / name)
        rows.append((name, "|".join(label for label in has if has[label]) or "No Finding", i // 2))
    pd.DataFrame(rows, columns=["Image Index", "Finding Labels", "Patient ID"]).to_csv(
        folder / "xrays.csv", index=False
    )
    return folder / "xrays.csv"


def streets(folder: Path, counts: dict[str, int] | None = None, height: int = 64, width: int = 96) -> Path:
    """Streets and their masks in CamVid's layout, with a classes.csv. Return the folder."""
    rng, (y, x) = np.random.default_rng(0), _grid(height, width)
    names = ["Sky", "Building", "Road", "Car", "Pole", "Void"]
    colors = np.array(
        [(128, 128, 128), (128, 0, 0), (128, 64, 128), (64, 0, 128), (192, 192, 128), (0, 0, 0)], np.uint8
    )
    folder.mkdir(parents=True, exist_ok=True)
    table = pd.DataFrame(colors, columns=["r", "g", "b"])
    table.insert(0, "name", names)
    table.to_csv(folder / "classes.csv", index=False)
    brightness = np.array(
        [(0.6, 0.8, 1), (0.7, 0.4, 0.3), (0.4, 0.4, 0.4), (0.2, 0.3, 0.7), (0.8, 0.8, 0.3), (0, 0, 0)]
    )
    for part, count in (counts or {"train": 16, "val": 6, "test": 6}).items():
        for place in (part, f"{part}_labels"):
            (folder / place).mkdir(exist_ok=True)
        for i in range(count):
            mask = np.where(y < -0.1, np.where(y > -0.9 + 0.8 * rng.random() * np.abs(np.sin(4 * x)), 1, 0), 2)
            car, pole = rng.uniform(-0.8, 0.8, 2)
            mask[(np.abs(x - car) < 0.2) & (np.abs(y - 0.25) < 0.2)] = 3
            mask[(np.abs(x - pole) < 0.03) & (np.abs(y) < 0.6)] = 4
            mask[-3:] = 5
            image = brightness[mask] + rng.normal(0, 0.08, (height, width, 3))
            Image.fromarray((image.clip(0, 1) * 255).astype(np.uint8)).save(folder / part / f"{i:04}.png")
            Image.fromarray(colors[mask]).save(folder / f"{part}_labels" / f"{i:04}_L.png")
    return folder


def organs(folder: Path, count: int = 12, size: int = 36) -> Path:
    """NIfTI volumes with an organ and a tumor in it, and their labels, in the Decathlon's layout. Return the folder."""
    import nibabel

    rng, (x, y, z), listed = np.random.default_rng(0), _grid(size, size, size), []
    for name in ("imagesTr", "labelsTr"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for i in range(count):
        a, b, c, *center = rng.uniform(0.35, 0.6, 3).tolist() + rng.uniform(-0.3, 0.3, 3).tolist()
        organ = ((x - center[0]) / a) ** 2 + ((y - center[1]) / b) ** 2 + ((z - center[2]) / c) ** 2 < 1
        tumor = (x - center[0] - 0.1) ** 2 + (y - center[1]) ** 2 + (z - center[2]) ** 2 < 0.04
        label = (organ.astype(np.uint8) + (organ & tumor)).astype(np.uint8)
        image = rng.normal(0, 60, label.shape) + np.array([0, 300, 600])[label]
        sample = {"image": f"./imagesTr/organ_{i:03}.nii.gz", "label": f"./labelsTr/organ_{i:03}.nii.gz"}
        for key, values in (("image", image.astype(np.float32)), ("label", label)):
            nibabel.save(nibabel.Nifti1Image(values, np.diag([2, 2, 3, 1])), folder / sample[key])
        listed.append(sample)
    names = {"0": "background", "1": "organ", "2": "tumor"}
    described = {"name": "generated organs", "modality": {"0": "CT"}, "labels": names, "training": listed}
    (folder / "dataset.json").write_text(json.dumps(described))
    return folder


def volumes(folder: Path, patients: int = 30, size: int = 40) -> Path:
    """A NIfTI volume a patient, a ball with a few or with many bright spots, and a CSV. Return the CSV."""
    import nibabel  # which the other programs do without

    rng, (x, y, z), rows = np.random.default_rng(0), _grid(size, size, size), []
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(patients):
        label = ("few spots", "many spots")[i % 2]
        volume = 400.0 * (x**2 + y**2 + z**2 < 0.8) + rng.normal(0, 40, x.shape)
        for center in rng.uniform(-0.6, 0.6, (8 if label == "few spots" else 40, 3)):
            volume[(x - center[0]) ** 2 + (y - center[1]) ** 2 + (z - center[2]) ** 2 < 0.015] += 500
        nibabel.save(nibabel.Nifti1Image(volume.astype(np.float32), np.diag([2, 2, 3, 1])), folder / f"{i:03}.nii.gz")
        rows.append((f"{i:03}.nii.gz", label, i))
    pd.DataFrame(rows, columns=["volume", "label", "patient"]).to_csv(folder / "volumes.csv", index=False)
    return folder / "volumes.csv"
