"""Read a dense block and a transition from the expressions of their outputs: which modules, in what order, of what.

What is read holds names alone, and is the same for a copy; `block_parts` gives the present modules. It is a proposal:
plain modules must compute the same expressions before an engine runs a block by it.
"""

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from .._dimensions import dimensions_of
from ..engine.parts import (
    BlockParts,
    ConsumerParts,
    LayerParts,
    NoPartsError,
    activations_of,
    block_reader,
    composed,
    is_activation,
    is_norm,
)
from ..kernels.activations import ActivationSpec, module_of, spec_of_operation
from .calls import Call
from .expressions import Expression, Table
from .structure import is_any_norm
from .trace import Trace

IDENTITY = ActivationSpec("identity")
POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "avg_pool": lambda x: dimensions_of(x).avg_pool(x, 2),
    "max_pool": lambda x: dimensions_of(x).max_pool(x, 2),
}
_DENSE_LAYER = (
    "where a dense layer has norm, activation and convolution, once or twice, and perhaps dropout after the last one"
)
_DROPOUTS = F.dropout, F.dropout1d, F.dropout2d, F.dropout3d


class Unit(NamedTuple):
    """The names of a norm and a convolution, and the activation between them: a module's name, or a function's
    settings."""

    norm: str
    activation: str | ActivationSpec
    conv: str


class Dropout(NamedTuple):
    """Where a rate of dropout comes from, a module and its attribute; and whether whole channels are dropped."""

    module: str
    attribute: str
    of_channels: bool


class Layer(NamedTuple):
    """A dense layer: one or two units, and dropout after them."""

    units: tuple[Unit, ...]
    dropout: Dropout | None


@dataclass(frozen=True)
class Parts:
    """A dense block by the names of its layers' parts; no layers where a registered reader gives `BlockParts`."""

    layers: tuple[Layer, ...] = ()
    newest_first: bool = False
    new_features_only: bool = False

    @property
    def units(self) -> list[Unit]:
        return [unit for layer in self.layers for unit in layer.units]

    @property
    def dropouts(self) -> list[Dropout]:
        return [layer.dropout for layer in self.layers if layer.dropout is not None]


@dataclass(frozen=True)
class Transition:
    """A transition: a unit, and after it dropout and poolings in their order."""

    unit: Unit
    after: tuple[Dropout | str, ...]

    @property
    def units(self) -> list[Unit]:
        return [self.unit]

    @property
    def dropouts(self) -> list[Dropout]:
        return [each for each in self.after if not isinstance(each, str)]


def read_parts(block: nn.Module, table: Table, traces: Sequence[Trace]) -> Parts:
    """The parts of a block, which must be the same in all modes but for dropout; `NoPartsError` if it has none."""
    if block_reader(block) is not None:
        return Parts()
    check_output(traces[0].output)
    in_modes = [_read_parts(block, table, trace) for trace in traces if not trace.mode.autocast and trace.error is None]
    found = next((each for each in in_modes if any(layer.dropout for layer in each.layers)), in_modes[0])
    for each in in_modes:
        pairs = zip(each.layers, found.layers, strict=True) if len(each.layers) == len(found.layers) else ()
        layers = tuple(a._replace(dropout=a.dropout or b.dropout) for a, b in pairs)
        if replace(each, layers=layers) != found:
            raise NoPartsError("found layers that are other ones in some modes")
    return found


def check_output(output: Any) -> None:
    if not isinstance(output, Expression):
        raise NoPartsError(f"found that it returns a {output[0]}, where a dense block returns a tensor")


def _read_parts(block: nn.Module, table: Table, trace: Trace) -> Parts:
    reader, atoms = _Reader(block, table, trace), list(table.parts(trace.output, 1))
    layers, inputs = list[Layer](), list[Sequence[Expression]]()
    for atom in atoms:
        if atom != trace.input:
            layer, before = reader.layer(atom)
            layers.append(layer)
            inputs.append(table.parts(before, 1))
    new = [each for each in atoms if each != trace.input]
    new_only = len(new) == len(atoms)
    newest_first = len(inputs[0]) > len(inputs[-1]) if new_only and inputs else atoms[0] != trace.input
    order = [trace.input, *(new[::-1] if newest_first else new)]
    if newest_first:
        layers, inputs = layers[::-1], [each[::-1] for each in inputs[::-1]]
    if len(layers) < 1 + new_only or (not new_only and atoms != (order[::-1] if newest_first else order)):
        raise NoPartsError("found no concatenation of its input and the outputs of layers")
    for i, each in enumerate(inputs):
        unknown = [part for part in each if part not in order]
        if unknown:
            raise NoPartsError(f"found {reader.described(unknown[0])} inside layer {i + 1}, {_DENSE_LAYER}")
        if list(each) != order[: i + 1]:
            raise NoPartsError(f"found that layer {i + 1} reads other features than all before it, in their order")
    growth = [str(table.shapes[each][1]) for each in order[1:]]
    if len(set(growth)) > 1:
        added = ", ".join(dict.fromkeys(growth))
        raise NoPartsError(f"found layers that add {added} channels, where all must add the same")
    return Parts(tuple(layers), newest_first, new_only)


