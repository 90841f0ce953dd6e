"""What --resume goes on with where there is no state of a run, and that it begins no other."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from forks import forked_demo
from samples import RUN, demo, read_rows, refused, same_run
from training.models import read_config
from training.run_state import read_to_resume

WORDS = (*RUN, "--n_epochs", "1", "--seed", "7", "--drop_rate", "0.1")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert forked_demo("cp_demo.py", *WORDS, cwd=folder).returncode == 0
    return folder / "run"


def test_a_mistyped_name_is_answered_by_the_runs_nearby(whole, tmp_path):
    for name in ("runs/model", "runs/other", "runs/third", "runs/fourth", "elsewhere"):
        shutil.copytree(whole, tmp_path / name)
    before = sorted(tmp_path.rglob("*"))
    for save, named in (("runs/modle", "runs/model, "), ("rnus/model", "runs/model, "), ("runs", "runs/")):
        done = demo("cp_demo.py", "--save", save, "--resume", cwd=tmp_path)
        refused(done, f"found --resume, but {save} contains no run to resume: nearby are {named}")
        assert ", …; name the run with --save, or leave --resume out to begin one (--resume auto" in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_where_there_are_no_runs_resuming_begins_none(tmp_path):
    done = demo("cp_demo.py", *WORDS, "--resume", cwd=tmp_path)
    refused(done, "found --resume, but run contains no run to resume: no run is nearby; name the run with --save")
    (tmp_path / "run").mkdir()
    refused(demo("cp_demo.py", *WORDS, "--resume", cwd=tmp_path), "found --resume, but run contains no run to resume")
    assert list(tmp_path.rglob("*")) == [tmp_path / "run"]


def test_resume_auto_begins_where_there_is_no_run_and_goes_on_where_there_is_one(whole, tmp_path):
    done = demo("cp_demo.py", *WORDS, "--resume", "auto", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "nothing to resume in run: starting" in done.stdout
    assert "resuming" not in done.stdout
    assert len(read_rows(tmp_path / "run")) == 1
    done = demo("cp_demo.py", *WORDS, "--resume", "auto", cwd=tmp_path)
    assert "resuming run after the last epoch" in done.stdout, done.stderr
    same_run(tmp_path / "run", whole)


@pytest.mark.parametrize("resume", [["--resume"], pytest.param(["--resume", "auto"], marks=pytest.mark.exhaustive)])
def test_a_run_that_has_a_config_only_begins_with_the_options_in_it(resume, whole, tmp_path):
    (tmp_path / "run").mkdir()
    shutil.copy(whole / "config.json", tmp_path / "run")
    assert read_to_resume(tmp_path / "run", "auto") == read_to_resume(tmp_path / "run", True) == read_config(whole)
    done = demo("cp_demo.py", "--save", "run", *resume, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "resuming run in epoch 1" in done.stdout
    same_run(tmp_path / "run", whole)
    options, expected = (
        json.loads((folder / "config.json").read_text())["options"] for folder in (tmp_path / "run", whole)
    )
    assert {name for name in options if options[name] != expected[name]} <= {"resume"}


def test_a_config_is_no_run_of_other_options(whole, tmp_path):
    (tmp_path / "run").mkdir()
    shutil.copy(whole / "config.json", tmp_path / "run")
    done = demo("cp_demo.py", "--save", "run", "--resume", "--seed", "8", cwd=tmp_path)
    refused(done, "seed is 8, but the run was started with 7: leave it out to resume, or start over with --overwrite")
    refused(demo("cp_demo.py", "--save", "run", cwd=tmp_path), "run contains a run: give --resume")
    content = json.loads((whole / "config.json").read_text())
    (tmp_path / "run" / "config.json").write_text(json.dumps(content | {"options": 3}))
    done = demo("cp_demo.py", "--save", "run", "--resume", cwd=tmp_path)
    refused(done, "run/config.json: options is 3, but must be a dict")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.json"]


@pytest.mark.exhaustive
def test_a_full_disk_before_the_first_state_costs_no_option(whole, tmp_path):
    """config.json is written, and last.pt is not; there is room again afterwards."""
    done = forked_demo("cp_demo.py", *WORDS, cwd=tmp_path, max_file_bytes=4000)
    refused(done, "run/last.pt could not be written (File too large)")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["config.json", "run.lock", "run_log.txt"]
    done = demo("cp_demo.py", "--save", "run", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    same_run(tmp_path / "run", whole)
    assert torch.load(tmp_path / "run" / "last.pt", weights_only=True)["options"]["seed"] == 7
