"""Training by --parallel ddp and fsdp: the same numbers, and the same state of a run for any number of processes.

Processes that run this file as a script take the training steps of cases, and the main one writes their outcomes.
Besides options of a run, a case may have an engine, a dtype, a first step with the path of a state to begin with, and
the first scale of fp16; `record` counts how often the last step reduces sharded gradients.
"""

import contextlib
import json
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import await_file, fork_processes
from helpers import assert_close
from samples import DEMOS, TINY, global_batch, same_content, same_run, tiny_trainer, write_cifar10
from training.data.images import Images
from training.distributed import DistributedContext, init_distributed

STEPS, EVALUATED = 3, 9
REDUCTION = "c10d::_reduce_scatter_base_"
SINGLE = DistributedContext(0, 1, torch.device("cpu"))
FIRST_TIER = [
    {"sync_bn": True, "record": True},
    {"sync_bn": True, "engine": "plain"},
    {"sync_bn": True, "engine": "official"},
    {"sync_bn": True, "engine": "checkpoint"},
    {"micro_batch_size": 3, "channels_last": True, "record": True},
    {"keep_bottleneck": True},
    {"dtype": "float32", "amp": "bf16", "engine": "best"},
    {"dtype": "float32", "amp": "fp16", "scale": 2.0**17},
]
FURTHER = [
    {},
    {"engine": "plain"},
    {"engine": "official", "drop_rate": 0.3},
    {"dtype": "float32", "amp": "fp16", "engine": "plain"},
    {"dtype": "float32", "amp": "fp16", "scale": 2.0**40, "micro_batch_size": 3, "sync_bn": True},
]


def outcome(case: dict[str, Any], context: DistributedContext) -> dict:
    """The state, the sums of each step, the evaluation, and the number of reductions."""
    special = {"engine": "shared", "dtype": "float64", "first": 0, "path": None, "scale": None, "record": False}
    engine, dtype, first, path, scale, record = (case.get(name, default) for name, default in special.items())
    options = {name: value for name, value in case.items() if name not in special}
    trainer = tiny_trainer(engine, context, getattr(torch, dtype), **options)
    if scale is not None:
        trainer.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    if path is not None:
        trainer.load_state(torch.load(path, weights_only=True))
    images, labels = global_batch()
    local, sums = context.rank_slice(len(labels)), []
    for step in range(first, first + STEPS):
        recorded = record and step == first + STEPS - 1
        with torch.profiler.profile() if recorded else contextlib.nullcontext() as profiler:
            step_sums = trainer.step(images[local], labels[local], len(labels), 0.1, (0, 1, step))
        sums.append(context.all_reduce_sum(step_sums))
    evaluated = trainer.evaluate(Images(images[:EVALUATED], labels[:EVALUATED]))
    reductions = [event for event in profiler.events() if event.name == REDUCTION] if profiler else []
    return {"state": trainer.state(), "sums": sums, "evaluated": evaluated, "reductions": len(reductions)}


def _outcomes(processes: int, cases: list[dict], folder: Path) -> list[dict]:
    running = fork_processes(processes, Path(__file__), json.dumps(cases), f"{processes}.pt", cwd=folder)
    for process in running:
        assert process.wait() == 0, process.communicate()
    return torch.load(folder / f"{processes}.pt", weights_only=True)


def _by_ddp_and_fsdp(processes: int, cases: list[dict], folder: Path) -> list[tuple[dict, dict]]:
    outcomes = _outcomes(processes, [{**case, "parallel": p} for case in cases for p in ("ddp", "fsdp")], folder)
    return list(zip(outcomes[::2], outcomes[1::2], strict=True))


def _assert_states_close(actual, expected, tolerance: float = 1e-10) -> None:
    """As `same_content`, but for rounding."""
    if isinstance(actual, dict) and isinstance(expected, dict):
        assert list(actual) == list(expected)
        for name in actual:
            _assert_states_close(actual[name], expected[name], tolerance)
    elif isinstance(actual, torch.Tensor):
        assert_close(actual, expected, tolerance)
    else:
        assert actual == expected


@pytest.fixture(scope="module")
def first_tier(tmp_path_factory) -> list[tuple[dict, dict]]:
    """Of ddp and fsdp, in two processes."""
    return _by_ddp_and_fsdp(2, FIRST_TIER, tmp_path_factory.mktemp("first"))


