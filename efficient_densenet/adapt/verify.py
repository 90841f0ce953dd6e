"""Verify by a numerical trial that a block's own forward computes what its parts say.

The trial runs on a few random pixels, with random values in place of all parameters and buffers, so that the block does
not change and no weight that happens to be zero or small hides a difference.
"""

import gc
import random
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from .._torch_private import is_flattened_by_fsdp1
from ..engines.eligibility import HOOKS
from .fingerprint import Fingerprint, change_since, fingerprint
from .structure import first_conv


class VerificationError(Exception):
    """Raised for a block that is not a dense block; the message says in what it differs from one."""


class SideEffectError(VerificationError):
    """Raised for a block whose forward does more than compute its output, so that it must not be recomputed either."""


Result = list[Any]
"""What a run produces, in this order: output, grad_input, random states, buffers."""
Results = list[Result]
"""The results in evaluation mode and in training mode."""
Run = Callable[[Callable[[Tensor], Tensor]], Results]


@contextmanager
def trial(module: nn.Module, in_channels: int, size: int = 3) -> Iterator[Run]:
    """Prepare `module` for a trial, and yield a function that runs a forward in it on an input of few pixels."""
    if any(map(_has_computed_weights, module.modules())):
        raise VerificationError(
            "holds weights that are no parameters, as torch.nn.utils.weight_norm, spectral_norm and prune make them"
        )
    if any(map(is_flattened_by_fsdp1, module.modules())):
        raise VerificationError(
            "holds parameters that FullyShardedDataParallel has sharded: call make_efficient before sharding the model"
        )
    conv = first_conv(module)
    with _isolated(module), _random_parameters_and_buffers(module):
        weight = next(conv.parameters())  # not conv.weight, which a parametrization would compute
        x = torch.randn(2, in_channels, *([size] * len(conv.kernel_size)), device="cpu").to(weight.device, weight.dtype)
        yield lambda forward: [_run(module, forward, x, training) for training in (False, True)]


def _has_computed_weights(module: nn.Module) -> bool:
    tensors = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
    return any(value.requires_grad or f"{name}_orig" in module._parameters for name, value in tensors.items())


def describe_difference(block_results: Results, run: Run, forward: Callable[[Tensor], Tensor]) -> str | None:
    """In what the block differs from the dense block that `forward` computes, or None if they agree."""
    try:
        results = run(forward)
    except VerificationError as failure:
        return f"has layers that {failure}, as norm, activation and convolution in turn on a growing concatenation"
    return None if all(map(_agree, results, block_results)) else _describe_difference(block_results, results)


def _run(block: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor, training: bool) -> Result:
    """Run `forward` and its backward in the given mode, from a fixed seed, and undo all changes of the modules."""
    before = [(module, dict(vars(module))) for module in block.modules()]
    for module, _ in before:
        module.training = training
        vars(module)["_buffers"] = {name: b if b is None else b.clone() for name, b in module._buffers.items()}
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    state, x = fingerprint(block), x.clone().requires_grad_()
    try:
        output = forward(x)
        if not isinstance(output, Tensor):
            raise VerificationError(f"returns a {type(output).__name__}, where a dense block returns a tensor")
        _check_no_side_effects(block, state, before)
        states = _random_states(x.device)
        grad_output = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device)
        output.backward(grad_output.view_as(output))
        values, reference = output.detach(), weakref.ref(output)
        del output
        _check_released(reference)
        return [values, x.grad, *states, *(b for m, _ in before for b in m._buffers.values())]
    except VerificationError:
        raise
    except Exception as exc:
        lines = str(exc).strip().splitlines() or [""]
        raise VerificationError(f"could not be run on a trial input: {type(exc).__name__}: {lines[0]}") from exc
    finally:
        for module, values in before:
            vars(module).clear()
            vars(module).update(values)


def _check_no_side_effects(block: nn.Module, state: Fingerprint, before: list[tuple[nn.Module, dict]]) -> None:
    """Raise `SideEffectError` if a forward changed what an engine would leave as it is, or change twice."""
    change = change_since(state, block)
    if change is not None:
        raise SideEffectError(f"changes its own state in its forward, which an engine would not: {change}")
    parametrizations = [module._modules.get("parametrizations") for module in block.modules()]
    known = {module for each in parametrizations if each is not None for module in each.modules()}
    for module, values in before:
        if isinstance(module, _NormBase) or module in known:
            continue  # under the exactly-once rule; never recomputed
        for name, buffer in values["_buffers"].items():
            changed = module._buffers[name]
            if buffer is not None and (changed is None or not torch.equal(changed, buffer)):
                raise SideEffectError(
                    f"changes the buffer {name} of a {type(module).__name__} in its forward, which recomputing would "
                    "do again"
                )


