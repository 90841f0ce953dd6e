"""Synchronized norms, torch's and ours, by every engine: the numbers of plain on the joined batch of all processes."""

import functools
from pathlib import Path

import pytest
import synchronized_steps
import torch
import torch.distributed as dist
from forks import outcomes_of_processes

from efficient_densenet import create_model
from efficient_densenet.norms.sync_batch_norm import synchronize_norms

CASES = [
    *(f"ours | ours | 2 3 | {engine}" for engine in ("plain", "official", "checkpoint", "shared")),
    *(f"ours | ours | 0 3 | {engine}" for engine in ("plain", "official", "checkpoint", "shared")),  # an empty batch
    "ours | torch's | 2 3 | shared",
    "ours without Numba | torch's | 1 2 | shared",  # so few pixels that PyTorch's batch norm would compute gradients
    "ours | torch's | 1 1 | best",
    "ours with a stem | torch's | 1 2 | shared",
    "ours with a stem | ours | 0 3 | best",
    "torchvision | torch's | 2 3 | shared",
    "torchvision | torch's | 0 2 | best",
    "torchvision | torch's after conversion | 2 3 | best",
    "torchvision | torch's after conversion | 3 1 | shared",
]


_outcomes = functools.partial(outcomes_of_processes, script=Path(synchronized_steps.__file__))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> list[dict[str, str]]:
    return _outcomes(CASES, 2, folder=tmp_path_factory.mktemp("synchronized"))


@pytest.mark.parametrize("case", CASES)
def test_synchronized_norms_train_as_plain_on_the_joined_batch(case, outcomes):
    engine = case.split(" | ")[-1].replace("best", "shared")
    for of_rank in outcomes:
        assert of_rank[case].startswith(f"equal, by {engine}, ")


def test_the_shared_engine_communicates_no_more_often_than_plain_and_fewer_bytes(outcomes):
    """A channel's statistics are reduced once, when it is written, and not once for each norm that reads it."""
    counts = {}
    for engine in ("plain", "checkpoint", "shared"):
        words = outcomes[0][f"ours | ours | 2 3 | {engine}"].replace(",", "").split()
        counts[engine] = int(words[-4]), int(words[-2])
    norms = 2 * 5 + 2  # of each layer two, of the transition and of the output
    assert counts["plain"][0] == counts["shared"][0] == 2 * norms  # in the forward and in the backward
    assert counts["checkpoint"][0] == 2 * norms + 5  # the first norms of the layers are recomputed
    assert counts["shared"][1] < 0.75 * counts["plain"][1]


@pytest.mark.exhaustive
def test_densenet121_communicates_a_quarter_of_plain_s_bytes():
    counts = {"plain": [0, 0], "shared": [0, 0]}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for engine, count in counts.items():
            model = create_model("densenet121", efficient=engine)
            synchronize_norms(model, None)
            with synchronized_steps.counted_collectives(count):
                model(torch.randn(2, 3, 64, 64)).sum().backward()
    finally:
        dist.destroy_process_group()
    assert counts == {"plain": [242, 669_668], "shared": [242, 165_348]}  # as in docs/how-it-works.md


@pytest.mark.exhaustive
def test_three_processes_with_batches_of_all_sizes(tmp_path):
    cases = [
        f"{model} | {norms} | {images} | shared"
        for model, norms in (
            ("ours", "ours"),
            ("ours with a stem", "torch's"),
            ("torchvision", "torch's"),
            ("torchvision", "torch's after conversion"),
        )
        for images in ("1 1 1", "0 0 2", "2 0 1", "3 2 4")
    ]
    for of_rank in _outcomes(cases, 3, folder=tmp_path):
        assert [f"{case}: {outcome}" for case, outcome in of_rank.items() if "equal, by shared" not in outcome] == []
