"""PyTorch's default random generators, the only ones from which a block that is converted draws."""

from typing import Any

import torch


def seed() -> None:
    """Set PyTorch's default generators."""
    has_accelerator = torch.accelerator.is_available()
    (torch.manual_seed if has_accelerator else torch.default_generator.manual_seed)(0)  # torch.manual_seed is slow


def random_states(device: torch.device) -> list[Any]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
