"""One training step, one epoch of them, and a judgement: what the numbers of a run come from."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .data.augment import Preparation, generator_for
from .data.images import Pictures, Streamed
from .distributed import Team, joining
from .options import Options
from .recipes import RECIPES

_PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Position:
    """How far a run is: an epoch from 1, the steps of it that are done, and what they came to."""

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
    """A model with its optimizer, and the team that trains it."""

    def __init__(self, model: nn.Module, preparation: Preparation, options: Options, team: Team) -> None:
        self.options, self.team, self.preparation = options, team, preparation
        layout = torch.channels_last if options.channels_last else torch.preserve_format
        self.model = model.to(team.device, memory_format=layout)
        self.runner = team.wrap(self.model, options.sync_bn)
        if options.compile:
            self.runner = torch.compile(self.runner)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=options.lr, momentum=0.9, nesterov=True, weight_decay=1e-4
        )
        self.scaler = torch.amp.GradScaler(team.device.type, enabled=options.amp == "fp16")
        self.dtype = next(self.model.parameters()).dtype

    def steps(self, pictures: Pictures | Streamed, position: Position) -> Iterator[None]:
        """Train from `position` to the end of its epoch, moving it; yields after each step."""
        options, epoch = self.options, position.epoch
        order = batches(len(pictures), options.batch_size, options.seed, epoch)
        shares = [index[self.team.share(len(index))] for index in order]
        fetched = pictures.fetch(shares[position.step :])
        for number, (images, labels) in enumerate(fetched, start=position.step):
            within = number / len(order)
            lr = RECIPES[options.recipe](options.lr, epoch, options.n_epochs, within)
            sums = self.step(images, labels, len(order[number]), lr, (options.seed, epoch, number))
            loss, wrong, seen = self.team.sum(sums)
            check_finite("loss", loss, f"epoch {epoch}, step {number + 1}", lr)
            position.add(loss, wrong, seen)
            yield

    def step(self, images: Tensor, labels: Tensor, joined: int, lr: float, chance: tuple[int, ...]) -> list[float]:
        """One update from this process's share of `joined` pictures: its sums of loss, wrong answers and pictures."""
        draw = self.preparation.draw(joined, generator_for(*chance))[self.team.share(joined)]
        images = self._input(self.preparation.vary(images, draw))
        torch.manual_seed(generator_for(*chance, self.team.rank).initial_seed())  # for dropout
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.model.train()
        self.optimizer.zero_grad()
        sums = torch.zeros(2, dtype=torch.float64, device=images.device)
        num_parts = self._num_parts(joined)
        parts = zip(images.tensor_split(num_parts), labels.tensor_split(num_parts), strict=True)
        for i, (some, theirs) in enumerate(parts, start=1):
            with joining(self.runner, last=i == num_parts):
                sums += self._gradients(some, theirs, self.team.size / joined)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return [*sums.tolist(), len(labels)]

    def _num_parts(self, joined: int) -> int:
        """In how many micro-batches each process runs its share: in as many as the others, none of them empty."""
        smallest, largest = joined // self.team.size, -(-joined // self.team.size)
        return min(-(-largest // (self.options.micro_batch_size or joined)), max(smallest, 1))

    def _gradients(self, images: Tensor, labels: Tensor, weight: float) -> Tensor:
        with _sentences():
            with self._precision():
                outputs = self.runner(images)
                loss = F.cross_entropy(outputs, labels, reduction="sum")
            self.scaler.scale(loss * weight).backward()
        return torch.stack([loss.detach(), (outputs.argmax(1) != labels).sum()]).double()

    @torch.no_grad()
    def evaluate(self, pictures: Pictures | Streamed, check: Callable[[], None] | None = None) -> tuple[float, float]:
        """Mean loss and share of wrong answers; `check` is called after each batch, and may raise."""
        self.team.one_model(self.model)
        self.model.eval()
        order = torch.arange(len(pictures)).split(self.options.micro_batch_size or self.options.batch_size)
        sums = torch.zeros(2, dtype=torch.float64, device=self.team.device)
        for images, labels in pictures.fetch(order[self.team.rank :: self.team.size]):
            with self._precision():
                outputs = self.model(self._input(images))
                loss = F.cross_entropy(outputs, labels, reduction="sum")
            sums += torch.stack([loss, (outputs.argmax(1) != labels).sum()]).double()
            if check:
                check()
        loss, wrong = self.team.sum(sums.tolist())
        return loss / len(pictures), wrong / len(pictures)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        for name, part in state.items():
            getattr(self, name).load_state_dict(part)

    def _input(self, images: Tensor) -> Tensor:
        prepared = self.preparation.normalise(images, self.dtype)
        return prepared.contiguous(memory_format=torch.channels_last) if self.options.channels_last else prepared

    def _precision(self) -> contextlib.AbstractContextManager:
        if self.options.amp is None:
            return contextlib.nullcontext()
        return torch.autocast(self.team.device.type, _PRECISIONS[self.options.amp])


@contextlib.contextmanager
def _sentences() -> Iterator[None]:
    """For the failures of a step that the options are the cause of; any other passes as it is."""
    try:
        yield
    except (ValueError, RuntimeError) as exc:
        if "value per channel" in str(exc):
            raise ValueError(
                "found one picture at once, which leaves a batch norm a single value per channel, without a variance: "
                "give a larger --batch_size or --micro_batch_size, or a larger --image_size"
            ) from exc
        if not type(exc).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        reason = " ".join(str(exc).split("\n\n")[0].split())
        raise ValueError(f"torch.compile failed here ({reason}): leave --compile out, or mend its compiler") from exc


def batches(number: int, batch_size: int, seed: int, epoch: int) -> list[Tensor]:
    """The order of an epoch, shuffled, in full batches; fewer pictures than one batch are one batch."""
    order = torch.randperm(number, generator=generator_for(seed, epoch))
    return list(order[: num_steps(number, batch_size) * batch_size].split(batch_size))


def check_finite(what: str, value: float, when: str, lr: float) -> None:
    if not math.isfinite(value):
        raise FloatingPointError(
            f"the {what} became {value} in {when}, at a learning rate of {lr:.3g}: "
            "start over with a smaller --lr; what was saved before is kept"
        )


def num_steps(number: int, batch_size: int) -> int:
    return max(number // batch_size, 1)
