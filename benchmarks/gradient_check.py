"""Check the gradients of the shared engine at real sizes: its error beside plain's, both against plain in float64.

    python benchmarks/gradient_check.py --model densenet_bc_100_12 --batch_size 64 --precision float32,tf32

The error is that of all gradients as one vector, divided by its length. It fails where the shared engine's is more than
twice plain's. A model that does not fit in float64 is compared with plain, and the errors may then add up.
"""

import sys
from typing import Any

import torch
from methods import choose
from options import run_command
from settings import Setting, as_list, expand
from torch import Tensor
from worker import Training, is_out_of_memory

AT_MOST = 2.0
"""How many times plain's error the shared engine's may be."""
ROUNDING = {"float32": 1e-4, "tf32": 1e-2, "bf16": 0.1, "fp16": 0.02}
"""What is no sign of a defect: ReLU's mask is the other one where rounding changes a sign."""


def check(
    model: str = "densenet_bc_100_12",
    batch_size: int = 64,
    image_size: int = 0,
    precision: Any = "float32",
    device: str = "",
    methods: Any = "shared",
) -> None:
    """Compare the gradients of methods with plain's, and exit with 1 where an error is large.

    Args:
        model: a zoo model, or densenet_bc_<depth>_<growth rate>.
        batch_size: number of images in a batch.
        image_size: height and width of the images. Default: 32 for models for CIFAR, 224 for ImageNet.
        precision: float32, tf32 (on CUDA), bf16 or fp16, or several of them.
        device: cpu or cuda. Default: cuda if there is a GPU.
        methods: names of methods, joined by commas.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    too_large = []
    for setting in expand(model, batch_size, image_size, precision, device=device):
        truth = _gradients("plain", setting, double=True)
        plain, *others = choose(as_list(methods), model, device)
        expected = _gradients(plain, setting)
        reference = _error(expected, truth) if truth is not None else 0.0
        for method in others:
            error = _error(_gradients(method, setting), expected if truth is None else truth)
            line = f"{setting.model}, batch {setting.batch_size}, {setting.precision}: "
            line += f"error of {method}'s gradients {error:.2e}, of plain's {reference:.2e}"
            print(line + (" (float64 did not fit: beside plain)" if truth is None else ""), flush=True)
            if not error <= AT_MOST * reference + ROUNDING[setting.precision]:
                too_large.append(f"{method} in {setting.precision}")
    if too_large:
        sys.exit(f"error: gradients differ by more than rounding: {', '.join(too_large)}")


def _gradients(method: str, setting: Setting, double: bool = False) -> list[Tensor] | None:
    """The gradients of one step, on the CPU; None where float64 does not fit in memory."""
    try:
        training = Training(method, setting)
        if double:
            training.model.double()
            training.images = training.images.double()
        torch.manual_seed(1)
        training.labels.random_(10)
        training.step()
    except Exception as exc:
        if double and is_out_of_memory(exc):
            return None
        raise
    return [parameter.grad.double().cpu() for parameter in training.model.parameters()]


def _error(gradients: list[Tensor] | None, truth: list[Tensor] | None) -> float:
    assert gradients is not None
    assert truth is not None
    difference = sum((ours - theirs).square().sum() for ours, theirs in zip(gradients, truth, strict=True))
    length = sum(theirs.square().sum() for theirs in truth)
    return float(difference / length) ** 0.5


if __name__ == "__main__":
    run_command(check)
