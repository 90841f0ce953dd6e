"""Compiled models under DistributedDataParallel, wrapped in either order: plain's numbers and the engine's memory."""

from pathlib import Path

import compiled_distributed_step
import pytest
import torch
import torch.distributed as dist
from compiled_distributed_step import BLOCKS, WRAPPINGS
from forks import fork_processes
from helpers import assert_all_close, assert_close, with_engine
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from efficient_densenet import DenseNet

pytestmark = pytest.mark.exhaustive


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
        assert_all_close(result[wrapping]["gradients"], gradients)
        assert_all_close(result[wrapping]["buffers"], model.buffers())


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_all_stages_are_in_one_graph_and_need_less_memory_than_plain(wrapping, results):
    for result in results:
        assert [count for count in result[wrapping]["num_stages"] if count] == [len(BLOCKS)]
        # a third of plain's with one thread; each further thread adds the buffers of its own
        assert result[wrapping]["peak"] <= 0.4 * result["plain"]["peak"]


@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("engine", [False, "shared"])
def test_buckets_below_one_mebibyte_need_the_compiler_without_its_split(engine):
    """PyTorch 2.14 raises for plain models as for ours, and for ones that are not a DenseNet."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = torch.randn(2, 3, 8, 8, dtype=torch.double)
        plain = DenseNet(4, (2, 2), num_init_features=4, efficient=False).double()
        for model in (nn.Sequential(nn.Conv2d(3, 4, 3)).double(), with_engine(plain, engine)):
            torch._dynamo.reset()
            compiled = torch.compile(DistributedDataParallel(model, bucket_cap_mb=0.01), backend="aot_eager")
            with pytest.raises(AssertionError, match="First bucket should be smaller"):
                compiled(x)
        torch._dynamo.reset()
        with torch._dynamo.config.patch(optimize_ddp=False):
            compiled(x).square().mean().backward()
        plain(x).square().mean().backward()
        for actual, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert_close(actual.grad, expected.grad)
    finally:
        dist.destroy_process_group()
