"""A trial of a block: does its own forward do what its parts say?

It runs on a few random pixels, with random numbers in place of all its parameters and buffers, so that nothing about
the block changes and no weight that happens to be zero or small hides a difference.
"""

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..engines.eligibility import HOOKS
from ..engines.parts import BlockParts
from .layers import run_layers
from .structure import read_block


class DifferentError(Exception):
    """The block is no dense block; the message says how it was found out."""


Seen = list[list[Any]]
"""All that can be seen of a block in evaluation and in training mode: output, gradient, random numbers, buffers."""
Run = Callable[[Callable[[Tensor], Tensor]], Seen]


@contextmanager
def trial(block: nn.Module) -> Iterator[Run]:
    """Have a function run in the block's place, and be watched."""
    conv = read_block(block).layers[0].conv1
    if any(isinstance(v, Tensor) and v.requires_grad for module in block.modules() for v in vars(module).values()):
        raise DifferentError("holds weights that are no parameters, as hooks of old weight_norm compute")
    with _undisturbed(block), _random_tensors(block):
        shape = 2, conv.in_channels, *([3] * len(conv.kernel_size))
        x = torch.randn(shape).to(conv.weight.device, conv.weight.dtype)
        yield lambda function: [_watch(block, function, x, training) for training in (False, True)]


def order_of(theirs: Seen, run: Run, read: Callable[[bool], BlockParts]) -> bool:
    """Whether new features are put first, which of the two gives what was seen; `DifferentError` if neither does."""
    orders = [order for order in (False, True) if read(order).newest_first == order]
    found = [run(partial(_by_parts, read, order)) for order in orders]
    for order, ours in zip(orders, found, strict=True):
        if all(map(_alike, ours, theirs)):
            return order
    raise DifferentError(_difference(theirs, found[0]))


def _by_parts(read: Callable[[bool], BlockParts], newest_first: bool, x: Tensor) -> Tensor:
    return run_layers(read(newest_first), x)


def _watch(block: nn.Module, function: Callable[[Tensor], Tensor], x: Tensor, training: bool) -> list[Any]:
    before = [(module, dict(vars(module))) for module in block.modules()]
    for module, _ in before:
        module.training = training
        vars(module)["_buffers"] = {name: b if b is None else b.clone() for name, b in module._buffers.items()}
    torch.manual_seed(0)
    random.seed(0)
    x = x.clone().requires_grad_()
    try:
        output = function(x)
        if not isinstance(output, Tensor):
            raise DifferentError(f"gives a {type(output).__name__}, where a dense block gives a tensor")
        state = _random_state(x.device)
        weights = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device)
        output.backward(weights.view_as(output))
        return [output.detach(), x.grad, *state, *(b for m, _ in before for b in m._buffers.values())]
    except DifferentError:
        raise
    except Exception as exc:
        lines = str(exc).strip().splitlines() or [""]
        raise DifferentError(f"could not be run on a trial input: {type(exc).__name__}: {lines[0]}") from exc
    finally:
        for module, values in before:
            vars(module).clear()
            vars(module).update(values)


def _alike(found: list[Any], expected: list[Any]) -> bool:
    return all(map(_same, found, expected))


def _same(found: Any, expected: Any) -> bool:
    if not (isinstance(found, Tensor) and isinstance(expected, Tensor)):
        return found is expected or (type(found) is type(expected) and found == expected)
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    tolerance = 1e-8 if found.dtype == torch.float64 else 1e-3
    if not found.numel():
        return True
    difference = (found.double() - expected.double()).abs().max()
    return bool(difference <= tolerance * expected.double().abs().max())


def _difference(theirs: Seen, ours: Seen) -> str:
    found, expected, mode = next(
        (found, expected, mode)
        for found, expected, mode in zip(theirs, ours, ("evaluation", "training"), strict=True)
        if not _alike(found, expected)
    )
    if found[0].shape != expected[0].shape:
        made, usual = tuple(found[0].shape[1:]), tuple(expected[0].shape[1:])
        return f"gives {made} from a trial input, where a dense block with these layers gives {usual}"
    what = "values" if not _alike(found[:2], expected[:2]) else "random numbers or running statistics"
    return (
        f"has other {what} in {mode} mode than norm, activation, convolution (and dropout) on a growing concatenation, "
        "which its layers look like"
    )


@contextmanager
def _undisturbed(block: nn.Module) -> Iterator[None]:
    """Hooks rest, modes come back, random streams go on as if nothing had been drawn; autograd records."""
    modules = list(block.modules())
    before = [{name: vars(module)[name] for name in (*HOOKS, "training")} for module in modules]
    devices = {parameter.device for parameter in block.parameters() if parameter.device.type == "cuda"}
    state = random.getstate()
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for device in {"cpu", *(device.type for device in devices)}:
            stack.enter_context(torch.autocast(device, enabled=False))
        try:
            for module in modules:
                vars(module).update({name: {} for name in HOOKS})
            yield
        finally:
            random.setstate(state)
            for module, values in zip(modules, before, strict=True):
                vars(module).update(values)


@contextmanager
def _random_tensors(block: nn.Module) -> Iterator[None]:
    """Random tensors stand for every module's own."""
    torch.manual_seed(0)
    made: dict[int, Tensor] = {}
    before = [(module, module._parameters, module._buffers) for module in block.modules()]

    def stand_in(tensor: Tensor | None, positive: bool) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in made:
            made[id(tensor)] = _random_like(tensor, positive)
        return made[id(tensor)]

    try:
        for module, parameters, buffers in before:
            vars(module)["_parameters"] = {name: stand_in(value, False) for name, value in parameters.items()}
            vars(module)["_buffers"] = {name: stand_in(value, True) for name, value in buffers.items()}
        yield
    finally:
        for module, parameters, buffers in before:
            vars(module).update(_parameters=parameters, _buffers=buffers)


def _random_like(tensor: Tensor, positive: bool) -> Tensor:
    """Large enough after a norm that a clipped activation shows; positive for buffers, as variances are."""
    device = "cpu" if tensor.device.type == "meta" else tensor.device
    if not tensor.is_floating_point():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    values = torch.randn(tensor.shape).to(device, _precision(torch.device(device)))
    if positive:
        return values.abs() + 0.5
    return values * 4 if tensor.dim() < 2 else values / (8 * tensor[0].numel() ** 0.5)


def _precision(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _random_state(device: torch.device) -> list[Any]:
    states = [torch.get_rng_state(), random.getstate()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states
