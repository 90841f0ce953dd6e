"""The shared engine under `fully_shard`: its options, its checkpoints and its memory."""

import json
from pathlib import Path

import fully_sharded_steps
import pytest
from forks import fork_processes


def _results(case: str, processes: int, folder: Path) -> list:
    """What `case` returns in each process."""
    for process in fork_processes(processes, Path(fully_sharded_steps.__file__), case, case, cwd=folder):
        assert process.wait() == 0, process.communicate()
    results = [json.loads((folder / f"{case}.{rank}").read_text()) for rank in range(processes)]
    (folder / f"{case}.store").unlink()
    return results


def test_clipped_gradients_equal_plain_s(tmp_path):
    for result in _results("clipped", 2, tmp_path):
        assert result["engines"] == ["plain", "shared"] or result["engines"] == ["shared"]
        assert result["difference"] <= 1e-10


def test_mixed_precision_is_as_exact_as_plain_s(tmp_path):
    for result in _results("mixed", 2, tmp_path):
        assert "shared" in result["engines"]
        plain, shared = (sum(error**2 for error in result[engine]) ** 0.5 for engine in ("False", "shared"))
        assert shared <= 2 * plain


def test_a_checkpoint_of_two_processes_is_loaded_by_one_and_by_three(tmp_path):
    """Bit for bit, and into another engine."""
    _results("save", 2, tmp_path)
    for processes in (1, 3):
        for result in _results("load", processes, tmp_path):
            assert result == {"equal": True, "steps": [2]}


def test_a_process_needs_less_memory_than_with_plain_and_than_unsharded(tmp_path):
    for peaks in _results("memory", 2, tmp_path):
        assert peaks["shared"] < 0.3 * peaks["plain"]
        assert peaks["shared"] < peaks["unsharded"] + 2**20  # gathered parameters of a block come to its features


@pytest.mark.exhaustive
def test_a_mesh_of_replicated_groups_equals_plain(tmp_path):
    for result in _results("hybrid", 4, tmp_path):
        assert result["difference"] <= 1e-10
