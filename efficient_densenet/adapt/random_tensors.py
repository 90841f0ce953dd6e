"""Random tensors in the place of a module's own, for a trial: no weight that happens to be zero hides a difference."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .fingerprint import buffers_taken_as_given
from .randomness import seed


@contextmanager
def random_tensors(block: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Replace the parameters, and the buffers of norms, by random tensors, shared where the originals are shared. Other
    buffers keep their values, on which the branches of a forward may depend."""
    seed()
    replacements: dict[int, Tensor] = {}
    before = [(module, module._parameters, module._buffers) for module in block.modules()]

    def replacement(tensor: Tensor | None, random_like: Callable[[Tensor], Tensor]) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in replacements:
            values = random_like(tensor)
            replacements[id(tensor)] = values.to(dtype) if dtype and values.is_floating_point() else values
        return replacements[id(tensor)]

    try:
        for module, parameters, buffers in before:
            given = {name for name, _ in buffers_taken_as_given(module)}
            vars(module)["_parameters"] = {name: replacement(value, _random_like) for name, value in parameters.items()}
            vars(module)["_buffers"] = {
                name: replacement(value, _same_values if name in given else _positive_like)
                for name, value in buffers.items()
            }
        yield
    finally:
        for module, parameters, buffers in before:
            vars(module).update(_parameters=parameters, _buffers=buffers)


def _random_like(tensor: Tensor) -> Tensor:
    """Random values in the shape of `tensor`. Vectors have large values, so that an activation that clips them gives a
    difference."""
    values = _normal_like(tensor)
    return values * 4 if tensor.dim() < 2 else values / (8 * tensor[0].numel() ** 0.5)


def _positive_like(tensor: Tensor) -> Tensor:
    """Random positive values, like a variance."""
    return _normal_like(tensor).abs() + 0.5 if tensor.is_floating_point() else _same_values(tensor)


def _same_values(tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        return _positive_like(tensor) if tensor.is_floating_point() else torch.zeros_like(tensor, device="cpu")
    values = tensor.detach().clone()
    return values.to(_trial_dtype(values.device)) if values.is_floating_point() else values


def _normal_like(tensor: Tensor) -> Tensor:
    device = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
    return torch.randn(tensor.shape, device="cpu").to(device, _trial_dtype(device))


def _trial_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
