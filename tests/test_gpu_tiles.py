"""Each candidate of `benchmarks/gpu_tiles.py` runs, in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton")
gpu_tiles = pytest.importorskip("gpu_tiles")


@pytest.mark.exhaustive
@pytest.mark.skipif(torch.cuda.is_available(), reason="takes minutes to compile")
def test_every_candidate_runs(monkeypatch):
    monkeypatch.setattr(gpu_tiles, "CONV3X3", {"a model": (20, 20, [(1, 3, 5)])})
    monkeypatch.setattr(gpu_tiles, "CONV1X1", {"a model": (20, [((1, 4, 4), 9)])})
    monkeypatch.setattr(gpu_tiles, "microseconds", lambda function: float(function() is None))
    convolutions = list(gpu_tiles.convolutions(torch.float32, "cpu"))
    assert len(convolutions) == 3 + 2
    for convolution in convolutions:
        found = list(gpu_tiles.measure(convolution))
        assert len(found) > 10
        assert all(time < 2 for time, _ in found), found
        assert sum(described.endswith("*") for _, described in found) == 1


def test_each_candidate_is_compiled_in_one_share(monkeypatch):
    compiled = []
    convolution = gpu_tiles.Convolution(
        "a kernel, a model", [{"BLOCK_ROWS": 16 * i} for i in range(1, 9)], compiled.append
    )
    for i in range(3):
        assert list(gpu_tiles.measure(convolution, share=(i, 3))) == []
    assert sorted(each["BLOCK_ROWS"] for each in compiled) == [16 * i for i in range(1, 9)]
