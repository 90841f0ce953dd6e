"""The demos as commands: help, bad options, predicting, the tour, the committed model, running from a clone."""

import configparser
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image
from samples import CIFAR10_CLASSES, DEMOS, TINY, demo, refused, write_folder
from training.options import Options

ROOT = DEMOS.parent
DIGITS = ROOT / "checkpoints" / "digits"
SCRIPTS = ("cp_demo.py", "original_demo.py", "predict.py", "memory_tour.py")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dept", "22"], "unknown option --dept: did you mean --depth?"),
        (["--batchsize=3"], "unknown option --batchsize: did you mean --batch_size?"),
        (["--zzz", "22"], "unknown option --zzz: there are --efficient, --data"),
        (["cifar"], "found 'cifar' on its own, but every option has a name"),
        (["--depth", "22", "40"], "found '40' on its own"),
        (["--depth", "23"], "depth is 23, but must be 6n + 4"),
        (["--efficient", "fast"], "efficient is 'fast', but must be one of True, False, 'best', 'plain'"),
        (
            ["--engine", "fast"],
            "engine is 'fast', but must be one of 'best', 'plain', 'official', 'checkpoint', 'shared'",
        ),
        (["--growth_rate", "-1"], "growth_rate is -1"),
        (["--batch_size", "0"], "batch_size is 0, but must be a whole number of at least 1"),
        (["--micro_batch_size", "0"], "micro_batch_size is 0"),
        (["--n_epochs", "1.5"], "n_epochs is 1.5"),
        (["--lr", "abc"], "lr is 'abc', but must be a number in (0, inf)"),
        (["--lr", "1e400"], "lr is inf, but must be a number in (0, inf)"),
        (["--weight_decay", "1"], "weight_decay is 1, but must be a number in [0, 1)"),
        (["--depth", "abc"], "depth is 'abc'"),
        (["--seed", "-1"], "seed is -1"),
        (["--amp", "int8"], "amp is 'int8', but must be one of 'bf16', 'fp16'"),
        (["--recipe", "magic"], "recipe is 'magic', but must be one of 'step', 'one_cycle'"),
        (["--dataset", "imagenet"], "dataset is 'imagenet', but must be one of 'cifar10'"),
        (["--device", "cuda:77"], "device is 'cuda:77', but cannot be used here"),
        (["--device", "abacus"], "device is 'abacus', but cannot be used here"),
        (["--model", "densenet12"], "unknown model 'densenet12': did you mean 'densenet121'?"),
        (["--model", "densenet121", "--depth", "40"], "found --model densenet121 with --depth or --growth_rate"),
        (["--resume", "--overwrite"], "found --resume and --overwrite"),
        (["--resume", "maybe"], "resume is 'maybe', but must be True or False"),
        (["--save"], "--save needs a value: give --save VALUE"),
        (["--valid_size", "2000"], "valid_size is 2000, but must leave some of the 1438 images to train on"),
        (["--evaluate", "nowhere"], "nowhere does not exist"),
        (["--sync_bn"], "found --sync_bn, but this is the only process: start several with torchrun"),
        (["--accept_changed_data"], "found --accept_changed_data without --resume"),
        (["--resume"], "found --resume, but checkpoints/digits_densenet_bc_22_12 contains no run to resume"),
        (["--device", "meta"], "device is 'meta', but cannot be used here"),
        (["--mirror", "3"], "mirror is 3, but must be True or False"),
        (["--stream", "maybe"], "stream is 'maybe', but must be True or False"),
        (["--evaluate", "0"], "0 does not exist"),
    ],
)
def test_bad_options_give_a_sentence_and_write_nothing(words, message, tmp_path):
    refused(demo("cp_demo.py", *words, cwd=tmp_path), message)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["run#2", "a,b", "2024_01_15", "1.50", "(1)", "'quoted'"])
def test_names_are_used_as_typed(name, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / name).write_text("a file")
    refused(demo("cp_demo.py", "--save", name, "--overwrite", cwd=tmp_path), f"{name} is a file, but a run needs")
    refused(demo("cp_demo.py", "--data", name, cwd=tmp_path), f"{name} is a file, but --data needs a directory")
    refused(demo("cp_demo.py", "--evaluate", f"{name}-", cwd=tmp_path), f"{name}- does not exist")
    refused(demo("predict.py", name, "--model", str(DIGITS), cwd=tmp_path), f"{name} is not an image that can")
    refused(demo("predict.py", name, "--model", f"{name}-", cwd=tmp_path), f"{name}- does not exist")


def test_the_reason_why_a_device_cannot_be_used_is_one_sentence(tmp_path):
    done = demo("cp_demo.py", "--device", "mps", cwd=tmp_path)
    refused(done, "device is 'mps', but cannot be used here (")
    assert len(done.stderr) < 300


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ({"dept": 22}, "model.model is missing, but must be the name of a model of the zoo"),
        (["depth", 22], "model is ['depth', 22], but must be a dict with model, depth, growth_rate, …"),
    ],
)
def test_a_config_of_something_else_is_refused(model, found, tmp_path):
    shutil.copytree(DIGITS, tmp_path / "run")
    path = tmp_path / "run" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model": model}))
    message = f"run/config.json: {found}"
    refused(demo("cp_demo.py", "--evaluate", "run", cwd=tmp_path), message)
    image = str(DEMOS / "pictures" / "digit_3.png")
    refused(demo("predict.py", image, "--model", "run", cwd=tmp_path), message)


