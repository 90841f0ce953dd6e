"""Launching a Triton kernel: all launches go through `launch`."""

from typing import Any

import torch


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch `kernel` on the device of the first argument, which need not be the current one."""
    with torch.cuda.device_of(arguments[0]):
        kernel[grid](*arguments, **constants)
