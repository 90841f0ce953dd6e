"""Train a model on pictures and judge it: one-cycle SGD, an epoch at a time."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from .data import Pictures, Splits, batches


@dataclass(frozen=True)
class Epoch:
    """What one epoch came to; errors are shares of wrong answers."""

    epoch: int
    train_loss: float
    train_error: float
    valid_loss: float
    valid_error: float
    seconds: float


def train(
    model: nn.Module, data: Splits, n_epochs: int, batch_size: int = 64, lr: float = 0.1, seed: int = 0
) -> Iterator[Epoch]:
    """Train by SGD with Nesterov momentum under a one-cycle schedule, yielding after each epoch."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True, weight_decay=1e-4)
    steps = max(len(data.train) // batch_size, 1) * n_epochs
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=steps)
    for epoch in range(1, n_epochs + 1):
        start = time.perf_counter()
        model.train()
        seen, loss_sum, wrong = 0, 0.0, 0
        for images, labels in batches(data.train, batch_size, generator):
            optimizer.zero_grad()
            outputs = model(images)
            loss = F.cross_entropy(outputs, labels)
            if not torch.isfinite(loss):
                raise FloatingPointError(f"the loss became {loss.item()} in epoch {epoch}: use a smaller lr than {lr}")
            loss.backward()
            optimizer.step()
            schedule.step()
            seen += len(labels)
            loss_sum += loss.item() * len(labels)
            wrong += (outputs.argmax(1) != labels).sum().item()
        valid_loss, valid_error = evaluate(model, data.valid, batch_size)
        yield Epoch(epoch, loss_sum / seen, wrong / seen, valid_loss, valid_error, time.perf_counter() - start)


@torch.no_grad()
def evaluate(model: nn.Module, pictures: Pictures, batch_size: int = 64) -> tuple[float, float]:
    """Mean loss and share of wrong answers."""
    model.eval()
    loss, wrong = 0.0, 0
    for images, labels in batches(pictures, batch_size):
        outputs = model(images)
        loss += F.cross_entropy(outputs, labels, reduction="sum").item()
        wrong += (outputs.argmax(1) != labels).sum().item()
    return loss / len(pictures), wrong / len(pictures)