@pytest.mark.parametrize("engine", ["plain", "shared"])
def test_a_batch_of_one_image_without_a_variance_ends_with_a_sentence(engine, tmp_path):
    write_folder(tmp_path / "own", each=5)
    words = ["--data", "own", "--image_size", "4", "--batch_size", "1", "--engine", engine, "--device", "cpu"]
    done = demo("cp_demo.py", *TINY, *words, "--n_epochs", "1", "--save", "run", cwd=tmp_path)
    refused(done, "found a batch of one image, which leaves a batch norm a single value per channel")


def test_a_compiler_error_is_reported_in_a_sentence(tmp_path, monkeypatch):
    def compile_nothing(graph, inputs):
        raise RuntimeError("no compiler here\nand more")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compile_nothing))
    write_folder(tmp_path / "own", each=5)
    words = ["--data", "own", "--image_size", "8", "--engine", "plain", "--device", "cpu", "--compile"]
    done = demo("cp_demo.py", *TINY, *words, "--n_epochs", "1", "--save", "run", cwd=tmp_path)
    refused(done, "torch.compile failed here (")
    assert "no compiler here" in done.stderr
    assert "leave --compile out" in done.stderr


def test_a_file_where_the_results_belong(tmp_path):
    (tmp_path / "run").write_text("a file")
    refused(demo("cp_demo.py", "--save", "run", cwd=tmp_path), "run is a file, but a run needs a directory")
    assert (tmp_path / "run").read_text() == "a file"


@pytest.mark.parametrize("script", ["cp_demo.py", "original_demo.py"])
def test_help_explains_every_option(script, tmp_path):
    done = demo(script, "--help", cwd=tmp_path)
    shown = done.stdout + done.stderr
    assert done.returncode == 0
    for name in Options.__dataclass_fields__:
        explained = re.search(rf"--{name}=.*\n(?: +(?:Type|Default): .*\n)+ +(\w.*)", shown)
        assert explained, name
        assert explained[1].rstrip().endswith("."), explained[1]
    assert f"python demos/{script}" in shown


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("words", [["--help"], ["--", "--help"]])
def test_help_shows_options_only(script, words, tmp_path):
    done = demo(script, *words, cwd=tmp_path)
    shown = done.stdout + done.stderr
    assert done.returncode == 0
    assert "NAME\n" in shown
    assert "METADATA" not in shown.upper()
    assert "GROUP" not in shown


def test_help_of_predict(tmp_path):
    done = demo("predict.py", "--help", cwd=tmp_path)
    assert all(word in done.stdout + done.stderr for word in ("IMAGES", "--model", "--top", "how many classes"))


def test_the_committed_model_has_the_stated_error(tmp_path):
    stated = (ROOT / "checkpoints" / "README.md").read_text()
    assert hashlib.sha256((DIGITS / "model.pt").read_bytes()).hexdigest() in stated
    error = re.search(r"test error of ([\d.]+%)", stated)[1]
    done = demo("cp_demo.py", "--evaluate", str(DIGITS), "--device", "cpu", cwd=tmp_path)
    assert f"test error {error}" in done.stdout, done.stderr
    assert float(error.rstrip("%")) < 5
    command = json.loads((DIGITS / "config.json").read_text())["options"]
    assert (command["seed"], command["data"], command["depth"]) == (0, None, 22)
    assert list(tmp_path.iterdir()) == []


def test_the_predict_command_of_the_readme(tmp_path):
    line = re.search(r"python (demos/predict\.py .*)", (ROOT / "README.md").read_text())[1]
    done = demo("predict.py", *line.split()[1:], cwd=ROOT)
    assert done.returncode == 0, done.stderr
    for printed, image in zip(done.stdout.splitlines(), re.findall(r"\S+\.png", line), strict=True):
        name = Path(image).stem.removeprefix("digit_")
        assert re.match(rf"{image}: {name} \(\d+\.\d%\)", printed), printed


def test_help_and_bad_options_of_the_tour(tmp_path):
    done = demo("memory_tour.py", "--help", cwd=tmp_path)
    assert "TOUR_QUICK=1" in done.stdout + done.stderr
    refused(demo("memory_tour.py", "--quick", cwd=tmp_path), "unknown option --quick: there are none")
    refused(demo("memory_tour.py", "quick", cwd=tmp_path), "found 'quick' on its own, but there are no options")


