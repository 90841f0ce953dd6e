"""`checkpoint`: recompute any function in the backward, with arguments and results of any structure."""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from .._compilers import CHECKPOINTS_UPDATE_ONCE, is_exporting
from .._recompute_mode import is_checkpointing_disabled
from .._torch_private import functorch_is_active, is_managed_by_fsdp, saved_tensors_hooks_enabled
from ..norms.batch_norm import update_once
from .frame import CheckpointFrame
from .hooks import fire_once
from .parameters import check_parameters_listed, modules_of, parameters_of, reachable_modules
from .recomputation import DEFAULTS, ContextFn, Options, function_name, tensors_in


def checkpoint(
    function: Callable,
    *args: Any,
    parameters: nn.Module | Iterable[Tensor | nn.Module] | None = None,
    preserve_rng_state: bool = True,
    offload: bool = False,
    generators: Iterable[torch.Generator] = (),
    early_stop: bool = True,
    context_fn: ContextFn | None = None,
    **kwargs: Any,
) -> Any:
    """Return `function(*args, **kwargs)`. Only the arguments are saved for backward; all other tensors are recomputed.

    Args:
        function: a module, a method of a module, or any callable that computes the same result in each call.
        parameters: tensors and modules that `function` uses besides its arguments. If `function` is a module or a
            method of a module, its parameters are found without this argument. For a closure they must be listed.
        preserve_rng_state: restore the RNG state for the recomputation, as dropout needs.
        offload: save the tensor arguments in CPU memory until the backward.
        generators: random generators that `function` uses besides the default generators.
        early_stop: end the recomputation when it has saved the last tensor that the forward saved for backward. Early
            stopping is also off inside `torch.utils.checkpoint.set_checkpoint_early_stop(False)`.
        context_fn: returns two context managers, one for the forward and one for the recomputation, as in
            `torch.utils.checkpoint`. `torch.utils.checkpoint.create_selective_checkpoint_contexts` makes a pair that
            saves the results of chosen operations, which are then not recomputed.
    """
    for name in ("use_reentrant", "determinism_check"):
        if name in kwargs and not _takes(function, name):
            raise TypeError(
                f"found {name}, an argument of torch.utils.checkpoint.checkpoint, which this function does not take: "
                "leave it out (this checkpoint is not reentrant, and checks every recomputation)"
            )
    generators = tuple(generators)
    if generators and not preserve_rng_state:
        raise ValueError(
            "found generators with preserve_rng_state=False, which restores no RNG state: give only one of the two"
        )
    options = Options(preserve_rng_state, generators, offload, early_stop, context_fn)
    return checkpoint_call(function, args, kwargs, options, parameters)


def _takes(function: Callable, name: str) -> bool:
    """Whether `function` may have an argument of this name."""
    try:
        parameters = inspect.signature(function.forward if isinstance(function, nn.Module) else function).parameters
    except (TypeError, ValueError):  # a function in C may have no signature
        return True
    return name in parameters or any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())


def checkpoint_call(
    function: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    options: Options = DEFAULTS,
    parameters: nn.Module | Iterable[Tensor | nn.Module] | None = None,
) -> Any:
    """`checkpoint` with `args` and `kwargs` as a tuple and a dict, so that keyword arguments may have any name."""
    if (
        not torch.is_grad_enabled()
        or is_checkpointing_disabled()
        or is_exporting(training=True)
        or functorch_is_active()
    ):
        return function(*args, **kwargs)
    if torch.compiler.is_compiling():
        return _checkpoint_compiled(function, args, kwargs, options)
    if not saved_tensors_hooks_enabled():
        warnings.warn(f"{function_name(function)} is not checkpointed, for lack of saved-tensor hooks", stacklevel=3)
        return function(*args, **kwargs)
    listed = _as_list(parameters)
    bound_modules = modules_of(function)
    modules = _modules_in((*(bound_modules or reachable_modules(function)), *listed, *args, *kwargs.values()))
    for module in modules:
        update_once(module)
        fire_once(module)
    frame = CheckpointFrame(function, args, kwargs, modules, options)
    result = frame.forward(*args, **kwargs)
    if not bound_modules and not any(map(is_managed_by_fsdp, modules)):  # FSDP's gathered parameters cannot be listed
        tensors = [t for value in listed for t in (parameters_of(value) if isinstance(value, nn.Module) else [value])]
        check_parameters_listed(function_name(function), tensors_in(result), tensors_in((args, kwargs)), tensors)
    return result


def checkpoint_sequential(
    modules: nn.Sequential | Sequence[Callable], segments: int, input: Any, **options: Any
) -> Any:
    """Run `modules` one after another, in `segments` segments, and checkpoint each segment except the last.

    Checkpointing the last segment would save no memory, because its backward starts right after its forward. `options`
    are keyword arguments of `checkpoint`.
    """
    functions = list(modules)
    if "parameters" in options:
        options["parameters"] = _as_list(options["parameters"])  # the first segment would exhaust an iterator
    if not 1 <= segments <= len(functions):
        raise ValueError(f"segments is {segments}, but must be from 1 to the number of modules, {len(functions)}")
    length = len(functions) // segments
    *checkpointed, last = range(0, segments * length, length)
    for start in checkpointed:
        input = checkpoint(functools.partial(_run_sequentially, *functions[start : start + length]), input, **options)
    return _run_sequentially(*functions[last:], input)


def _run_sequentially(*functions_and_input: Any) -> Any:
    *functions, value = functions_and_input
    for function in functions:
        value = function(value)
    return value


def _checkpoint_compiled(function: Callable, args: tuple, kwargs: dict[str, Any], options: Options) -> Any:
    if not CHECKPOINTS_UPDATE_ONCE:
        return function(*args, **kwargs)
    call = functools.partial(function, **kwargs) if kwargs else function
    context: dict[str, Any] = {} if options.context_fn is None else {"context_fn": options.context_fn}
    return torch_checkpoint(call, *args, use_reentrant=False, preserve_rng_state=options.preserve_rng_state, **context)


def _as_list(parameters: nn.Module | Iterable[Tensor | nn.Module] | None) -> list[Tensor | nn.Module]:
    if parameters is None:
        return []
    listed = [parameters] if isinstance(parameters, (nn.Module, Tensor)) else list(parameters)
    wrong = next((value for value in listed if not isinstance(value, (nn.Module, Tensor))), None)
    if wrong is not None:
        raise TypeError(f"found a {type(wrong).__name__} in parameters, which must contain only tensors and modules")
    return listed


def _modules_in(values: Iterable[Any]) -> list[nn.Module]:
    """Return the modules among `values` with all their submodules, each once."""
    modules: dict[nn.Module, None] = {}
    remaining = [value for value in values if isinstance(value, nn.Module)]
    while remaining:  # takes half the time of nn.Module.modules
        module = remaining.pop()
        if module not in modules:
            modules[module] = None
            remaining.extend(child for child in module._modules.values() if child is not None)
    return list(modules)
