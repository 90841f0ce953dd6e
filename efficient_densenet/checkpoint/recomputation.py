"""The forward and the recomputation of a function, under the same state, and the check that both compute the same."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._recompute_mode import checkpointed_forward, recomputing
from .._torch_private import is_managed_by_fsdp
from .hooks import side_effects_undone
from .selective import ContextFn, UserContexts
from .states import AutocastState, DefaultDevice, RngState
from .trees import flatten

TensorMetadata = list[tuple[torch.Size, torch.dtype, torch.device]]


@dataclass
class Options:
    """What a caller of `checkpoint` can choose."""

    preserve_rng_state: bool = True
    generators: Sequence[torch.Generator] = ()
    offload: bool = False
    early_stop: bool = True
    context_fn: ContextFn | None = None


DEFAULTS = Options()


class Recomputation:
    """Runs a function that uses `tensors` and `modules`, and recomputes it in the same state.

    The state is autocast, the default device, the RNG state, and each module's training mode, parameters and hooks.
    """

    def __init__(
        self,
        name: str,
        tensors: Sequence[Tensor],
        modules: Iterable[nn.Module],
        options: Options,
        cache_casts: bool = True,
    ) -> None:
        self.name = name
        self.autocast = AutocastState(tensors, cache_casts)
        self.default_device = DefaultDevice()
        self.rng_state = RngState(tensors, options.generators) if options.preserve_rng_state else None
        self.module_states = [(module, _ModuleState(module)) for module in modules]
        generators = self.rng_state.generators if self.rng_state else ()
        self.user_contexts = UserContexts(options.context_fn, generators) if options.context_fn else None
        self.output_metadata: TensorMetadata | None = None

    def forward(self, function: Callable, inputs: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        """Run `function`. `inputs` are the tensors among its arguments."""
        versions = [tensor._version for tensor in inputs]
        user_context = self.user_contexts.forward() if self.user_contexts else nullcontext()
        with checkpointed_forward(), self.autocast.restored(), user_context:
            result = function(*args, **kwargs)
        for module, state in self.module_states:
            state.hooks = _hooks(module)  # without those that have removed themselves, as a lazy module's
        if [tensor._version for tensor in inputs] != versions:
            raise RuntimeError(
                f"{self.name} changes an input in place, so it cannot be recomputed from its inputs: make its first "
                "operation an out-of-place one, or pass a clone"
            )
        if self.rng_state is not None and not self.rng_state.has_changed():
            self.rng_state = None  # the function drew no random numbers
        self.output_metadata = metadata_of(tensors_in(result))
        return result

    def recompute(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Run `function` again in the state of the forward."""
        rng_state = nullcontext() if self.rng_state is None else self.rng_state.restored()
        user_context = self.user_contexts.recomputation() if self.user_contexts else nullcontext()
        autocast, device = self.autocast.restored(), self.default_device.restored()
        modules = self._modules_restored()
        with recomputing(), autocast, device, modules, rng_state, user_context:
            return function(*args, **kwargs)

    def check_result(self, result: Any) -> None:
        """Raise RuntimeError if the recomputation returned other tensors than the forward."""
        self.check_metadata("returned", metadata_of(tensors_in(result)), self.output_metadata)

    def check_metadata(self, verb: str, recomputed: TensorMetadata, expected: TensorMetadata | None) -> None:
        """Raise RuntimeError if the recomputation returned or saved other tensors than the forward.

        If a gradient is computed inside the function, the forward is not finished, and nothing is checked.
        """
        if self.output_metadata is not None and expected is not None and recomputed != expected:
            devices = {device for _, _, device in recomputed} != {device for _, _, device in expected}
            raise RuntimeError(
                f"{self.name} {verb} {_format_metadata(recomputed, devices)} in the recomputation, but "
                f"{_format_metadata(expected, devices)} in the forward: a checkpointed function must compute the same "
                f"in both{', on the same device' if devices else ''}"
            )

    @contextmanager
    def _modules_restored(self) -> Iterator[None]:
        """Give the modules the state of the forward, if it was changed before the backward."""
        changes = [change for module, state in self.module_states for change in state.changes(module, self.name)]
        now = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
        _set_all(changes)
        try:
            with side_effects_undone([module for module, state in self.module_states if state.hooks]):
                yield
        finally:
            _set_all(now)


