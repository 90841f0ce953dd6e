"""Train an FC-DenseNet (Tiramisu) to give every pixel a class: on crops first, then on whole pictures, as in the paper.

pip install -e '.[examples]'
python examples/segmentation.py --data generated --out runs/first
python examples/segmentation.py --data CamVid --out runs/camvid --classes examples/camvid_classes.csv
python examples/segmentation.py --predict new_pictures --out runs/camvid

A data folder has train, train_labels, val, val_labels, test, test_labels, and a classes.csv with the columns
name, r, g, b. It writes iou.csv, confusion.png, overlays/NAME.png, checkpoint.pt, best.pt, config.json into --out.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import _extra  # before the packages that it looks for
import common
import generated
import masks
import numpy as np
import pandas as pd
import pictures
import torch
from common import DEVICE, Run, at_least, autocast
from masks import IGNORE, MEAN, STD, Classes, Scenes
from PIL import Image
from torch import Tensor, nn
from torchmetrics.classification import MulticlassConfusionMatrix
from torchvision import tv_tensors
from torchvision.transforms import v2

from efficient_densenet import create_model, list_models

Loss = Callable[[Tensor, Tensor], Tensor]


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = common.make_parser(__doc__, epochs=600, batch_size=3, learning_rate=1e-3)
    add = parser.add_argument
    add("--data", help="a folder in CamVid's layout, or the word generated, for a quick first run")
    add("--classes", type=Path, help="a CSV of name, r, g, b; by default the folder's classes.csv or class_dict.csv")
    add("--ignore", nargs="*", default=["Void"], help="classes that are neither learned nor counted")
    add("--model", default="fc_densenet103", choices=list_models("fc_*"), help="56, 67 or 103 layers")
    add("--crop", type=at_least(32), default=224, help="height and width of the crops")
    add(
        "--whole_epochs",
        type=at_least(0),
        default=150,
        help="epochs on whole pictures, one a step, after those on crops",
    )
    add(
        "--image_size",
        type=at_least(32),
        nargs=2,
        metavar=("HEIGHT", "WIDTH"),
        help="resize the pictures to this first",
    )
    add(
        "--class_weights", choices=["median_frequency", "none"], default="median_frequency", help="of the cross entropy"
    )
    losses = ["cross_entropy", "dice", "focal", "lovasz", "tversky"]
    add("--loss", choices=losses, default="cross_entropy", help="others are segmentation_models_pytorch's")
    add("--overlays", type=at_least(0), default=8, help="how many test pictures are drawn")
    options = common.parse_options(parser, words, model="fc_densenet56", crop=64, epochs=6, whole_epochs=1)
    if options.loss != "cross_entropy":
        _extra.need("segmentation_models_pytorch")
    return options


def make_loss(options: argparse.Namespace, weights: Tensor | None) -> Loss:
    if options.loss == "cross_entropy":
        return nn.CrossEntropyLoss(weights, ignore_index=IGNORE)
    from segmentation_models_pytorch import losses

    kinds = {"dice": "DiceLoss", "focal": "FocalLoss", "lovasz": "LovaszLoss", "tversky": "TverskyLoss"}
    return getattr(losses, kinds[options.loss])("multiclass", ignore_index=IGNORE)


def train(run: Run, data: Scenes, size: int, loss_of: Loss, title: str) -> None:
    run.model.train()
    for _, (images, targets) in run.batches(data, data.files, title, size, shuffle=True):
        with autocast(run.options):
            logits = run.network(images.to(DEVICE))
        run.step(loss_of(logits.float(), targets.to(DEVICE)))


@torch.no_grad()
def predict(run: Run, image: Tensor) -> Tensor:
    """The number of the likeliest class of each pixel."""
    run.model.eval()
    with autocast(run.options):
        return run.model(image.to(DEVICE)).argmax(1)


def confusion(run: Run, data: Scenes, title: str) -> np.ndarray:
    """Pixels by class (rows) and predicted class (columns)."""
    matrix = MulticlassConfusionMatrix(len(data.classes.names), ignore_index=IGNORE).to(DEVICE)
    for _, (image, mask) in run.batches(data, data.files, title, 1):
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
    for i in [i for i, file in enumerate(data.files) if file not in run.broken][: run.options.overlays]:
        image, mask = data[i]
        pixels = image * torch.tensor(STD)[:, None, None] + torch.tensor(MEAN)[:, None, None]
        found = predict(run, image[None])[0].cpu().numpy()
        path = folder / f"{data.pairs[i][0].stem}.png"
        maps = {"picture": None, "mask": mask.numpy(), "prediction": found}
        pictures.overlays(path, f"{name}, {path.stem}", pixels.movedim(0, 2).numpy(), maps, data.classes.names)


def predict_folder(options: argparse.Namespace) -> pd.DataFrame:
    """Write the share of each class in the pictures of a folder, and their masks, by the best model of the run."""
    names = common.load_config(options)["classes"]
    files = common.files_in(options.predict, (".png", ".jpg", ".jpeg"))
    common.check_files(files, partial(masks.check_picture, options=options), options)
    model = create_model(options.model, num_classes=len(names), efficient=options.engine == "shared").to(DEVICE)
    common.load_best(model, options.out)
    run, shares = Run(options, model), torch.full((len(files), len(names)), torch.nan)
    data = Scenes([(file, None) for file in files], None, options)
    for (i,), image in run.batches(data, data.files, "predicting", 1):
        found = predict(run, image)[0].cpu()
        shares[i] = found.flatten().bincount(minlength=len(names)) / found.numel()
        mask = options.out / "predicted" / files[i].relative_to(options.predict).with_suffix(".png")
        mask.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(found.byte().numpy()).save(mask)
    return common.write_predicted(run, data.files, names, shares)


def main(words: list[str] | None = None) -> pd.DataFrame:
    options = parse(words)
    if options.predict:
        return predict_folder(options)
    name = "generated streets" if options.data == "generated" else Path(options.data).resolve().name
    common.prepare_folder(options, generated.streets)
    classes = Classes(Path(options.data), options.ignore, options.classes)
    pairs = {part: masks.find_pairs(Path(options.data), part, options) for part in ("train", "val", "test")}
    pixels = {part: masks.count_pixels(pairs[part], classes, f"masks, {part}") for part in pairs}
    num = len(classes.names)
    print(f"{name}: {num} classes; pictures: {', '.join(f'{len(pairs[part]):,} {part}' for part in pairs)}")

    torch.manual_seed(options.seed)
    model = create_model(options.model, num_classes=num, efficient=options.engine == "shared")
    common.print_what_fits(model, options.batch_size, (3, options.crop, options.crop), "rmsprop", options)
    whole = Scenes(pairs["train"], classes, options, v2.RandomHorizontalFlip())
    common.print_what_fits(model, 1, tuple(whole[0][0].shape), "rmsprop", options)
    fill = {tv_tensors.Image: 0, tv_tensors.Mask: IGNORE}
    crop = v2.RandomCrop(options.crop, pad_if_needed=True, fill=fill)
    crops = Scenes(pairs["train"], classes, options, crop, v2.RandomHorizontalFlip())
    valid, test = (Scenes(pairs[part], classes, options) for part in ("val", "test"))

    model.to(DEVICE)
    optimizer = torch.optim.RMSprop(model.parameters(), options.learning_rate, weight_decay=1e-4)
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.995**i * (1 if i < options.epochs else 0.1))
    run = Run(options, model, optimizer, decay, classes=classes.names)
    weights = None
    if options.class_weights == "median_frequency":
        weights = torch.tensor(masks.median_frequency_weights(pixels["train"]), dtype=torch.float32, device=DEVICE)
    loss, epochs = make_loss(options, weights), options.epochs + options.whole_epochs
    for epoch in range(run.resume(), epochs):
        torch.manual_seed(options.seed + epoch)  # so that a run that was interrupted draws the same crops
        data, size = (crops, options.batch_size) if epoch < options.epochs else (whole, common.WORLD_SIZE)
        train(run, data, size, loss, f"epoch {epoch + 1} of {epochs}")
        decay.step()
        score = float(iou_table(confusion(run, valid, "validation"), classes.names)["iou"].iloc[-1])
        kind = "crops" if data is crops else "whole pictures"
        print(f"epoch {epoch + 1}, {kind}: mean IoU of the validation pictures {score:.3f}", flush=True)
        run.save(epoch + 1, score)

    common.load_best(model, options.out)
    matrix = confusion(run, test, "test")
    common.leave_to_main()
    table = iou_table(matrix, classes.names)
    table.to_csv(options.out / "iou.csv", index=False)
    pictures.confusion(options.out / "confusion.png", name, matrix, classes.names, "pixels")
    draw_overlays(run, test, name)
    run.print_broken()
    print(f"\n{name}, test pictures, the best epoch's model\n{table.to_string(index=False, float_format='%.3f')}")
    return table


if __name__ == "__main__":
    common.script(main)
