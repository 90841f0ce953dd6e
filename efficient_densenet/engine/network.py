"""Modules that run one after another; dense blocks run together with the modules before and after them.

A block and the consumer after it (a transition or a norm) run as one stage, and the modules before the first block as
one stem, wherever `choose` finds that they can; all other modules are called. This loop serves our models and
converted `nn.Sequential`s of other libraries.
"""

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from .._tensors import formatted, memory_format_of
from . import choose
from .changed_modules import must_be_called
from .parts import BlockParts
from .stage import run as shared
from .stage.run import StageFormats

NamedModules = Sequence[tuple[str, nn.Module]]
STEM_LENGTH = 4


def run_sequence(
    modules: NamedModules, x: Any, is_block: Callable[[nn.Module], bool], taps: Collection[str] = ()
) -> tuple[Any, dict[str, Tensor]]:
    """The output of the last module, and the outputs of the modules that `taps` names ("transition1.relu" inside one).

    A module for which `is_block` is true has an `engine`, and with `can_join_stage` it may be run without being called.
    """
    walk = _Walk(modules, x, is_block, taps)
    walk.run_stem()
    while walk.position < len(modules):
        if walk.is_at_stage():
            walk.run_stage()
        else:
            walk.call_next()
    return walk.x, walk.outputs


class _Walk:
    """One pass over a network's modules.

    `plain_format` is the memory format of x in the plain network, if a stage has kept x in channels_last; else None.
    """

    def __init__(
        self, modules: NamedModules, x: Any, is_block: Callable[[nn.Module], bool], taps: Collection[str]
    ) -> None:
        self.modules, self.x, self.is_block, self.taps = modules, x, is_block, taps
        self.outputs: dict[str, Tensor] = {}
        self.position = 0
        self.plain_format: torch.memory_format | None = None
        blocks = [module for _, module in modules if is_block(module)]
        self.first_block = blocks[0] if blocks else None
        self.first_parts: BlockParts | None = None

    def run_stem(self) -> None:
        tapped = any(name in self.taps for name, _ in self.modules[: STEM_LENGTH - 1])
        if self.first_block is None or tapped or not isinstance(self.x, Tensor):
            return
        result = choose.run_stem([module for _, module in self.modules], self.first_block, self.x)
        if result is not None:
            (self.x, self.first_parts), self.position = result, STEM_LENGTH

    def is_at_stage(self) -> bool:
        """Whether the next module is a block that may run with the module after it."""
        _, module = self.modules[self.position]
        has_consumer = self.position + 1 < len(self.modules) and isinstance(self.x, (Tensor, Proxy))
        return has_consumer and self.is_block(module) and choose.as_engine_block(module).can_join_stage

    def run_stage(self) -> None:
        """Run a block with its consumer. The consumer's output is computed in channels_last, and keeps this format if
        only another block reads it."""
        (name, block), (consumer_name, consumer), *following = self.modules[self.position : self.position + 3]
        parts, relu = self.first_parts if block is self.first_block else None, f"{consumer_name}.relu"
        joined = None if relu in self.taps else choose.join(block, consumer, self.x, parts)
        if relu in self.taps:
            self._use_plain_format()
            self.x, self.outputs[relu] = _run_with_rectified(block, consumer, self.x, parts)
        elif joined is None:
            self.call_next()
            return
        elif name in self.taps:
            self._use_plain_format()
            self.x, self.outputs[name] = shared.run_with_features(*joined, self.x)
        else:
            formats = StageFormats(
                plain=self.plain_format or memory_format_of(self.x),
                keeps_channels_last=consumer_name not in self.taps and any(self.is_block(m) for _, m in following),
            )
            self.x = shared.run(*joined, self.x, formats)
            self.plain_format = formats.plain if formats.keeps_channels_last else None
        self.position += 2
        if consumer_name in self.taps:
            self.outputs[consumer_name] = self.x

    def call_next(self) -> None:
        self._use_plain_format()
        name, module = self.modules[self.position]
        self.x = module(self.x)
        self.position += 1
        if name in self.taps:
            self.outputs[name] = self.x

    def _use_plain_format(self) -> None:
        self.x, self.plain_format = formatted(self.x, self.plain_format), None


def _run_with_rectified(
    block: nn.Module, transition: Any, x: Tensor, parts: BlockParts | None
) -> tuple[Tensor, Tensor]:
    """The output of `transition` on the output of `block`, and the output of the transition's ReLU."""
    if must_be_called(transition):
        return _call_with_rectified(transition, block(x))
    joined = choose.join(block, transition.norm, x, parts)
    x = rectified = transition.relu(transition.norm(block(x)) if joined is None else shared.run(*joined, x))
    rest = list(transition)[2:]
    if joined is not None and not any(map(must_be_called, rest)):
        rest.reverse()  # average pooling commutes with the 1×1 convolution, and leaves it a quarter of the pixels
    for module in rest:
        x = module(x)
    return x, rectified


def _call_with_rectified(transition: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs of `transition` and of its ReLU, by calling the transition, which may have hooks.

    The hooks get a copy of the transition, whose forward records the ReLU's output.
    """
    rectified = []

    def forward(x: Tensor) -> Tensor:
        for module in transition:
            x = module(x)
            if module is transition.relu:
                rectified.append(x)
        return x

    stand_in = copy.copy(transition)
    stand_in.forward = forward
    return stand_in(x), rectified[0]
