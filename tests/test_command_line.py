"""What may be typed after the name of a demo: as for gpleiss's demo.py, by name, letter or position; help; refusals."""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
import torch
import training
from forks import await_file
from samples import DEMOS, RUN, TINY, demo, read_rows, refused, same_run, write_cifar10, write_folder
from training.options import parse

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
    ],
)
def test_what_is_typed_stands_for_options(words, given, typed):
    assert typed(words) == given


@pytest.mark.parametrize(("value", "engine"), [("1", "best"), ("0", "plain"), (1, "best"), ("true", "best")])
def test_efficient_may_be_a_number(value, engine):
    assert parse({"efficient": value}, "best").engine == engine


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("cifar model 40", "found '40' on its own, but every option has a name: such as --data 40"),
        ("cifar --save model", "found 'cifar' on its own, but every option has a name: such as --data cifar"),
        ("-s 3", "-s could be --save or --seed or --sync_bn or --stream: give the whole name"),
        ("-x 3", "unknown option -x: there are --efficient, --data"),
        ("--noefficient True", "unknown option --noefficient: did you mean --efficient?"),
        ("--noefficient=x", "unknown option --noefficient: did you mean --efficient?"),
        ("--nodepth", "depth is False, but must be 6n + 4"),
        ("--lr", "lr is True, but must be a number in (0, inf)"),
        ("--nosave", "--save needs a value: give --save VALUE"),
        ("--data --save x", "--data needs a value: give --data VALUE"),
        ("--lr True", "lr is True, but must be a number in (0, inf)"),
        ("--batch_size True", "batch_size is True, but must be a whole number of at least 1"),
        ("--n_epochs None --lr None", "lr is None, but must be a number in (0, inf)"),
        ("--batch_size 99999999999999999999", "batch_size is 99999999999999999999, but must be a whole number of at"),
        ("--seed 99999999999999999999", "seed is 99999999999999999999, but must be a whole number of at least 0 and"),
        ("--lr 1" + "0" * 5000, "lr is '100000000000000000000000000000000000000000000000000000000000' …, but must be"),
        ("--depth 13", "depth is 13, but must be 6n + 4, such as 22, 40 or 100"),
        ("--efficient 2", "efficient is '2', but must be one of True, False, 'best', 'plain'"),
        ("-- --trace", "unknown option --trace: there are --efficient, --data"),
        ("-- --interactive", "unknown option --interactive: there are --efficient"),
        ("--depth 22 - --n_epochs 3", "found '-' on its own, but every option has a name"),
        ("--valid_size -1", "valid_size is -1, but must be a whole number of at least 0"),
    ],
)
def test_the_rest_is_refused_as_it_was_typed(words, message, tmp_path):
    refused(demo("cp_demo.py", *words.split(), cwd=tmp_path), f"error: {message}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("words", ["--depth 10 --save run --help", "--help --depth", "x.png -h", "--zzz 3 -- --help"])
def test_help_wins_wherever_it_stands(words, script, tmp_path):
    done = demo(script, *words.split(), cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("NAME\n")
    assert "INFO" not in done.stdout + done.stderr
    assert "error:" not in done.stderr
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize("name", ["config.json", "model.pt"])
def test_a_pipe_in_the_place_of_a_file_of_a_run_is_refused(name, tmp_path):
    shutil.copytree(DEMOS.parent / "checkpoints" / "digits", tmp_path / "run")
    (tmp_path / "run" / name).unlink()
    os.mkfifo(tmp_path / "run" / name)
    done = demo("cp_demo.py", "--evaluate", "run", cwd=tmp_path)
    refused(done, f"run/{name} is no regular file, but a pipe or a device")
