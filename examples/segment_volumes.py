"""Train a 3D FC-DenseNet to give each voxel a class, on patches; predict whole volumes by a sliding window.

pip install -e '.[examples]'
python examples/segment_volumes.py --data generated --out runs/first
python examples/segment_volumes.py --data Task09_Spleen --out runs/spleen --spacing 1.5 1.5 2 --window -57 164
python examples/segment_volumes.py --predict new_volumes --out runs/spleen

The data are a folder in the layout of the Medical Segmentation Decathlon: dataset.json, imagesTr and labelsTr.
Into --out it writes dice.csv, labels (NIfTI and PNG), checkpoint.pt, best.pt and config.json.
"""

import argparse
from pathlib import Path

import _extra  # noqa: F401 - before the packages that it looks for
import common
import generated
import nibabel
import numpy as np
import pandas as pd
import pictures
import torch
from common import DEVICE, Run, at_least, autocast
from decathlon import check_modalities, make_data, read_folder
from monai.data import list_data_collate
from monai.inferers import sliding_window_inference
from monai.losses import DiceCELoss
from torch import Tensor, nn
from volume_tables import SUFFIXES, parse_options

from efficient_densenet import create_model, list_models


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = common.make_parser(__doc__, epochs=300, batch_size=2, learning_rate=1e-3)
    add = parser.add_argument
    add("--data", help="a folder in the Decathlon's layout, or the word generated, for a quick first run")
    add("--model", default="fc_densenet56", choices=list_models("fc_*"), help="56, 67 or 103 layers")
    add("--pictures", type=at_least(0), default=4, help="how many test volumes are drawn")
    return parse_options(parser, words, patch=64, epochs=6, batch_size=1, learning_rate=2e-3)


def build(options: argparse.Namespace, num_channels: int, num_classes: int) -> nn.Module:
    settings = {"num_classes": num_classes, "in_channels": num_channels, "dims": 3}
    return create_model(options.model, efficient=options.engine == "shared", **settings)


def train(run: Run, data, names: list[str], loss_of: nn.Module, title: str) -> None:
    run.model.train()
    for _, batch in run.batches(data, names, title, run.options.batch_size, True, list_data_collate):
        with autocast(run.options):
            logits = run.network(batch["image"].as_tensor().to(DEVICE))
        run.step(loss_of(logits.float(), batch["label"].as_tensor().to(DEVICE)))


@torch.no_grad()
def predict(run: Run, volume: Tensor) -> Tensor:
    """The number of the likeliest class at each voxel, (x, y, z): by the windows' logits, and their mean where they
    overlap."""

    def logits_of(patches: Tensor) -> Tensor:
        with autocast(run.options):
            return run.model(patches).float()

    run.model.eval()
    options = run.options
    settings = {"overlap": options.overlap, "mode": "gaussian", "device": "cpu"}
    inputs = volume[None].to(DEVICE)
    logits = sliding_window_inference(inputs, options.patch, options.batch_size, logits_of, **settings)
    return logits[0].argmax(0)


def dice(run: Run, data, names: list[str], num_classes: int, title: str) -> np.ndarray:
    """A row a volume: of each class but the background twice the overlap, divided by both sizes; NaN where both are
    empty, or the file cannot be read."""
    scores = np.full((len(data), num_classes - 1), np.nan)
    for (row,), (sample,) in run.batches(data, names, title, 1, combine=list):
        found, truth = predict(run, sample["image"].as_tensor()), sample["label"].as_tensor()[0].long()
        for i in range(1, num_classes):
            sizes = int((found == i).sum() + (truth == i).sum())
            if sizes:
                scores[row, i - 1] = 2 * int(((found == i) & (truth == i)).sum()) / sizes
    return common.join_rows(torch.from_numpy(scores)).numpy()


def write_label(run: Run, sample: dict, path: Path) -> np.ndarray:
    """Write what is predicted of a volume as NIfTI, on the voxels that it was predicted on."""
    volume = sample["image"]
    found = predict(run, volume.as_tensor()).byte().numpy()
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(found, volume.affine.numpy()), path)
    return found


