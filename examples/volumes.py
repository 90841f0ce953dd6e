"""Train a 3D DenseNet to classify volumes (CT, MR) from patches of them; predict whole ones by a sliding window.

pip install -e '.[examples]'
python examples/volumes.py --data generated --out runs/first
python examples/volumes.py --data volumes.csv --out runs/ct --patch 96 96 96 --spacing 1 1 1 --window -1000 400
python examples/volumes.py --predict new_volumes --out runs/ct

The CSV has the columns volume (a NIfTI file) and label, and may have patient and split (train, valid or test).
Into --out it writes results.csv, predictions.csv, confusion.png, maps (NIfTI and PNG), checkpoint.pt, best.pt.
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
from common import DEVICE, Run, at_least, auroc, autocast
from monai.data import CacheDataset, list_data_collate
from monai.inferers import sliding_window_inference
from torch import Tensor, nn
from torchmetrics.functional.classification import multiclass_confusion_matrix
from volume_tables import SUFFIXES, check_header, make_data, parse_options, read_table

from efficient_densenet import conversion_report, create_model, list_models, make_efficient


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = common.make_parser(__doc__, epochs=50, batch_size=2, learning_rate=1e-4)
    add = parser.add_argument
    add("--data", help="a CSV of volumes and labels, or the word generated, for a quick first run")
    add("--images", type=Path, help="folder of the volumes; by default that of the CSV")
    models = [*list_models("densenet*"), "monai"]
    add("--model", metavar="NAME", default="densenet121", choices=models, help="a model of the zoo, or monai")
    add("--accumulate", type=at_least(1), default=1, help="steps whose gradients are added before the weights change")
    add("--maps", type=at_least(0), default=4, help="how many test volumes get a map")
    add("--resamples", type=at_least(1), default=1000, help="bootstrap samples for the 95 %% intervals")
    return parse_options(parser, words, patch=96, epochs=5)


def build(options: argparse.Namespace, num_classes: int) -> nn.Module:
    if options.model == "monai":
        from monai.networks.nets import DenseNet121

        model = DenseNet121(spatial_dims=3, in_channels=1, out_channels=num_classes)
        print(conversion_report(make_efficient(model, options.engine == "shared")))
        return model
    settings = {"num_classes": num_classes, "in_channels": 1, "dims": 3}
    return create_model(options.model, efficient=options.engine == "shared", **settings)


def train(run: Run, data: CacheDataset, names: list[str], loss_of: nn.Module, title: str) -> None:
    run.model.train()
    accumulate, size = run.options.accumulate, run.options.batch_size
    for i, (_, batch) in enumerate(run.batches(data, names, title, size, True, list_data_collate), start=1):
        patches, targets = batch["image"].as_tensor().to(DEVICE), batch["target"].to(DEVICE)
        with autocast(run.options):
            logits = run.network(patches)
        loss = loss_of(logits.float(), targets)
        run.step(loss, i % accumulate == 0 or i == run.num_batches, accumulate)


@torch.no_grad()
def predict_map(run: Run, volume: Tensor) -> Tensor:
    """Probabilities at each voxel, (classes, x, y, z): a window's, averaged where windows overlap."""

    def spread(patches: Tensor) -> Tensor:
        with autocast(run.options):
            probabilities = run.model(patches).float().softmax(1)
        return probabilities[:, :, None, None, None].repeat(1, 1, *patches.shape[2:])

    run.model.eval()
    options, inputs = run.options, volume[None].to(DEVICE)
    maps = sliding_window_inference(
        inputs, options.patch, options.batch_size, spread, options.overlap, "gaussian", device="cpu"
    )
    return maps[0]


def predict(run: Run, data: CacheDataset, names: list[str], num_classes: int) -> Tensor:
    """A row of probabilities a volume: the mean of its map; NaN where its file cannot be read."""
    scores = torch.full((len(data), num_classes), torch.nan)
    for (row,), (sample,) in run.batches(data, names, "predicting", 1, combine=list):
        scores[row] = predict_map(run, sample["image"].as_tensor()).mean((1, 2, 3))
    return common.join_rows(scores)


def report(scores: Tensor, test: pd.DataFrame, classes: list[str], name: str, options) -> pd.DataFrame:
    """Write predictions, the confusion matrix, and of each class sensitivity and AUROC with an interval."""
    is_read = scores.isfinite().all(1)
    scores, test = scores[is_read], test[is_read.numpy()]
    targets, found = torch.tensor(test["target"].to_numpy()), scores.argmax(1)
    predictions = test[["volume", "patient", "label"]].assign(predicted=[classes[i] for i in found])
    predictions = predictions.join(pd.DataFrame(scores.numpy(), test.index, classes).add_prefix("p "))
    predictions.to_csv(options.out / "predictions.csv", index=False)
    matrix = multiclass_confusion_matrix(found, targets, len(classes)).numpy()
    pictures.confusion(options.out / "confusion.png", name, matrix, classes, "volumes")
    rows = []
    for i, label in enumerate(classes):
        pair = scores[:, i], (targets == i).int()
        interval = common.auroc_interval(*pair, test["patient"].to_numpy(), options)
        rows.append((label, int(pair[1].sum()), matrix[i, i] / matrix[i].sum(), auroc(*pair), *interval))
    table = pd.DataFrame(rows, columns=["class", "volumes", "sensitivity", "auroc", "low", "high"])
    table.to_csv(options.out / "results.csv", index=False)
    return table


