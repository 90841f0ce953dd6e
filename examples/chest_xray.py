"""Train a DenseNet on chest X-rays with several labels a picture; report each label's AUROC and its 95 % interval.

pip install -e '.[examples]'
python examples/chest_xray.py --data generated --out runs/first
python examples/chest_xray.py --data nih/Data_Entry_2017.csv --out runs/nih --image_size 512 --weights DEFAULT
python examples/chest_xray.py --data CheXpert-v1.0-small/train.csv --out runs/chexpert --uncertain ones
python examples/chest_xray.py --predict new_pictures --out runs/nih

It writes auroc.csv, predictions.csv, roc.png, gradcam/LABEL.png, checkpoint.pt, best.pt and config.json into --out.
"""

import argparse
from pathlib import Path

import _extra  # before the packages that it looks for
import common
import generated
import gradcam
import pandas as pd
import pictures
import torch
import torch.nn.functional as F
import xray_images
from common import DEVICE, Run, auroc, autocast, stop
from torch import Tensor, nn
from tqdm import tqdm
from xray_images import XRays
from xray_tables import read_table

from efficient_densenet import conversion_report, create_model, list_models, load_weights, make_efficient


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = common.make_parser(__doc__, epochs=5, batch_size=16, learning_rate=1e-4)
    add = parser.add_argument
    add("--data", help="a CSV in the layout of NIH ChestX-ray14 or CheXpert, or the word generated")
    add("--images", help="folder of the pictures; by default that of the CSV")
    add("--labels", nargs="+", help="labels to learn; by default all")
    policies = ["ignore", "ones", "zeros"]
    add("--uncertain", choices=policies, default="ignore", help="what a label of -1 counts as")
    add("--blank", choices=policies, default="zeros", help="what a label counts as that CheXpert leaves blank")
    add("--test_list", help="file with the names of the test pictures, such as NIH's test_list.txt")
    add("--views", choices=["all", "frontal"], default="all", help="the pictures of CheXpert to use")
    models = [*list_models("densenet*"), "torchxrayvision"]
    add("--model", metavar="NAME", default="densenet121", choices=models, help="of the zoo, or torchxrayvision")
    add("--weights", help="DEFAULT for torchvision's, a file, or a name of torchxrayvision's")
    black_and_white = {"type": float, "nargs": 2, "metavar": ("BLACK", "WHITE")}
    add("--window", **black_and_white, help="values of files of more than 8 bits; by default what a DICOM file says")
    add("--range", **black_and_white, help="of files that say nothing; by default the ends of the training pictures")
    clipped = "share of the pixels that may lose their differences at one end of a window"
    add("--max_clipped", type=float, default=0.05, help=clipped)
    add("--image_size", type=common.at_least(32), default=224, help="height and width, 224 to 1024")
    add("--channels", type=int, choices=[1, 3], default=1, help="of the model's input; all weights work with both")
    add("--class_weights", choices=["balanced", "none"], default="balanced", help="whether rare findings weigh more")
    add("--resamples", type=common.at_least(1), default=1000, help="bootstrap samples for the 95 %% intervals")
    options = common.parse_options(parser, words, image_size=64)
    if options.model == "torchxrayvision":
        _extra.need("torchxrayvision")
    return options


def build(options: argparse.Namespace, num_labels: int) -> nn.Module:
    if options.model == "torchxrayvision":
        import torchxrayvision

        model = torchxrayvision.models.DenseNet(in_channels=options.channels, weights=options.weights)
        model.classifier = nn.Linear(model.classifier.in_features, num_labels)
        model.op_threshs = None  # thresholds of its own labels
        vars(model).pop("input_resolution", None)  # its weights take other sizes than 224 as well
        print(conversion_report(make_efficient(model, options.engine == "shared")))
        return model
    settings = {"num_classes": num_labels, "in_channels": options.channels, "efficient": options.engine == "shared"}
    adapt = "sum" if options.channels == 1 else None  # three channels of weights into one
    if options.weights is None or not Path(options.weights).is_file():
        return create_model(options.model, weights=options.weights, adapt_input=adapt, **settings)
    model = create_model(options.model, **settings)
    load_weights(model, options.weights, skip="classifier", adapt_input=adapt)
    return model


