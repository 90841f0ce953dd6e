"""The devices and processes of a run: one of each, replicas on several GPUs, or the process group of torchrun."""

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.rendezvous import rendezvous

from efficient_densenet.models.densenet import DenseNet
from efficient_densenet.norms.sync_batch_norm import synchronize_norms

from .options import RunOptions

TIMEOUT = timedelta(minutes=10)
"""How long PyTorch lets a process wait for the others in a step. It then counts them as lost, stopped ones too."""
_LONGEST_WAIT = timedelta(days=1)
"""How long the others wait for the main process to download, read or write."""
T = TypeVar("T")


@dataclass(frozen=True)
class DistributedContext:
    """The rank of this process, the number of processes, and the device of this process."""

    rank: int
    world_size: int
    device: torch.device
    waiting_group: Any = None
    """A process group for waiting for one process that works alone for long."""

    @property
    def is_main_process(self) -> bool:
        return self.rank == 0

    @property
    def num_gpus(self) -> int:
        """GPUs that this process uses; a device "cuda" without an index means all visible ones."""
        if self.device.type != "cuda":
            return 0
        return torch.cuda.device_count() if self.device.index is None and self.world_size == 1 else 1

    def rank_slice(self, batch_size: int) -> slice:
        """The part of a global batch that this process computes."""
        return slice(self.rank * batch_size // self.world_size, (self.rank + 1) * batch_size // self.world_size)

    def all_reduce_sum(self, values: Sequence[float]) -> list[float]:
        """The sums over all processes."""
        if self.world_size == 1:
            return list(values)
        device = self.device if self.device.type == "cuda" else "cpu"
        sums = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(sums)
        return sums.tolist()

    def on_main(self, function: Callable[[], T]) -> T:
        """What `function` returns in the main process, in all of them; an error that it raises there is raised in all.

        Files of a run are read and written in this way only: nodes need not share them.
        """
        if self.world_size == 1:
            return function()
        outcome: list[Any] = [None, None]
        if self.is_main_process:
            try:
                outcome = [function(), None]
            except Exception as exc:
                outcome = [None, exc]
        dist.broadcast_object_list(outcome, group=self.waiting_group)
        result, error = outcome
        if error is not None:
            raise error
        return result

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier(self.waiting_group)

    def wrap_model(self, model: DenseNet, sync_bn: bool) -> nn.Module:
        """The module to call in training, which reduces gradients over all processes or GPUs."""
        if self.world_size > 1:
            if sync_bn:
                synchronize_norms(model, None)
            return nn.parallel.DistributedDataParallel(model)
        return nn.DataParallel(model) if self.num_gpus > 1 else model

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Give every process the running statistics of rank 0."""
        if self.world_size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)

    def describe(self) -> str:
        if self.world_size > 1:
            return f"{self.world_size} processes, this one on {self.device}"
        return f"{self.num_gpus} GPUs" if self.num_gpus > 1 else str(self.device)


def check_sync_bn(options: RunOptions) -> None:
    """Raise where norms are to be synchronized with no other process."""
    if options.sync_bn and not options.resume and not dist.is_torchelastic_launched():
        raise ValueError(
            "found --sync_bn, but this is the only process: start several with torchrun "
            "(torchrun --nproc_per_node 2 …), or leave it out"
        )


def gradient_sync(model: Callable, last: bool) -> contextlib.AbstractContextManager[Any]:
    """Reduce gradients in the backward of the last micro-batch of an update, and only accumulate them before."""
    no_sync = getattr(model, "no_sync", None)  # of DistributedDataParallel, compiled or not
    return contextlib.nullcontext() if last or no_sync is None else no_sync()


@contextlib.contextmanager
def init_distributed(device: str | None) -> Iterator[DistributedContext]:
    """The context of this process; under torchrun a process group is initialized for the time of the `with`."""
    chosen = _parse_device(device)
    if not dist.is_torchelastic_launched():
        yield DistributedContext(0, 1, chosen)
        return
    if chosen.type == "cuda":
        chosen = _local_gpu()
    store, rank, world_size = next(rendezvous("env://"))
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=_of_this_start(store), rank=rank, world_size=world_size, timeout=TIMEOUT)
    try:
        context = DistributedContext(rank, world_size, chosen, dist.new_group(backend="gloo", timeout=_LONGEST_WAIT))
        yield context
        context.barrier()  # a process that leaves while another one writes looks dead to it
    except RuntimeError as exc:
        if not isinstance(exc, dist.DistError) and not any(sign in str(exc) for sign in ("gloo", "closed by peer")):
            raise
        raise ConnectionError(
            f"lost another process, which ended, was stopped or lost its network ({str(exc).splitlines()[0]}): its own "
            "error, above or below, is the cause; fix that, then continue with --resume"
        ) from exc
    finally:
        dist.destroy_process_group()


def _of_this_start(store: Any) -> Any:
    """The part of torchrun's store that belongs to this start of the processes.

    torchrun keeps the store when it restarts them, and with it the addresses of those that have ended, which the others
    would wait for (pytorch/pytorch#135712). It counts the restarts, but on each node its own alone; so with c10d's
    rendezvous of several nodes, the environment variable must let it make another store.
    """
    if os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1":
        return store
    prefix = f"restart_{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    return dist.PrefixStore(prefix, store)  # pyright: ignore[reportPrivateImportUsage]


def _local_gpu() -> torch.device:
    """The GPU of this process, by its local rank; made the current one."""
    local_rank = int(os.environ["LOCAL_RANK"])
    if local_rank >= torch.cuda.device_count():
        raise ValueError(
            f"found {torch.cuda.device_count()} GPUs, but torchrun started "
            f"{os.environ['LOCAL_WORLD_SIZE']} processes here: give a lower --nproc_per_node, or --device cpu"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def _parse_device(name: str | None) -> torch.device:
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        # This raises on a device that is absent, or has no values, such as meta, or no float64, as MPS has none.
        torch.zeros(1, device=device, dtype=torch.float64).item()
    except (RuntimeError, AssertionError, TypeError) as exc:
        reason = str(exc).splitlines()[0].partition(". ")[0]
        raise ValueError(f"device is {name!r}, but cannot be used here ({reason}): try cpu") from exc
    return device
