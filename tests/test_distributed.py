"""Several processes and several devices: the same numbers as one, results written once, failures reported."""

import signal
import threading

import pytest
import torch
from forks import await_file, fork_processes
from helpers import assert_close
from samples import DEMOS, TINY, demo, global_batch, tiny_trainer
from torch import nn
from training.distributed import DistributedContext

SINGLE = DistributedContext(0, 1, torch.device("cpu"))


@pytest.mark.exhaustive
def test_the_main_process_alone_locks_the_directory(tmp_path):
    words = [*TINY, "--save", "run", "--n_epochs", "300", "--batch_size", "128", "--device", "cpu"]
    processes = fork_processes(2, DEMOS / "cp_demo.py", *words, cwd=tmp_path)
    await_file(tmp_path / "run" / "last.pt", processes[0])
    await_file(tmp_path / "run" / "run_log.txt", processes[0])
    seconds = fork_processes(2, DEMOS / "cp_demo.py", *words, "--resume", cwd=tmp_path)
    errors = [(process.wait(), process.communicate()[1]) for process in seconds]
    assert [status for status, _ in errors] == [1, 1]
    assert "error: process 0 of 2: run is in use" in errors[0][1]
    assert "error: process 1 of 2: run is in use" in errors[1][1]
    assert [process.poll() for process in processes] == [None, None]
    processes[0].send_signal(signal.SIGKILL)
    processes[1].send_signal(signal.SIGSTOP)  # which would hold the lock if it had it
    processes[0].wait()
    done = demo("cp_demo.py", "--save", "run", "--resume", "--lr", "9", cwd=tmp_path)
    assert "lr is 9, but the run was started with 0.1" in done.stderr  # that is, after the lock
    processes[1].send_signal(signal.SIGKILL)
    processes[1].wait()


def test_more_processes_than_images_are_refused(tmp_path):
    words = (*TINY, "--batch_size", "1", "--save", "run", "--device", "cpu")
    for process in fork_processes(2, DEMOS / "cp_demo.py", *words, cwd=tmp_path):
        assert process.wait() == 1
        assert "found a batch of 1 images for 2 processes, but each needs at least one" in process.communicate()[1]
    assert list(tmp_path.iterdir()) == []


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
