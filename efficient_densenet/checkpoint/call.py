"""`checkpoint`: any function, with arguments and results of any shape."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from .._recompute_mode import is_disabled
from .._torch_private import compilers_recompute_exactly, functorch_is_active, is_exporting
from ..norms.batch_norm import update_once
from .frame import Frame
from .hooks import fire_once
from .parameters import check_listed, modules_of, modules_reached_by, parameters_of
from .recomputation import name_of, tensors_in


def checkpoint(
    function: Callable,
    *args: Any,
    parameters: nn.Module | Iterable[Tensor | nn.Module] | None = None,
    preserve_rng_state: bool = True,
    offload: bool = False,
    generators: Iterable[torch.Generator] = (),
    **kwargs: Any,
) -> Any:
    """`function(*args, **kwargs)`, keeping nothing for the backward but the arguments.

    Args:
        function: a module, a method of one, or any callable that does the same each time it is called.
        parameters: what `function` computes with besides its arguments, as tensors or modules. Those of a module, or of
            the module that a method belongs to, are found without; a closure's must be given.
        preserve_rng_state: draw the same random numbers in the recomputation, as dropout needs.
        offload: keep the tensor arguments in CPU memory until the backward.
        generators: random generators that `function` draws from besides the default ones.
    """
    return run_twice(function, args, kwargs, parameters, preserve_rng_state, offload, generators)


def run_twice(
    function: Callable,
    args: tuple,
    kwargs: dict,
    parameters: nn.Module | Iterable[Tensor | nn.Module] | None = None,
    preserve_rng_state: bool = True,
    offload: bool = False,
    generators: Iterable[torch.Generator] = (),
) -> Any:
    """`checkpoint` for a function whose own arguments may have any name."""
    if not torch.is_grad_enabled() or is_disabled() or is_exporting(training=True) or functorch_is_active():
        return function(*args, **kwargs)
    if torch.compiler.is_compiling():
        return _compiled(function, args, kwargs, preserve_rng_state)
    generators = list(generators)
    if generators and not preserve_rng_state:
        raise ValueError("found generators with preserve_rng_state=False, which restores none: give one or the other")
    listed = _listed(parameters)
    owners = modules_of(function)
    reached = owners or modules_reached_by(function)
    modules = _every_module_in((*reached, *listed, *args, *kwargs.values()))
    for module in modules:
        update_once(module)
        fire_once(module)
    result = Frame(function, args, kwargs, modules, preserve_rng_state, generators, offload).first_run(*args, **kwargs)
    if not owners:
        known = [t for value in listed for t in (parameters_of(value) if isinstance(value, nn.Module) else [value])]
        check_listed(name_of(function), tensors_in(result), tensors_in((args, kwargs)), known)
    return result


def checkpoint_sequential(
    modules: nn.Sequential | Sequence[Callable], segments: int, input: Any, **options: Any
) -> Any:
    """Run `modules` one after the other, in `segments` parts that are each checkpointed, except the last.

    The last part's backward comes at once, so that nothing would be gained. `options` are those of `checkpoint`.
    """
    functions = list(modules)
    if "parameters" in options:
        options["parameters"] = _listed(options["parameters"])  # an iterator would be spent on the first part
    if not 1 <= segments <= len(functions):
        raise ValueError(f"segments is {segments}, but must be from 1 to the number of modules, {len(functions)}")
    length = len(functions) // segments
    *recomputed, last = range(0, segments * length, length)
    for start in recomputed:
        input = checkpoint(functools.partial(_in_turn, *functions[start : start + length]), input, **options)
    return _in_turn(*functions[last:], input)


def _in_turn(*functions_and_input: Any) -> Any:
    *functions, value = functions_and_input
    for function in functions:
        value = function(value)
    return value


def _compiled(function: Callable, args: tuple, kwargs: dict, preserve_rng_state: bool) -> Any:
    if not compilers_recompute_exactly():
        return function(*args, **kwargs)
    call = functools.partial(function, **kwargs) if kwargs else function
    return torch_checkpoint(call, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


def _listed(parameters: nn.Module | Iterable[Tensor | nn.Module] | None) -> list[Tensor | nn.Module]:
    if parameters is None:
        return []
    listed = [parameters] if isinstance(parameters, (nn.Module, Tensor)) else list(parameters)
    wrong = next((value for value in listed if not isinstance(value, (nn.Module, Tensor))), None)
    if wrong is not None:
        raise TypeError(f"found a {type(wrong).__name__} in parameters, which must hold tensors or modules")
    return listed


def _every_module_in(values: Iterable[Any]) -> list[nn.Module]:
    found = {module: None for value in values if isinstance(value, nn.Module) for module in value.modules()}
    return list(found)
