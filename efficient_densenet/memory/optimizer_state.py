"""The state that an optimizer has, or will have after its first step, as tensors on the meta device."""

import copy
from collections import defaultdict
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from .trace import tensors_of

OptimizerLike = torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | str | None

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
}


def optimizer_state(model: nn.Module, meta_model: nn.Module, optimizer: OptimizerLike) -> list[Tensor]:
    """The tensors of the optimizer's state: those that it has, or what a step on the meta device makes."""
    if optimizer is None:
        return []
    if isinstance(optimizer, torch.optim.Optimizer):
        made = optimizer if optimizer.state else _on_meta(optimizer, model, meta_model)
    else:
        if isinstance(optimizer, str) and optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer is {optimizer!r}, but must be one of {', '.join(OPTIMIZERS)}, or an optimizer")
        make = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
        made = make([p for p in meta_model.parameters() if p.requires_grad])
    if not made.state:
        try:
            made.step()
        except Exception as error:  # of an optimizer that needs data, a closure or a certain device
            raise ValueError(
                f"found a {type(made).__name__}, whose state is not known before its first step ({error}): give the "
                "optimizer after a step, or another one"
            ) from error
    tensors = [value for state in made.state.values() for value in tensors_of([*state.values()]) if value.dim() > 0]
    return [torch.empty_like(value, device="meta") for value in tensors]


def _on_meta(optimizer: torch.optim.Optimizer, model: nn.Module, meta_model: nn.Module) -> torch.optim.Optimizer:
    """A copy of an optimizer without state that trains the copies of its parameters."""
    of_copy = dict(zip(map(id, model.parameters()), meta_model.parameters(), strict=True))
    not_on_meta = {key: False for key in ("fused", "foreach", "capturable") if key in optimizer.defaults}
    made = copy.copy(optimizer)
    made.state = defaultdict(dict)
    made.param_groups = [
        group | not_on_meta | {"params": [of_copy[id(p)] for p in group["params"] if id(p) in of_copy]}
        for group in optimizer.param_groups
    ]
    if not any(group["params"] for group in made.param_groups):
        raise ValueError(f"found a {type(optimizer).__name__} that trains no parameter of this model")
    return made
