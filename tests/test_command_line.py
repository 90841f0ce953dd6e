"""What may be typed after the name of a demo: as for gpleiss's demo.py, by name, letter or position; help; refusals."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import training
from forks import await_file
from samples import DEMOS, RUN, TINY, demo, read_rows, refused, same_run, write_cifar10, write_folder
from training.options import Options, parse

SCRIPTS = ("cp_demo.py", "original_demo.py", "predict.py", "memory_tour.py")


@pytest.fixture
def typed(monkeypatch, tmp_path):
    """A function from the words after cp_demo.py to the options that they stand for; nothing is trained."""
    seen = []
    monkeypatch.setattr(training, "train", lambda given: seen.append(given))

    def run(words: str) -> dict:
        done = demo("cp_demo.py", *words.split(), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return seen.pop()

    return run


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ("cifar model", {"data": "cifar", "save": "model"}),
        ("cifar model --depth 40", {"data": "cifar", "save": "model", "depth": 40}),
        ("--efficient False cifar model", {"efficient": False, "data": "cifar", "save": "model"}),
        ("-e True", {"efficient": True}),
        ("-e=False", {"efficient": False}),
        ("--efficient", {"efficient": True}),
        ("--noefficient", {"efficient": False}),
        ("--no-resume --noresume --n_epochs=3", {"resume": False, "n_epochs": 3}),
        ("--resume 1 --mirror 0 --compile true", {"resume": True, "mirror": False, "compile": True}),
        ("--resume auto", {"resume": "auto"}),
        ("--resume --data cifar", {"resume": True, "data": "cifar"}),
        ("--batch-size 3 -n 4 -g=5", {"batch_size": 3, "n_epochs": 4, "growth_rate": 5}),
        ("--seed None --data None", {"seed": None, "data": None}),
        ("--lr 1e-3 --lr .5", {"lr": 0.5}),
        ("--depth 22 --", {"depth": 22}),
        ("--evaluate", {"evaluate": True}),
        ("--evaluate True --save 1", {"evaluate": True, "save": "1"}),
        ("--seed -1", {"seed": -1}),
        ("--save run#2 --data a,b --model 2024_01_15", {"save": "run#2", "data": "a,b", "model": "2024_01_15"}),
        ("--evaluate 1.50 --weights (1) --device 'q'", {"evaluate": "1.50", "weights": "(1)", "device": "'q'"}),
    ],
)
def test_what_is_typed_stands_for_options(words, given, typed):
    assert typed(words) == given


@pytest.mark.parametrize(("value", "engine"), [("1", "best"), ("0", "plain"), (1, "best"), ("true", "best")])
def test_efficient_may_be_a_number(value, engine):
    assert parse({"efficient": value}, "best").engine == engine


def test_names_of_images_are_used_as_typed(monkeypatch):
    predict = mock.create_autospec(training.predict)
    monkeypatch.setattr(training, "predict", predict)
    names = ("run#2", "a,b", "2024_01_15", "1.50", "(1)", "'quoted'")
    done = demo("predict.py", *names, "--model", "3.50", "--top", "2", cwd=DEMOS)
    assert (done.returncode, predict.mock_calls) == (0, [mock.call(*names, model="3.50", top=2)])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("cifar", "found 'cifar' on its own, but every option has a name: such as --data cifar"),
        ("cifar model 40", "found '40' on its own, but every option has a name: such as --data 40"),
        ("cifar --save model", "found 'cifar' on its own, but every option has a name: such as --data cifar"),
        ("--depth 22 - --n_epochs 3", "found '-' on its own, but every option has a name"),
        ("-s 3", "-s could be --save or --seed or --sync_bn or --stream: give the whole name"),
        ("-x 3", "unknown option -x: there are --efficient, --data"),
        ("-- --trace", "unknown option --trace: there are --efficient, --data"),
        ("--batchsize=3", "unknown option --batchsize: did you mean --batch_size?"),
        ("--noefficient True", "unknown option --noefficient: did you mean --efficient?"),
        ("--save", "--save needs a value: give --save VALUE"),
        ("--nosave", "--save needs a value: give --save VALUE"),
        ("--data --save x", "--data needs a value: give --data VALUE"),
        ("--nodepth", "depth is False, but must be 6n + 4"),
        ("--depth 23", "depth is 23, but must be 6n + 4, such as 22, 40 or 100"),
        ("--efficient fast", "efficient is 'fast', but must be one of True, False, 'best', 'plain'"),
        ("--engine fast", "engine is 'fast', but must be one of 'best', 'plain', 'official', 'checkpoint', 'shared'"),
        ("--growth_rate -1", "growth_rate is -1"),
        ("--batch_size 0", "batch_size is 0, but must be a whole number of at least 1"),
        ("--micro_batch_size 0", "micro_batch_size is 0"),
        ("--n_epochs 1.5", "n_epochs is 1.5"),
        ("--lr", "lr is True, but must be a number in (0, inf)"),
        ("--lr abc", "lr is 'abc', but must be a number in (0, inf)"),
        ("--lr 1e400", "lr is inf, but must be a number in (0, inf)"),
        ("--lr 1" + "0" * 5000, "lr is '100000000000000000000000000000000000000000000000000000000000' …, but must be"),
        ("--n_epochs None --lr None", "lr is None, but must be a number in (0, inf)"),
        ("--weight_decay 1", "weight_decay is 1, but must be a number in [0, 1)"),
        ("--seed 99999999999999999999", "seed is 99999999999999999999, but must be a whole number of at least 0 and"),
        ("--amp int8", "amp is 'int8', but must be one of 'bf16', 'fp16'"),
        ("--recipe magic", "recipe is 'magic', but must be one of 'step', 'one_cycle'"),
        ("--dataset imagenet", "dataset is 'imagenet', but must be one of 'cifar10'"),
        ("--dataset svhn", "found --dataset svhn without --data: give the directory"),
        ("--device cuda:77", "device is 'cuda:77', but cannot be used here"),
        ("--device abacus", "device is 'abacus', but cannot be used here"),
        ("--device meta", "device is 'meta', but cannot be used here"),
        ("--device mps", "device is 'mps', but cannot be used here ("),
        ("--model densenet12", "unknown model 'densenet12': did you mean 'densenet121'?"),
        ("--model densenet121 --depth 40", "found --model densenet121 with --depth or --growth_rate"),
        ("--resume --overwrite", "found --resume and --overwrite"),
        ("--resume maybe", "resume is 'maybe', but must be True or False"),
        ("--resume", "found --resume, but checkpoints/digits_densenet_bc_22_12 contains no run to resume"),
        ("--accept_changed_data", "found --accept_changed_data without --resume"),
        ("--evaluate --overwrite", "found --evaluate and --overwrite, but a model that is evaluated is not trained"),
        ("--evaluate nowhere", "nowhere does not exist"),
        ("--evaluate 0", "0 does not exist"),
        ("--valid_size 2000", "valid_size is 2000, but must leave some of the 1438 images to train on"),
        ("--mirror 3", "mirror is 3, but must be True or False"),
        ("--stream maybe", "stream is 'maybe', but must be True or False"),
        ("--stream", "found --stream, but only an image folder is streamed, and not UCI handwritten digits"),
        ("--image_size 64", "found --image_size 64, but the images of UCI handwritten digits have 32×32"),
        ("--parallel tp", "parallel is 'tp', but must be one of 'ddp', 'fsdp', 'dp'"),
        ("--parallel ddp", "found --parallel ddp, but this is the only process: start several with torchrun"),
        ("--parallel fsdp", "found --parallel fsdp, but this is the only process: start several with torchrun"),
        ("--parallel dp --device cpu", "found --parallel dp, but the device is cpu alone, while DataParallel needs"),
        ("--sync_bn", "found --sync_bn, but this is the only process: start several with torchrun"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence_and_nothing_is_written(words, message, tmp_path):
    done = demo("cp_demo.py", *words.split(), cwd=tmp_path)
    refused(done, f"error: {message}")
    assert len(done.stderr) < 1000
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("option", ["resume", "weights", "freeze"])
def test_a_model_that_is_evaluated_is_not_trained(option):
    value = {"weights": "cifar10", "freeze": "features"}.get(option, True)
    with pytest.raises(ValueError, match=f"found --evaluate and --{option}, but a model that is evaluated is not"):
        parse({"evaluate": True, option: value}, "best")


def _help(script: str, words: str, folder: Path) -> str:
    done = demo(script, *words.split(), cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("NAME\n")
    assert not re.search("INFO|METADATA|GROUP", done.stdout)
    assert list(folder.iterdir()) == []
    return done.stdout


@pytest.mark.parametrize("words", ["--depth 10 --save run --help", "--help --depth", "x.png -h", "--zzz 3 -- --help"])
def test_help_wins_wherever_it_stands(words, tmp_path):
    assert "--depth=" in _help("cp_demo.py", words, tmp_path)


@pytest.mark.parametrize(
    ("script", "contents"),
    [
        ("original_demo.py", ["python demos/original_demo.py"]),
        ("predict.py", ["IMAGES", "--model", "--top", "how many classes"]),
        ("memory_tour.py", ["TOUR_QUICK=1"]),
    ],
)
def test_every_demo_has_a_help(script, contents, tmp_path):
    shown = _help(script, "--help", tmp_path)
    assert [each for each in contents if each not in shown] == []


def test_help_explains_every_option(tmp_path):
    shown = _help("cp_demo.py", "-- --help", tmp_path)
    assert "python demos/cp_demo.py" in shown
    for name in Options.__dataclass_fields__:
        explained = re.search(rf"--{name}=.*\n(?: +(?:Type|Default): .*\n)+ +(\w.*)", shown)
        assert explained, name
        assert explained[1].rstrip().endswith("."), explained[1]


def test_the_tour_has_no_options(tmp_path):
    refused(demo("memory_tour.py", "--quick", cwd=tmp_path), "unknown option --quick: there are none")
    refused(demo("memory_tour.py", "quick", cwd=tmp_path), "found 'quick' on its own, but there are no options")


@pytest.mark.exhaustive
def test_training_on_all_images_keeps_the_last_epoch(tmp_path):
    words = [*RUN, "--n_epochs", "2", "--valid_size", "0"]
    done = demo("cp_demo.py", *words, cwd=tmp_path)
    assert "1,438 to train, 0 to validate" in done.stdout, done.stderr
    assert "model.pt (the last epoch)" in done.stdout
    assert "validation loss" not in done.stdout
    rows = read_rows(tmp_path / "run")
    assert [(row["valid_loss"], row["valid_error"]) for row in rows] == [("", "")] * 2
    model, last = (torch.load(tmp_path / "run" / name, weights_only=True) for name in ("model.pt", "last.pt"))
    assert all(torch.equal(tensor, last["state"]["model"][name]) for name, tensor in model.items())
    done = demo("cp_demo.py", "--resume", "--save", "run", cwd=tmp_path)
    assert "test error" in done.stdout, done.stderr


@pytest.mark.exhaustive
def test_without_a_seed_one_is_drawn_that_repeats_the_run(tmp_path):
    words = [*TINY, "--batch_size", "128", "--n_epochs", "1"]
    seeds = []
    for save in ("one", "two"):
        done = demo("cp_demo.py", *words, "--seed", "None", "--save", save, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        seeds.append(json.loads((tmp_path / save / "config.json").read_text())["options"]["seed"])
        assert f"seed {seeds[-1]}" in done.stdout
    assert seeds[0] != seeds[1]
    done = demo("cp_demo.py", *words, "--seed", str(seeds[0]), "--save", "again", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    same_run(tmp_path / "again", tmp_path / "one")
    done = demo("cp_demo.py", "--seed", "None", "--save", "one", "--resume", cwd=tmp_path)
    assert "test error" in done.stdout, done.stderr


def test_a_data_set_that_is_named_is_the_one_that_is_taken(tmp_path):
    write_cifar10(tmp_path / "sets")
    write_folder(tmp_path / "own")
    words = [*TINY, "--batch_size", "32", "--n_epochs", "1", "--save", "run"]
    done = demo("cp_demo.py", *words, "--data", "sets", "--dataset", "cifar100", cwd=tmp_path)
    refused(
        done, "sets contains cifar-10-batches-py, but --dataset cifar100 needs CIFAR-100 there: leave --dataset out"
    )
    done = demo("cp_demo.py", *words, "--data", "own", "--dataset", "cifar10", cwd=tmp_path)
    refused(done, "own contains test, train, but --dataset cifar10 needs CIFAR-10 there")
    done = demo("cp_demo.py", *words, "--data", "sets", "--dataset", "cifar10", cwd=tmp_path)
    assert "CIFAR-10: 10 classes" in done.stdout, done.stderr
    done = demo("cp_demo.py", "--save", "run", "--resume", cwd=tmp_path)
    assert "test error" in done.stdout, done.stderr


WAITING = """
import time
open("importing", "w")
for _ in range(6000):
    time.sleep(0.01)
"""


@pytest.mark.parametrize("script", SCRIPTS)
def test_ctrl_c_while_modules_are_imported_ends_with_a_line(script, tmp_path):
    """A module that waits stands in for torch, whose import takes seconds.

    It waits in short sleeps: a signal that comes just before a sleep begins is handled only after it.
    """
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(WAITING)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(DEMOS / script)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment) as process:
        await_file(tmp_path / "importing", process)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=20)[1] == "interrupted\n"
        assert process.returncode == 130


def test_ctrl_c_before_the_first_step_ends_with_a_line(tmp_path, monkeypatch):
    def load(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("training.run.load", load)
    done = demo("cp_demo.py", *RUN, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")
