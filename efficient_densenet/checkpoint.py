"""Run a function without keeping its intermediate tensors, and run it again when its gradient is wanted."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from .torch_private import tensor_hooks


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
        inputs = args[:n]
        ctx.function, ctx.n = function, n
        ctx.autocast = _AutocastState(args)
        before = _RandomState(args)
        with ctx.autocast.restored():
            outputs = function(*inputs)
        # A function that drew nothing needs no state restored, and the state is 5 KB that need not be kept.
        ctx.random = None if before == _RandomState(args) else before
        ctx.save_for_backward(*args)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(o for o in _as_tuple(outputs) if not _is_differentiable(o)))
        return outputs

    @staticmethod
    def backward(ctx: Any, *output_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        args = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        differentiable_again = torch.is_grad_enabled()
        inputs, parameters = args[: ctx.n], args[ctx.n :]
        if not differentiable_again:
            inputs = [t.detach().requires_grad_(need) for t, need in zip(inputs, needed, strict=False)]
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(ctx.autocast.restored())
            if ctx.random is not None:
                stack.enter_context(ctx.random.restored())
            # Differentiate in views: one input may have been computed from another, and that path is not ours.
            # A view can also be written into where the function does so, which a leaf cannot.
            inputs = [t.view_as(t) for t in inputs]
            outputs = _as_tuple(ctx.function(*inputs))
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, output_grads, strict=True)
            if grad is not None and output.requires_grad
        ]
        wanted = [t for t, need in zip(chain(inputs, parameters), needed, strict=True) if need]
        with _silenced_hooks(wanted):
            grads = iter(
                torch.autograd.grad(
                    [output for output, _ in pairs],
                    wanted,
                    [grad for _, grad in pairs],
                    allow_unused=True,
                    create_graph=differentiable_again,
                )
                if pairs
                else [None] * len(wanted)
            )
        return None, None, *(next(grads) if need else None for need in needed)


def parameters_of(*modules: nn.Module) -> list[Tensor]:
    """The tensors that `modules` optimise, also in the replicas of `nn.DataParallel`, whose `parameters()` is empty."""
    found = {}
    for module in chain.from_iterable(m.modules() for m in modules):
        replicated = getattr(module, "_former_parameters", {})
        for tensor in chain(module._parameters.values(), replicated.values()):
            if tensor is not None:
                found[id(tensor)] = tensor
    return list(found.values())


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


class _RandomState:
    """The default generators of the CPU and of every device that `tensors` live on, as they are now."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        self.cpu = torch.get_rng_state()
        devices = {t.device for t in tensors if isinstance(t, Tensor)}
        self.devices = {device: _get_state(device) for device in devices if device.type not in ("cpu", "meta")}

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _RandomState)
            and torch.equal(self.cpu, other.cpu)
            and self.devices.keys() == other.devices.keys()
            and all(torch.equal(state, other.devices[device]) for device, state in self.devices.items())
        )

    __hash__ = None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Replay from this state, then go on from where the generators were."""
        present = _RandomState(torch.empty(0, device=device) for device in self.devices)
        self._set()
        try:
            yield
        finally:
            present._set()

    def _set(self) -> None:
        torch.set_rng_state(self.cpu)
        for device, state in self.devices.items():
            torch.get_device_module(device).set_rng_state(state, device)


def _get_state(device: torch.device) -> Tensor:
    return torch.get_device_module(device).get_rng_state(device)


class _AutocastState:
    """Autocast as it is now, for the CPU and for every device type among `tensors`."""

    def __init__(self, tensors: Iterable[Any]) -> None:
        types = {"cpu", *(t.device.type for t in tensors if isinstance(t, Tensor))}
        self.states = {
            kind: (torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in types
            if torch.amp.is_autocast_available(kind)
        }

    @contextmanager
    def restored(self) -> Iterator[None]:
        # Autocast caches the weights it casts. Casts cached by the first run carry no graph, and casts cached by the
        # second one carry a graph that is gone: neither may be seen by the code around, so both runs go uncached.
        with ExitStack() as stack:
            for kind, (dtype, enabled) in self.states.items():
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield


def _as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