def read_transition(module: nn.Module, table: Table, traces: Sequence[Trace]) -> Transition:
    """The parts of a transition, which must be the same in all modes but for dropout."""
    in_modes = [_read_transition(module, table, trace) for trace in traces if not trace.mode.autocast]
    found = max(in_modes, key=lambda each: len(each.after))
    for each in in_modes:
        if each.unit != found.unit or [name for name in found.after if name in each.after] != list(each.after):
            raise NoPartsError("found modules that are other ones in some modes")
    parts = consumer_parts(module, found)
    if not (is_norm(parts.norm) and all(map(is_activation, parts.activations))):
        raise NoPartsError("found a norm or an activation that the shared engine does not have")
    return found


def run_transition(module: nn.Module, read: Transition, x: Tensor) -> Tensor:
    """The transition's output, from its parts."""
    parts = consumer_parts(module, read)
    output = parts.norm(x)
    if not activations_of(parts.norm):
        output = parts.activations[0](output)
    output = cast(_ConvNd, parts.conv)(output)
    if parts.max_pools and parts.drop_rate:
        output = parts.dropout(output, parts.drop_rate)
    if parts.pools or parts.max_pools:
        output = POOLS["avg_pool" if parts.pools else "max_pool"](output)
    return output if parts.after is None else parts.after(output)


def _read_transition(module: nn.Module, table: Table, trace: Trace) -> Transition:
    reader, after, e = _Reader(module, table, trace), list[Dropout | str](), trace.output
    while e not in reader.calls:
        dropout, before = reader.dropout(e)
        name, args = table.nodes[e]
        if name in ("squeeze", "unsqueeze"):  # PyTorch pools signals as images of one row
            e = args[0]
            continue
        pool = next((each for each in POOLS if each in name), None)
        if dropout is None and pool is None:
            raise NoPartsError(f"found {name} after its convolution")
        after.append(dropout or cast(str, pool))
        e = before if dropout is not None else args[0]
    layer, e = reader.layer(e)
    if len(layer.units) != 1 or e != trace.input:
        raise NoPartsError("found no norm, activation and convolution of its input")
    return Transition(layer.units[0], tuple(after[::-1]))


class _Reader:
    """Reads backwards from an output to the calls that have computed it."""

    def __init__(self, module: nn.Module, table: Table, trace: Trace) -> None:
        self.table, self._module, self._rates = table, module, trace.rates
        self.calls: dict[Expression, Call] = {}
        self._activations: dict[tuple[Expression, Expression], set[str]] = {}
        for call in trace.calls:
            (e, *others), inner = call.args or (None,), module.get_submodule(call.name)
            if not (isinstance(e, Expression) and isinstance(call.output, Expression)) or others or call.output == e:
                continue
            if is_any_norm(inner) or isinstance(inner, _ConvNd):
                self.calls.setdefault(call.output, call)
            elif not any(True for _ in inner.children()):
                self._activations.setdefault((e, call.output), set()).add(call.name)

    def layer(self, e: Expression) -> tuple[Layer, Expression]:
        """The layer that computes `e`, and what it reads."""
        dropout, e = self.dropout(e)
        units = list[Unit]()
        while e in self.calls and not self._is_norm(e):
            conv, before = self.calls[e].name, self.calls[e].args[0]
            activation, e = self._activation(before, conv)
            norm, units = self.calls[e].name, [Unit(self.calls[e].name, activation, conv), *units]
            inside = activations_of(self._module.get_submodule(norm))
            if len(inside) > 1:
                raise NoPartsError(
                    f"found a {type(self._module.get_submodule(norm)).__name__} with several activations"
                )
            e = self.calls[e].args[0]
        if not 1 <= len(units) <= 2:
            raise NoPartsError(f"found {self.described(e)}, {_DENSE_LAYER}")
        return Layer(tuple(units), dropout), e

    def _is_norm(self, e: Expression) -> bool:
        return e in self.calls and is_any_norm(self._module.get_submodule(self.calls[e].name))

    def described(self, e: Expression) -> str:
        """What has computed an expression: a module's class and name, or an operation."""
        name, _args = self.table.nodes[e]
        modules = [self.calls[e].name] if e in self.calls else []
        modules += [each for (_, output), names in self._activations.items() if output == e for each in names]
        if modules:
            return f"a {type(self._module.get_submodule(modules[0])).__name__} ({modules[0]})"
        return "its input" if name == "leaf" else f"the output of {'add' if name == 'sum' else name}"

    def _activation(self, e: Expression, conv: str) -> tuple[str | ActivationSpec, Expression]:
        """The activation that computes what a convolution reads, and what the activation reads."""
        if self._is_norm(e):
            return IDENTITY, e
        name, args = self.table.nodes[e]
        before = args[0] if args and isinstance(args[0], Expression) else e
        modules = {each for (x, output), names in self._activations.items() if output == e for each in names}
        inputs = {x for x, output in self._activations if output == e}
        if len(modules) > 1:
            raise NoPartsError(f"found {' and '.join(sorted(modules))}, of which one would do")
        spec = None if modules else spec_of_operation(name, *map(_value, args[1:-2]))
        before = inputs.pop() if modules else before
        if not self._is_norm(before) or not (modules or spec):
            raise NoPartsError(
                f"found {self.described(before if modules or spec else e)} before {conv}, {_DENSE_LAYER}"
            )
        return (modules.pop() if modules else cast(ActivationSpec, spec)), before

    def dropout(self, e: Expression) -> tuple[Dropout | None, Expression]:
        """The dropout that computes `e`, which is x · (bernoulli(1 - p) / (1 - p)), and x; or None and `e`."""
        name, args = self.table.nodes[e]
        if name in ("dropout", "feature_dropout"):
            kept, of_channels = 1 - _value(args[1]), name == "feature_dropout"
        elif name == "mul" and all(isinstance(each, Expression) for each in args[:2]):
            name, divided = self.table.nodes[args[1]]
            if name != "div" or "bernoulli" not in self.table.nodes[divided[0]].name:
                return None, e
            kept, of_channels = _value(divided[1]), self.table.shapes[args[1]] != self.table.shapes[e]
        else:
            return None, e
        place = next((place for rate, place in self._rates.items() if 1 - rate == kept), None)
        if place is None:
            raise NoPartsError("found dropout of a rate that is no attribute")
        return Dropout(*place, of_channels), args[0]