Change = tuple[Any, str, Any]
"""An object, the name of its attribute, and a value for the attribute."""

_HOOKS = "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_hooks_with_kwargs"


class _ModuleState:
    """What a recomputation needs of a module as it was in the forward."""

    def __init__(self, module: nn.Module) -> None:
        self.training = module.training
        self.parameters = _parameters(module)
        self.hooks: tuple[dict, ...] = ()

    def changes(self, module: nn.Module, function_name: str) -> Iterator[Change]:
        """What has to be set to restore this state. Raise RuntimeError if parameters have been replaced."""
        if module.training is not self.training:
            yield module, "training", self.training
        parameters = _parameters(module)
        if parameters != self.parameters:
            if {name: key for name, (key, _) in parameters.items()} == {
                name: key for name, (key, _) in self.parameters.items()
            }:
                for name, (_, requires_grad) in self.parameters.items():
                    if requires_grad is not parameters[name][1]:
                        yield module._parameters[name], "requires_grad", requires_grad
            elif not is_managed_by_fsdp(module):  # FSDP replaces them by gathered ones and back, with the same values
                raise RuntimeError(
                    f"{function_name} is recomputed with other parameters than in the forward: those of a "
                    f"{type(module).__name__} have been replaced since then, as torch.func.functional_call does when "
                    "it returns; run the backward before that, or do not checkpoint"
                )
        if (self.hooks or module._forward_hooks or module._forward_pre_hooks) and _hooks(module) != self.hooks:
            yield from ((module, name, hooks) for name, hooks in zip(_HOOKS, self.hooks or ({},) * 4, strict=True))


def _parameters(module: nn.Module) -> dict[str, tuple[int, bool]]:
    """The identity of each parameter, and whether it requires a gradient."""
    return {name: (id(each), each is not None and each.requires_grad) for name, each in module._parameters.items()}


def _hooks(module: nn.Module) -> tuple[dict, ...]:
    """Copies of the dicts of the module's forward hooks; nothing for a module without any."""
    if not (module._forward_hooks or module._forward_pre_hooks):
        return ()
    return tuple(getattr(module, name).copy() for name in _HOOKS)


def _set_all(changes: Iterable[Change]) -> None:
    for owner, name, value in changes:
        setattr(owner, name, value)


def function_name(function: Callable) -> str:
    """Return the name of `function` for a message."""
    if isinstance(function, nn.Module):
        return type(function).__name__
    if isinstance(function, functools.partial):
        modules = ", ".join(function_name(value) for value in function.args if isinstance(value, nn.Module))
        return f"{function_name(function.func)}({modules})" if modules else function_name(function.func)
    return getattr(function, "__qualname__", type(function).__name__)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in a tree of arguments or results."""
    if isinstance(tree, Tensor):
        return [tree]
    return [leaf for leaf in flatten(tree)[0] if isinstance(leaf, Tensor)]


def metadata_of(tensors: Iterable[Tensor]) -> TensorMetadata:
    """Return the shape, dtype and device of each tensor."""
    return [(_shape(tensor) if tensor.is_nested else tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]


def _shape(nested: Tensor) -> torch.Size:
    # With the strided layout, a nested tensor has no shape. The number of its elements stands for it.
    return nested.shape if nested.layout == torch.jagged else torch.Size([nested.numel()])


def _format_metadata(metadata: TensorMetadata, with_devices: bool) -> str:
    tensors = ", ".join(
        f"{tuple(shape)} {str(dtype).removeprefix('torch.')}{f' on {device}' if with_devices else ''}"
        for shape, dtype, device in metadata
    )
    return f"{len(metadata)} tensor{'' if len(metadata) == 1 else 's'} ({tensors})"
