"""Train a DenseNet on chest X-rays with several labels a picture; report each label's AUROC and its 95 % interval.

pip install -e '.[examples]'
python examples/chest_xray.py --data generated --out runs/first
python examples/chest_xray.py --data nih/Data_Entry_2017.csv --out runs/nih --image_size 512 --weights DEFAULT
python examples/chest_xray.py --data CheXpert-v1.0-small/train.csv --out runs/chexpert --uncertain ones

It writes auroc.csv, predictions.csv, roc.png, gradcam/LABEL.png, checkpoint.pt and best.pt into --out.
"""

import argparse
from pathlib import Path

import generated
import pandas as pd
import pictures
import torch
import torch.nn.functional as F
from common import DEVICE, Run, auroc, auroc_interval, autocast, make_parser, parse_options, print_what_fits, stop
from PIL import Image
from pytorch_grad_cam import GradCAM
from pytorch_grad_cam.utils.model_targets import ClassifierOutputTarget
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2
from tqdm import tqdm
from xray_tables import read_table

from efficient_densenet import conversion_report, create_model, list_models, load_weights, make_efficient


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, epochs=5, batch_size=16, learning_rate=1e-4)
    add = parser.add_argument
    add("--data", required=True, help="a CSV in the layout of NIH ChestX-ray14 or CheXpert, or the word generated")
    add("--images", help="folder of the pictures; by default that of the CSV")
    add("--labels", nargs="+", help="labels to learn; by default all")
    add("--uncertain", choices=["ignore", "ones", "zeros"], default="ignore", help="what a label of -1 counts as")
    add("--test_list", help="file with the names of the test pictures, such as NIH's test_list.txt")
    add("--views", choices=["all", "frontal"], default="all", help="the pictures of CheXpert to use")
    models = [*list_models("densenet*"), "torchxrayvision"]
    add("--model", metavar="NAME", default="densenet121", choices=models, help="of the zoo, or torchxrayvision")
    add("--weights", help="DEFAULT for torchvision's, a file, or a name of torchxrayvision's")
    add("--image_size", type=int, default=224, help="height and width, 224 to 1024")
    add("--channels", type=int, choices=[1, 3], default=1, help="of the model's input; all weights work with both")
    add("--class_weights", choices=["balanced", "none"], default="balanced", help="whether rare findings weigh more")
    add("--resamples", type=int, default=1000, help="bootstrap samples for the 95 %% intervals")
    return parse_options(parser, words, image_size=64)


class XRays(Dataset):
    """Pictures, and their labels as a row of numbers: 1, 0, or NaN where it is not known."""

    def __init__(self, table: pd.DataFrame, labels: list[str], options: argparse.Namespace, augment: bool) -> None:
        self.files, self.mode = table["file"].tolist(), "L" if options.channels == 1 else "RGB"
        self.targets = torch.tensor(table[labels].to_numpy(), dtype=torch.float32)
        mean, std = ([0.449], [0.226]) if options.channels == 1 else ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
        if options.model == "torchxrayvision":  # pixels from -1024 to 1024
            mean, std = [0.5] * options.channels, [1 / 2048] * options.channels
        steps = [v2.ToImage(), v2.Resize(options.image_size), v2.CenterCrop(options.image_size)]
        if augment:  # without a flip: the heart is on the left
            steps.append(v2.RandomAffine(5, (0.05, 0.05), (0.9, 1.1), interpolation=v2.InterpolationMode.BILINEAR))
        self.transform = v2.Compose([*steps, v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)])

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.transform(Image.open(self.files[i]).convert(self.mode)), self.targets[i]

    def positive_weights(self) -> Tensor:
        """Of each label, how many pictures are without it for one that has it."""
        positive, negative = (self.targets == 1).sum(0), (self.targets == 0).sum(0)
        return negative / positive.clamp(min=1)


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


def train(run: Run, loader: DataLoader, weights: Tensor | None, title: str) -> None:
    run.model.train()
    for images, targets in (bar := tqdm(loader, title, leave=False)):
        with autocast(run.options):
            logits = run.model(images.to(DEVICE))
        loss = known_loss(logits, targets.to(DEVICE), weights)
        run.step(loss)
        bar.set_postfix(loss=f"{loss.item():.3f}")


@torch.no_grad()
def predict(run: Run, loader: DataLoader) -> Tensor:
    """A row of probabilities a picture."""
    run.model.eval()
    scores = []
    for images, _ in tqdm(loader, "predicting", leave=False):
        with autocast(run.options):
            scores.append(run.model(images.to(DEVICE)).float().sigmoid().cpu())
    return torch.cat(scores)


