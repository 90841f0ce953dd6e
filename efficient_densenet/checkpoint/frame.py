"""The autograd side of one checkpointed call.

The operations of the call are in the autograd graph, as without checkpointing. Saved-tensor hooks replace each tensor
that these operations save for backward by an index. When the backward unpacks the first index, the call is recomputed,
and the tensors that the recomputation saves are returned by index. The recomputation ends when it has saved the last
tensor. Views, hooks, closures, second derivatives and partial backwards need no code here, because autograd handles
them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .._recompute_mode import is_inside_checkpoint
from .._torch_private import early_stop_enabled, graph_task_id, is_part_of_leaf, memory_key, queue_backward_callback
from ..norms.batch_norm import update_once
from .hooks import has_affecting_hooks
from .inputs import SavedInputs
from .recomputation import Options, Recomputation, TensorMetadata, function_name, metadata_of
from .trees import flatten_arguments, unflatten_arguments


class CheckpointFrame:
    """The inputs of a checkpointed call, and the tensors recomputed from them for each backward."""

    def __init__(
        self,
        function: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        modules: Sequence[nn.Module],
        options: Options,
    ) -> None:
        self.function, self.modules, self.options = function, modules, options
        leaves, self.spec = flatten_arguments(args, kwargs)
        self.inputs = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())
        indices = {id(tensor): i for i, tensor in enumerate(self.inputs)}
        self.leaves = [_InputIndex(indices[id(leaf)]) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.recomputation = Recomputation(function_name(function), self.inputs, modules, options)
        self.early_stop = early_stop_enabled(options.early_stop)
        self.saved_metadata: TensorMetadata = []
        self.versions: list[int] = []
        # One entry for each running backward, whose queued callback references the entry: it is freed when the backward
        # ends, even by an exception.
        self.recomputed_tensors: WeakValueDictionary[int, _RecomputedTensors] = WeakValueDictionary()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, and save its tensor arguments in place of everything that it saves for backward."""
        inputs, self.inputs = self.inputs, []
        self.input_keys = set(map(memory_key, inputs))
        # In a nested checkpoint, the hooks of the outer checkpoint must see the inputs, so they are not offloaded here.
        self.saved_inputs = SavedInputs(inputs, self.options.offload and not is_inside_checkpoint())
        with saved_tensors_hooks(self._pack, self._unpack):
            return self.recomputation.forward(self.function, inputs, *args, **kwargs)

    def _pack(self, tensor: Tensor) -> int:
        self.saved_metadata += metadata_of([tensor])
        self.versions.append(self._version(tensor, self.input_keys))
        return len(self.saved_metadata) - 1

    def _unpack(self, index: int) -> Tensor:
        """Return saved tensor number `index`. Each backward that unpacks tensors recomputes the function once.

        Outside of a backward, as when a user reads `grad_fn.saved_tensors`, each call recomputes, and keeps no tensors.
        """
        backward = graph_task_id()
        if backward == -1:
            return self._recompute()[index]
        tensors = self.recomputed_tensors.get(backward)
        if tensors is None:
            self.recomputed_tensors[backward] = tensors = _RecomputedTensors()
            queue_backward_callback(tensors.clear)
        if index not in tensors:
            tensors.update(enumerate(self._recompute()))
        return tensors.pop(index)

    def _recompute(self) -> list[Tensor]:
        for module in self.modules:
            update_once(module)  # again, since a lazy norm has become a batch norm in the forward
        with self.recomputation.modules_restored(), self.saved_inputs.restored() as inputs:
            leaves = [inputs[leaf] if isinstance(leaf, _InputIndex) else leaf for leaf in self.leaves]
            args, kwargs = unflatten_arguments(leaves, self.spec)
            needed = len(self.saved_metadata) if self.early_stop and not has_affecting_hooks(self.modules) else None
            recording = _Recording(partial(self._version, input_keys=set(map(memory_key, inputs))), needed)
            with torch.enable_grad(), recording.hooks():
                result = self.recomputation.recompute(partial(recording.run, self.function), *args, **kwargs)
        if not recording.is_complete():
            self.recomputation.check_result(result)
        self.recomputation.check_metadata("saved", metadata_of(recording.tensors), self.saved_metadata)
        if self.recomputation.output_metadata is not None and recording.versions != self.versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor that {self.recomputation.name} uses has another version than in the forward"
            )
        return recording.tensors

    def _version(self, tensor: Tensor, input_keys: set[int]) -> int:
        """Return the version counter of a parameter, and 0 for other tensors.

        Tensors that require no gradient may change between forward and recomputation, as running statistics do.
        Autograd checks the versions of the inputs, which `SavedInputs` saves; offloaded inputs come back as other
        tensors. With a `context_fn`, only leaves and views of leaves are checked: its policy may allow the forward to
        change other saved tensors in place.
        """
        version = tensor._version
        if not version or not tensor.requires_grad or memory_key(tensor) in input_keys:
            return 0
        return version if self.options.context_fn is None or is_part_of_leaf(tensor) else 0


class _RecomputedTensors(dict[int, Tensor]):
    """The tensors that one backward has not unpacked yet, by index: a subclass of dict, to allow weak references."""


class _Recording:
    """The tensors that a recomputation saves for backward, and their versions.

    If `needed` is a number, `_RecomputationComplete` ends the recomputation when it has saved this many tensors.
    """

    def __init__(self, version_of: Callable[[Tensor], int], needed: int | None) -> None:
        self.version_of, self.needed = version_of, needed
        self.tensors: list[Tensor] = []
        self.versions: list[int] = []

    def run(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Call the function. Return its result, or None if the recording is complete before it returns."""
        try:
            return function(*args, **kwargs)
        except (_RecomputationComplete, RuntimeError):  # TorchScript turns every error into a RuntimeError
            if not self.is_complete():
                raise

    def hooks(self) -> saved_tensors_hooks:
        """Return the context in which saved tensors are recorded."""
        return saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def is_complete(self) -> bool:
        """Return True if all needed tensors are recorded."""
        return len(self.tensors) == self.needed

    def _pack(self, tensor: Tensor) -> Tensor:
        if not self.is_complete():
            self.versions.append(self.version_of(tensor))
            # Autograd saves a leaf itself and no alias: a hook may replace its `.data` during the forward only.
            self.tensors.append(tensor if tensor.is_leaf else tensor.detach())
        if self.is_complete():
            raise _RecomputationComplete
        return self.tensors[-1]


class _RecomputationComplete(BaseException):
    """Ends a recomputation that has saved all tensors. A BaseException, which `except Exception` does not catch."""


class _InputIndex(int):
    """The index of an input, which replaces the tensor among the leaves of the arguments."""
