"""The autograd Functions that stand in the graph for what is to be computed again."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..torch_private import tensor_hooks
from .offload import Resting
from .recomputation import Recomputation


class CheckpointFunction(torch.autograd.Function):
    """`CheckpointFunction.apply(function, n, *inputs, *parameters)` is `function(*inputs)`, recomputed in the backward.

    The first `n` arguments after `n` are handed to `function`; the rest are the parameters that `function` uses
    without being handed them, listed so that they get their gradients. The recomputation differentiates with
    `torch.autograd.grad`: there is no nested `backward()`, so gradients reach parameters once, through the outer graph,
    and replicas made by `nn.DataParallel` do not wait for each other.

    The random state and the autocast state of the first run are restored in the second. Outputs are a tensor or a tuple
    of tensors.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable, n: int, *args: Tensor) -> Tensor | tuple[Tensor, ...]:
        recomputation = Recomputation(function, args)
        outputs = recomputation.first(*args[:n])
        _remember(ctx, recomputation, n, args, offload=False)
        tensors = outputs if isinstance(outputs, tuple) else (outputs,)
        ctx.mark_non_differentiable(*(t for t in tensors if not (t.is_floating_point() or t.is_complex())))
        return outputs

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *_differentiate(ctx, 2, output_grads)


class Resumed(torch.autograd.Function):
    """The same for a first run that has been made already.

    `apply(recomputation, outputs, offload, n, *inputs, *parameters)`: `outputs` pairs each tensor with whether it needs
    a gradient; with `offload` the inputs wait in CPU memory.
    """

    @staticmethod
    def forward(
        ctx: Any, recomputation: Recomputation, outputs: list[tuple[Tensor, bool]], offload: bool, n: int, *args: Tensor
    ) -> tuple[Tensor, ...]:
        _remember(ctx, recomputation, n, args, offload)
        ctx.mark_non_differentiable(*(output for output, needs_grad in outputs if not needs_grad))
        return tuple(output for output, _ in outputs)

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, None, None, *_differentiate(ctx, 4, output_grads)


def _remember(ctx: Any, recomputation: Recomputation, n: int, args: Sequence[Tensor], offload: bool) -> None:
    ctx.recomputation, ctx.n = recomputation, n
    ctx.resting = [Resting(t) for t in args[:n]] if offload else None
    ctx.save_for_backward(*(args[n:] if offload else args))
    ctx.set_materialize_grads(False)


def _recall(ctx: Any) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """The inputs and the parameters."""
    if ctx.resting is None:
        return ctx.saved_tensors[: ctx.n], ctx.saved_tensors[ctx.n :]
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"found create_graph=True, but {ctx.recomputation.name} was checkpointed with its inputs offloaded, and a "
            "copy cannot be differentiated through: checkpoint it without offloading"
        )
    return [resting.woken() for resting in ctx.resting], ctx.saved_tensors


def _differentiate(
    ctx: Any, num_other_arguments: int, output_grads: Sequence[Tensor | None]
) -> Iterator[Tensor | None]:
    """The gradients of the inputs and the parameters, by running again."""
    again_differentiable = torch.is_grad_enabled()
    needed = ctx.needs_input_grad[num_other_arguments:]
    inputs, parameters = _recall(ctx)
    with torch.enable_grad():
        if again_differentiable:
            # In views: one input may have been computed from another, and the path between them is not ours.
            inputs = [t.view_as(t) for t in inputs]
        else:
            inputs = [t.detach().requires_grad_(need) for t, need in zip(inputs, needed, strict=False)]
        outputs = ctx.recomputation.again(*inputs)
    pairs = [(o, g) for o, g in zip(outputs, output_grads, strict=True) if g is not None and o.requires_grad]
    wanted = [t for t, need in zip([*inputs, *parameters], needed, strict=True) if need]
    if not pairs or not wanted:
        return iter([None] * len(needed))
    with _silenced_hooks(parameters):
        found = iter(
            torch.autograd.grad(
                [output for output, _ in pairs],
                wanted,
                [grad for _, grad in pairs],
                allow_unused=True,
                create_graph=again_differentiable,
            )
        )
    return (next(found) if need else None for need in needed)


@contextmanager
def _silenced_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Keep `register_hook` callables from firing on the inner gradient: the outer graph fires them, once."""
    silenced = [(hooks, dict(hooks)) for hooks in map(tensor_hooks, tensors) if hooks]
    for hooks, _ in silenced:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in silenced:
            hooks.update(kept)
