"""Train an FC-DenseNet (Tiramisu) to give every pixel a class: on crops first, then on whole pictures, as in the paper.

pip install -e '.[examples]'
python examples/segmentation.py --data generated --out runs/first
python examples/segmentation.py --data CamVid --out runs/camvid --ignore Void

A data folder has train, train_labels, val, val_labels, test, test_labels, and a classes.csv with the columns
name, r, g, b. It writes iou.csv, confusion.png, overlays/NAME.png, checkpoint.pt and best.pt into --out.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import generated
import numpy as np
import pandas as pd
import pictures
import torch
from common import DEVICE, Run, autocast, make_parser, parse_options, print_what_fits
from masks import IGNORE, Classes, count_pixels, find_pairs, median_frequency_weights
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassConfusionMatrix
from torchvision import tv_tensors
from torchvision.transforms import v2
from tqdm import tqdm

from efficient_densenet import create_model, list_models

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
Loss = Callable[[Tensor, Tensor], Tensor]


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, epochs=600, batch_size=3, learning_rate=1e-3)
    add = parser.add_argument
    add("--data", required=True, help="a folder in CamVid's layout, or the word generated, for a quick first run")
    add("--ignore", nargs="*", default=["Void"], help="classes that are neither learned nor counted")
    add("--model", default="fc_densenet103", choices=list_models("fc_*"), help="56, 67 or 103 layers")
    add("--crop", type=int, default=224, help="height and width of the crops")
    add("--whole_epochs", type=int, default=150, help="epochs on whole pictures, one a step, after those on crops")
    add("--image_size", type=int, nargs=2, metavar=("HEIGHT", "WIDTH"), help="resize the pictures to this first")
    add(
        "--class_weights", choices=["median_frequency", "none"], default="median_frequency", help="of the cross entropy"
    )
    losses = ["cross_entropy", "dice", "focal", "lovasz", "tversky"]
    add("--loss", choices=losses, default="cross_entropy", help="others are segmentation_models_pytorch's")
    add("--overlays", type=int, default=8, help="how many test pictures are drawn")
    return parse_options(parser, words, model="fc_densenet56", crop=64, epochs=6, whole_epochs=1)


class Scenes(Dataset):
    """Pictures, with the number of each pixel's class."""

    def __init__(self, pairs: list, classes: Classes, options: argparse.Namespace, *augmentation: nn.Module) -> None:
        self.pairs, self.classes = pairs, classes
        resize = [v2.Resize(options.image_size)] if options.image_size else []
        to_numbers = v2.ToDtype({tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.long}, scale=True)
        self.transform = v2.Compose([*resize, *augmentation, to_numbers, v2.Normalize(MEAN, STD)])

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        image, mask = self.pairs[i]
        pixels = v2.functional.to_image(Image.open(image).convert("RGB"))
        return self.transform(pixels, tv_tensors.Mask(self.classes.read(mask)))


def make_loss(options: argparse.Namespace, weights: Tensor | None) -> Loss:
    if options.loss == "cross_entropy":
        return nn.CrossEntropyLoss(weights, ignore_index=IGNORE)
    from segmentation_models_pytorch import losses

    kinds = {"dice": "DiceLoss", "focal": "FocalLoss", "lovasz": "LovaszLoss", "tversky": "TverskyLoss"}
    return getattr(losses, kinds[options.loss])("multiclass", ignore_index=IGNORE)


def train(run: Run, loader: DataLoader, loss_of: Loss, title: str) -> None:
    run.model.train()
    for images, masks in (bar := tqdm(loader, title, leave=False)):
        with autocast(run.options):
            logits = run.model(images.to(DEVICE))
        loss = loss_of(logits.float(), masks.to(DEVICE))
        run.step(loss)
        bar.set_postfix(loss=f"{loss.item():.3f}")


@torch.no_grad()
def predict(run: Run, image: Tensor) -> Tensor:
    """The number of the likeliest class of each pixel."""
    run.model.eval()
    with autocast(run.options):
        return run.model(image.to(DEVICE)).argmax(1)


def confusion(run: Run, data: Scenes, title: str) -> np.ndarray:
    """Pixels by class (rows) and predicted class (columns)."""
    matrix = MulticlassConfusionMatrix(len(data.classes.names), ignore_index=IGNORE).to(DEVICE)
    for image, mask in tqdm(DataLoader(data, num_workers=run.options.workers), title, leave=False):
        matrix.update(predict(run, image), mask.to(DEVICE))
    return matrix.compute().cpu().numpy()


