"""How the forward of a dense block without norms uses its layers, read from a trace by torch.fx."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from ..engine.conv_block.parts import ConvBlock, ConvLayer
from ..engine.parts import NoPartsError, is_activation
from ..engine.refuse import must_be_called
from ..kernels.activations import TABLE, ActivationSpec, spec_of

FEWEST_LAYERS = 3
"""A block of fewer convolutions saves little."""

ActivationName = str | ActivationSpec | None
"""The name of a module in the block, or the settings of a function; None for no activation."""

Expression = Any
"""What a forward computes of the results: "x", "last" or "features", or a tuple of an operation and its operands."""

_FUNCTIONS: dict[Any, Any] = {
    **dict.fromkeys((F.relu, torch.relu, "relu", "relu_", F.relu_, torch.relu_), nn.ReLU),
    F.leaky_relu: nn.LeakyReLU,
    F.elu: nn.ELU,
    F.silu: nn.SiLU,
    F.gelu: nn.GELU,
    F.mish: nn.Mish,
    F.relu6: nn.ReLU6,
    F.hardtanh: nn.Hardtanh,
}
"""The class of module for each function, whose arguments are the class's."""

_CONCATENATIONS = (torch.cat, torch.concat, torch.concatenate)
_ARITHMETIC = {
    **dict.fromkeys((operator.add, torch.add, "add", operator.iadd, "add_"), "add"),
    **dict.fromkeys((operator.mul, torch.mul, "mul", operator.imul, "mul_"), "mul"),
}


@dataclass(frozen=True)
class Recipe:
    """How a forward uses its layers, by their names in the block.

    Attributes:
        layers: the convolution and the activation of each layer, which reads all features before it.
        last: a convolution of all features.
        newest_first: as in `ConvBlock`.
        result: what the forward returns.
    """

    layers: tuple[tuple[str, ActivationName], ...]
    last: str | None
    newest_first: bool
    result: Expression

    @property
    def returns_features(self) -> bool:
        return _mentions(self.result, "features")

    def parts(self, block: nn.Module) -> ConvBlock:
        """The modules of `block` as they are now."""
        layers = tuple(ConvLayer(_conv(block, name), _activation(block, each)) for name, each in self.layers)
        last = None if self.last is None else _conv(block, self.last)
        return ConvBlock(layers, last, self.newest_first, self.returns_features)

    def finish(self, block: nn.Module, x: Tensor, *results: Tensor) -> Any:
        """What the forward returns, from the output of the last convolution, if there is one, and the features."""
        names = [] if self.last is None else ["last"]
        values = dict(zip([*names, "features"], results, strict=False)) | {"x": x}
        return _evaluate(block, self.result, values)

    def run_plain(self, block: nn.Module, x: Tensor) -> Any:
        """What the forward returns, by the block's modules and concatenations."""
        parts, features = self.parts(block), x
        for conv, activation in parts.layers:
            new = conv(features)
            new = new if activation is None else activation(new)
            features = torch.cat([new, features] if self.newest_first else [features, new], 1)
        last = [] if parts.last is None else [parts.last(features)]
        return self.finish(block, x, *last, features)


def looks_like_conv_block(block: nn.Module) -> bool:
    """Whether the convolutions in `block`, in their order, may read a growing concatenation, with only activations
    between them."""
    if "forward" in vars(block) or isinstance(block, torch.jit.ScriptModule):
        return False
    inside = [module for module in block.modules() if module is not block]
    leaves = [module for module in inside if not any(True for _ in module.children())]
    convolutions = [module for module in leaves if isinstance(module, _ConvNd)]
    others = [module for module in leaves if module not in convolutions]
    if len(convolutions) < FEWEST_LAYERS or any(isinstance(each, _ConvTransposeNd) for each in convolutions):
        return False
    if any(True for module in others for _ in module.buffers()) or any(map(must_be_called, inside)):
        return False
    widths = accumulate((each.out_channels for each in convolutions), initial=convolutions[0].in_channels)
    return all(each.in_channels == width for each, width in zip(convolutions, widths, strict=False))


def read_recipe(block: nn.Module) -> Recipe:
    """The recipe of `block`; `NoPartsError` if its forward is no dense block's."""
    before = [(module, dict(vars(module))) for module in block.modules()]
    try:
        graph = fx.Tracer().trace(block)
    except Exception as failure:  # whatever an author's code raises on a proxy
        raise NoPartsError(f"found a forward that torch.fx cannot trace: {failure}") from failure
    finally:
        for module, values in before:
            vars(module).clear()
            vars(module).update(values)
    return _Reader(block).read(graph)


