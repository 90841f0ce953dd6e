"""One checkpointed call in autograd's graph: it keeps its inputs, and the call is made again when more is asked for.

The call's own operations stand in the graph, as in the plain call; only the tensors that they save are replaced by
numbers. When the backward asks for the first of them, the call is made again, and what is saved then is handed out by
number. So views, hooks, closures, second derivatives and partial backwards need no thought here: autograd sees to them.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .._recompute_mode import is_in_a_run
from .._torch_private import at_the_end_of_backward, graph_task
from ..norms.batch_norm import update_once
from .offload import resting_in_cpu_memory
from .recomputation import Description, Recomputation, described, name_of
from .trees import flatten, unflatten


class Frame:
    def __init__(
        self,
        function: Callable,
        args: tuple,
        kwargs: dict,
        modules: Sequence[nn.Module],
        preserve_rng_state: bool = True,
        generators: Iterable[torch.Generator] = (),
        offload: bool = False,
    ) -> None:
        self.function, self.modules = function, modules
        leaves, self.spec = flatten((args, kwargs))
        self.inputs = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())
        places = {id(tensor): i for i, tensor in enumerate(self.inputs)}
        self.leaves = [_Place(places[id(leaf)]) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.needing = [tensor.requires_grad for tensor in self.inputs]
        self.offload = offload
        self.recomputation = Recomputation(name_of(function), self.inputs, modules, preserve_rng_state, generators)
        self.saved: Description = []
        self.versions: list[int] = []
        self.handing_out: dict[int, dict[int, Tensor]] = {}

    def first_run(self, *args: Any, **kwargs: Any) -> Any:
        # A checkpoint within a checkpoint keeps its inputs through the outer one's hooks, which must see them.
        offloading = self.offload and not is_in_a_run()
        inputs, self.inputs = self.inputs, []
        self.given = _storages(inputs)
        with resting_in_cpu_memory(offloading):
            self.keeper = _Keep.apply(torch.empty(0, requires_grad=True), *inputs)
        with saved_tensors_hooks(self._number, self._saved_tensor):
            return self.recomputation.first(self.function, inputs, *args, **kwargs)

    def _number(self, tensor: Tensor) -> int:
        self.saved.append((tensor.shape, tensor.dtype))
        self.versions.append(_version(tensor, self.given))
        return len(self.saved) - 1

    def _saved_tensor(self, number: int) -> Tensor:
        """The tensor that was saved under `number`, recomputed once for each backward that asks."""
        task = graph_task()
        backward = task if task != -1 else -2 - threading.get_ident()
        if number not in self.handing_out.get(backward, ()):
            if task != -1 and backward not in self.handing_out:
                # What this backward does not ask for is not kept after it; nor is this frame, until then.
                at_the_end_of_backward(partial(self.handing_out.pop, backward, None))
            self.handing_out[backward] = dict(enumerate(self._second_run()))
        tensor = self.handing_out[backward].pop(number)
        if not self.handing_out[backward]:
            del self.handing_out[backward]
        return tensor

    def _second_run(self) -> list[Tensor]:
        for module in self.modules:
            update_once(module)  # a lazy norm has become one since
        kept = self.keeper.grad_fn.saved_tensors[1:]
        inputs = [t.detach().requires_grad_(need) for t, need in zip(kept, self.needing, strict=True)]
        leaves = [inputs[leaf] if isinstance(leaf, _Place) else leaf for leaf in self.leaves]
        args, kwargs = unflatten(leaves, self.spec)
        given = _storages(inputs)
        saved: list[Tensor] = []
        versions: list[int] = []

        def note(tensor: Tensor) -> Tensor:
            saved.append(tensor.detach())
            versions.append(_version(tensor, given))
            return saved[-1]

        with torch.enable_grad(), saved_tensors_hooks(note, lambda tensor: tensor):
            self.recomputation.again(self.function, *args, **kwargs)
        self.recomputation.refuse_difference("saved", described(saved), self.saved)
        if self.recomputation.given is not None and versions != self.versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"tensor that {self.recomputation.name} computes with is at another version than in its first run"
            )
        return saved


def _storages(tensors: Sequence[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.layout == torch.strided}


def _version(tensor: Tensor, given: set[int]) -> int:
    """How often a parameter has been written into.

    Of what needs no gradient, buffers may change between the runs, as statistics do. Inputs are minded by `_Keep`, and
    come back as other tensors where they rested in CPU memory.
    """
    if not tensor.requires_grad or tensor.layout != torch.strided:
        return 0
    return 0 if tensor.untyped_storage().data_ptr() in given else tensor._version


class _Place(int):
    """The place of a tensor among the inputs."""


class _Keep(torch.autograd.Function):
    """Saves its arguments, so that autograd notices writes into them and an outer checkpoint can recompute them."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        raise AssertionError("nothing is computed from what is kept")
