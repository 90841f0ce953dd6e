"""`checkpoint`: `torch.utils.checkpoint` in which batch norms update once, forward hooks fire once, and modules are
recomputed in the training mode of the forward."""

import functools
import gc
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import set_checkpoint_early_stop

from .._compilers import CHECKPOINTS_UPDATE_ONCE, is_exporting
from .._recompute_mode import state, state_with, with_attributes
from .._torch_private import functorch_is_active, is_managed_by_fsdp, saved_tensors_hooks_enabled
from ..norms.batch_norm import UpdatesOnce, update_once
from .hooks import fire_once

ALREADY_OFFLOADED = "cpu", "meta"
"""The types of devices whose tensors are saved as they are: copies would miss changes in place."""

ContextFn = Callable[[], tuple[AbstractContextManager, AbstractContextManager]]


def checkpoint(
    function: Callable,
    *args: Any,
    parameters: nn.Module | Iterable[Tensor | nn.Module] | None = (),
    use_reentrant: bool = False,
    offload: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool = True,
    context_fn: ContextFn | None = None,
    determinism_check: str = "default",
    debug: bool = False,
    **kwargs: Any,
) -> Any:
    """Return `function(*args, **kwargs)`. Only the arguments are saved for backward; all other tensors are recomputed.

    This is `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`, in which batch norms update their running
    statistics once, forward hooks fire once, and modules are recomputed in the training mode of the forward.

    Args:
        function: a module, a method of a module, or any callable that computes the same result in each call.
        parameters: modules that `function` uses besides its arguments. Those that it refers to as a closure, global
            or attribute are found without this argument. Tensors may be listed too; they need not be.
        use_reentrant: False. True gives a warning, and the same gradients.
        offload: save the tensor arguments in CPU memory until the backward.
        early_stop: end the recomputation when it has saved the last tensor that the forward saved for backward. Early
            stopping is also off inside `torch.utils.checkpoint.set_checkpoint_early_stop(False)`.

    `preserve_rng_state`, `context_fn`, `determinism_check` and `debug` are those of torch's function.
    """
    if use_reentrant:
        warnings.warn("use_reentrant=True is ignored: use_reentrant=False computes the same gradients", stacklevel=2)
    options: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}
    options |= {"preserve_rng_state": preserve_rng_state, "determinism_check": determinism_check, "debug": debug}
    used = [parameters] if isinstance(parameters, (nn.Module, Tensor)) else parameters or ()
    return checkpoint_call(function, args, kwargs, used, offload, early_stop, **options)


def checkpoint_call(
    function: Any,
    args: tuple,
    kwargs: dict[str, Any],
    used: Iterable[Any] = (),
    offload: bool = False,
    early_stop: bool = True,
    **options: Any,
) -> Any:
    """`checkpoint` with `args` and `kwargs` as a tuple and a dict, so that keyword arguments may have any name. Modules
    among `used` are those that `function` uses; `options` are torch's."""
    is_compiling = torch.compiler.is_compiling()
    if (
        not torch.is_grad_enabled()
        or state.is_disabled
        or is_exporting(training=True)
        or functorch_is_active()
        or (is_compiling and not CHECKPOINTS_UPDATE_ONCE)
    ):
        return function(*args, **kwargs)
    if is_compiling:
        call = functools.partial(function, **kwargs) if kwargs else function
        options = {name: options[name] for name in ("preserve_rng_state", "context_fn") if name in options}
        return torch_checkpoint(call, *args, use_reentrant=False, **options)
    leaves, spec = args, None
    if kwargs or not all(isinstance(value, Tensor) for value in args):  # torch's function saves positional tensors only
        leaves, spec = tree_flatten((args, kwargs))
    modules = _modules_of(function, [*used, *leaves])
    lazy: Any = LazyModuleMixin
    has_no_sizes = any(isinstance(each, lazy) and each.has_uninitialized_params() for each in modules)
    if has_no_sizes or not saved_tensors_hooks_enabled():
        return function(*args, **kwargs)
    for module in modules:
        fire_once(module)
        update_once(module)
    owner: Any = getattr(function, "__self__", None)
    if isinstance(owner, UpdatesOnce) and function == super(UpdatesOnce, owner).forward:
        function = MethodType(UpdatesOnce.forward, owner)  # it was bound before the norm was under the rule
    states = {module: {"training": module.training} | _buffers_that_are_read(module) for module in modules}
    is_selective = state.is_selective or "context_fn" in options
    parameters: list[dict[str, Any]] | None = None

    def run(*leaves: Any) -> Any:
        nonlocal parameters
        args, kwargs = (leaves, {}) if spec is None else tree_unflatten(leaves, spec)
        if parameters is None:
            with state_with(in_forward=True, is_selective=is_selective):
                result = function(*args, **kwargs)
            parameters = [module._parameters.copy() for module in modules]
            return result
        _check_parameters(modules, parameters)
        # A backward inside `disable_checkpointing` checkpoints what the forward did.
        mode = state_with(in_recomputation=True, is_disabled=False, is_selective=is_selective)
        with mode, with_attributes(states):
            return function(*args, **kwargs)

    # The hooks of an outer checkpoint save the tensors of an inner one.
    on_device = any(isinstance(leaf, Tensor) and leaf.device.type not in ALREADY_OFFLOADED for leaf in leaves)
    offloads = offload and on_device and not (state.in_forward or state.in_recomputation)
    offloading = save_on_cpu(pin_memory=torch.cuda.is_available()) if offloads else nullcontext()
    stops_early = early_stop and may_stop_early(modules)
    with offloading, nullcontext() if stops_early else set_checkpoint_early_stop(False):
        return torch_checkpoint(run, *leaves, use_reentrant=False, **options)