class _Reader:
    """Reads a graph. The value of a node is a tuple of segments, of which it is the concatenation (0 is the block's
    input, i the output of convolution i), or an `Expression`; ("conv", i) is convolution i without activation."""

    def __init__(self, block: nn.Module) -> None:
        self.block, self.values = block, {}
        self.names: list[str] = []
        self.reads: list[tuple[int, ...]] = []
        self.activations: dict[int, ActivationName] = {}
        self.concatenated: set[int] = {0}

    def read(self, graph: fx.Graph) -> Recipe:
        result = None
        for node in graph.nodes:
            if node.op == "output":
                result = self._expression(node.args[0])
            else:
                self.values[node] = self._value(node)
        count = len(self.names)
        last = count if count not in self.concatenated else None
        layers = range(1, count + (last is None))
        if len(layers) + (last is not None) < FEWEST_LAYERS:
            raise NoPartsError("found too few convolutions")
        newest_first = len(layers) > 1 and self.reads[1] == (1, 0)
        for i, reads in enumerate(self.reads):
            if reads != _order(i, newest_first) or (i + 1 in layers and i + 1 not in self.concatenated):
                raise NoPartsError("found convolutions that do not read all features before them")
        everything = _order(len(layers), newest_first)
        return Recipe(
            tuple((self.names[i - 1], self.activations.get(i)) for i in layers),
            None if last is None else self.names[last - 1],
            newest_first,
            self._resolved(result, everything, last),
        )

    def _value(self, node: fx.Node) -> Any:
        arguments = node.args
        if node.op == "placeholder":
            if self.values:
                raise NoPartsError("found a forward of several arguments")
            return (0,)
        if node.op == "call_module":
            return self._called(str(node.target), self.block.get_submodule(str(node.target)), arguments)
        if node.op == "call_function" and node.target in _CONCATENATIONS:
            return self._concatenation(node)
        if node.target in _FUNCTIONS:
            spec = spec_of(_FUNCTIONS[node.target](*arguments[1:], **node.kwargs))
            return self._activated(arguments[0], cast(ActivationSpec, spec))
        if node.target in _ARITHMETIC and len(arguments) == 2 and not node.kwargs:
            return (_ARITHMETIC[node.target], *map(self._operand, arguments))
        raise NoPartsError(f"found a call of {node.target}")

    def _called(self, name: str, module: nn.Module, arguments: tuple) -> Any:
        if isinstance(module, _ConvNd):
            reads = self._segments(arguments[0])
            self.names.append(name)
            self.reads.append(reads)
            return ("conv", len(self.names))
        if is_activation(module):
            return self._activated(arguments[0], name)
        raise NoPartsError(f"found a {type(module).__name__}")

    def _activated(self, argument: Any, activation: ActivationName) -> Any:
        value = self.values[argument]
        if value[0] != "conv":
            return ("activation", activation, self._operand(argument))
        self.activations[value[1]] = activation
        return (value[1],)

    def _concatenation(self, node: fx.Node) -> tuple[int, ...]:
        tensors, *dim = node.args
        if (dim or [node.kwargs.get("dim", node.kwargs.get("axis", 0))])[0] != 1:
            raise NoPartsError("found a concatenation of other dimensions than channels")
        segments = tuple(each for tensor in cast(Sequence[Any], tensors) for each in self._segments(tensor))
        self.concatenated.update(segments)
        return segments

    def _segments(self, argument: Any) -> tuple[int, ...]:
        """The segments of a tensor that a convolution or a concatenation reads."""
        value = self.values.get(argument)
        if value is not None and value[0] == "conv":  # without an activation
            return (value[1],)
        if value is None or not all(isinstance(each, int) for each in value):
            raise NoPartsError("found a convolution of something else than features")
        return value

    def _operand(self, argument: Any) -> Expression:
        if isinstance(argument, fx.Node):
            return self.values[argument]
        if isinstance(argument, (int, float)):
            return ("number", argument)
        raise NoPartsError(f"found {argument!r} in the forward")

    def _expression(self, result: Any) -> Expression:
        if isinstance(result, (tuple, list)):
            return (type(result).__name__, *map(self._operand, result))
        return self._operand(result)

    def _resolved(self, value: Any, everything: tuple[int, ...], last: int | None) -> Expression:
        """The expression with the block's results in the place of segments."""
        if value == ("conv", last):
            return "last"
        if value == (0,):
            return "x"
        if last is not None and value == (last,):
            return ("activation", self.activations[last], "last")
        if value == everything:
            return "features"
        if not isinstance(value, tuple) or not isinstance(value[0], str) or value[0] == "conv":
            raise NoPartsError("found a result that is neither all features nor of the last convolution")
        if value[0] == "number":
            return value
        operation, *operands = value
        fixed = operands[:1] if operation == "activation" else []
        return (operation, *fixed, *(self._resolved(each, everything, last) for each in operands[len(fixed) :]))


def _order(i: int, newest_first: bool) -> tuple[int, ...]:
    """All segments before convolution i + 1, in their order."""
    segments = tuple(range(i + 1))
    return segments[::-1] if newest_first else segments


def _mentions(expression: Expression, name: str) -> bool:
    return expression == name or (isinstance(expression, tuple) and any(_mentions(each, name) for each in expression))


def _evaluate(block: nn.Module, expression: Expression, values: dict[str, Tensor]) -> Any:
    if isinstance(expression, str):
        return values[expression]
    operation, *operands = expression
    if operation == "number":
        return operands[0]
    if operation == "activation":
        activation, operand = operands
        return cast(nn.Module, _activation(block, activation))(_evaluate(block, operand, values))
    results = [_evaluate(block, each, values) for each in operands]
    if operation in ("tuple", "list"):
        return tuple(results) if operation == "tuple" else results
    return (operator.add if operation == "add" else operator.mul)(*results)


def _conv(block: nn.Module, name: str) -> _ConvNd:
    return cast(_ConvNd, block.get_submodule(name))


def _activation(block: nn.Module, activation: ActivationName) -> nn.Module | None:
    if activation is None or isinstance(activation, str):
        return None if activation is None else block.get_submodule(activation)
    return _module_of(activation)


@lru_cache(maxsize=256)
def _module_of(spec: ActivationSpec) -> nn.Module:
    """A module with these settings, for a function."""
    if spec.name == "gelu_tanh":
        return nn.GELU("tanh")
    module: Any = TABLE[spec.name].module()
    constants = TABLE[spec.name].constants(module)
    return TABLE[spec.name].module(*spec[1:][: len(constants)])
