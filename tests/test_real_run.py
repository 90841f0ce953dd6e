"""A short training run on digits: `shared` deviates from plain no more than plain runs do from one another."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from training.data import load

from efficient_densenet import create_model

STEPS, BATCH = 60, 8
FIRST = 2
"""Steps after which the weights are compared: rounding errors have not grown much yet."""
FACTOR = 4
"""Tolerance, relative to the largest deviation among the plain runs."""


def _batches() -> list[tuple[Tensor, Tensor]]:
    train = load(None).train
    images, labels = train.images.expand(-1, 3, -1, -1), train.labels
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))[: STEPS * BATCH]
    return [(images[part].float() / 127.5 - 1, labels[part]) for part in order.split(BATCH)]


def _run(
    engine: str, batches: list, order: Tensor | None = None, layout=torch.contiguous_format
) -> tuple[Tensor, Tensor]:
    """The loss of each step, and the weights after each of the first ones."""
    torch.manual_seed(0)
    channels = batches[0][0].shape[1]
    model = create_model("densenet_bc_100_12", efficient=engine, in_channels=channels).to(memory_format=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9, weight_decay=1e-4, nesterov=True)
    losses, weights = [], []
    for step, (images, labels) in enumerate(batches, start=1):
        optimizer.param_groups[0]["lr"] = 1e-3 * step
        if order is not None:
            images, labels = images[order], labels[order]
        loss = F.cross_entropy(model(images.to(memory_format=layout)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step <= FIRST:
            weights.append(torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()]))
    return torch.tensor(losses, dtype=torch.double), torch.stack(weights)


@pytest.mark.exhaustive
def test_a_run_deviates_from_plain_no_more_than_plain_runs_from_one_another():
    """BC-100-12, batch 8, 60 steps of SGD, its rate growing from 0.001 to 0.06, against three plain runs that sum in
    other orders. So deep a network amplifies rounding errors tenfold a step and more: the deviation of the loss is
    compared with the largest among the plain runs one step later, and that of the weights after the first steps.
    """
    batches = _batches()
    reference, weights = _run("plain", batches)

    def deviations(engine: str, batches: list, **other) -> tuple[Tensor, Tensor]:
        losses, others = _run(engine, batches, **other)
        return (losses - reference[: len(losses)]).abs(), (others - weights).norm(dim=1)

    plain = [
        deviations("plain", batches, **other)
        for other in (
            {"order": torch.arange(BATCH).flip(0)},
            {"order": torch.arange(BATCH).roll(3)},
            {"layout": torch.channels_last},
        )
    ]
    largest, largest_of_weights = (torch.stack(each).amax(0).cummax(0).values for each in zip(*plain, strict=True))
    one_rounding = torch.finfo(torch.float32).eps * reference.max()
    allowed = FACTOR * torch.cat([largest[1:], largest[-1:]]).clamp_min(one_rounding)
    ours, ours_of_weights = deviations("shared", batches)
    assert (ours <= allowed).all()
    assert (ours_of_weights <= FACTOR * largest_of_weights).all()