def may_stop_early(modules: Iterable[nn.Module]) -> bool:
    """Return False if a recomputation has to run to its end, for a forward hook that may undo what a pre-hook changed.

    FSDP's hooks handle recomputations that end early.
    """
    return not any(module._forward_hooks and not is_managed_by_fsdp(module) for module in modules)


def _check_parameters(modules: Sequence[nn.Module], parameters: Sequence[dict[str, Any]]) -> None:
    """Raise RuntimeError if the modules have other parameters than in the forward, with which gradients would be wrong.

    FSDP replaces those that it manages by gathered ones of equal values.
    """
    for module, before in zip(modules, parameters, strict=True):
        now = module._parameters
        if any(now.get(name) is not each for name, each in before.items()) and not is_managed_by_fsdp(module):
            raise RuntimeError(
                f"found other parameters of a {type(module).__name__} in the recomputation than in the forward: run "
                "the backward before they are replaced, as torch.func.functional_call does when it returns, or do "
                "not checkpoint"
            )


def _buffers_that_are_read(module: nn.Module) -> dict[str, Any]:
    """Copies of the buffers of a norm whose author's forward may read what it updates; none of any other module."""
    if not (isinstance(module, UpdatesOnce) and module.training):
        return {}
    classes = (cls for cls in type(module).__mro__ if "forward" in vars(cls))
    if all(cls.__module__.startswith(("torch.", "efficient_densenet.")) for cls in classes):
        return {}
    return {"_buffers": {name: each if each is None else each.clone() for name, each in module._buffers.items()}}


def _modules_of(function: Callable, values: Iterable[Any]) -> list[Any]:
    """The modules among `values`, and the one that `function` is or belongs to, or those that it references directly or
    not: by closure, default, global or attribute; all with their submodules, each once."""
    owner = function if isinstance(function, nn.Module) else getattr(function, "__self__", None)
    found = [each for each in (owner, *values) if isinstance(each, nn.Module)]
    seen: dict[int, Any] = {}
    referenced = [] if isinstance(owner, nn.Module) else [function]
    for _ in range(8):
        new = {id(value): value for value in referenced if id(value) not in seen}
        referenced, seen = list[Any](), seen | new
        for value in new.values():
            if isinstance(value, nn.Module):
                found.append(value)
            elif isinstance(value, FunctionType):
                named = (value.__globals__.get(name) for name in value.__code__.co_names)
                referenced += [*(value.__closure__ or ()), value.__defaults__, value.__kwdefaults__, *named]
            elif not isinstance(value, (type, ModuleType, Tensor)):
                referents = [*gc.get_referents(value), vars(type(value)).get("__call__")]
                referenced += () if len(referents) > 1000 else referents  # many are data
    return list(dict.fromkeys(module for each in found for module in each.modules()))


def checkpoint_sequential(
    modules: nn.Sequential | Sequence[Callable], segments: int, input: Any, **options: Any
) -> Any:
    """Run `modules` one after another, in `segments` segments, and checkpoint each segment except the last.

    Checkpointing the last segment would save no memory, because its backward starts right after its forward. `options`
    are keyword arguments of `checkpoint`.
    """
    functions = list(modules)
    if not 1 <= segments <= len(functions):
        raise ValueError(f"segments is {segments}, but must be from 1 to the number of modules, {len(functions)}")
    length = len(functions) // segments
    *checkpointed, last = range(0, segments * length, length)
    for start in checkpointed:
        input = checkpoint(functools.partial(_run_sequentially, functions[start : start + length]), input, **options)
    return _run_sequentially(functions[last:], input)


def _run_sequentially(functions: Sequence[Callable], input: Any) -> Any:
    return functools.reduce(lambda value, function: function(value), functions, input)


class CheckpointFunction:
    """`CheckpointFunction.apply(function, n, *inputs, *parameters)` is `function(*inputs)`, recomputed in the backward.

    There are `n` inputs. The parameters are the other tensors that `function` uses: they get their gradients whether
    they are listed or not. `function` may return anything.
    """

    @staticmethod
    def apply(function: Callable, n: int, *args: Any) -> Any:
        if not (isinstance(n, int) and 0 <= n <= len(args)):
            raise ValueError(
                f"found a {type(n).__name__} as the number of inputs, and {len(args)} inputs and parameters: "
                "CheckpointFunction.apply(function, number_of_inputs, *inputs, *parameters)"
            )
        return checkpoint_call(function, args[:n], {})
