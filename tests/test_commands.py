"""The commands of a wheel: efficient-densenet predict, memory and doctor; models for torch.hub and Hugging Face."""

import csv
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from helpers import small_model
from safetensors import torch as safetensors
from samples import DEMOS, DIGITS

from efficient_densenet import DenseNet, fc_densenet56, features, list_models
from efficient_densenet import __main__ as command

ROOT = DEMOS.parent


def run(monkeypatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["efficient-densenet", *words])
    command.main()


def test_predict_a_folder(tmp_path, monkeypatch, capsys):
    for name in ("digit_3.png", "digit_7.png"):
        (tmp_path / "some" / name[:7]).mkdir(parents=True)
        shutil.copy(DEMOS / "pictures" / name, tmp_path / "some" / name[:7] / name)
    (tmp_path / "some" / "a.png").write_text("not an image")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="error: 1 of the files could not be decoded"):
        run(monkeypatch, "predict", "some", "--model", str(DIGITS), "--top", "2", "--csv", "a.csv")
    printed = capsys.readouterr()
    assert "note: some/a.png is not an image that can be decoded" in printed.err
    with open("a.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["image"], row["rank"]) for row in rows] == [
        (f"some/{name}/{name}.png", rank) for name in ("digit_3", "digit_7") for rank in ("1", "2")
    ]
    assert [row["class"] for row in rows[::2]] == ["3", "7"]
    shown = (f"{row['class']} ({float(row['probability']):.1%})" for row in rows)
    assert printed.out == "".join(f"{rows[i]['image']}: {next(shown)}, {next(shown)}\n" for i in (0, 2))


@pytest.mark.parametrize(
    ("model", "error"),
    [
        ("nowhere", "nowhere does not exist: give a folder with model.pt and .* densenet121, .*, cifar10_jpeg"),
        ("model.pt", "config.json cannot be read .No such file or directory., which says what the classes of model.pt"),
    ],
)
def test_a_model_that_cannot_be_read(model, error, tmp_path, monkeypatch):
    shutil.copy(DIGITS / "model.pt", tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match=error):
        run(monkeypatch, "predict", str(DEMOS / "pictures"), "--model", model)


def test_every_command_has_help_and_others_are_refused(monkeypatch, capsys):
    for name in command.COMMANDS:
        with pytest.raises(SystemExit) as ended:
            run(monkeypatch, name, "--help")
        assert ended.value.code == 0
        assert f"usage: efficient-densenet {name}" in capsys.readouterr().out
    run(monkeypatch)
    assert "usage: efficient-densenet COMMAND" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="unknown command 'predit': give one of memory, doctor, predict"):
        run(monkeypatch, "predit")


MODELS = {
    "another classifier": lambda: small_model("imagenet", dims=1, in_channels=2, efficient="plain"),
    "a backbone": lambda: features(small_model("imagenet"), (1, 2), maps="raw"),
    "fc": lambda: fc_densenet56(num_classes=3, block_config=(1, 2, 1)),
}


@pytest.mark.parametrize("which", MODELS)
def test_models_saved_for_hugging_face_are_built_again(which, tmp_path, capsys):
    model = MODELS[which]().to(memory_format=torch.preserve_format).float()
    if which == "another classifier":
        model.reset_classifier(7)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    assert type(again) is type(model)
    assert (again.engine, again.training) == (model.engine, False)
    assert str(again) == str(model)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert type(model).from_pretrained(tmp_path, efficient="checkpoint").engine == "checkpoint"
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    tensors.popitem()
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"[Mm]issing key"):
        type(model).from_pretrained(tmp_path)


def _other_head() -> DenseNet:
    model = small_model("bc")
    model.classifier = torch.nn.Linear(model.num_features, 7)
    return model


def _other_activation() -> DenseNet:
    model = small_model("bc")
    model.features.denseblock1.denselayer1.relu1 = torch.nn.SiLU()
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: small_model("bc", activation=torch.nn.SiLU), "found a model whose activation cannot be written: save"),
        (_other_head, "found that classifier has changed since the model was built"),
        (_other_activation, "found that features.denseblock1.denselayer1.relu1 has changed since"),
    ],
)
def test_a_model_that_its_arguments_do_not_build_again_is_not_saved(make, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        make().save_pretrained(tmp_path / "model")
    assert not Path(tmp_path / "model").exists()


def test_torch_hub_builds_the_models_of_the_zoo():
    assert set(list_models()) <= set(runpy.run_path(str(ROOT / "hubconf.py")))
    model = torch.hub.load(str(ROOT), "densenet121", source="local", num_classes=3, block_config=(1, 1))
    assert model.num_classes == 3
