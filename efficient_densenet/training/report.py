"""What a run shows while it goes: a bar an epoch on a terminal, a line an epoch elsewhere."""

import resource
import sys
from typing import Any

import torch

from .._extras import need


def mib(number: float) -> str:
    return f"{number / 2**20:,.{1 if number < 10 * 2**20 else 0}f} MiB"


def peak_memory(device: torch.device) -> int:
    """CUDA: the most bytes of tensors since the epoch began; CPU: the most that the process ever had resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


class Progress:
    """The steps of one epoch as they are done; `shown` is False in all processes but the first."""

    def __init__(self, epoch: int, n_epochs: int, num_steps: int, done: int, shown: bool) -> None:
        self.title, self.shown = f"epoch {epoch}/{n_epochs}", shown
        on_terminal = shown and sys.stderr.isatty()
        tqdm = need("tqdm", extra="demos").tqdm
        self.bar = tqdm(
            total=num_steps, initial=done, desc=self.title, unit="step", leave=False, disable=not on_terminal
        )

    def step(self, loss: float, error: float, speed: float, peak: int) -> None:
        self.bar.set_postfix_str(
            f"loss {loss:.3f}, error {error:.2%}, {speed:,.0f} images/s, peak {mib(peak)}", refresh=False
        )
        self.bar.update()

    def close(self) -> None:
        self.bar.close()

    def finish(self, row: dict[str, Any]) -> None:
        self.close()
        if self.shown:
            print(
                f"{self.title}: train loss {row['train_loss']:.3f}, error {row['train_error']:.2%}; "
                f"validation loss {row['valid_loss']:.3f}, error {row['valid_error']:.2%}; "
                f"{row['seconds']:.1f} s, {row['images_per_second']:,.0f} images/s, "
                f"peak memory {row['peak_memory_mib']:,.0f} MiB, lr {row['lr']:.3g}",
                flush=True,
            )
