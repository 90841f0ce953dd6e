"""Read the recipe of a dense block without norms from a trace of its forward by torch.fx."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from ..engine.changed_modules import must_be_called
from ..engine.conv_block.parts import PADDING_MODES
from ..engine.parts import NoPartsError, is_activation
from ..kernels.activations import TABLE, spec_of
from .conv_recipe import ActivationName, LayerNames, Recipe, Step, Value

FEWEST_LAYERS = 3
"""A block of fewer convolutions saves little."""

Channels = tuple[fx.Node, ...]
"""The nodes whose concatenation a tensor is."""

_FUNCTIONS: dict[Any, Any] = {
    getattr(F, name): definition.module for name, definition in TABLE.items() if hasattr(F, name)
} | {F.relu6: nn.ReLU6, **dict.fromkeys((torch.relu, "relu", "relu_", F.relu_, torch.relu_), nn.ReLU)}
"""The class of module for each function, whose arguments are the class's."""

_CONCATENATIONS = (torch.cat, torch.concat, torch.concatenate)


def looks_like_conv_block(block: nn.Module) -> bool:
    """Whether the convolutions in `block`, in their order, may read a growing concatenation, and no module between them
    has buffers. The first convolution may come before those in the innermost module."""
    if "forward" in vars(block) or isinstance(block, torch.jit.ScriptModule):
        return False
    inside = [module for module in block.modules() if module is not block]
    leaves = [module for module in inside if not any(True for _ in module.children())]
    convolutions = [module for module in leaves if isinstance(module, _ConvNd)]
    if any(isinstance(each, _ConvTransposeNd) for each in convolutions):
        return False
    if any(True for module in inside for _ in module.buffers()) or any(map(must_be_called, inside)):
        return False
    return _grow(convolutions) or (_grow(convolutions[1:]) and not any(map(looks_like_conv_block, block.children())))


def _grow(convolutions: Sequence[_ConvNd]) -> bool:
    """Whether each convolution reads as many channels as the first one, and all between, read and write."""
    if len(convolutions) < FEWEST_LAYERS:
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
    nodes = list(graph.nodes)
    if [node.op for node in nodes].count("placeholder") != 1:
        raise NoPartsError("found a forward of several arguments")
    convolutions = [node for node in nodes if isinstance(_module(block, node), _ConvNd)]
    layers = max((_Layers(block, convolutions[i:]) for i in range(min(2, len(convolutions)))), key=len)
    if len(layers) < max(FEWEST_LAYERS, len(convolutions) - 1):
        raise NoPartsError("found convolutions that do not read all features before them")
    return layers.recipe(nodes)


