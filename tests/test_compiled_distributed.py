"""Compiled models under DistributedDataParallel, wrapped in either order: plain's numbers and the engine's memory."""

from pathlib import Path

import compiled_distributed_step
import pytest
import torch
from compiled_distributed_step import BLOCKS, WRAPPINGS
from forks import fork_processes
from helpers import assert_close
from torch import Tensor, nn

pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(
        torch.__version__ < "2.11",
        reason="the compiler of PyTorch 2.6 breaks the graph, as between the modules of a network",
    ),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> list[dict]:
    """Of both ranks."""
    folder = tmp_path_factory.mktemp("compiled")
    for process in fork_processes(2, Path(compiled_distributed_step.__file__), "results.pt", cwd=folder):
        assert process.wait() == 0, process.communicate()
    return [torch.load(folder / f"results.pt.{rank}", weights_only=True) for rank in range(2)]


@pytest.fixture(scope="module")
def expected() -> tuple[list[Tensor], list[nn.Module]]:
    """The mean gradients of plain models that ran a rank's images each, without processes; and those models."""
    models = [compiled_distributed_step.network() for _ in range(2)]
    for model, images in zip(models, compiled_distributed_step.images_of_ranks(), strict=True):
        model(images).square().mean().backward()
    pairs = zip(*(model.parameters() for model in models), strict=True)
    return [(first.grad + second.grad) / 2 for first, second in pairs], models


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_gradients_are_the_means_of_plains(wrapping, results, expected):
    gradients, models = expected
    for result, model in zip(results, models, strict=True):
        for actual, gradient in zip(result[wrapping]["gradients"], gradients, strict=True):
            assert_close(actual, gradient)
        for actual, buffer in zip(result[wrapping]["buffers"], model.buffers(), strict=True):
            assert_close(actual, buffer, 0 if buffer.dtype == torch.long else 1e-10)


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_all_stages_are_in_one_graph_and_need_less_memory_than_plain(wrapping, results):
    for result in results:
        assert [count for count in result[wrapping]["num_stages"] if count] == [len(BLOCKS)]
        # a third of plain's with one thread; each further thread adds the buffers of its own
        assert result[wrapping]["peak"] <= 0.4 * result["plain"]["peak"]