def _value(text: Any) -> Any:
    """The constant of this text, as `Expressions.of` writes it."""
    if not isinstance(text, str):
        return text
    kind, _, value = text.partition(" ")
    return float(value) if kind == "float" else ast.literal_eval(value)


def block_parts(block: nn.Module, parts: Parts) -> BlockParts:
    """The present parts of `block`, from the reader that was registered for its class, or of the modules read."""
    reader = block_reader(block)
    if reader is not None:
        return reader(block)
    layers = tuple(_layer_parts(block, layer) for layer in parts.layers)
    return BlockParts(layers, parts.newest_first, parts.new_features_only)


def _layer_parts(block: nn.Module, layer: Layer) -> LayerParts:
    names = [name for unit in layer.units for name in (unit.norm, unit.conv)]
    modules = [submodule(block, name) for name in names]
    activations = tuple(_present_activation(block, unit) for unit in layer.units)
    rate, dropout = _present_dropout(block, layer.dropout, modules[-1])
    paths = [name.split(".")[:-1] for name in names]
    common = [each for i, each in enumerate(paths[0]) if all(path[: i + 1] == paths[0][: i + 1] for path in paths)]
    owner = submodule(block, ".".join(common))
    kept = getattr(owner, "keep_bottleneck", None)
    return LayerParts(owner, *modules, activations=activations, drop_rate=rate, dropout=dropout, keep_bottleneck=kept)


def _present_activation(block: nn.Module, unit: Unit) -> nn.Module:
    inside = activations_of(submodule(block, unit.norm))
    if inside:
        return inside[0]
    return submodule(block, unit.activation) if isinstance(unit.activation, str) else module_of(unit.activation)


def _present_dropout(block: nn.Module, dropout: Dropout | None, conv: Any) -> tuple[float, Callable]:
    if dropout is None:
        return 0.0, F.dropout
    place = submodule(block, dropout.module)
    rate = vars(place)[dropout.attribute] if place.training else 0.0
    return rate, _DROPOUTS[len(conv.kernel_size) if dropout.of_channels else 0]


def consumer_parts(module: nn.Module, read: Transition) -> ConsumerParts:
    """The present parts of a transition."""
    norm, conv = (submodule(module, name) for name in (read.unit.norm, read.unit.conv))
    after, steps = list(read.after), []
    first = after[0] if after and not isinstance(after[0], str) else None
    pooling = after if first is None else after[1:]
    max_pools = len(pooling) > 0 and pooling[0] == "max_pool"  # with the dropout before it a part of the operation
    rate, dropout = _present_dropout(module, first if max_pools else None, conv)
    for each in pooling[1:] if max_pools else after:
        if isinstance(each, str):
            steps.append(POOLS[each])
        else:
            rate_here, function = _present_dropout(module, each, conv)
            if rate_here:
                steps.append(partial(function, p=rate_here))
    pools = not max_pools and len(steps) > 0 and steps[0] is POOLS["avg_pool"]
    settings = pools, (_present_activation(module, read.unit),), composed(*steps[pools:]), max_pools, rate, dropout
    return ConsumerParts(norm, cast(_ConvNd, conv), *settings)


def submodule(module: nn.Module, name: str) -> Any:
    """The module inside `module` of this name, as `get_submodule`, in less time."""
    for each in name.split(".") if name else ():
        child = module._modules.get(each)
        if child is None:
            raise NoPartsError(f"found no {each} in a {type(module).__name__} any more")
        module = child
    return module