@pytest.mark.parametrize("i", range(len(FIRST_TIER)), ids=str)
def test_fsdp_in_two_processes_is_ddp_bit_for_bit(i, first_tier):
    ddp, fsdp = first_tier[i]
    for name in ("state", "sums", "evaluated"):
        same_content(fsdp[name], ddp[name])


def test_two_processes_equal_one(first_tier):
    """With synchronized norms, over three steps and an evaluation."""
    expected = outcome({}, SINGLE)
    for each in (each for outcomes in first_tier[:4] for each in outcomes):
        _assert_states_close(each["state"], expected["state"])
        for name in ("sums", "evaluated"):
            assert_close(torch.tensor(each[name]), torch.tensor(expected[name]), 1e-10)


def test_fsdp_reduces_gradients_once_for_an_update_of_micro_batches(first_tier):
    """Once for each group of parameters: two stages and what is left."""
    assert [first_tier[case][1]["reductions"] for case in (0, 4)] == [3, 3]


def test_fp16_leaves_out_steps_whose_gradients_overflow(first_tier):
    _, fsdp = first_tier[-1]
    assert fsdp["state"]["scaler"]["scale"] < 2.0**17
    assert fsdp["state"]["optimizer"]["state"]  # of a step that was taken


def test_another_number_of_processes_goes_on_from_the_state_of_two(first_tier, tmp_path):
    """As one process does that took all steps."""
    halves = [tmp_path / "expected.pt", tmp_path / "sharded.pt"]
    torch.save(outcome({}, SINGLE)["state"], halves[0])
    torch.save(first_tier[0][1]["state"], halves[1])
    expected, single = (outcome({"first": 3, "path": str(path)}, SINGLE)["state"] for path in halves)
    _assert_states_close(single, expected)
    goes_on = {"sync_bn": True, "first": 3}
    cases = [{**goes_on, "parallel": "fsdp", "path": str(halves[0])}, {**goes_on, "path": str(halves[1])}]
    for each in _outcomes(3, cases, tmp_path):
        _assert_states_close(each["state"], expected)


@pytest.mark.exhaustive
def test_a_run_by_fsdp_that_was_stopped_is_resumed_by_ddp_to_the_same_files(tmp_path):
    words = f"{' '.join(TINY)} --data {write_cifar10(tmp_path / 'cifar')} --batch_size 45 --n_epochs 15".split()
    words += ["--device", "cpu", "--save"]
    for status, *others in (0, "whole"), (143, "parted", "--parallel", "fsdp"), (0, "parted", "--resume"):
        processes = fork_processes(2, DEMOS / "cp_demo.py", *words, *others, cwd=tmp_path)
        if status:
            await_file(tmp_path / "parted" / "results.csv", processes[0])
        for process in processes if status else ():
            process.send_signal(signal.SIGTERM)
        for process in processes:
            assert process.wait() == status, process.communicate()
    same_run(tmp_path / "parted", tmp_path / "whole")


@pytest.mark.exhaustive
@pytest.mark.parametrize("processes", [2, 3])
def test_fsdp_is_ddp_with_every_option(processes, tmp_path):
    """In three processes sums are of another order, and of their few images plain modules hold less: "best" runs these
    by DDP alone, since sharded blocks are called."""
    cases = FIRST_TIER + FURTHER
    if processes == 3:
        cases = [{**case, "engine": "shared"} if case.get("engine") == "best" else case for case in cases]
    for ddp, fsdp in _by_ddp_and_fsdp(processes, cases, tmp_path):
        if processes == 2:
            same_content(fsdp["state"], ddp["state"])
        else:
            tolerance = 1e-10 if ddp["state"]["model"]["classifier.weight"].dtype == torch.double else 1e-5
            _assert_states_close(fsdp["state"], ddp["state"], tolerance)


@pytest.mark.exhaustive
def test_a_compiled_sharded_model_equals_an_eager_one(tmp_path):
    compiled, eager = _outcomes(2, [{"parallel": "fsdp", "compile": True}, {"parallel": "fsdp"}], tmp_path)
    _assert_states_close(compiled["state"], eager["state"])


if __name__ == "__main__":
    cases, path = json.loads(sys.argv[1]), sys.argv[2]
    warnings.simplefilter("ignore", UserWarning)
    with init_distributed("cpu") as context:
        outcomes = [outcome(case, context) for case in cases]
        if context.is_main_process:
            torch.save(outcomes, path)
