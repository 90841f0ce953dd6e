"""The autograd side of one checkpointed call.

The operations of the call are in the autograd graph, as without checkpointing. Saved-tensor hooks replace each tensor
that they save for backward by an index. When the backward unpacks the first index, the call is recomputed, and the
tensors that the recomputation saves are returned by index. Views, hooks, closures, second derivatives and partial
backwards need no code here, because autograd handles them.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .._recompute_mode import is_inside_checkpoint
from .._torch_private import graph_task_id, queue_backward_callback
from ..norms.batch_norm import update_once
from .offload import offload_to_cpu
from .recomputation import Recomputation, TensorMetadata, function_name, metadata_of
from .trees import flatten, unflatten


class CheckpointFrame:
    """The inputs of a checkpointed call, and the tensors recomputed from them for each backward."""

    def __init__(
        self,
        function: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        modules: Sequence[nn.Module],
        preserve_rng_state: bool = True,
        generators: Iterable[torch.Generator] = (),
        offload: bool = False,
    ) -> None:
        self.function, self.modules = function, modules
        leaves, self.spec = flatten((args, kwargs))
        self.inputs = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())
        indices = {id(tensor): i for i, tensor in enumerate(self.inputs)}
        self.leaves = [_InputIndex(indices[id(leaf)]) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.requires_grad = [tensor.requires_grad for tensor in self.inputs]
        self.offload = offload
        name = function_name(function)
        self.recomputation = Recomputation(name, self.inputs, modules, preserve_rng_state, generators)
        self.saved_metadata: TensorMetadata = []
        self.versions: list[int] = []
        self.recomputed_tensors: dict[int, dict[int, Tensor]] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, and save its tensor arguments in place of everything that it saves for backward."""
        # In a nested checkpoint, the hooks of the outer one must see the inputs, so they are not offloaded here.
        offload = self.offload and not is_inside_checkpoint()
        inputs, self.inputs = self.inputs, []
        self.input_storages = _storages(inputs)
        with offload_to_cpu(offload):
            self.saved_inputs = _SaveInputs.apply(torch.empty(0, requires_grad=True), *inputs)
        with saved_tensors_hooks(self._pack, self._unpack):
            return self.recomputation.forward(self.function, inputs, *args, **kwargs)

    def _pack(self, tensor: Tensor) -> int:
        self.saved_metadata.append((tensor.shape, tensor.dtype))
        self.versions.append(_version(tensor, self.input_storages))
        return len(self.saved_metadata) - 1

    def _unpack(self, index: int) -> Tensor:
        """Return saved tensor number `index`. The function is recomputed once for each backward that unpacks."""
        task = graph_task_id()
        backward = task if task != -1 else -2 - threading.get_ident()
        if index not in self.recomputed_tensors.get(backward, ()):
            if task != -1 and backward not in self.recomputed_tensors:
                # Free the tensors that this backward does not unpack. The callback keeps the frame alive until then.
                queue_backward_callback(partial(self.recomputed_tensors.pop, backward, None))
            self.recomputed_tensors[backward] = dict(enumerate(self._recompute()))
        tensor = self.recomputed_tensors[backward].pop(index)
        if not self.recomputed_tensors[backward]:
            del self.recomputed_tensors[backward]
        return tensor

    def _recompute(self) -> list[Tensor]:
        for module in self.modules:
            update_once(module)  # a lazy norm becomes a batch norm in the forward
        saved_inputs = self.saved_inputs.grad_fn.saved_tensors[1:]
        inputs = [t.detach().requires_grad_(needed) for t, needed in zip(saved_inputs, self.requires_grad, strict=True)]
        leaves = [inputs[leaf] if isinstance(leaf, _InputIndex) else leaf for leaf in self.leaves]
        args, kwargs = unflatten(leaves, self.spec)
        input_storages = _storages(inputs)
        recomputed: list[Tensor] = []
        versions: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            recomputed.append(tensor.detach())
            versions.append(_version(tensor, input_storages))
            return recomputed[-1]

        with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
            self.recomputation.recompute(self.function, *args, **kwargs)
        self.recomputation.check_metadata("saved", metadata_of(recomputed), self.saved_metadata)
        if self.recomputation.output_metadata is not None and versions != self.versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor that {self.recomputation.name} uses has another version than in the forward"
            )
        return recomputed


def _storages(tensors: Sequence[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.layout == torch.strided}


def _version(tensor: Tensor, input_storages: set[int]) -> int:
    """Return the version counter of a parameter, and 0 for other tensors.

    Tensors that require no gradient may change between forward and recomputation, as running statistics do. Autograd
    checks the versions of the inputs, which `_SaveInputs` saves; offloaded inputs come back as other tensors.
    """
    if not tensor.requires_grad or tensor.layout != torch.strided:
        return 0
    return 0 if tensor.untyped_storage().data_ptr() in input_storages else tensor._version


class _InputIndex(int):
    """Stands for a tensor among the leaves of the arguments: its index in the inputs."""


class _SaveInputs(torch.autograd.Function):
    """Saves its arguments for backward: autograd detects in-place changes, and an outer checkpoint recomputes them."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Tensor | None) -> Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> None:
        raise AssertionError("no output depends on the saved inputs, so no backward reaches this node")