def test_training_on_and_predicting_own_images(tmp_path):
    write_folder(tmp_path / "own", each=40)
    words = ["--data", "own", "--depth", "10", "--growth_rate", "4", "--n_epochs", "3", "--batch_size", "8"]
    done = demo("cp_demo.py", *words, "--recipe", "one_cycle", "--save", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    Image.new("RGB", (50, 40), (10, 10, 10)).save(tmp_path / "dark.png")
    Image.new("RGB", (50, 40), (240, 240, 240)).save(tmp_path / "bright.jpg")
    done = demo("predict.py", "dark.png", "bright.jpg", "--model", "run", "--top", "2", cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("dark.png: cat ("), done.stdout
    assert lines[1].startswith("bright.jpg: dog ("), done.stdout


def test_evaluating_on_other_classes_is_refused(tmp_path):
    write_folder(tmp_path / "own")
    done = demo("cp_demo.py", "--evaluate", str(DIGITS), "--data", "own", cwd=tmp_path)
    refused(done, "has 2 classes (cat, dog) in 3 channels, but")


def test_the_memory_tour_as_a_quick_check():
    environment = os.environ | {"TOUR_QUICK": "1"}
    command = [sys.executable, "-W", "error::UserWarning", str(DEMOS / "memory_tour.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    rows = {
        name.strip(): (float(peak), float(ratio), float(difference))
        for name, peak, ratio, difference in re.findall(
            r"^(.*?) +([\d.]+) MiB +([\d.]+) +[\d.]+× +(\d\S*)$", done.stdout, re.MULTILINE
        )
    }
    assert len(rows) == 6, done.stdout
    assert all(ratio < 1 for name, (_, ratio, _) in rows.items() if name != "plain")
    errors = {name: error for name, (_, _, error) in rows.items() if "accumulation" not in name}
    assert max(errors.values()) <= max(5 * errors["plain"], 1e-5)


CIFAR10_JPEG = ROOT.parent / "shared" / "data" / "cifar10-jpeg.tar.xz"


def _some_of_each_class(folder: Path, train: int, test: int) -> None:
    left = {"train": dict.fromkeys(CIFAR10_CLASSES, train), "test": dict.fromkeys(CIFAR10_CLASSES, test)}
    with tarfile.open(CIFAR10_JPEG) as archive:
        for member in archive:
            *_, split, name, file = ["", "", *Path(member.name).parts]
            if member.isfile() and left[split][name] > 0:
                left[split][name] -= 1
                place = folder / split / name
                place.mkdir(parents=True, exist_ok=True)
                (place / file).write_bytes(archive.extractfile(member).read())


@pytest.mark.exhaustive
@pytest.mark.skipif(not CIFAR10_JPEG.exists(), reason="needs the JPEG copy of CIFAR-10 beside the project")
def test_a_short_run_on_real_images_is_far_from_chance(tmp_path):
    _some_of_each_class(tmp_path / "cifar", train=200, test=50)
    words = ["--depth", "22", "--n_epochs", "4", "--recipe", "one_cycle", "--batch_size", "32", "--device", "cpu"]
    done = demo("cp_demo.py", "--efficient", "True", "--data", "cifar", "--save", "model", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    error = float(re.search(r"test error ([\d.]+)%", done.stdout)[1])
    assert error < 78, done.stdout  # chance is 90; five standard deviations for 500 images are 7


@pytest.mark.parametrize("save", ["file/run", "dangling", "/proc/run"])
def test_an_unwritable_directory_is_reported_at_once(save, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("a file")
    Path("dangling").symlink_to("nowhere")
    done = demo("cp_demo.py", "--save", save, "--data", "absent", cwd=tmp_path)
    refused(done, f"nothing can be written to {save} (")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "file"]


def _write_package(place: Path, name: str) -> None:
    """A package that ends the process that imports it, with its name."""
    place.mkdir(parents=True)
    (place / "__init__.py").write_text(f"raise SystemExit({name!r})")


@pytest.mark.parametrize(
    ("script", "cloned"),
    [
        *((script, True) for script in SCRIPTS),
        ("cp_demo.py", False),
        *(pytest.param(script, False, marks=pytest.mark.exhaustive) for script in SCRIPTS[1:]),
    ],
)
def test_a_demo_prefers_the_package_beside_it_to_an_installed_one(script, cloned, tmp_path):
    _write_package(tmp_path / "installed" / "efficient_densenet", "the installed package")
    if cloned:
        _write_package(tmp_path / "clone" / "efficient_densenet", "the package of the clone")
    training = tmp_path / "clone" / "demos" / "training"
    training.mkdir(parents=True)
    (training / "__init__.py").write_text("import efficient_densenet")
    for name in (script, "startup.py"):
        shutil.copy(DEMOS / name, training.parent)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "installed")}
    command = [sys.executable, f"clone/demos/{script}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.stderr.strip() == ("the package of the clone" if cloned else "the installed package")


def test_a_demo_runs_in_a_clone_that_is_not_installed(tmp_path):
    """Without `site`, which would process the .pth file of an editable installation; packages such as torch remain."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    }
    command = [sys.executable, "-S", str(DEMOS / "predict.py"), str(DEMOS / "pictures" / "digit_3.png")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert "digit_3.png: 3 (" in done.stdout, done.stderr


def test_the_demos_extra_brings_the_fast_kernels():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert "numba" in config["options.extras_require"]["demos"].split()
