"""`CheckpointFunction`: a recomputed function as one node of the autograd graph."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .._torch_private import tensor_hooks
from .inputs import with_class_and_attributes
from .parameters import check_parameters_listed, modules_of
from .recomputation import DEFAULTS, Recomputation, function_name, tensors_in


class CheckpointFunction(torch.autograd.Function):
    """`CheckpointFunction.apply(function, n, *inputs, *parameters)` is `function(*inputs)`, recomputed in the backward.

    There are `n` inputs. The parameters are the other tensors that `function` uses; they are listed so that they get
    their gradients. The recomputation is differentiated by `torch.autograd.grad`, not by a nested `backward()`:
    gradients reach the parameters once, through the outer graph, and the replicas of `nn.DataParallel` do not block
    each other.

    `function` returns a tensor or a tuple of tensors. The backward raises an error if `function` uses parameters
    that are not listed, or that are replaced while it runs, as FSDP does: use `checkpoint` for such a function.
    """

    @staticmethod
    def forward(ctx: Any, function: Callable, n: int, *args: Tensor) -> Tensor | tuple[Tensor, ...]:
        other_types = [type(value).__name__ for value in args if not isinstance(value, Tensor)]
        if other_types:
            raise TypeError(
                f"found a {other_types[0]} among the inputs and parameters of {function_name(function)}, which must "
                "be tensors: bind it with functools.partial, or use checkpoint, which accepts arguments of any type"
            )
        modules = (submodule for module in modules_of(function) for submodule in module.modules())
        # Autocast must not cache the weights cast in this forward: they have no grad_fn, and later code would use them.
        # The recomputation gets no copies of the buffers: some norms, written for functions like this one, update their
        # buffers only there.
        ctx.recomputation = Recomputation(
            function_name(function), args, modules, DEFAULTS, cache_casts=False, with_buffers=False
        )
        ctx.function, ctx.n = function, n
        outputs = ctx.recomputation.forward(function, args[:n], *args[:n])
        ctx.save_for_backward(*args)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(t for t in tensors_in(outputs) if not (t.is_floating_point() or t.is_complex())))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        create_graph = torch.is_grad_enabled()
        needs_grad = ctx.needs_input_grad[2:]
        saved = ctx.saved_tensors  # read once, because each read unpacks, and an outer checkpoint unpacks only once
        inputs, parameters = saved[: ctx.n], saved[ctx.n :]
        with ctx.recomputation.modules_restored(), torch.enable_grad():
            if create_graph:
                # Views: if one input was computed from another, the path between them belongs to the outer graph.
                inputs = [with_class_and_attributes(t.view_as(t), t) for t in inputs]
            else:
                detached = [with_class_and_attributes(t.detach(), t) for t in inputs]
                inputs = [t.requires_grad_(needed) for t, needed in zip(detached, needs_grad, strict=False)]
            result = ctx.recomputation.recompute(ctx.function, *inputs)
        ctx.recomputation.check_result(result)
        outputs = tensors_in(result)
        check_parameters_listed(ctx.recomputation.name, outputs, inputs, parameters, _REMEDY)
        pairs = [(o, g) for o, g in zip(outputs, grad_outputs, strict=True) if g is not None and o.requires_grad]
        targets = [t for t, needed in zip([*inputs, *parameters], needs_grad, strict=True) if needed]
        if not pairs or not targets:
            return None, None, *(None for _ in needs_grad)
        with ctx.recomputation.modules_restored(), _disabled_hooks(parameters):
            grads = iter(
                torch.autograd.grad(
                    [output for output, _ in pairs],
                    targets,
                    [grad for _, grad in pairs],
                    allow_unused=True,
                    create_graph=create_graph,
                )
            )
        return None, None, *(next(grads) if needed else None for needed in needs_grad)


_REMEDY = "list them, or use checkpoint if they are swapped while it runs, as FSDP swaps sharded parameters"


@contextmanager
def _disabled_hooks(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Disable the `register_hook` hooks of `tensors` in the inner backward. The hooks fire once, in the outer graph.

    The hooks are disabled for all threads. If several threads run a backward through one model at the same time, and
    its leaf tensors have hooks, use `checkpoint`.
    """
    disabled = [(hooks, dict(hooks)) for hooks in map(tensor_hooks, tensors) if hooks]
    for hooks, _ in disabled:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, saved in disabled:
            hooks.update(saved)
