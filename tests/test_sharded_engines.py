"""Every engine under `fully_shard` and FSDP1, whatever is sharded: plain's numbers, or a refusal."""

import functools
import itertools
from pathlib import Path

import pytest
import sharded_steps
import torch
from forks import outcomes_of_processes
from sharded_steps import ENGINES, MODELS, SHARDINGS, UNITS
from torch import nn

QUICK = [
    "ours | fully_shard | convolution | checkpoint",
    "ours | fully_shard | norm | official",
    "ours | fully_shard | layer | best",
    "ours | fully_shard | convolution | shared",
    "ours | FSDP1 | norm | best",
    "ours | FSDP1 | layer | shared",
    "ours | FSDP1, flat | block | checkpoint",
    "ours | FSDP1, flat | stage | best",
    "ours | FSDP1, flat | convolution | best",
    "converted | fully_shard | block | shared",
    "converted | fully_shard | stage | best",
    "converted | fully_shard | norm | checkpoint",
    "converted | fully_shard | layer | shared",
    "converted last | fully_shard, not resharded | layer | best",
    "converted | FSDP1 | convolution | shared",
    "converted | FSDP1, flat | root | checkpoint",
    "converted | FSDP1, flat | norm | best",
    "converted last | fully_shard | block | shared",
    "converted last | FSDP1 | block | best",
]
ALL = [" | ".join(case) for case in itertools.product(MODELS, SHARDINGS, UNITS, ENGINES)]


_outcomes = functools.partial(outcomes_of_processes, script=Path(sharded_steps.__file__))


def _is_right(case: str, outcome: str) -> bool:
    model, sharding, unit, engine = case.split(" | ")
    runs_shared = unit in ("root", "stage", "block") or (unit == "layer" and sharding.startswith("fully_shard"))
    if model != "ours" and (engine == "plain" or (model == "converted last" and sharding.startswith("FSDP1"))):
        return outcome == "equal, by the author's forward"  # a model that FSDP1 has sharded is not converted
    replaced = model == "converted" and sharding.startswith("FSDP1") and not runs_shared  # as if not verified
    if (engine == "shared" and not runs_shared) or (replaced and engine not in ("plain", "best")):
        sharder = "FullyShardedDataParallel" if sharding.startswith("FSDP1") else "fully_shard"
        refusal = (
            f"forward 0: RuntimeError: engine {engine!r} cannot run here: found parameters that {sharder} shards on"
        )
        return outcome.startswith(refusal) and "shard blocks, stages or the whole model instead" in outcome
    runs = engine if engine != "best" else "shared" if runs_shared else "plain" if replaced else "checkpoint"
    return outcome == f"equal, by {runs}"


@pytest.fixture(scope="module")
def quick(tmp_path_factory) -> list[dict[str, str]]:
    return _outcomes(QUICK, 2, folder=tmp_path_factory.mktemp("sharded"))


@pytest.mark.parametrize("case", QUICK)
def test_a_sharded_model_trains_as_plain_or_is_refused(case, quick):
    for outcomes in quick:
        assert _is_right(case, outcomes[case]), outcomes[case]


def test_a_module_in_the_place_of_another_is_named():
    model = sharded_steps.MODELS["converted"]("shared")
    model.features.denseblock1.denselayer2.relu1 = nn.ELU()
    with pytest.raises(RuntimeError, match="found that a ReLU has become a ELU since it was verified: call"):
        model.train()(torch.randn(2, 3, 32, 32))


@pytest.mark.exhaustive
@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("model", MODELS)
def test_every_sharded_model_trains_as_plain_or_is_refused(model, processes, tmp_path):
    cases = [case for case in ALL if case.startswith(f"{model} | ")]
    for outcomes in _outcomes(cases, processes, folder=tmp_path):
        assert [f"{case}: {outcome}" for case, outcome in outcomes.items() if not _is_right(case, outcome)] == []
