"""What may be typed after the name of a demo, help, and what is refused."""

import re
from dataclasses import fields

import pytest
import torch
import training
from samples import RUN, demo, read_rows, refused
from training.options import Options, parse


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
        ("", {}),
        ("cifar model --depth 40", {"data": "cifar", "save": "model", "depth": 40}),
        ("--efficient True --data cifar --batch_size 256", {"data": "cifar", "efficient": True, "batch_size": 256}),
        ("--noefficient --n_epochs=3", {"efficient": False, "n_epochs": 3}),
        ("--epochs 3 --learning_rate=0.5 --out run", {"n_epochs": 3, "lr": 0.5, "save": "run"}),
        ("--resume auto", {"resume": "auto"}),
        ("--resume --data cifar", {"resume": True, "data": "cifar"}),
        ("--batch-size 3 --lr 1e-3", {"batch_size": 3, "lr": 1e-3}),
        ("--seed None --data None", {"seed": None}),
        ("--evaluate", {"evaluate": True}),
        ("--evaluate checkpoints/digits", {"evaluate": "checkpoints/digits"}),
        ("--save run#2 --data a,b --model 2024_01_15", {"save": "run#2", "data": "a,b", "model": "2024_01_15"}),
    ],
)
def test_what_is_typed_stands_for_options(words, given, typed):
    assert typed(words) == given


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--data --save x", "data is True, but must be a path or a name, or None"),
        ("--depth 23", "depth is 23, but must be 6n + 4, such as 22, 40 or 100, or None"),
        ("--efficient fast", "efficient is 'fast', but must be one of True, False, or one of 'best', 'plain', 'offici"),
        ("--batch_size 0", "batch_size is 0, but must be a whole number of at least 1"),
        ("--lr 1" + "0" * 5000, "lr is "),
        ("--n_epochs None --lr None", "lr is None, but must be a number in (0, "),
        ("--seed 99999999999999999999", "seed is 99999999999999999999, but must be a whole number of at least 0 and"),
        ("--dataset mnist", "found --dataset mnist without --data: give the directory"),
        ("--device meta", "device is 'meta', but cannot be used here"),
        ("--model densenet12", "unknown model 'densenet12': did you mean 'densenet121'?"),
        ("--model fc_densenet56", "model is 'fc_densenet56', but must be the name of a model of the zoo that labels"),
        ("--model densenet121 --depth 40", "found --model with --depth or --growth_rate"),
        ("--resume --overwrite", "found --resume and --overwrite"),
        ("--accept_changed_data", "found --accept_changed_data without --resume"),
        ("--evaluate nowhere", "nowhere does not exist"),
        ("--valid_size 2000", "valid_size is 2000, but must leave some of the 1438 images to train on"),
        ("--stream", "found --stream, but only an image folder is streamed, and not UCI handwritten digits"),
        ("--image_size 64", "found --image_size 64, but the images of UCI handwritten digits have 32×32"),
        ("--cuda_graph --device cpu", "found --cuda_graph, but the device is cpu, and CUDA graphs need a GPU: leave -"),
        ("--batchsize 3", "unknown option '--batchsize': did you mean --batch_size"),
        ("--learning-rat=1e-3", "unknown option '--learning-rat=1e-3': did you mean --learning_rate"),
        ("--zzz", "unknown option '--zzz': see --help"),
        ("--sync_bn", "found --sync_bn, but this is the only process: start several with torchrun"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence_and_nothing_is_written(words, message, tmp_path):
    done = demo("cp_demo.py", *words.split(), cwd=tmp_path)
    refused(done, f"error: {message}")
    assert len(done.stderr) < 1000
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("script", "contents"),
    [
        ("cp_demo.py", ["python demos/cp_demo.py", *(f"--{field.name}=" for field in fields(Options))]),
        ("original_demo.py", ["python demos/original_demo.py"]),
    ],
)
def test_every_demo_has_a_help_that_explains_every_option(script, contents, tmp_path):
    done = demo(script, *["--depth", "22"] * (script == "cp_demo.py"), "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert [each for each in contents if each not in done.stderr] == []
    assert list(tmp_path.iterdir()) == []
    for option in contents[1:] if script == "cp_demo.py" else []:
        assert re.search(rf"{option}.*\n(?: +(?:Type|Default): .*\n)+ +\w.*\.\n", done.stderr + "\n"), option


def test_the_defaults_of_digits_and_of_other_data():
    digits, cifar, zoo = (
        parse(given, "best") for given in ({}, {"data": "cifar"}, {"data": "x", "model": "densenet121"})
    )
    assert (digits.depth, digits.n_epochs, digits.recipe, digits.engine) == (22, 20, "one_cycle", "best")
    assert (cifar.depth, cifar.growth_rate, cifar.n_epochs, cifar.recipe) == (100, 12, 300, "step")
    assert (zoo.depth, zoo.growth_rate) == (None, None)
    assert parse({"data": "digits", "amp": "float32"}, "best") == digits
    for efficient, engine in ((True, "official"), (False, "plain"), ("checkpoint", "checkpoint")):
        assert parse({"efficient": efficient}, "official").engine == engine


@pytest.mark.exhaustive
def test_training_on_all_images_keeps_the_last_epoch(tmp_path):
    done = demo("cp_demo.py", *RUN, "--n_epochs", "2", "--valid_size", "0", cwd=tmp_path)
    assert "1,438 to train, 0 to validate" in done.stdout, done.stderr
    assert "model.pt (the last epoch)" in done.stdout
    assert [(row["valid_loss"], row["valid_error"]) for row in read_rows(tmp_path / "run")] == [("", "")] * 2
    model, last = (torch.load(tmp_path / "run" / name, weights_only=True) for name in ("model.pt", "last.pt"))
    assert all(torch.equal(tensor, last["state"]["model"][name]) for name, tensor in model.items())
