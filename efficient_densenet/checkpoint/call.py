"""`checkpoint`: recompute any function in the backward, with arguments and results of any structure."""

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import set_checkpoint_early_stop

from .._compilers import CHECKPOINTS_UPDATE_ONCE, is_exporting
from .._recompute_mode import is_checkpointing, is_checkpointing_disabled, is_recomputing
from .._torch_private import functorch_is_active, saved_tensors_hooks_enabled
from ..norms.batch_norm import update_once
from .hooks import fire_once, may_stop_early
from .parameters import function_name, reachable_modules, with_submodules
from .recomputable import DEFAULTS, ContextFn, Options, RecomputableCall, flatten

_HAS_HOOKS_OPTION = "respect_saved_tensors_hooks" in inspect.signature(torch_checkpoint).parameters


def checkpoint(
    function: Callable,
    *args: Any,
    parameters: nn.Module | Iterable[Tensor | nn.Module] | None = None,
    use_reentrant: bool = False,
    preserve_rng_state: bool = True,
    offload: bool = False,
    generators: Iterable[torch.Generator] = (),
    early_stop: bool = True,
    context_fn: ContextFn | None = None,
    determinism_check: str = "default",
    debug: bool = False,
    **kwargs: Any,
) -> Any:
    """Return `function(*args, **kwargs)`. Only the arguments are saved for backward; all other tensors are recomputed.

    This is `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`, in which batch norms update their running
    statistics once, forward hooks fire once, and modules are recomputed in the mode of the forward.

    Args:
        function: a module, a method of a module, or any callable that computes the same result in each call.
        parameters: modules that `function` uses besides its arguments. Those that it refers to as a closure, global
            or attribute are found without this argument. Tensors may be listed too; they need not be.
        use_reentrant: False. True gives a warning, and the same gradients.
        preserve_rng_state: restore the RNG state for the recomputation, as dropout needs.
        offload: save the tensor arguments in CPU memory until the backward.
        generators: random generators that `function` uses besides the default generators.
        early_stop: end the recomputation when it has saved the last tensor that the forward saved for backward. Early
            stopping is also off inside `torch.utils.checkpoint.set_checkpoint_early_stop(False)`.
        context_fn: returns two context managers, one for the forward and one for the recomputation.
            `torch.utils.checkpoint.create_selective_checkpoint_contexts` makes a pair that saves the results of chosen
            operations, which are then not recomputed.
        determinism_check: "default" compares shapes, dtypes and devices of saved and recomputed tensors; "none" does
            not.
        debug: show the operations of forward and recomputation in the error of a recomputation that differs.
    """
    generators = tuple(generators)
    if generators and not preserve_rng_state:
        raise ValueError(
            "found generators with preserve_rng_state=False, which restores no RNG state: give only one of the two"
        )
    if use_reentrant:
        warnings.warn(
            "found use_reentrant=True, which this checkpoint does not have: it recomputes as with use_reentrant=False, "
            "which computes the same gradients",
            stacklevel=2,
        )
    options = Options(preserve_rng_state, generators, offload, early_stop, context_fn, determinism_check, debug)
    return checkpoint_call(function, args, kwargs, options, parameters)


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
    leaves, spec = flatten(args, kwargs)
    modules = with_submodules((*reachable_modules(function), *_as_list(parameters), *leaves))
    if any(map(_is_lazy, modules)):
        return function(*args, **kwargs)  # whose parameters get their sizes now
    for module in modules:
        fire_once(module)
        update_once(module)
    call = RecomputableCall(function, leaves, spec, modules, options)
    early_stop = options.early_stop and may_stop_early(modules)
    with _offloading(options, leaves), nullcontext() if early_stop else set_checkpoint_early_stop(False):
        result = torch_checkpoint(call, *leaves, use_reentrant=False, **_torch_options(options))
    if call.error is not None:
        try:
            raise call.error
        finally:
            call.error = None  # breaks a reference cycle, which would hold the tensors of the forward
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


def _offloading(options: Options, leaves: Iterable[Any]) -> AbstractContextManager:
    """Return a context in which `offload` holds. Inside a checkpoint, the hooks of the outer one save the arguments."""
    is_inner = is_checkpointing() or is_recomputing()
    if options.offload and not is_inner and any(map(is_on_device, leaves)):
        return save_on_cpu(pin_memory=torch.cuda.is_available())
    return nullcontext()


def is_on_device(leaf: Any) -> bool:
    """Return True for a tensor that offloading copies."""
    return isinstance(leaf, Tensor) and leaf.device.type not in ("cpu", "meta")


def _is_lazy(module: Any) -> bool:
    lazy: Any = LazyModuleMixin
    return isinstance(module, lazy) and module.has_uninitialized_params()


def _torch_options(options: Options) -> dict[str, Any]:
    """Return the keyword arguments of torch's function. Selective checkpointing saves its tensors itself."""
    return {
        "preserve_rng_state": False,  # done here, and only where random numbers were drawn
        "determinism_check": options.determinism_check,
        "debug": options.debug,
        **({} if options.context_fn is None else {"context_fn": options.context_fn}),
        **({"respect_saved_tensors_hooks": False} if _HAS_HOOKS_OPTION and options.context_fn is not None else {}),
    }


def _as_list(parameters: nn.Module | Iterable[Tensor | nn.Module] | None) -> list[Tensor | nn.Module]:
    if parameters is None:
        return []
    listed = [parameters] if isinstance(parameters, (nn.Module, Tensor)) else list(parameters)
    wrong = next((value for value in listed if not isinstance(value, (nn.Module, Tensor))), None)
    if wrong is not None:
        raise TypeError(f"found a {type(wrong).__name__} in parameters, which must contain only tensors and modules")
    return listed
