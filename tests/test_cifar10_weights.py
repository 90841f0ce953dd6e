"""The committed weights called cifar10: what they say of committed images, the stated errors, and fine-tuning."""

import csv
import re
from pathlib import Path

import pytest
import torch
from PIL import Image
from samples import DEMOS, demo, write_folder

from efficient_densenet import densenet_bc_100_12, weights_classes, weights_transforms
from efficient_densenet.weights.trained import CHECKPOINTS, TRAINED

IMAGES = {name: DEMOS / "pictures" / f"{name}.png" for name in ("airplane", "automobile", "frog", "ship", "truck")}
RUN = TRAINED["cifar10"].folder


@pytest.mark.parametrize("efficient", [True, False])
@torch.no_grad()
def test_they_classify_images_correctly(efficient):
    prepare = weights_transforms("densenet_bc_100_12", "cifar10")
    images = torch.stack([prepare(Image.open(path)) for path in IMAGES.values()])
    probabilities = densenet_bc_100_12(weights="cifar10", efficient=efficient).eval()(images).softmax(1)
    classes = weights_classes("densenet_bc_100_12", "cifar10")
    assert [classes[i] for i in probabilities.argmax(1)] == list(IMAGES)
    assert probabilities.amax(1).min() > 0.5


def test_the_demo_takes_them_for_images_in_color(tmp_path):
    digit = DEMOS / "pictures" / "digit_3.png"
    done = demo("predict.py", *map(str, IMAGES.values()), str(digit), cwd=tmp_path)
    assert re.findall(r": (\w+) \(", done.stdout) == [*IMAGES, "3"], done.stderr


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_page_states_what_the_files_say():
    page, rows = (CHECKPOINTS / "README.md").read_text(), read(RUN / "results.csv")
    *_, last = read(RUN / "ten_more_epochs" / "results.csv")
    assert f"{float(last['test_error']):.2%}" in page
    assert f"{float(rows[-1]['test_error']):.2%}" in page
    assert f"{min(float(row['valid_error']) for row in rows):.2%}" in page
    assert f"{sum(float(row['seconds']) for row in rows) / 3600:.1f} hours" in page
    assert f"{max(float(row['peak_memory_mib']) for row in rows):,.0f} MiB" in page


def test_fine_tuning_begins_with_them(tmp_path):
    write_folder(tmp_path / "mine", ("left", "right"), each=12)
    words = ["--weights", "cifar10", "--freeze", "features", "--n_epochs", "1", "--batch_size", "8", "--device", "cpu"]
    done = demo("cp_demo.py", "--data", "mine", "--save", "tuned", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "the classifier is new: for 2 classes (left, right), where the weights have 10 classes" in done.stdout
    tuned = torch.load(tmp_path / "tuned" / "model.pt", weights_only=True)
    given = torch.load(RUN / "model.pt", weights_only=True)
    assert tuned["classifier.weight"].shape == (2, 342)
    for name, tensor in given.items():
        assert torch.equal(tuned[name], tensor) or name.startswith("classifier"), name
