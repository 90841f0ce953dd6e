"""Several processes and several devices: the same numbers as one, results written once, failures and restarts.

Processes that run this file as a script take the training steps of cases, and the main one writes their outcomes.
Besides options of a run, a case may have an engine, a dtype, a first step with the path of a state to begin with, and
the first scale of fp16; `record` counts how often the last step reduces gradients.
"""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from forks import await_file, fork_processes, torchrun
from helpers import assert_close
from samples import DEMOS, TINY, global_batch, same_run, tiny_trainer, write_cifar10, write_folder
from torch import nn
from training.data.images import Images
from training.distributed import DistributedContext, init_distributed

SINGLE = DistributedContext(0, 1, torch.device("cpu"))
STEPS, EVALUATED = 3, 9
CP_DEMO = DEMOS / "cp_demo.py"
CASES = [
    *({"sync_bn": True, "engine": engine} for engine in ("shared", "plain", "official", "checkpoint")),
    {"record": True},
    {"record": True, "micro_batch_size": 3, "channels_last": True},
    {"dtype": "float32", "amp": "fp16", "scale": 2.0**17},
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
        sums.append([*map(float, context.all_reduce_sum(step_sums))])
    evaluated = trainer.evaluate(Images(images[:EVALUATED], labels[:EVALUATED]))
    reductions = [event for event in profiler.events() if event.name == "c10d::allreduce_"] if profiler else []
    return {"state": trainer.state(), "sums": sums, "evaluated": evaluated, "reductions": len(reductions)}


def _outcomes(processes: int, cases: list[dict], folder: Path) -> list[dict]:
    running = fork_processes(processes, Path(__file__), json.dumps(cases), f"{processes}.pt", cwd=folder)
    for process in running:
        assert process.wait() == 0, process.communicate()
    return torch.load(folder / f"{processes}.pt", weights_only=True)


close = partial(torch.testing.assert_close, rtol=1e-10, atol=1e-10)


@pytest.fixture(scope="module")
def of_two(tmp_path_factory) -> list[dict]:
    """The outcomes of two processes."""
    return _outcomes(2, CASES, tmp_path_factory.mktemp("two"))


def test_two_processes_equal_one(of_two):
    """With synchronized norms, over three steps and an evaluation."""
    for each in of_two[:4]:
        close(each, outcome({}, SINGLE))


def test_gradients_are_reduced_once_for_an_update_of_micro_batches(of_two):
    assert of_two[4]["reductions"] == of_two[5]["reductions"] > 0


def test_fp16_leaves_out_steps_whose_gradients_overflow(of_two):
    state = of_two[6]["state"]
    assert state["scaler"]["scale"] < 2.0**17
    assert state["optimizer"]["state"]  # of a step that was taken


def test_another_number_of_processes_goes_on_from_the_state_of_two(of_two, tmp_path):
    """As one process does that took all steps."""
    torch.save(outcome({}, SINGLE)["state"], tmp_path / "one")
    torch.save(of_two[0]["state"], tmp_path / "two")
    expected = outcome({"first": 3, "path": str(tmp_path / "one")}, SINGLE)
    case = {"first": 3, "path": str(tmp_path / "two")}
    for each in (outcome(case, SINGLE), *_outcomes(3, [{**case, "sync_bn": True}], tmp_path)):
        close(each, expected)


@pytest.mark.exhaustive
def test_a_run_that_was_stopped_is_resumed_to_the_same_files(tmp_path):
    words = f"{' '.join(TINY)} --data {write_cifar10(tmp_path / 'cifar')} --batch_size 45 --n_epochs 15".split()
    words += ["--device", "cpu", "--save"]
    for status, *others in (0, "whole"), (143, "parted"), (0, "parted", "--resume"):
        processes = fork_processes(2, CP_DEMO, *words, *others, cwd=tmp_path)
        if status:
            await_file(tmp_path / "parted" / "results.csv", processes[0])
        for process in processes if status else ():
            process.send_signal(signal.SIGTERM)
        for process in processes:
            assert process.wait() == status, process.communicate()
    same_run(tmp_path / "parted", tmp_path / "whole")


@pytest.mark.exhaustive
def test_more_processes_than_images_are_refused(tmp_path):
    words = (*TINY, "--batch_size", "1", "--save", "run", "--device", "cpu")
    for process in fork_processes(2, CP_DEMO, *words, cwd=tmp_path):
        assert process.wait() == 1
        assert "found a batch of 1 images for 2 processes, but each needs at least one" in process.communicate()[1]
    assert list(tmp_path.iterdir()) == []


# Several devices of one process


def _replica(module: nn.Module, number: int) -> nn.Module:
    """A replica as `nn.DataParallel` makes it: its parameters are results of a broadcast, its buffers copies.

    The first replica's buffers are the module's own, so that its running statistics are updated.
    """
    replica = module._replicate_for_data_parallel()
    replica._modules = {name: _replica(child, number) for name, child in module._modules.items()}
    replica._former_parameters = {name: p.view_as(p) for name, p in module._parameters.items() if p is not None}
    for name in module._parameters:
        replica._parameters[name] = None
    for name, parameter in replica._former_parameters.items():
        del replica._parameters[name]
        setattr(replica, name, parameter)
    if number > 0:
        replica._buffers = {name: buffer.clone() for name, buffer in module._buffers.items()}
    return replica


class ThreadedReplicas(nn.Module):
    """`nn.DataParallel` without GPUs: a replica in a thread for each part of the batch, outputs concatenated."""

    def __init__(self, module: nn.Module, number: int) -> None:
        super().__init__()
        self.module, self.number = module, number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        replicas = [_replica(self.module, i) for i in range(self.number)]
        outputs: list = [None] * self.number
        parts = x.tensor_split(self.number)

        def work(i: int) -> None:
            outputs[i] = replicas[i](parts[i])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(self.number)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return torch.cat(outputs)


@pytest.mark.parametrize("engine", ["checkpoint", "shared"])
def test_replicas_in_threads_equal_the_parts_in_sequence(engine):
    """The parts of the batch in sequence are two micro-batches, which have batch statistics of their own as well."""
    images, labels = global_batch()
    ours, theirs = tiny_trainer(engine, SINGLE), tiny_trainer("plain", SINGLE, micro_batch_size=6)
    ours.wrapped_model = ThreadedReplicas(ours.model, 2)
    sums = [trainer.step(images, labels, len(labels), 0.1, (0, 1, 0)) for trainer in (ours, theirs)]
    assert_close(torch.tensor(sums[0]), torch.tensor(sums[1]), 1e-10)
    for actual, expected in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert_close(actual.grad, expected.grad, 1e-10)


def test_several_gpus_are_used_by_data_parallel(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(nn, "DataParallel", lambda model: ("DataParallel", model))
    context = DistributedContext(0, 1, torch.device("cuda"))
    assert context.wrap_model("model", sync_bn=False) == ("DataParallel", "model")
    assert context.describe() == "2 GPUs"
    assert DistributedContext(0, 1, torch.device("cuda:1")).wrap_model("model", sync_bn=False) == "model"


# Processes that die or stop: the others end with a cause, and torchrun restarts all to the same numbers

LOST = "error: process 0 of 2: lost another process, which ended, was stopped or lost its network ("
WORDS = (*TINY, "--save", "run", "--batch_size", "128", "--device", "cpu", "--n_epochs")


def test_a_killed_process_ends_the_others_at_once(tmp_path):
    first, second = fork_processes(2, CP_DEMO, *WORDS, "300", cwd=tmp_path)
    await_file(tmp_path / "run" / "results.csv", first)
    second.send_signal(signal.SIGKILL)
    second.wait()
    _, errors = first.communicate(timeout=100)
    assert first.returncode == 1
    assert LOST in errors


@pytest.mark.exhaustive
def test_nodes_need_not_share_the_directory_and_an_error_of_the_main_process_is_everyones(tmp_path):
    """Only the main process reads and writes it; each process is in a directory of its own."""
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for node in nodes:
        node.mkdir()
    for status, last in ((0, ()), (1, ()), (0, ("--resume",))):
        for process in fork_processes(2, CP_DEMO, *WORDS, "1", *last, cwd=nodes):
            assert process.wait() == status, process.communicate()
            assert status == 0 or "run contains a run: give --resume" in process.communicate()[1]
    assert [(node / "run" / "model.pt").exists() for node in nodes] == [True, False]


@pytest.mark.exhaustive
@pytest.mark.parametrize("killed_node", [0, 1])
def test_two_nodes_are_one_run_and_restart_together(killed_node, tmp_path):
    """Two agents on one machine, of which one loses its process. Sums depend on the number of threads, which torchrun
    gives its processes: it starts the run that nothing interrupts too."""
    data = str(write_folder(tmp_path / "images"))
    words = [*TINY, "--data", data, "--batch_size", "10", "--workers", "0", "--device", "cpu", "--n_epochs", "8"]
    process = torchrun("--standalone", "--nproc_per_node", "2", str(CP_DEMO), *words, "--save", "whole", cwd=tmp_path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    words += ["--save", "run", "--resume", "auto"]
    launch = ["--nnodes", "2", "--nproc_per_node", "1", "--max-restarts", "3"]
    launch += ["--rdzv_backend", "c10d", "--rdzv_endpoint", endpoint, "--rdzv_id", "run", "--local_addr", "127.0.0.1"]
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    agents = [torchrun(*launch, str(CP_DEMO), *words, cwd=tmp_path, **environment) for _ in range(2)]
    await_file(tmp_path / "run" / "results.csv", agents[0])
    pid = agents[killed_node].pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    os.kill(
        next(int(each) for each in children if b"cp_demo.py" in Path(f"/proc/{each}/cmdline").read_bytes()),
        signal.SIGKILL,
    )
    for agent in agents:
        _, errors = agent.communicate(timeout=150)
        assert agent.returncode == 0, errors
    assert "resumed in epoch" in (tmp_path / "run" / "run_log.txt").read_text()
    same_run(tmp_path / "run", tmp_path / "whole")


if __name__ == "__main__":
    cases, path = json.loads(sys.argv[1]), sys.argv[2]
    warnings.simplefilter("ignore", UserWarning)
    with init_distributed("cpu") as context:
        outcomes = [outcome(case, context) for case in cases]
        if context.is_main_process:
            torch.save(outcomes, path)
