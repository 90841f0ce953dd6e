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
from .parts import EngineBlock
from .read import Kept, StageRequest
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
        self.saved_by_default: dict[nn.Module, tuple[int, Kept | None]] | None = {}
        blocks = [module for _, module in modules if is_block(module)]
        self.first_block = blocks[0] if blocks else None

    def run_stem(self) -> None:
        tapped = any(name in self.taps for name, _ in self.modules[: STEM_LENGTH - 1])
        if self.first_block is None or tapped or not isinstance(self.x, Tensor):
            return
        output = choose.run_stem([module for _, module in self.modules[:STEM_LENGTH]], self.first_block, self.x)
        if output is not None:
            self.x, self.position = output, STEM_LENGTH

    def is_at_stage(self) -> bool:
        """Whether the next module is a block that may run with the module after it."""
        module: EngineBlock = self.modules[self.position][1]
        has_consumer = self.position + 1 < len(self.modules) and isinstance(self.x, (Tensor, Proxy))
        return has_consumer and self.is_block(module) and module.can_join_stage

    def run_stage(self) -> None:
        """Run a block with its consumer. The consumer's output is computed in channels_last, and keeps this format if
        only another block reads it."""
        (name, block), (consumer_name, consumer), *following = self.modules[self.position : self.position + 3]
        relu = f"{consumer_name}.relu"
        if relu in self.taps:
            self._use_plain_format()
            self.x, self.outputs[relu] = _run_with_rectified(block, consumer, self.x)
        else:
            taps_block, is_tapped = name in self.taps, consumer_name in self.taps
            handed_on = not (taps_block or is_tapped) and any(self.is_block(module) for _, module in following)
            formats, saved = StageFormats(self.plain_format, handed_on), self._saved_by_default(block)
            if saved is None:
                self.x = choose.run_block(block, self.x, choose.BlockPlan(choose.Engine.PLAIN))
                self.position += 1
                return
            request = StageRequest(formats, taps_block, *saved)
            stage = choose.join(block, consumer, self.x, request)
            if stage is None:
                self.call_next()
                return
            if taps_block:
                self._use_plain_format()
            plain_format = self.plain_format or memory_format_of(self.x)
            if stage.after is not None:
                self._forget_comparisons()
            self.x, *features = stage.run(self.x)
            if taps_block:
                (self.outputs[name],) = features
            self.plain_format = plain_format if handed_on else None
        self.position += 2
        if consumer_name in self.taps:
            self.outputs[consumer_name] = self.x

    def _saved_by_default(self, block: nn.Module) -> tuple[int, Kept | None] | None:
        """How many layers of `block` save their bottlenecks by default, and what is kept of its stage, if its modules
        have been compared and none has been called since. None where plain modules hold less."""
        if block is self.first_block and not self.taps:
            self.saved_by_default = choose.num_saved([module for _, module in self.modules[self.position :]], self.x)
        return None if self.saved_by_default is None else self.saved_by_default.get(block, (0, None))

    def _forget_comparisons(self) -> None:
        if self.saved_by_default is None:
            return
        self.saved_by_default = {block: (number, None) for block, (number, _) in self.saved_by_default.items()}

    def call_next(self) -> None:
        self._use_plain_format()
        self._forget_comparisons()
        name, module = self.modules[self.position]
        self.x = module(self.x)
        self.position += 1
        if name in self.taps:
            self.outputs[name] = self.x

    def _use_plain_format(self) -> None:
        self.x, self.plain_format = formatted(self.x, self.plain_format), None


def _run_with_rectified(block: nn.Module, transition: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output of `transition` on the output of `block`, and the output of the transition's ReLU."""
    if must_be_called(transition):
        return _call_with_rectified(transition, block(x))
    stage = choose.join(block, transition.norm, x)
    x = rectified = transition.relu(transition.norm(block(x)) if stage is None else stage.run(x)[0])
    rest = list(transition)[2:]
    if stage is not None and not any(map(must_be_called, rest)):
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
