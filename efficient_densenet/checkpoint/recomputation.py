"""The forward and the recomputation of a function, in the same state, and the check that their tensors match."""

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._recompute_mode import checkpointed_forward, recomputing
from .module_state import ModuleState, modules_restored
from .selective import ContextFn, UserContexts
from .states import AutocastState, DefaultDevice, RngState
from .trees import flatten

TensorMetadata = list[tuple[torch.Size, torch.dtype, torch.device]]


@dataclass
class Options:
    """The options of `checkpoint`."""

    preserve_rng_state: bool = True
    generators: Sequence[torch.Generator] = ()
    offload: bool = False
    early_stop: bool = True
    context_fn: ContextFn | None = None


DEFAULTS = Options()


class Recomputation:
    """Runs a function that uses `tensors` and `modules`, and recomputes it in the same state.

    The state is autocast, the default device, the RNG state, and the `ModuleState` of each module.
    """

    def __init__(
        self,
        name: str,
        tensors: Sequence[Tensor],
        modules: Iterable[nn.Module],
        options: Options,
        cache_casts: bool = True,
        with_buffers: bool = True,
    ) -> None:
        self.name = name
        self.autocast = AutocastState(tensors, cache_casts)
        self.default_device = DefaultDevice()
        self.module_states = [ModuleState(module, with_buffers) for module in modules]
        may_draw = any(state.has_hooks() for state in self.module_states)
        self.rng_state = RngState(tensors, options.generators, may_draw) if options.preserve_rng_state else None
        generators = self.rng_state.generators if self.rng_state else ()
        self.user_contexts = UserContexts(options.context_fn, generators) if options.context_fn else None
        self.output_metadata: TensorMetadata | None = None

    def forward(self, function: Callable, inputs: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        """Run `function`. `inputs` are the tensors among its arguments."""
        versions = [tensor._version for tensor in inputs]
        user_context = self.user_contexts.forward() if self.user_contexts else nullcontext()
        with checkpointed_forward(), self.autocast.restored(), user_context:
            result = function(*args, **kwargs)
        if [tensor._version for tensor in inputs] != versions:
            raise RuntimeError(
                f"{self.name} changes an input in place, so it cannot be recomputed from its inputs: make its first "
                "operation an out-of-place one, or pass a clone"
            )
        for state in self.module_states:
            state.update_after_forward()
        if self.rng_state is not None and not self.rng_state.has_changed():
            self.rng_state = None  # the function drew no random numbers
        self.output_metadata = metadata_of(tensors_in(result))
        return result

    def recompute(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Run `function` again in the state of the forward, in a context of `modules_restored()`."""
        rng_state = nullcontext() if self.rng_state is None else self.rng_state.restored()
        user_context = self.user_contexts.recomputation() if self.user_contexts else nullcontext()
        autocast, device = self.autocast.restored(), self.default_device.restored()
        with recomputing(), autocast, device, rng_state, user_context:
            return function(*args, **kwargs)

    def check_result(self, result: Any) -> None:
        """Raise RuntimeError if the recomputation returned tensors with other metadata than the forward."""
        self.check_metadata("returned", metadata_of(tensors_in(result)), self.output_metadata)

    def check_metadata(self, verb: str, recomputed: TensorMetadata, expected: TensorMetadata | None) -> None:
        """Raise RuntimeError if the recomputation returned or saved tensors with other metadata than the forward.

        If the function runs a backward itself, the forward is not finished then, and nothing is checked.
        """
        if self.output_metadata is not None and expected is not None and recomputed != expected:
            devices = {device for _, _, device in recomputed} != {device for _, _, device in expected}
            raise RuntimeError(
                f"{self.name} {verb} {_format_metadata(recomputed, devices)} in the recomputation, but "
                f"{_format_metadata(expected, devices)} in the forward: a checkpointed function must compute the same "
                f"tensors in both{', on the same device' if devices else ''}"
            )

    def modules_restored(self) -> AbstractContextManager:
        """Return a context in which each module has its state of the forward. Raise RuntimeError for new parameters."""
        changed = next((state.module for state in self.module_states if state.has_other_parameters()), None)
        if changed is not None:
            raise RuntimeError(
                f"{self.name} is recomputed with other parameters than in the forward: the parameters of a "
                f"{type(changed).__name__} have been replaced since then, as torch.func.functional_call does when "
                "it returns; run the backward before that, or do not checkpoint"
            )
        return modules_restored(self.module_states)


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
    # A nested tensor with the strided layout has no shape, so its number of elements is compared.
    return nested.shape if nested.layout == torch.jagged else torch.Size([nested.numel()])


def _format_metadata(metadata: TensorMetadata, with_devices: bool) -> str:
    tensors = ", ".join(
        f"{tuple(shape)} {str(dtype).removeprefix('torch.')}{f' on {device}' if with_devices else ''}"
        for shape, dtype, device in metadata
    )
    return f"{len(metadata)} tensor{'' if len(metadata) == 1 else 's'} ({tensors})"
