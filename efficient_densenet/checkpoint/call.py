"""`checkpoint`: any function, with arguments and results of any shape."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ..batchnorm import update_once
from ..torch_private import functorch_is_active
from .function import Resumed
from .hooks import fire_once
from .modes import is_disabled, is_in_first_run
from .parameters import find_unlisted, modules_of, modules_reached_by, parameters_of
from .recomputation import Recomputation, name_of
from .trees import flatten, unflatten


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
    if not torch.is_grad_enabled() or is_disabled() or torch.jit.is_tracing() or functorch_is_active():
        return function(*args, **kwargs)
    if is_in_first_run():
        return function(*args, **kwargs)  # inside another checkpoint, whose first run keeps nothing anyway
    if torch.compiler.is_compiling():
        return _compiled(function, args, kwargs, preserve_rng_state)
    listed = _listed(parameters)
    modules = [m for m in listed if isinstance(m, nn.Module)]
    tensors = _distinct([*parameters_of(*modules_of(function), *modules), *_tensors(listed)])
    reached = list({m for module in (*modules_reached_by(function), *modules) for m in module.modules()})
    for module in reached:
        update_once(module)
        fire_once(module)
    call = _Call(function, args, kwargs)
    recomputation = Recomputation(
        call, [*call.inputs, *tensors], name_of(function), preserve_rng_state, generators, reached
    )
    outputs = _first_run(recomputation, call, tensors)
    if any(needs_gradient for _, needs_gradient in outputs):
        made = Resumed.apply(recomputation, outputs, offload, len(call.inputs), *call.inputs, *tensors)
    else:
        made = [output for output, _ in outputs]
    return call.result(made)


def checkpoint_sequential(
    modules: nn.Sequential | Sequence[Callable], segments: int, input: Any, **options: Any
) -> Any:
    """Run `modules` one after the other, in `segments` parts that are each checkpointed, except the last.

    The last part's backward comes at once, so that nothing would be gained. `options` are those of `checkpoint`.
    """
    functions = list(modules)
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


class _Call:
    """A function of nested arguments as one of flat tensors, and its flat outputs as its nested result."""

    def __init__(self, function: Callable, args: tuple, kwargs: dict) -> None:
        self.function = function
        leaves, self.spec = flatten((args, kwargs))
        self.inputs = _distinct(_tensors(leaves))
        places = {id(tensor): i for i, tensor in enumerate(self.inputs)}
        self.leaves = [_Input(places[id(leaf)]) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.template: list[Any] | None = None

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = unflatten([_filled(leaf, inputs, ()) for leaf in self.leaves], self.spec)
        leaves, spec = flatten(self.function(*args, **kwargs))
        known: dict[int, Any] = {id(tensor): _Input(i) for i, tensor in enumerate(inputs)}
        outputs: list[Tensor] = []
        template = []
        for leaf in leaves:
            if isinstance(leaf, Tensor) and id(leaf) not in known:
                known[id(leaf)] = _Output(len(outputs))
                outputs.append(leaf)
            template.append(known[id(leaf)] if isinstance(leaf, Tensor) else leaf)
        if self.template is None:
            self.template, self.result_spec = template, spec
        return tuple(outputs)

    def result(self, outputs: Sequence[Tensor]) -> Any:
        """The nested result; an argument that was returned is the very argument."""
        template, self.template = self.template, []  # whatever else was returned is the caller's, not the graph's
        leaves = [_filled(leaf, self.inputs, outputs) for leaf in template]
        # Between here and the backward the inputs belong to the graph, which notices writes into them.
        self.inputs = []
        return unflatten(leaves, self.result_spec)


class _Input(int):
    """The place of a tensor among the inputs."""


class _Output(int):
    """The place of a tensor among the outputs."""


def _filled(leaf: Any, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Any:
    if isinstance(leaf, _Input):
        return inputs[leaf]
    return outputs[leaf] if isinstance(leaf, _Output) else leaf


def _first_run(recomputation: Recomputation, call: _Call, parameters: Sequence[Tensor]) -> list[tuple[Tensor, bool]]:
    """The outputs, each with whether it needs a gradient, from a graph whose tensors are dropped as they come."""
    inputs = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in call.inputs]
    with saved_tensors_hooks(_drop, _refuse):
        outputs = recomputation.first(*inputs)
    unlisted = find_unlisted(outputs, [*inputs, *parameters])
    if unlisted:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in unlisted[:3])
        raise RuntimeError(
            f"{recomputation.name} computes with {len(unlisted)} tensor(s) that need a gradient and were not given "
            f"(of shape {shapes}{', …' if len(unlisted) > 3 else ''}): "
            "list them, or their modules, in checkpoint(..., parameters=[...])"
        )
    return [(output.detach(), output.requires_grad) for output in outputs]


def _drop(tensor: Tensor) -> None:
    return None


def _refuse(nothing: None) -> Tensor:
    raise RuntimeError(
        "found a gradient taken inside a checkpointed function, but its first run keeps nothing to take it from: "
        "checkpoint the parts before and after it"
    )


def _compiled(function: Callable, args: tuple, kwargs: dict, preserve_rng_state: bool) -> Any:
    # Compilers know torch's own checkpointing. Before 2.11 their recomputation updates batch norms a second time.
    if torch.__version__ < "2.11":
        return function(*args, **kwargs)
    return torch_checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs)


def _listed(parameters: nn.Module | Iterable[Tensor | nn.Module] | None) -> list[Tensor | nn.Module]:
    if parameters is None:
        return []
    listed = [parameters] if isinstance(parameters, (nn.Module, Tensor)) else list(parameters)
    wrong = next((value for value in listed if not isinstance(value, (nn.Module, Tensor))), None)
    if wrong is not None:
        raise TypeError(f"found a {type(wrong).__name__} in parameters, which must hold tensors or modules")
    return listed


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    return (value for value in values if isinstance(value, Tensor))


def _distinct(tensors: Iterable[Tensor]) -> list[Tensor]:
    return list({id(tensor): tensor for tensor in tensors}.values())
