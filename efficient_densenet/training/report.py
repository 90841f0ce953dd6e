"""Progress of a run: a bar for each epoch on a terminal, a line for each epoch elsewhere."""

import resource
import sys
from typing import Any

import torch

from .._extras import need


def mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.{1 if num_bytes < 10 * 2**20 else 0}f} MiB"


def peak_memory(device: torch.device) -> int:
    """CUDA: the peak bytes of tensors since the last reset; CPU: the peak resident memory of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


class EpochProgress:
    """The progress of one epoch. With `visible=False`, as in all processes but the main one, it shows nothing."""

    def __init__(self, epoch: int, n_epochs: int, num_steps: int, initial_step: int, visible: bool) -> None:
        self.title, self.visible = f"epoch {epoch}/{n_epochs}", visible
        on_terminal = visible and sys.stderr.isatty()
        tqdm = need("tqdm", extra="demos").tqdm
        self.bar = tqdm(
            total=num_steps, initial=initial_step, desc=self.title, unit="step", leave=False, disable=not on_terminal
        )

    def step(self, loss: float, error: float, images_per_second: float, peak_bytes: int) -> None:
        self.bar.set_postfix_str(
            f"loss {loss:.3f}, error {error:.2%}, {images_per_second:,.0f} images/s, peak {mib(peak_bytes)}",
            refresh=False,
        )
        self.bar.update()

    def close(self) -> None:
        self.bar.close()

    def finish(self, row: dict[str, Any]) -> None:
        self.close()
        if self.visible:
            validation = (
                ""
                if row["valid_loss"] == ""
                else f"validation loss {row['valid_loss']:.3f}, error {row['valid_error']:.2%}; "
            )
            print(
                f"{self.title}: train loss {row['train_loss']:.3f}, error {row['train_error']:.2%}; {validation}"
                f"{row['seconds']:.1f} s, {row['images_per_second']:,.0f} images/s, "
                f"peak memory {row['peak_memory_mib']:,.0f} MiB, lr {row['lr']:.3g}",
                flush=True,
            )
