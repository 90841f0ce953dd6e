"""The training step, an epoch of steps, and evaluation."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_densenet.models.densenet import DenseNet

from .cuda_graph import CudaGraphBackward
from .data.augment import Transform, generator_for
from .data.images import ImageSet
from .distributed import DistributedContext, gradient_sync
from .options import AMP_DTYPES, RunOptions
from .recipes import RECIPES


@dataclass
class TrainingPosition:
    """How far a run is: the epoch, from 1, the steps done in it, and their sums.

    last.pt contains a position as a dict: the field names are part of its format.
    """

    epoch: int = 1
    step: int = 0
    loss: float = 0.0
    wrong: float = 0.0
    seen: float = 0.0
    seconds: float = 0.0

    def add(self, loss: float, wrong: float, seen: float) -> None:
        self.step += 1
        self.loss, self.wrong, self.seen = self.loss + loss, self.wrong + wrong, self.seen + seen


class Trainer:
    """A model with its optimizer, on the devices and processes of `context`."""

    def __init__(self, model: DenseNet, transform: Transform, options: RunOptions, context: DistributedContext) -> None:
        self.options, self.context, self.transform = options, context, transform
        self.model = model.to(context.device)
        if options.channels_last:
            self.model.to(memory_format=torch.channels_last)
        self.wrapped_model: Callable[..., Tensor] = context.wrap_model(self.model, options.sync_bn)
        if options.compile:
            self.wrapped_model = torch.compile(self.wrapped_model)
        trained = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(
            trained, lr=options.lr, weight_decay=options.weight_decay, momentum=0.9, nesterov=True
        )
        self.scaler = torch.amp.GradScaler(context.device.type, enabled=options.amp == "fp16")
        self.dtype = next(self.model.parameters()).dtype
        self.backward: Callable[[Tensor, Tensor, float], Tensor] = self._backward
        if options.cuda_graph:
            self.backward = CudaGraphBackward(self._backward, trained)

    def steps(self, images: ImageSet, position: TrainingPosition) -> Iterator[None]:
        """Train from `position` to the end of its epoch; updates `position` and yields after each step."""
        options, epoch = self.options, position.epoch
        order = batches(len(images), options.batch_size, options.seed, epoch)
        local = [indices[self.context.rank_slice(len(indices))] for indices in order]
        fetched = images.fetch(local[position.step :])
        for number, (batch, labels) in enumerate(fetched, start=position.step):
            lr = RECIPES[options.recipe](options.lr, epoch, options.n_epochs, number / len(order))
            sums = self.step(batch, labels, len(order[number]), lr, (options.seed, epoch, number))
            loss, wrong, seen = self.context.all_reduce_sum(sums)
            check_finite("loss", loss, f"epoch {epoch}, step {number + 1}", lr)
            position.add(loss, wrong, seen)
            yield

    def step(
        self, images: Tensor, labels: Tensor, global_batch_size: int, lr: float, key: tuple[int, ...]
    ) -> list[float]:
        """One update from this process's part of the global batch.

        Args:
            images: uint8 (N, C, H, W).
            labels: class indices (N,).
            global_batch_size: images of all processes together.
            lr: learning rate.
            key: what seeds the random numbers of the step, such as (seed, epoch, step).

        Returns:
            This process's sum of losses, number of wrong predictions, and number of images.
        """
        params = self.transform.sample_params(global_batch_size, generator_for(*key))
        images = self._input(self.transform.augment(images, params[:, self.context.rank_slice(global_batch_size)]))
        torch.manual_seed(generator_for(*key, self.context.rank).initial_seed())  # for dropout
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.model.train()
        self.optimizer.zero_grad()
        sums = torch.zeros(2, dtype=torch.float64, device=images.device)
        count = self._num_micro_batches(global_batch_size)
        micro_batches = zip(images.tensor_split(count), labels.tensor_split(count), strict=True)
        for i, (some_images, some_labels) in enumerate(micro_batches, start=1):
            with gradient_sync(self.wrapped_model, last=i == count):
                # Processes average their gradients, the loss is of the global batch.
                sums += self.backward(some_images, some_labels, self.context.world_size / global_batch_size)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return [*sums.tolist(), len(labels)]

    def _num_micro_batches(self, global_batch_size: int) -> int:
        """The same number for every process, so that none has an empty micro-batch."""
        world_size = self.context.world_size
        smallest, largest = global_batch_size // world_size, -(-global_batch_size // world_size)
        return min(-(-largest // (self.options.micro_batch_size or global_batch_size)), max(smallest, 1))

    def _backward(self, images: Tensor, labels: Tensor, loss_scale: float) -> Tensor:
        """Accumulate gradients; returns the sum of losses and the number of wrong predictions."""
        with self.autocast():
            logits = self.wrapped_model(images)
            loss = F.cross_entropy(logits, labels, reduction="sum")
        self.scaler.scale(loss * loss_scale).backward()
        return torch.stack([loss.detach(), (logits.argmax(1) != labels).sum()]).double()

    @torch.no_grad()
    def evaluate(self, images: ImageSet, after_batch: Callable[[], None] | None = None) -> tuple[float, float]:
        """Mean loss and error rate; `after_batch` is called after each batch, and may raise."""
        self.context.broadcast_buffers(self.model)
        self.model.eval()
        order = torch.arange(len(images)).split(self.options.micro_batch_size or self.options.batch_size)
        sums = torch.zeros(2, dtype=torch.float64, device=self.context.device)
        for batch, labels in images.fetch(order[self.context.rank :: self.context.world_size]):
            with self.autocast():
                logits = self.model(self._input(batch))
                loss = F.cross_entropy(logits, labels, reduction="sum")
            sums += torch.stack([loss, (logits.argmax(1) != labels).sum()]).double()
            if after_batch:
                after_batch()
        loss, wrong = self.context.all_reduce_sum(sums.tolist())
        return loss / len(images), wrong / len(images)

    def state(self) -> dict[str, Any]:
        """What a run goes on from."""
        parts = {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}
        return {name: part.state_dict() for name, part in parts.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load what `state` returned in the main process."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])

    def _input(self, images: Tensor) -> Tensor:
        normalized = self.transform.normalize(images, self.dtype)
        return normalized.contiguous(memory_format=torch.channels_last) if self.options.channels_last else normalized

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self.options.amp is None:
            return contextlib.nullcontext()
        return torch.autocast(self.context.device.type, AMP_DTYPES[self.options.amp])


def batches(num_images: int, batch_size: int, seed: int, epoch: int) -> list[Tensor]:
    """The shuffled indices of an epoch in full batches; fewer images than one batch are one batch."""
    order = torch.randperm(num_images, generator=generator_for(seed, epoch))
    return list(order[: num_steps(num_images, batch_size) * batch_size].split(batch_size))


def check_finite(what: str, value: float, when: str, lr: float) -> None:
    if not math.isfinite(value):
        raise FloatingPointError(
            f"the {what} became {value} in {when}, at a learning rate of {lr:.3g}: "
            "start over with a smaller --lr; what was saved before is kept"
        )


def num_steps(num_images: int, batch_size: int) -> int:
    return max(num_images // batch_size, 1)
