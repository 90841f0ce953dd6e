"""The shared engine under `fully_shard`: its options, its checkpoints and its memory."""

from collections.abc import Callable
from pathlib import Path

import communication
import fully_sharded_steps
import pytest
import torch
from forks import results_of_processes

from efficient_densenet import DenseNet
from efficient_densenet.memory import tensor_peak


def _results(case: str, processes: int, folder: Path) -> list:
    """What `case` returns in each process."""
    results = results_of_processes(processes, Path(fully_sharded_steps.__file__), case, case, cwd=folder)
    (folder / f"{case}.store").unlink()
    return results


def test_clipped_gradients_equal_plain_s(tmp_path):
    for result in _results("clipped", 2, tmp_path):
        assert result["engines"] == ["shared"]
        assert result["difference"] <= 1e-10


def test_mixed_precision_is_as_exact_as_plain_s(tmp_path):
    for result in _results("mixed", 2, tmp_path):
        assert result["shared"]["engines"] == ["shared"]
        assert result["shared"]["error"] <= 2 * result["plain"]["error"]


def test_a_checkpoint_of_two_processes_is_loaded_by_one_and_by_three(tmp_path):
    """Bit for bit, and into another engine."""
    _results("save", 2, tmp_path)
    for processes in (1, 3):
        for result in _results("load", processes, tmp_path):
            assert result == {"equal": True, "steps": [2]}


def _peak(wrap: Callable, engine: str) -> int:
    """The tensor peak of a process that builds a model and trains two steps: parameters, gradients and all else.

    Its collectives send nothing: a thread that sends may release its tensors late.
    """
    x = torch.randn(4, 3, 32, 32)

    def train() -> None:
        torch.manual_seed(0)
        model = wrap(DenseNet(24, (8, 8), num_init_features=24, efficient=engine))
        for _ in range(2):
            model(x).sum().backward()

    return tensor_peak(train)


def test_a_process_needs_less_memory_than_with_plain_and_than_with_ddp():
    with communication._processes(2):
        shared, plain = (_peak(fully_sharded_steps._sharded, engine) for engine in ("shared", "plain"))
        with_ddp = _peak(communication._ddp, "shared")
    print(shared, plain, with_ddp)
    assert shared < 0.3 * plain
    assert shared < with_ddp


def test_offloaded_parameters_train_as_plain_s(tmp_path):
    for result in _results("offloaded", 2, tmp_path):
        assert result["difference"] <= 1e-10


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_a_tensor_parallel_classifier_trains_as_plain_s(processes, tmp_path):
    """In four processes also sharded over pairs of them."""
    for result in _results("tensor_parallel", processes, tmp_path):
        assert result["ColwiseParallel"] <= 1e-10
        assert result["RowwiseParallel"] <= 1e-10


@pytest.mark.exhaustive
def test_a_mesh_of_replicated_groups_equals_plain(tmp_path):
    for result in _results("hybrid", 4, tmp_path):
        assert result["difference"] <= 1e-10
