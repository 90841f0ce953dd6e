"""Call whole layers as the author's forward calls them: which features each gets, how they are nested, and which slice
of its output is new. Engines that recompute save the features alone then."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..engine.layerwise import RunFirstHalf
from ..engine.parts import NoPartsError
from .expressions import Expression, Table
from .guard import Guard, Snapshot
from .layers import unshared
from .read import check_output, submodule
from .structure import layers_in
from .trace import Trace


class Features(tuple[int, ...]):
    """The concatenation of the features of these numbers; the block's input is feature 0."""


class Nested(NamedTuple):
    """A list or a tuple of arguments."""

    kind: type
    values: tuple[Any, ...]


@dataclass(frozen=True)
class LayerCall:
    """A call of a layer: its name, its arguments, in which `Features` stand for tensors, and the channels of its output
    that are new."""

    name: str
    args: Nested
    start: int
    end: int | None


@dataclass(frozen=True)
class Recipe:
    """The calls of a block's layers, and the features that it returns."""

    calls: tuple[LayerCall, ...]
    output: Features


WHOLE = Recipe((), Features())
"""A block that is recomputed as a whole, since its forward does more than to concatenate what layers return."""


def read_recipe(block: nn.Module, table: Table, trace: Trace) -> Recipe:
    """How the block's forward calls its layers in a trace; `NoPartsError` if it computes anything besides."""
    check_output(trace.output)
    names = {module: name for name, module in block.named_modules()}
    failure = NoPartsError("found no layers")
    for layers in (layers_in(block), list(block.children())):
        try:
            return _read_recipe({names[each] for each in layers}, table, trace)
        except NoPartsError as reason:
            failure = reason
    raise failure


def _read_recipe(names: set[str], table: Table, trace: Trace) -> Recipe:
    features, calls = [trace.input], list[LayerCall]()
    for call in trace.calls:
        if call.name in names:
            args = _described(table, features, call.args)
            if not isinstance(call.output, Expression):
                raise NoPartsError(f"found {call.name}, which returns no tensor")
            known = {part for feature in features for part in table.parts(feature, 1)}
            new, at, start = list[Expression](), 0, 0
            for part in table.parts(call.output, 1):
                start = at if not new else start
                new += [part] if part not in known else []
                at += table.shapes[part][1]
            if not new:
                raise NoPartsError(f"found {call.name}, which adds no features")
            feature = table.cat(new, 1)
            width, is_all = table.shapes[feature][1], table.shapes[feature] == table.shapes[call.output]
            features.append(feature)
            calls.append(LayerCall(call.name, args, start, None if is_all else start + width))
    if not calls:
        raise NoPartsError("found no layers that its forward calls")
    output = _described(table, features, trace.output)
    if not set(range(1, len(features))) <= set(output):
        raise NoPartsError("found layers whose outputs it does not return")
    return Recipe(tuple(calls), output)


def _described(table: Table, features: Sequence[Expression], value: Any) -> Any:
    """Features for each expression, at any depth of lists and tuples."""
    if type(value) in (list, tuple):
        return Nested(type(value), tuple(_described(table, features, each) for each in value))
    if not isinstance(value, Expression):
        raise NoPartsError(f"found a {type(value).__name__} that is passed to a layer")
    numbers, parts = list[int](), list(table.parts(value, 1))
    while parts:
        for i, feature in enumerate(features):
            inside = list(table.parts(feature, 1))
            if parts[: len(inside)] == inside:
                numbers.append(i)
                parts = parts[len(inside) :]
                break
        else:
            raise NoPartsError(f"found {table.nodes[parts[0]].name} between its layers")
    return Features(numbers)


def run_recipe(
    block: nn.Module, recipe: Recipe, x: Tensor, run_first_half: RunFirstHalf, guard: Guard | None = None
) -> Tensor:
    """The output of a block whose layers are called whole, each by `run_first_half`; `guard` is the block's."""
    features = [unshared(x, run_first_half)]
    for call in recipe.calls:
        layer = WholeLayer(submodule(block, call.name), call, guard)
        features.append(run_first_half(layer, [features[i] for i in layer.reads]))
    return features[recipe.output[0]] if len(recipe.output) == 1 else torch.cat([features[i] for i in recipe.output], 1)


class WholeLayer(nn.Module):
    """The concatenation and a whole layer of any kind, which official and checkpoint recompute."""

    def __init__(self, layer: nn.Module, call: LayerCall, guard: Guard | None) -> None:
        super().__init__()
        self.layer, self.run, self.call = layer, unchanged(layer, layer, guard), call
        self.reads = sorted(set(_numbers(call.args)))
        self.norm1 = nn.Identity()  # the block has put the norms inside under the exactly-once rule
        self.training = layer.training

    def first_half(self, *features: Tensor) -> Tensor:
        output = self.run(*_built(self.call.args, dict(zip(self.reads, features, strict=True))))
        # A copy, since a view would keep the input alive.
        return output if self.call.end is None else output[:, self.call.start : self.call.end].clone()


def _numbers(args: Any) -> list[int]:
    return list(args) if isinstance(args, Features) else [number for each in args.values for number in _numbers(each)]


def _built(args: Any, features: dict[int, Tensor]) -> Any:
    if not isinstance(args, Features):
        return args.kind(_built(each, features) for each in args.values)
    return features[args[0]] if len(args) == 1 else torch.cat([features[i] for i in args], 1)


def unchanged(module: nn.Module, forward: Callable, guard: Guard | None) -> Callable:
    """A `forward` of `module`, inside a block with this guard, for recomputation, which must read the same again."""
    if torch.compiler.is_compiling() or guard is None:  # a compiler recomputes with the values of the forward
        return forward
    before = Snapshot(module, guard.names)

    def run(*args: Any) -> Any:
        change = before.change()
        if change is not None:
            raise RuntimeError(
                f"found that {change} between the forward of a {type(module).__name__} and its backward, which "
                "recomputes it: change it after the backward"
            )
        return forward(*args)

    return run
