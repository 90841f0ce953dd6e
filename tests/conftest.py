import os
import zlib

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:  # idle threads of one worker leave the cores to the others
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported, which looks once
import torch
import torch.distributed as dist

from efficient_densenet.engine import choose
from efficient_densenet.engine.recording import programs

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton, which looks once


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="1/1", help="run one of several equal parts of the tests, such as 2/3")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    shard, shards = map(int, config.getoption("--shard").split("/"))
    if shards > 1:
        in_shard = [zlib.crc32(item.nodeid.encode()) % shards == shard - 1 for item in items]
        config.hook.pytest_deselected(items=[item for item, run in zip(items, in_shard, strict=True) if not run])
        items[:] = [item for item, run in zip(items, in_shard, strict=True) if run]


@pytest.fixture(autouse=True)
def _nothing_of_another_test():
    """A program of another test would not see what this one replaces; warnings come once; threads may be changed."""
    torch.manual_seed(0)
    programs.forget()
    choose._warned.clear()
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def process_group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def fresh_compiler():
    """A compiler that has seen nothing.

    With recursive tags of dicts, which are the default of PyTorch 2.9 and 2.10 alone, it would miss changes of any
    model's attributes and classes.
    """
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    tags = "use_recursive_dict_tags_for_guards"
    with torch._dynamo.config.patch({tags: False} if hasattr(torch._dynamo.config, tags) else {}):
        yield
