"""DistributedDataParallel with its options: plain's numbers by the shared engine, reduced during the backward."""

import functools
from pathlib import Path

import ddp_steps
import pytest
import torch
from ddp_steps import SIDES, WAYS
from forks import outcomes_of_processes
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from efficient_densenet import DenseNet
from efficient_densenet.engine.stage import groups
from efficient_densenet.engine.stage.backward import Backward

ALL = [f"{model} | {way}" for model in SIDES for way in WAYS]
QUICK = [*(f"ours | {way}" for way in WAYS), "converted | usual", "converted | joined"]


_outcomes = functools.partial(outcomes_of_processes, script=Path(ddp_steps.__file__))


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> list[dict[str, str]]:
    return _outcomes(QUICK, 2, folder=tmp_path_factory.mktemp("ddp"))


@pytest.mark.parametrize("case", QUICK)
def test_steps_of_two_processes_equal_plain_s(case, outcomes):
    assert [of_rank[case] for of_rank in outcomes] == ["equal, by shared"] * 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("processes", [2, 3])
def test_steps_of_several_processes_equal_plain_s(processes, tmp_path):
    for of_rank in _outcomes(ALL, processes, folder=tmp_path):
        assert {case: outcome for case, outcome in of_rank.items() if outcome != "equal, by shared"} == {}


def _layers_before_buckets(engine: str, monkeypatch) -> list[int]:
    """For each bucket of a step's gradients, how many layers' backward had run when its reduction was launched."""
    model = DenseNet(4, (6, 6), num_init_features=6, efficient=engine)
    wrapped, launched, layers = DistributedDataParallel(model, bucket_cap_mb=0.01), [], []
    if engine == "shared":
        layer_backward = Backward._layer

        def recording(self, i, grad_output):
            layer_backward(self, i, grad_output)
            layers.append(i)

        monkeypatch.setattr(Backward, "_layer", recording)
    else:
        for name, parameter in model.named_parameters():
            if name.endswith("norm1.weight"):  # the first of a layer's parameters, the last to get its gradient
                parameter.register_post_accumulate_grad_hook(layers.append)

    def hook(state, bucket):
        launched.append(len(layers))
        return allreduce_hook(None, bucket)

    wrapped.register_comm_hook(None, hook)
    for _ in range(2):  # buckets are made anew after the first step, in the order of its gradients
        launched.clear()
        layers.clear()
        wrapped(torch.randn(2, 3, 8, 8)).sum().backward()
    assert len(layers) == 12
    return launched


def test_buckets_are_reduced_while_earlier_layers_run_their_backward(process_group_of_one, monkeypatch):
    """As early as plain's, but for the one layer whose gradients come together."""
    monkeypatch.setattr(groups, "LAYER_GROUP_BYTES", 0)
    shared, plain = (_layers_before_buckets(engine, monkeypatch) for engine in ("shared", "plain"))
    assert len(plain) > 4
    assert len(shared) == len(plain)
    for ours, theirs in zip(shared, plain, strict=True):
        assert ours <= theirs + 1
