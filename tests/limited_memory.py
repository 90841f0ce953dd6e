"""Trains in a limited address space: at the largest batch of a budget, and at 1.3 times it."""

import ctypes
import resource
from pathlib import Path

import torch

from efficient_densenet import DenseNet
from efficient_densenet.memory import largest_batch
from efficient_densenet.memory.step import MetaModel, default_loss

STEP = 400 << 20
MARGIN = 1.1
"""The address space has gaps, and oneDNN's own memory is not PyTorch's."""


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def train(model: DenseNet, images: int) -> None:
    default_loss(model(torch.zeros(images, 3, 32, 32))).backward()


def main() -> None:
    torch.set_num_threads(1)
    model = DenseNet(12, (8, 8, 8))
    train(model, 8)  # loads and compiles what stays
    batch = largest_batch(model, 32, MetaModel(model).persistent.total + STEP)
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    limit = address_space() + round(MARGIN * STEP)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    train(model, batch)
    print(f"trained at {batch}")
    try:
        train(model, round(1.3 * batch))
    except (RuntimeError, MemoryError) as error:
        print(f"out of memory at {round(1.3 * batch)}: {error}")


if __name__ == "__main__":
    main()
