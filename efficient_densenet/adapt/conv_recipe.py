"""How the forward of a dense block without norms uses its layers: plain data, with which it can be run again."""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ..engine.conv_block.parts import ConvBlock, ConvLayer
from ..kernels.activations import ActivationSpec, module_of

ActivationName = str | ActivationSpec | None
"""The name of a module in the block, or the settings of a function; None for no activation."""

RunRow = Callable[[ConvBlock, Tensor], Sequence[Tensor]]
"""Runs the layers on a tensor; returns the output of the last convolution, if there is one, and the features."""


class LayerNames(NamedTuple):
    """The names of a layer's convolution, of the activation after it, and of the module that pads before it."""

    conv: str
    activation: ActivationName = None
    padding: str | None = None

    def layer(self, block: nn.Module) -> ConvLayer:
        padding = None if self.padding is None else block.get_submodule(self.padding)
        conv = cast(_ConvNd, block.get_submodule(self.conv))
        return ConvLayer(conv, _activation(block, self.activation), padding)


class Value(NamedTuple):
    """The result of a step among the arguments of another one."""

    name: str


class Step(NamedTuple):
    """One operation of a forward, before or after its layers: a node of torch.fx, with a `Value` for each node among
    its arguments."""

    name: str
    kind: str
    target: Any
    args: Any
    kwargs: Any

    def run(self, block: nn.Module, values: Mapping[str, Any]) -> Any:
        if self.kind == "get_attr":
            return operator.attrgetter(self.target)(block)
        args, kwargs = resolved(self.args, values), resolved(self.kwargs, values)
        if self.kind == "call_function":
            return self.target(*args, **kwargs)
        if self.kind == "call_method":
            return getattr(args[0], self.target)(*args[1:], **kwargs)
        return block.get_submodule(self.target)(*args, **kwargs)


@dataclass(frozen=True)
class Recipe:
    """How a forward uses its layers, by their names in the block.

    Attributes:
        layers: each reads all features before it.
        last: a convolution of all features, without activation.
        newest_first, new_features_only: as in `ConvBlock`.
        argument: the name of the forward's argument.
        before, after: what the forward computes before and after its layers.
        reads: what the layers read, the forward's argument or the result of a step.
        results: the name under which later steps find each result of the layers.
        returned: what the forward returns.
    """

    layers: tuple[LayerNames, ...]
    last: LayerNames | None
    newest_first: bool
    new_features_only: bool
    argument: str
    before: tuple[Step, ...]
    reads: Value
    results: tuple[str, ...]
    after: tuple[Step, ...]
    returned: Any

    def parts(self, block: nn.Module) -> ConvBlock:
        """The modules of `block` as they are now."""
        layers = tuple(names.layer(block) for names in self.layers)
        last = None if self.last is None else self.last.layer(block)
        returns_features = len(self.results) > (last is not None)
        return ConvBlock(layers, last, self.newest_first, returns_features, self.new_features_only)

    def run(self, block: nn.Module, x: Tensor, run_row: RunRow) -> Any:
        """What the forward returns, with its layers run by `run_row`."""
        values: dict[str, Any] = {self.argument: x}
        for step in self.before:
            values[step.name] = step.run(block, values)
        values.update(zip(self.results, run_row(self.parts(block), values[self.reads.name]), strict=True))
        for step in self.after:
            values[step.name] = step.run(block, values)
        return resolved(self.returned, values)


def run_plain(parts: ConvBlock, x: Tensor) -> list[Tensor]:
    """The results of the layers, by modules and concatenations."""
    features = [x]
    for layer in parts.layers:
        new = _run_layer(layer, features)
        features = [new, *features] if parts.newest_first else [*features, new]
    results = [] if parts.last is None else [_run_layer(parts.last, features)]
    if parts.new_features_only:
        del features[-1 if parts.newest_first else 0]
    return [*results, _concatenated(features)] if parts.returns_features else results


def _run_layer(layer: ConvLayer, features: list[Tensor]) -> Tensor:
    x = _concatenated(features)
    for module in (layer.padding, layer.conv, layer.activation):
        x = x if module is None else module(x)
    return x


def _concatenated(features: list[Tensor]) -> Tensor:
    return torch.cat(features, 1) if len(features) > 1 else features[0]


def resolved(arguments: Any, values: Mapping[str, Any]) -> Any:
    """Arguments, in nested containers, with the results of the steps in the place of each `Value`."""
    if isinstance(arguments, Value):
        return values[arguments.name]
    if type(arguments) in (tuple, list):
        return type(arguments)(resolved(each, values) for each in arguments)
    if type(arguments) is dict:
        return {name: resolved(each, values) for name, each in arguments.items()}
    return arguments


def _activation(block: nn.Module, activation: ActivationName) -> nn.Module | None:
    if activation is None or isinstance(activation, str):
        return None if activation is None else block.get_submodule(activation)
    return module_of(activation)