class _Layers:
    """The convolutions that read all features before them, the first of `convolutions` and the following ones.

    Attributes:
        read: the channels that the first one reads.
        outputs: the output of each, after its activation if it has one.
    """

    def __init__(self, block: nn.Module, convolutions: Sequence[fx.Node]) -> None:
        self.block, self.first, self.newest_first = block, convolutions[0], False
        self.read = features = _channels(self._input(self.first))
        self.convolutions: list[fx.Node] = []
        self.outputs: list[fx.Node] = []
        for conv in convolutions:
            channels = _channels(self._input(conv))
            if len(self.outputs) == 1:
                self.newest_first = channels == (*self.outputs, *self.read)
                features = self._features()
            if channels != features:
                break
            self.convolutions.append(conv)
            self.outputs.append(self._output(conv))
            features = self._features()

    def __len__(self) -> int:
        return len(self.convolutions)

    def _output(self, conv: fx.Node) -> fx.Node:
        users = list(conv.users)
        return users[0] if len(users) == 1 and self._activation(users[0]) is not None else conv

    def _activation(self, node: fx.Node) -> ActivationName:
        module = _module(self.block, node)
        if module is not None:
            return str(node.target) if is_activation(module) else None
        if node.target not in _FUNCTIONS or not node.args:
            return None
        return spec_of(_FUNCTIONS[node.target](*node.args[1:], **node.kwargs))

    def _new_features(self) -> Channels:
        return tuple(self.outputs[::-1] if self.newest_first else self.outputs)

    def _features(self) -> Channels:
        return (*self._new_features(), *self.read) if self.newest_first else (*self.read, *self._new_features())

    def recipe(self, nodes: Sequence[fx.Node]) -> Recipe:
        """The recipe of a forward with these nodes."""
        last = self._split_off_last(nodes)
        paddings = {self._padding(conv) for conv in (*self.convolutions, *([] if last is None else [last]))} - {None}
        inside = {*self.convolutions, *self.outputs, *paddings}
        whole, new = self._features(), self._new_features()
        concatenations = {
            node: channels
            for node in nodes
            if inside.intersection(channels := _channels(node)) and {*whole}.issuperset(channels) and node not in inside
        }
        results = {node for node, channels in concatenations.items() if channels in (whole, new)}
        results = {node for node in results if any(user not in {*inside, *concatenations, last} for user in node.users)}
        only_new = {concatenations[node] == new for node in results}
        if len(only_new) > 1:
            raise NoPartsError("found results with and without the block's input")
        names = dict.fromkeys(results, "features") | ({} if last is None else {last: "last"})
        if not names:
            raise NoPartsError("found no result of the layers")
        hidden = {*inside, *concatenations}.difference(names)
        start = nodes.index(self.first)
        before, after = ([n for n in part if n not in {*hidden, *names}] for part in (nodes[:start], nodes[start:]))
        *after, output = after
        make = _Steps(self.block, names, hidden)
        return Recipe(
            layers=tuple(map(self._names, self.convolutions, self.outputs)),
            last=None if last is None else self._names(last, last),
            newest_first=self.newest_first,
            new_features_only=only_new == {True},
            argument=next(node.name for node in before if node.op == "placeholder"),
            before=make.steps(node for node in before if node.op != "placeholder"),
            reads=make.value(self._input(self.first)),
            results=tuple(name for name in ("last", "features") if name in names.values()),
            after=make.steps(after),
            returned=make.arguments(output.args[0]),
        )

    def _names(self, conv: fx.Node, output: fx.Node) -> LayerNames:
        padding = self._padding(conv)
        activation = None if output is conv else self._activation(output)
        return LayerNames(str(conv.target), activation, None if padding is None else str(padding.target))

    def _padding(self, conv: fx.Node) -> fx.Node | None:
        """The module that pads the input of a convolution."""
        node = _argument(conv)
        pads = type(_module(self.block, node)) in PADDING_MODES and len(node.users) == 1
        return node if pads else None

    def _input(self, conv: fx.Node) -> fx.Node:
        return _argument(self._padding(conv) or conv)

    def _split_off_last(self, nodes: Sequence[fx.Node]) -> fx.Node | None:
        """Take the last convolution from the layers, if no concatenation has its output, and return it."""
        if any(self.outputs[-1] in _channels(node) for node in nodes if node is not self.outputs[-1]):
            return None
        self.outputs.pop()
        return self.convolutions.pop()


class _Steps:
    """Makes the steps of nodes. `names` are those of the layers' results; other nodes of the layers are `hidden`."""

    def __init__(self, block: nn.Module, names: dict[fx.Node, str], hidden: set[fx.Node]) -> None:
        self.block, self.names, self.hidden = block, names, hidden

    def steps(self, nodes: Any) -> tuple[Step, ...]:
        return tuple(map(self._step, nodes))

    def _step(self, node: fx.Node) -> Step:
        step = Step(node.name, node.op, node.target, self.arguments(node.args), self.arguments(node.kwargs))
        if node.op == "get_attr":
            try:
                step.run(self.block, {})
            except AttributeError as failure:  # of a constant in the code, which torch.fx has set
                raise NoPartsError(f"found a constant tensor {node.target}") from failure
        return step

    def value(self, node: fx.Node) -> Value:
        if node in self.hidden:
            raise NoPartsError("found a result that is neither all features nor of the last convolution")
        return Value(self.names.get(node, node.name))

    def arguments(self, arguments: Any) -> Any:
        if isinstance(arguments, fx.Node):
            return self.value(arguments)
        if type(arguments) is tuple:
            return tuple(map(self.arguments, arguments))
        if isinstance(arguments, list):  # of torch.fx's own class
            return list(map(self.arguments, arguments))
        if isinstance(arguments, dict):
            return {name: self.arguments(each) for name, each in arguments.items()}
        if isinstance(arguments, (tuple, slice)):
            raise NoPartsError(f"found a {type(arguments).__name__} in the forward")
        return arguments


def _channels(node: fx.Node) -> Channels:
    """The nodes whose concatenation a node is, itself if it is none."""
    if node.op != "call_function" or node.target not in _CONCATENATIONS:
        return (node,)
    tensors, *dim = node.args or (node.kwargs.get("tensors"),)
    dim = dim[0] if dim else node.kwargs.get("dim", node.kwargs.get("axis", 0))
    if dim != 1 or not isinstance(tensors, (tuple, list)):
        return (node,)
    return tuple(each for tensor in cast(Sequence[fx.Node], tensors) for each in _channels(tensor))


def _argument(node: fx.Node) -> fx.Node:
    if len(node.args) != 1:
        raise NoPartsError("found a convolution that is not called with one tensor")
    return cast(fx.Node, node.args[0])


def _module(block: nn.Module, node: fx.Node) -> nn.Module | None:
    return block.get_submodule(str(node.target)) if node.op == "call_module" else None