def write_maps(run: Run, data: CacheDataset, test: pd.DataFrame, classes: list[str], name: str) -> None:
    """The probability of the likeliest class at each voxel, as NIfTI and over three slices."""
    folder = run.folder / "maps"
    folder.mkdir(exist_ok=True)
    readable = [i for i, file in enumerate(test["image"]) if file not in run.broken]
    for i in readable[: run.options.maps]:
        volume, row = data[i]["image"], test.iloc[i]
        maps = predict_map(run, volume.as_tensor())
        found = int(maps.mean((1, 2, 3)).argmax())
        stem = row["volume"].replace("/", "_").split(".nii")[0]
        nibabel.save(nibabel.Nifti1Image(maps[found].numpy(), volume.affine.numpy()), folder / f"{stem}.nii.gz")
        above_chance = ((maps[found] - 1 / len(classes)) / (1 - 1 / len(classes))).clamp(min=0)
        title = f"{name}, {stem}: {row['label']}, predicted {classes[found]}"
        spacing = volume.pixdim.tolist()
        pictures.planes(folder / f"{stem}.png", title, volume[0].numpy(), above_chance.numpy(), spacing)


def predict_folder(options: argparse.Namespace) -> pd.DataFrame:
    """Write the probabilities of the volumes in a folder, by the best model of the run in --out."""
    classes = common.load_config(options)["classes"]
    files = [str(path) for path in common.files_in(options.predict, SUFFIXES)]
    common.check_files(files, check_header, options)
    model = build(options, len(classes)).to(DEVICE)
    common.load_best(model, options.out)
    run = Run(options, model)
    scores = predict(run, make_data(pd.DataFrame({"image": files}), options), files, len(classes))
    return common.write_predicted(run, files, classes, scores)


def main(words: list[str] | None = None) -> pd.DataFrame:
    options = parse(words)
    if options.predict:
        return predict_folder(options)
    name = "generated volumes" if options.data == "generated" else Path(options.data).stem
    common.prepare_folder(options, generated.volumes)
    table, classes = read_table(options)
    tables = {part: table[table["split"] == part] for part in ("train", "valid", "test")}
    files = {part: rows["image"].tolist() for part, rows in tables.items()}
    print(f"{name}: classes {', '.join(classes)}; volumes: {', '.join(f'{len(tables[p]):,} {p}' for p in tables)}")

    torch.manual_seed(options.seed)
    model = build(options, len(classes))
    common.print_what_fits(model, options.batch_size * options.patches, (1, *options.patch), "adamw", options)
    data = {part: make_data(rows, options, augment=part == "train") for part, rows in tables.items()}
    model.to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    run = Run(options, model, optimizer, decay, classes=classes)
    counts = torch.tensor([(tables["train"]["target"] == i).sum() for i in range(len(classes))])
    loss = nn.CrossEntropyLoss(counts.sum() / (len(classes) * counts.to(DEVICE)))  # rare classes weigh more
    for epoch in range(run.resume(), options.epochs):
        torch.manual_seed(options.seed + epoch)  # so that a run that was interrupted draws the same patches
        train(run, data["train"], files["train"], loss, f"epoch {epoch + 1} of {options.epochs}")
        decay.step()
        scores = predict(run, data["valid"], files["valid"], len(classes))
        targets = tables["valid"]["target"].to_numpy()
        known = scores.isfinite().all(1)
        pairs = [(scores[known, i], torch.tensor(targets == i).int()[known]) for i in range(len(classes))]
        score = float(np.mean([auroc(*pair) for pair in pairs]))
        print(f"epoch {epoch + 1}: mean AUROC of the validation volumes {score:.3f}", flush=True)
        run.save(epoch + 1, score)

    common.load_best(model, options.out)
    scores = predict(run, data["test"], files["test"], len(classes))
    common.leave_to_main()
    result = report(scores, tables["test"], classes, name, options)
    write_maps(run, data["test"], tables["test"], classes, name)
    run.print_broken()
    print(f"\n{name}, test volumes, the best epoch's model\n{result.to_string(index=False, float_format='%.3f')}")
    return result


if __name__ == "__main__":
    common.script(main)