def by_label(scores: Tensor, targets: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """For each label the scores and targets of the pictures of which it is known."""
    known, columns = ~targets.isnan(), range(targets.shape[1])
    return [scores[known[:, i], i] for i in columns], [targets[known[:, i], i].int() for i in columns]


def report(scores: Tensor, test: pd.DataFrame, data: XRays, labels: list[str], name: str, options) -> pd.DataFrame:
    """Write predictions, AUROCs with intervals, and ROC curves; return the AUROCs."""
    predictions = test[["image", "patient", *labels]].rename(columns={label: f"{label} (truth)" for label in labels})
    predictions = predictions.join(pd.DataFrame(scores.numpy(), test.index, labels).round(4))
    predictions.to_csv(options.out / "predictions.csv", index=False)
    rows, (some_scores, some_targets) = [], by_label(scores, data.targets)
    for label, s, t in zip(labels, tqdm(some_scores, "intervals", leave=False), some_targets, strict=True):
        patients = test["patient"].to_numpy()[test[label].notna()]
        rows.append((label, len(t), int(t.sum()), auroc(s, t), *auroc_interval(s, t, patients, options)))
    table = pd.DataFrame(rows, columns=["label", "pictures", "positive", "auroc", "low", "high"])
    table.to_csv(options.out / "auroc.csv", index=False)
    pictures.roc(options.out / "roc.png", name, some_scores, some_targets, table)
    return table


def draw_cams(model: nn.Module, scores: Tensor, data: XRays, labels: list[str], name: str, out: Path) -> None:
    """For each label the four pictures with the highest score, and by Grad-CAM what the score comes from."""
    out.mkdir(exist_ok=True)
    with GradCAM(model, [model.get_submodule("features.norm5")]) as cam:
        for i, label in enumerate(tqdm(labels, "Grad-CAM", leave=False)):
            top = scores[:, i].topk(min(4, len(data))).indices.tolist()
            images = torch.stack([data[j][0] for j in top])
            maps = cam(images, [ClassifierOutputTarget(i)] * len(top))
            figure, axes = pictures.grid(f"Grad-CAM of {label.replace('_', ' ')}, {name}", 2 * len(top), len(top))
            for k, j in enumerate(top):
                truth = {1.0: "present", 0.0: "absent"}.get(data.targets[j, i].item(), "not known")
                pictures.show(axes[k], images[k, 0].numpy(), f"score {scores[j, i]:.2f}, {truth}")
                pictures.show(axes[len(top) + k], images[k, 0].numpy(), heat=maps[k])
            figure.savefig(out / f"{label.replace(' ', '_')}.png")


def main(words: list[str] | None = None) -> pd.DataFrame:
    options = parse(words)
    if options.data == "generated":
        options.data = str(generated.xrays(options.out / "generated"))
    table, labels, name = read_table(options)
    parts = {part: table[table["split"] == part] for part in ("train", "valid", "test")}
    data = {part: XRays(parts[part], labels, options, augment=part == "train") for part in parts}
    reading = {"batch_size": options.batch_size, "num_workers": options.workers}
    loaders = {part: DataLoader(data[part], shuffle=part == "train", **reading) for part in parts}
    print(f"{name}: {len(labels)} labels; pictures: {', '.join(f'{len(data[part]):,} {part}' for part in parts)}")

    torch.manual_seed(options.seed)
    try:
        model = build(options, len(labels))
    except ValueError as error:  # weights that do not fit, or are not there
        stop(str(error))
    print_what_fits(model, options.batch_size, tuple(data["test"][0][0].shape), "adamw", options)
    model.to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate)
    run = Run(options, model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs))
    weights = data["train"].positive_weights().to(DEVICE) if options.class_weights == "balanced" else None
    for epoch in range(run.resume(), options.epochs):
        torch.manual_seed(options.seed + epoch)  # so that a run that was interrupted draws the same pictures
        train(run, loaders["train"], weights, f"epoch {epoch + 1} of {options.epochs}")
        run.scheduler.step()
        found = by_label(predict(run, loaders["valid"]), data["valid"].targets)
        score = float(pd.Series(map(auroc, *found)).mean())  # of the labels that have one
        print(f"epoch {epoch + 1}: mean AUROC of the validation pictures {score:.3f}", flush=True)
        run.save(epoch + 1, score)

    run.load_best()
    scores = predict(run, loaders["test"])
    result = report(scores, parts["test"], data["test"], labels, name, options)
    draw_cams(model, scores, data["test"], labels, name, options.out / "gradcam")
    print(f"\n{name}, test pictures, the best epoch's model\n{result.to_string(index=False, float_format='%.3f')}")
    return result


if __name__ == "__main__":
    main()