def known_loss(logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """The cross entropy, a mean over the labels that are known."""
    known, targets = ~targets.isnan(), targets.nan_to_num()
    losses = F.binary_cross_entropy_with_logits(logits.float(), targets, pos_weight=weights, reduction="none")
    return (losses * known).sum() / known.sum().clamp(min=1)


def train(run: Run, data: XRays, weights: Tensor | None, title: str) -> None:
    run.model.train()
    for _, (images, targets) in run.batches(data, data.files, title, run.options.batch_size, shuffle=True):
        with autocast(run.options):
            logits = run.network(images.to(DEVICE))
        run.step(known_loss(logits, targets.to(DEVICE), weights))


@torch.no_grad()
def predict(run: Run, data: XRays) -> Tensor:
    """A row of probabilities a picture, NaN where its file cannot be read."""
    run.model.eval()
    scores = torch.full(data.targets.shape, torch.nan)
    for rows, (images, _) in run.batches(data, data.files, "predicting", run.options.batch_size):
        with autocast(run.options):
            scores[rows] = run.model(images.to(DEVICE)).float().sigmoid().cpu()
    return common.join_rows(scores)


def by_label(scores: Tensor, targets: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """For each label the scores and targets of the pictures of which both are known."""
    known, columns = ~(targets + scores).isnan(), range(targets.shape[1])
    return [scores[known[:, i], i] for i in columns], [targets[known[:, i], i].int() for i in columns]


def report(scores: Tensor, test: pd.DataFrame, data: XRays, labels: list[str], name: str, options) -> pd.DataFrame:
    """Write predictions, AUROCs with intervals, and ROC curves; return the AUROCs."""
    predictions = test[["image", "patient", *labels]].rename(columns={label: f"{label} (truth)" for label in labels})
    predictions = predictions.join(pd.DataFrame(scores.numpy(), test.index, labels))
    predictions.to_csv(options.out / "predictions.csv", index=False)
    rows, (some_scores, some_targets) = [], by_label(scores, data.targets)
    for label, s, t in zip(labels, tqdm(some_scores, "intervals", leave=False), some_targets, strict=True):
        patients = test["patient"].to_numpy()[test[label].notna() & scores.isfinite().all(1).numpy()]
        rows.append((label, len(t), int(t.sum()), auroc(s, t), *common.auroc_interval(s, t, patients, options)))
    table = pd.DataFrame(rows, columns=["label", "pictures", "positive", "auroc", "low", "high"])
    table.to_csv(options.out / "auroc.csv", index=False)
    pictures.roc(options.out / "roc.png", name, some_scores, some_targets, table)
    return table


def predict_folder(options: argparse.Namespace) -> pd.DataFrame:
    """Write the probabilities of the pictures in a folder, by the best model of the run in --out."""
    labels = common.load_config(options)["labels"]
    files = [str(path) for path in common.files_in(options.predict, xray_images.SUFFIXES)]
    common.check_files(files, xray_images.check_header, options)
    model = build(options, len(labels)).to(DEVICE)
    common.load_best(model, options.out)
    run = Run(options, model)
    scores = predict(run, XRays(files, torch.full((len(files), len(labels)), torch.nan), options))
    return common.write_predicted(run, files, labels, scores)


def main(words: list[str] | None = None) -> pd.DataFrame:
    options = parse(words)
    if options.predict:
        return predict_folder(options)
    common.prepare_folder(options, generated.xrays)
    table, labels, name = read_table(options)
    parts = {part: table[table["split"] == part] for part in ("train", "valid", "test")}
    found = ", ".join(f"{label} {(table[label] == 1).sum():,}" for label in labels)
    print(f"{name}: labels {found}; pictures: {', '.join(f'{len(parts[part]):,} {part}' for part in parts)}")
    xray_images.measure(parts["train"]["file"].tolist(), options)
    data = {}
    for part, rows in parts.items():
        targets = torch.tensor(rows[labels].to_numpy(), dtype=torch.float32)
        data[part] = XRays(rows["file"].tolist(), targets, options, augment=part == "train")

    torch.manual_seed(options.seed)
    try:
        model = build(options, len(labels))
    except ValueError as error:  # weights that do not fit, or are not there
        stop(str(error))
    common.print_what_fits(model, options.batch_size, (options.channels, *[options.image_size] * 2), "adamw", options)
    model.to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    run = Run(options, model, optimizer, decay, labels=labels)
    weights = None
    if options.class_weights == "balanced":  # pictures without a label for one that has it
        counts = [(data["train"].targets == known).sum(0) for known in (0, 1)]
        weights = (counts[0] / counts[1].clamp(min=1)).to(DEVICE)
    for epoch in range(run.resume(), options.epochs):
        torch.manual_seed(options.seed + epoch)  # so that a run that was interrupted draws the same pictures
        train(run, data["train"], weights, f"epoch {epoch + 1} of {options.epochs}")
        decay.step()
        found = by_label(predict(run, data["valid"]), data["valid"].targets)
        score = float(pd.Series(map(auroc, *found)).mean())  # of the labels that have one
        print(f"epoch {epoch + 1}: mean AUROC of the validation pictures {score:.3f}", flush=True)
        run.save(epoch + 1, score)

    common.load_best(model, options.out)
    scores = predict(run, data["test"])
    common.leave_to_main()
    result = report(scores, parts["test"], data["test"], labels, name, options)
    gradcam.draw(model, scores, data["test"], labels, name, options.out / "gradcam")
    run.print_broken()
    print(f"\n{name}, test pictures, the best epoch's model\n{result.to_string(index=False, float_format='%.3f')}")
    return result


if __name__ == "__main__":
    common.script(main)