def iou_table(matrix: np.ndarray, names: list[str]) -> pd.DataFrame:
    """A row a class, and a last one with the means; NaN for a class that is neither there nor predicted."""
    correct, truth, predicted = np.diag(matrix), matrix.sum(1), matrix.sum(0)
    with np.errstate(invalid="ignore"):
        table = pd.DataFrame({"class": names, "pixels": truth, "iou": correct / (truth + predicted - correct),
                              "accuracy": correct / truth})  # fmt: skip
    table.loc[len(names)] = ["mean", truth.sum(), table["iou"].mean(), table["accuracy"].mean()]
    return table


def draw_overlays(run: Run, data: Scenes, name: str) -> None:
    """Pictures beside their masks and what is predicted."""
    folder = run.folder / "overlays"
    folder.mkdir(exist_ok=True)
    for i in range(min(run.options.overlays, len(data))):
        image, mask = data[i]
        pixels = image * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]
        found = predict(run, image[None])[0].cpu().numpy()
        path = folder / f"{data.pairs[i][0].stem}.png"
        maps = {"picture": None, "mask": mask.numpy(), "prediction": found}
        pictures.overlays(path, f"{name}, {path.stem}", pixels.movedim(0, 2).numpy(), maps, data.classes.names)


def main(words: list[str] | None = None) -> pd.DataFrame:
    options = parse(words)
    name = "generated streets" if options.data == "generated" else Path(options.data).resolve().name
    if options.data == "generated":
        options.data = str(generated.streets(options.out / "generated"))
    classes = Classes(Path(options.data), options.ignore)
    pairs = {part: find_pairs(Path(options.data), part) for part in ("train", "val", "test")}
    pixels = {part: count_pixels(pairs[part], classes, f"masks, {part}") for part in pairs}
    num = len(classes.names)
    print(f"{name}: {num} classes; pictures: {', '.join(f'{len(pairs[part]):,} {part}' for part in pairs)}")

    torch.manual_seed(options.seed)
    model = create_model(options.model, num_classes=num, efficient=options.engine == "shared")
    print_what_fits(model, options.batch_size, (3, options.crop, options.crop), "rmsprop", options)
    whole = Scenes(pairs["train"], classes, options, v2.RandomHorizontalFlip())
    print_what_fits(model, 1, tuple(whole[0][0].shape), "rmsprop", options)
    fill = {tv_tensors.Image: 0, tv_tensors.Mask: IGNORE}
    crop = v2.RandomCrop(options.crop, pad_if_needed=True, fill=fill)
    crops = Scenes(pairs["train"], classes, options, crop, v2.RandomHorizontalFlip())
    valid, test = (Scenes(pairs[part], classes, options) for part in ("val", "test"))

    model.to(DEVICE)
    optimizer = torch.optim.RMSprop(model.parameters(), options.learning_rate, weight_decay=1e-4)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.995**i * (1 if i < options.epochs else 0.1))
    run = Run(options, model, optimizer, decay)
    weights = None
    if options.class_weights == "median_frequency":
        weights = torch.tensor(median_frequency_weights(pixels["train"]), dtype=torch.float32, device=DEVICE)
    loss, epochs = make_loss(options, weights), options.epochs + options.whole_epochs
    for epoch in range(run.resume(), epochs):
        torch.manual_seed(options.seed + epoch)  # so that a run that was interrupted draws the same crops
        data, size = (crops, options.batch_size) if epoch < options.epochs else (whole, 1)
        loader = DataLoader(data, size, shuffle=True, num_workers=options.workers)
        train(run, loader, loss, f"epoch {epoch + 1} of {epochs}")
        run.scheduler.step()
        score = float(iou_table(confusion(run, valid, "validation"), classes.names)["iou"].iloc[-1])
        kind = "crops" if data is crops else "whole pictures"
        print(f"epoch {epoch + 1}, {kind}: mean IoU of the validation pictures {score:.3f}", flush=True)
        run.save(epoch + 1, score)

    run.load_best()
    matrix = confusion(run, test, "test")
    table = iou_table(matrix, classes.names)
    table.to_csv(options.out / "iou.csv", index=False)
    pictures.confusion(options.out / "confusion.png", name, matrix, classes.names, "pixels")
    draw_overlays(run, test, name)
    print(f"\n{name}, test pictures, the best epoch's model\n{table.to_string(index=False, float_format='%.3f')}")
    return table


if __name__ == "__main__":
    main()
