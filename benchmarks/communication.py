"""Count what the processes of a training step exchange, and the memory of one of them, without the other processes.

    python benchmarks/communication.py --model densenet121 --processes 8,64,512
    python benchmarks/communication.py --model densenet121 --processes 8,64,512 --batch_size 16 --image_size 224

One process runs the steps of rank 0 in a process group of PyTorch that sends nothing. With a batch size the table has
the memory of a step, without one the collectives of a step and the bytes that a process receives in them.
"""

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from methods import architecture, as_list
from options import run_command
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from efficient_densenet import DenseNet
from efficient_densenet.memory import tensor_peak
from efficient_densenet.models.layers import DenseBlock, Transition
from efficient_densenet.norms.sync_batch_norm import synchronize_norms

NODE = 8
"""Number of GPUs in a node. Groups of this size stay within a node."""
ENGINES = ("plain", "shared")


def communication(
    model: str = "densenet121", processes: Any = "8,64,512", batch_size: int = 0, image_size: int = 0
) -> None:
    """Print what a process of a training step receives, or with a batch size how much memory it needs, as a Markdown
    table.

    Args:
        model: a name of the zoo, or densenet_bc_<depth>_<growth rate>.
        processes: how many there are, one number or several.
        batch_size: images of a process. Default: no memory is measured.
        image_size: height and width of the images. Default: the smallest that the network takes.
    """
    sizes = [int(size) for size in as_list(processes)]
    print(f"|  | engine | {' | '.join(f'{size} processes' for size in sizes)} |")
    print(f"|---|---|{'---:|' * len(sizes)}")
    for wrapping, engine in itertools.product(MEMORY_OF if batch_size else WRAPPINGS, ENGINES):
        cells = []
        for size in sizes:
            with _processes(size):
                if batch_size:
                    cells.append(f"{_peak(model, wrapping, engine, batch_size, image_size) / 2**20:,.0f} MiB")
                else:
                    counts = count(model, wrapping, engine, image_size)
                    cells.append(f"{counts.collectives}, {counts.bytes / 2**20:,.1f} MiB")
        print(f"| {wrapping} | `{engine}` | {' | '.join(cells)} |")


@contextlib.contextmanager
def _processes(size: int) -> Iterator[None]:
    """Make this process rank 0 of a group of `size`, whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        dist.destroy_process_group()


def _ddp(model: DenseNet) -> nn.Module:
    # Buffers are not broadcast: of batch norms they are running statistics, which no training step reads.
    wrapped = DistributedDataParallel(model, broadcast_buffers=False)
    wrapped.register_comm_hook(None, _all_reduce)
    return wrapped


def _all_reduce(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DistributedDataParallel's default reduction, called through `torch.distributed`, where it is counted."""
    dist.all_reduce(bucket.buffer())
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _ddp_with_synchronized_norms(model: DenseNet, of_node: bool) -> nn.Module:
    group = dist.new_group(range(min(NODE, dist.get_world_size()))) if of_node else None
    synchronize_norms(model, group)
    return _ddp(model)


def _fully_sharded(model: DenseNet, of_node: bool) -> nn.Module:
    """`model` with its stages sharded, and what is left with the root."""
    nodes = dist.get_world_size() // NODE
    mesh: DeviceMesh | None = None
    if of_node and nodes > 1:
        mesh = init_device_mesh("cpu", (nodes, NODE), mesh_dim_names=("replicate", "shard"))
    stages = [module for module in model.modules() if isinstance(module, DenseBlock | Transition)]
    for first in range(0, len(stages), 2):
        fully_shard(stages[first : first + 2], mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPPINGS: dict[str, Callable[[DenseNet], nn.Module]] = {
    "DDP": _ddp,
    "DDP, norms synchronized over all": lambda model: _ddp_with_synchronized_norms(model, of_node=False),
    f"DDP, norms synchronized over {NODE}": lambda model: _ddp_with_synchronized_norms(model, of_node=True),
    "`fully_shard` over all": lambda model: _fully_sharded(model, of_node=False),
    f"`fully_shard` over {NODE}, replicated": lambda model: _fully_sharded(model, of_node=True),
}
MEMORY_OF = [name for name in WRAPPINGS if "norms" not in name]


@dataclass
class Counts:
    """The number of collectives, and of the bytes that a process receives in them where each is a ring."""

    collectives: int = 0
    bytes: float = 0


RECEIVED: dict[str, Callable[[int, tuple[Any, ...]], float]] = {
    "all_gather": lambda others, tensors: others * tensors[1].nbytes,
    "all_gather_into_tensor": lambda others, tensors: others * tensors[1].nbytes,
    "all_gather_single": lambda others, tensors: others * tensors[1].nbytes,  # its name since PyTorch 2.14
    "reduce_scatter_tensor": lambda others, tensors: others * tensors[0].nbytes,
    "reduce_scatter_single": lambda others, tensors: others * tensors[0].nbytes,
    "all_reduce": lambda others, tensors: 2 * others / (others + 1) * tensors[0].nbytes,
}
"""Bytes that a collective receives from the other processes, by its name in `torch.distributed`: a ring reduces
and then gathers a part of the tensor for each process."""


@contextlib.contextmanager
def _counted(counts: Counts) -> Iterator[None]:
    originals = {name: getattr(dist, name) for name in RECEIVED if hasattr(dist, name)}

    def counting(name: str) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            # Some callers name the tensors, and this is their order.
            tensors = args or tuple(each for each in kwargs.values() if isinstance(each, Tensor))
            others = dist.get_world_size(kwargs.get("group")) - 1
            counts.collectives += 1
            counts.bytes += RECEIVED[name](others, tensors)
            return originals[name](*args, **kwargs)

        return wrapper

    for name in originals:
        setattr(dist, name, counting(name))
    try:
        yield
    finally:
        for name, function in originals.items():
            setattr(dist, name, function)


def count(model: str, wrapping: str, engine: str, image_size: int = 0) -> Counts:
    """The collectives of a training step inside of a process group."""
    network = DenseNet(**architecture(model) | {"efficient": engine})
    wrapped, counts = WRAPPINGS[wrapping](network), Counts()
    x = torch.zeros(2, 3, *[image_size or 32] * 2)
    wrapped(x).sum().backward()  # DistributedDataParallel makes its buckets anew after the first step
    with _counted(counts):
        wrapped(x).sum().backward()
    return counts


def _peak(model: str, wrapping: str, engine: str, batch_size: int, image_size: int) -> int:
    """The most memory of the tensors of a process: parameters, gradients, SGD's momentum and a step."""
    x = torch.zeros(batch_size, 3, image_size, image_size)

    def train() -> None:
        network = WRAPPINGS[wrapping](DenseNet(**architecture(model) | {"efficient": engine}))
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            network(x).sum().backward()
            optimizer.step()

    return tensor_peak(train)


if __name__ == "__main__":
    run_command(communication)
