"""`CheckpointFunction`: recomputation as one node of the graph."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .._torch_private import tensor_hooks
from .parameters import modules_of
from .recomputation import Recomputation, name_of, tensors_in


class CheckpointFunction(torch.autograd.Function):
    """`CheckpointFunction.apply(function, n, *inputs, *parameters)` is `function(*inputs)`, recomputed in the backward.

    The first `n` arguments after `n` are handed to `function`; the rest are the parameters that `function` uses
    without being handed them, listed so that they get their gradients. The recomputation differentiates with
    `torch.autograd.grad`: there is no nested `backward()`, so gradients reach parameters once, through the outer graph,
    and replicas made by `nn.DataParallel` do not wait for each other.

    Outputs are a tensor or a tuple of tensors. Next to `checkpoint`, which is for any function, this has least to do
    in Python and needs the most care: a parameter that is not listed gets no gradient.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable, n: int, *args: Tensor) -> Tensor | tuple[Tensor, ...]:
        strange = [type(value).__name__ for value in args if not isinstance(value, Tensor)]
        if strange:
            raise TypeError(
                f"found a {strange[0]} among the inputs and parameters of {name_of(function)}, which must "
                "be tensors: bind it with functools.partial, or use checkpoint, which takes anything"
            )
        modules = (inside for module in modules_of(function) for inside in module.modules())
        # Weights cast in this run carry no graph: autocast must not keep them for the code around.
        ctx.recomputation = Recomputation(name_of(function), args, modules, cache_casts=False)
        ctx.function, ctx.n = function, n
        outputs = ctx.recomputation.first(function, args[:n], *args[:n])
        ctx.save_for_backward(*args)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in tensors_in(outputs) if not (t.is_floating_point() or t.is_complex())))
        return outputs

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        again_differentiable = torch.is_grad_enabled()
        needed = ctx.needs_input_grad[2:]
        saved = ctx.saved_tensors  # once: each reading unpacks, and an outer checkpoint hands out once
        inputs, parameters = saved[: ctx.n], saved[ctx.n :]
        with torch.enable_grad():
            if again_differentiable:
                # In views: one input may have been computed from another, and the path between them is not ours.
                inputs = [t.view_as(t) for t in inputs]
            else:
                inputs = [t.detach().requires_grad_(need) for t, need in zip(inputs, needed, strict=False)]
            outputs = tensors_in(ctx.recomputation.again(ctx.function, *inputs))
        pairs = [(o, g) for o, g in zip(outputs, output_grads, strict=True) if g is not None and o.requires_grad]
        wanted = [t for t, need in zip([*inputs, *parameters], needed, strict=True) if need]
        if not pairs or not wanted:
            return None, None, *(None for _ in needed)
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
        return None, None, *(next(found) if need else None for need in needed)


@contextmanager
def _silenced_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Keep `register_hook` callables from firing on the inner gradient: the outer graph fires them, once.

    Threads that run backwards through one model at the same time, whose leaves have such hooks, want `checkpoint`.
    """
    silenced = [(hooks, dict(hooks)) for hooks in map(tensor_hooks, tensors) if hooks]
    for hooks, _ in silenced:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, kept in silenced:
            hooks.update(kept)