def _check_released(output: "weakref.ReferenceType[Tensor]") -> None:
    """Raise `SideEffectError` if somebody else holds a forward's output, such as a list of skip connections."""
    if output() is not None:
        gc.collect()
    if output() is not None:
        raise SideEffectError("hands its output to another object in its forward, which an engine would not")


def _agree(actual: Result, expected: Result) -> bool:
    return all(map(_values_agree, actual, expected))


def _values_agree(actual: Any, expected: Any) -> bool:
    """Whether two tensors are equal up to a tolerance relative to the largest value, or two other values are equal."""
    if not (isinstance(actual, Tensor) and isinstance(expected, Tensor)):
        return actual is expected or (type(actual) is type(expected) and actual == expected)
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return False
    tolerance = 1e-8 if actual.dtype == torch.float64 else 1e-3
    if not actual.numel():
        return True
    difference = (actual.double() - expected.double()).abs().max()
    return bool(difference <= tolerance * expected.double().abs().max())


def _describe_difference(block_results: Results, parts_results: Results) -> str:
    actual, expected, mode = next(
        (actual, expected, mode)
        for actual, expected, mode in zip(block_results, parts_results, ("evaluation", "training"), strict=True)
        if not _agree(actual, expected)
    )
    if actual[0].shape != expected[0].shape:
        shape, dense_shape = tuple(actual[0].shape[1:]), tuple(expected[0].shape[1:])
        return f"returns {shape} for a trial input, where a dense block with these layers returns {dense_shape}"
    what = "values" if not _agree(actual[:2], expected[:2]) else "random numbers or running statistics"
    return (
        f"has other {what} in {mode} mode than the dense block that its layers suggest: norm, activation, convolution "
        "(and dropout) on a growing concatenation"
    )


@contextmanager
def _isolated(block: nn.Module) -> Iterator[None]:
    """Disable hooks, warnings and autocast, and enable autograd; restore hooks, modes and random states afterwards."""
    modules = list(block.modules())
    before = [{name: vars(module)[name] for name in (*HOOKS, "training")} for module in modules]
    devices = {parameter.device for parameter in block.parameters() if parameter.device.type == "cuda"}
    state, numpy_state = random.getstate(), _numpy_state()
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
            if numpy_state is not None:
                sys.modules["numpy"].random.set_state(numpy_state)
            for module, values in zip(modules, before, strict=True):
                vars(module).update(values)


@contextmanager
def _random_parameters_and_buffers(block: nn.Module) -> Iterator[None]:
    """Replace the parameters and buffers of all modules by random tensors, shared where the originals are shared."""
    torch.manual_seed(0)
    replacements: dict[int, Tensor] = {}
    before = [(module, module._parameters, module._buffers) for module in block.modules()]

    def replacement(tensor: Tensor | None, positive: bool) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in replacements:
            replacements[id(tensor)] = _random_like(tensor, positive)
        return replacements[id(tensor)]

    try:
        for module, parameters, buffers in before:
            vars(module)["_parameters"] = {name: replacement(value, False) for name, value in parameters.items()}
            vars(module)["_buffers"] = {name: replacement(value, True) for name, value in buffers.items()}
        yield
    finally:
        for module, parameters, buffers in before:
            vars(module).update(_parameters=parameters, _buffers=buffers)


def _random_like(tensor: Tensor, positive: bool) -> Tensor:
    """Random values in the shape of `tensor`, and the values of integers.

    Buffers are positive, as variances are. Vectors are so large that a clipped activation after a norm shows.
    """
    device = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
    if not tensor.is_floating_point():  # such as a flag
        return (
            torch.zeros(tensor.shape, dtype=tensor.dtype, device=device) if tensor.is_meta else tensor.detach().clone()
        )
    values = torch.randn(tensor.shape, device="cpu").to(device, _trial_dtype(device))
    if positive:
        return values.abs() + 0.5
    return values * 4 if tensor.dim() < 2 else values / (8 * tensor[0].numel() ** 0.5)


def _trial_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _numpy_state() -> Any:
    """The state of NumPy's global generator, which some stochastic depth draws from; None where nothing uses NumPy."""
    return sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None


def _random_states(device: torch.device) -> list[Any]:
    states = [torch.get_rng_state(), random.getstate(), str(_numpy_state())]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states