def draw(run: Run, data, names: list[str], classes: list[str], title: str) -> None:
    """Three slices of test volumes with the contours of the labels and of what is predicted."""
    readable = [i for i, name in enumerate(names) if name not in run.broken]
    for i in readable[: run.options.pictures]:
        stem = Path(names[i]).name.split(".nii")[0]
        found = write_label(run, sample := data[i], run.folder / "labels" / f"{stem}.nii.gz")
        image, truth = sample["image"], sample["label"].as_tensor()[0].numpy()
        path, spacing = run.folder / "labels" / f"{stem}.png", image.pixdim.tolist()
        pictures.contours(
            path, f"{title}, {stem}", image[0].numpy(), {"label": truth, "predicted": found}, spacing, classes
        )


def predict_folder(options: argparse.Namespace) -> pd.DataFrame:
    """Write the labels of the volumes in a folder, by the run's best model, and how large each class is."""
    config = common.load_config(options)
    classes, files = config["classes"], [str(path) for path in common.files_in(options.predict, SUFFIXES)]
    common.check_files(files, lambda file: check_modalities(file, config["channels"]), options)
    model = build(options, config["channels"], len(classes)).to(DEVICE)
    common.load_best(model, options.out)
    run, shares = Run(options, model), torch.full((len(files), len(classes)), torch.nan)
    data = make_data([{"image": file} for file in files], len(classes), options)
    for (row,), (sample,) in run.batches(data, files, "predicting", 1, combine=list):
        place = options.out / "predicted" / Path(files[row]).relative_to(options.predict)
        found = write_label(run, sample, place)
        shares[row] = torch.from_numpy(np.bincount(found.ravel(), minlength=len(classes)) / found.size)
    return common.write_predicted(run, files, classes, shares)


def main(words: list[str] | None = None) -> pd.DataFrame:
    options = parse(words)
    if options.predict:
        return predict_folder(options)
    common.prepare_folder(options, generated.organs)
    parts, classes, channels, name = read_folder(Path(options.data), options)
    names = {part: [sample["image"] for sample in samples] for part, samples in parts.items()}
    print(f"{name}: classes {', '.join(classes)}; volumes: {', '.join(f'{len(parts[p]):,} {p}' for p in parts)}")

    torch.manual_seed(options.seed)
    model = build(options, channels, len(classes))
    size = (channels, *options.patch)
    common.print_what_fits(model, options.batch_size * options.patches, size, "adamw", options)
    data = {part: make_data(samples, len(classes), options, augment=part == "train") for part, samples in parts.items()}
    model.to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    run = Run(options, model, optimizer, decay, classes=classes, channels=channels)
    loss = DiceCELoss(to_onehot_y=True, softmax=True)
    for epoch in range(run.resume(), options.epochs):
        torch.manual_seed(options.seed + epoch)  # so that a run that was interrupted draws the same patches
        train(run, data["train"], names["train"], loss, f"epoch {epoch + 1} of {options.epochs}")
        decay.step()
        scores = dice(run, data["valid"], names["valid"], len(classes), "validation")
        score = float(pd.DataFrame(scores).stack().mean())
        print(f"epoch {epoch + 1}: mean Dice of the validation volumes {score:.3f}", flush=True)
        run.save(epoch + 1, score)

    common.load_best(model, options.out)
    scores = dice(run, data["test"], names["test"], len(classes), "test")
    common.leave_to_main()
    by_class = pd.DataFrame(scores, columns=classes[1:])
    table = pd.DataFrame({"volumes": by_class.count(), "dice": by_class.mean(), "least": by_class.min()})
    table = table.rename_axis("class").reset_index()
    table.to_csv(options.out / "dice.csv", index=False)
    draw(run, data["test"], names["test"], classes, name)
    run.print_broken()
    print(f"\n{name}, test volumes, the best epoch's model\n{table.to_string(index=False, float_format='%.3f')}")
    return table


if __name__ == "__main__":
    common.script(main)
