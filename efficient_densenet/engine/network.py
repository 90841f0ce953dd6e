"""Modules that run one after another, in which dense blocks run together with what comes before and after them.

A block and the consumer after it (a transition or a norm) run as one stage, and the modules before the first block as
one stem, wherever the dispatcher finds that they can; all others are called. This loop serves our models and
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
from .parts import BlockParts
from .refuse import must_be_called

NamedModules = Sequence[tuple[str, nn.Module]]
STEM_LENGTH = 4


def run_sequence(
    modules: NamedModules, x: Any, is_block: Callable[[nn.Module], bool], taps: Collection[str] = ()
) -> tuple[Any, dict[str, Tensor]]:
    """The output of the last module, and the outputs of the modules that `taps` names ("transition1.relu" inside one).

    A module for which `is_block` is true has an `engine`, and with `can_join_stage` it may be run without being called.
    """
    outputs: dict[str, Tensor] = {}
    blocks = [module for _, module in modules if is_block(module)]
    first_block = blocks[0] if blocks else None
    x, position, first_parts = _run_stem(modules, x, first_block, taps)
    # The plain network's memory format of x, where a stage has kept x in channels_last.
    memory_format: torch.memory_format | None = None
    while position < len(modules):
        name, module = modules[position]
        position += 1
        has_consumer = position < len(modules) and isinstance(x, (Tensor, Proxy))
        if has_consumer and is_block(module) and choose.as_engine_block(module).can_join_stage:
            consumer_name, consumer = modules[position]
            parts = first_parts if module is first_block else None
            if _is_stage_tapped(name, consumer_name, taps):
                x = formatted(x, memory_format)
                x, consumed = _run_tapped_stage(name, module, consumer_name, consumer, x, parts, taps, outputs)
                memory_format = None
            else:
                keeps_channels_last = any(is_block(following) for _, following in modules[position + 1 : position + 2])
                x, consumed, memory_format = _run_stage(module, consumer, x, parts, memory_format, keeps_channels_last)
            position += consumed
        else:
            x, memory_format = module(formatted(x, memory_format)), None
            if name in taps:
                outputs[name] = x
    return x, outputs


def _run_stem(
    modules: NamedModules, x: Any, block: nn.Module | None, taps: Collection[str]
) -> tuple[Any, int, BlockParts | None]:
    """The stem's output, how many modules have run, and the parts of the first block if they were read."""
    tapped = any(name in taps for name, _ in modules[: STEM_LENGTH - 1])
    if block is None or tapped or not isinstance(x, Tensor):
        return x, 0, None
    result = choose.run_stem([module for _, module in modules], block, x)
    if result is None:
        return x, 0, None
    return result[0], STEM_LENGTH, result[1]


def _run_stage(
    block: nn.Module,
    consumer: nn.Module,
    x: Any,
    parts: BlockParts | None,
    memory_format: torch.memory_format | None,
    keeps_channels_last: bool,
) -> tuple[Any, bool, torch.memory_format | None]:
    """The output of `block`, or of `consumer` on it, and whether that has run; and the output's memory format in the
    plain network, where it has been kept in channels_last."""
    output, consumed = choose.run_stage(block, consumer, x, parts, memory_format, keeps_channels_last)
    if not (consumed and keeps_channels_last):
        return output, consumed, None
    return output, consumed, memory_format or memory_format_of(x)


def _is_stage_tapped(name: str, consumer_name: str, taps: Collection[str]) -> bool:
    return not {name, consumer_name, f"{consumer_name}.relu"}.isdisjoint(taps)


def _run_tapped_stage(
    name: str,
    block: nn.Module,
    consumer_name: str,
    consumer: nn.Module,
    x: Any,
    parts: BlockParts | None,
    taps: Collection[str],
    outputs: dict[str, Tensor],
) -> tuple[Tensor, bool]:
    """The output of `block`, or of `consumer` on it, and whether that has run; adds what is tapped to `outputs`."""
    consumed = True
    if f"{consumer_name}.relu" in taps:
        x, outputs[f"{consumer_name}.relu"] = _run_with_rectified(block, consumer, x, parts)
    elif name in taps:
        x, outputs[name] = choose.run_stage_with_features(block, consumer, x, parts)
    else:
        x, consumed = choose.run_stage(block, consumer, x, parts)
    if consumed and consumer_name in taps:
        outputs[consumer_name] = x
    return x, consumed


def _run_with_rectified(
    block: nn.Module, transition: Any, x: Tensor, parts: BlockParts | None
) -> tuple[Tensor, Tensor]:
    """The output of `transition` on that of `block`, and the output of the transition's ReLU."""
    if must_be_called(transition):
        return _call_with_rectified(transition, block(x))
    x, normalized = choose.run_stage(block, transition.norm, x, parts)
    rectified = transition.relu(x if normalized else transition.norm(x))
    rest = list(transition)[2:]
    if normalized and not any(map(must_be_called, rest)):
        rest.reverse()  # average pooling commutes with the 1×1 convolution, and leaves it a quarter of the pixels
    x = rectified
    for module in rest:
        x = module(x)
    return x, rectified


def _call_with_rectified(transition: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The same by calling the transition, for the hooks on it; they see a copy, which records the ReLU's output."""
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
