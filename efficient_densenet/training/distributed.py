"""The processes and devices that share a run: one of each, replicas on several GPUs, or what torchrun started."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ..norms.sync_batch_norm import synchronize_norms


@dataclass(frozen=True)
class Team:
    """This process's number among how many, and the device it computes on."""

    rank: int
    size: int
    device: torch.device
    norms: dist.ProcessGroup | None = None
    """A group of its own for batch norms, whose exchanges then never mix with the gradients'."""

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def num_gpus(self) -> int:
        everything = self.device.type == "cuda" and self.device.index is None and self.size == 1
        return torch.cuda.device_count() if everything else int(self.device.type == "cuda")

    def share(self, number: int) -> slice:
        """Which of `number` joined pictures are this process's."""
        return slice(self.rank * number // self.size, (self.rank + 1) * number // self.size)

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums over all processes."""
        if self.size == 1:
            return list(values)
        device = self.device if self.device.type == "cuda" else "cpu"
        joined = torch.tensor(values, dtype=torch.float64, device=device)
        dist.all_reduce(joined)
        return joined.tolist()

    def wait(self) -> None:
        if self.size > 1:
            dist.barrier()

    def wrap(self, model: nn.Module, sync_bn: bool) -> nn.Module:
        """The module to call in training: it joins the gradients of all processes or devices."""
        if self.size > 1:
            if sync_bn:
                synchronize_norms(model, self.norms)
            return nn.parallel.DistributedDataParallel(model)
        return nn.DataParallel(model) if self.num_gpus > 1 else model

    def one_model(self, model: nn.Module) -> None:
        """Give every process the first one's running statistics."""
        if self.size > 1:
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)

    def describe(self) -> str:
        if self.size > 1:
            return f"{self.size} processes, this one on {self.device}"
        return f"{self.num_gpus} GPUs" if self.num_gpus > 1 else str(self.device)


def joining(runner: nn.Module, last: bool) -> contextlib.AbstractContextManager:
    """Gradients are joined in the last micro-batch of an update, and only added up before."""
    return runner.no_sync() if hasattr(runner, "no_sync") and not last else contextlib.nullcontext()


@contextlib.contextmanager
def assemble(device: str | None) -> Iterator[Team]:
    """The team that this process belongs to."""
    chosen = _device(device)
    if not dist.is_torchelastic_launched():
        yield Team(0, 1, chosen)
        return
    if chosen.type == "cuda":
        local = int(os.environ["LOCAL_RANK"])
        if local >= torch.cuda.device_count():
            raise ValueError(
                f"found {torch.cuda.device_count()} GPUs, but torchrun started "
                f"{os.environ['LOCAL_WORLD_SIZE']} processes here: give a lower --nproc_per_node, or --device cpu"
            )
        chosen = torch.device("cuda", local)
        torch.cuda.set_device(chosen)
    dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield Team(dist.get_rank(), dist.get_world_size(), chosen, dist.new_group())
    except RuntimeError as exc:
        if not isinstance(exc, dist.DistError) and "gloo" not in str(exc) and "closed by peer" not in str(exc):
            raise
        raise ConnectionError(
            f"lost another process ({str(exc).splitlines()[0]}): its own error, above or below, is the cause; "
            "mend that, then go on with --resume"
        ) from exc
    finally:
        dist.destroy_process_group()


def _device(name: str | None) -> torch.device:
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # what lies on meta has no values
    except (RuntimeError, AssertionError) as exc:
        reason = str(exc).splitlines()[0].partition(". ")[0]
        raise ValueError(f"device is {name!r}, but cannot be used here ({reason}): try cpu") from exc
    return device
