"""Lightning, accelerate and transformers' Trainer train our models and converted ones, and resume from checkpoints."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import trainer_steps
from forks import outcomes_of_processes
from helpers import assert_close, assert_same_buffers, assert_same_gradients, convert_and_report

pytestmark = pytest.mark.exhaustive  # the libraries take seconds to import
CASES = {
    1: [
        "lightning | ours | steps",
        "lightning | converted last | accumulated and clipped",
        "accelerate | ours | steps",
        "accelerate | converted last | accumulated and clipped",
        "transformers | converted last | steps",
        "transformers | converted | accumulated",
    ],
    2: [
        "lightning | ours | steps",
        "lightning | converted last | accumulated and clipped",
        "lightning | ours | synchronized",
        "lightning | converted | synchronized",
        "lightning | ours | fully_shard",
        "lightning | converted last | fully_shard",
        "accelerate | ours | steps",
        "accelerate | converted | accumulated and clipped",
        "accelerate | converted last | steps",
        "transformers | ours | steps",
        "transformers | converted last | accumulated",
    ],
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Callable[[int, str], list[dict]]:
    """A function that returns the outcomes of all cases of a trainer with a number of processes, of each process."""

    @functools.cache
    def run(processes: int, trainer: str) -> list[dict]:
        cases, script = [case for case in CASES[processes] if case.startswith(trainer)], Path(trainer_steps.__file__)
        return outcomes_of_processes(cases, processes, script, tmp_path_factory.mktemp(trainer))

    return run


@pytest.mark.parametrize(("processes", "case"), [(processes, case) for processes in CASES for case in CASES[processes]])
def test_models_train_as_plain_ones_and_resume(processes, case, outcomes):
    trainer = case.partition(" ")[0]
    pytest.importorskip(trainer)
    steps = trainer_steps.EPOCHS * trainer_steps.IMAGES // trainer_steps.BATCH // processes
    for of_rank in outcomes(processes, trainer):
        outcome = of_rank[case]
        assert outcome["engines"] == ["shared", "shared"]  # of the first run, and of the resumed one
        assert outcome["steps of norms"] == [steps]
        assert outcome["difference of the resumed"] == 0
        assert outcome["difference"] <= 1e-10


def test_a_backbone_of_transformers():
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("timm")
    config = transformers.TimmBackboneConfig(backbone="densenet121", use_pretrained_backbone=False, out_indices=[1, 4])
    ours, plain = (transformers.TimmBackbone(config).double().train() for _ in range(2))
    plain.load_state_dict(ours.state_dict())
    report = convert_and_report(ours)
    assert [change.engine for change in report.changed] == ["shared"] * 4
    x = torch.randn(2, 3, 64, 64, dtype=torch.double)
    maps = [model(x).feature_maps for model in (ours, plain)]
    for actual, expected in zip(*maps, strict=True):
        assert_close(actual.detach(), expected.detach())
    for each in maps:
        sum(features.square().mean() for features in each).backward()
    assert_same_gradients(ours, plain, 1e-9)
    assert_same_buffers(ours, plain, 1e-9)
