"""Modules that run one after another; dense blocks run together with the modules before and after them.

A block and the consumer after it (a transition or a norm) run as one stage, and the modules before the first block as
one stem, wherever `plan` finds that they can; all other modules are called. This loop serves our models and
converted `nn.Sequential`s of other libraries.
"""

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._tensors import formatted, memory_format_of
from . import choose, layerwise, plan
from .limits import must_be_called, why_not_conv
from .parts import halves
from .stage.run import StageRequest
from .stem import STEM_LENGTH


def run_sequence(
    named_modules: Sequence[tuple[str, nn.Module]],
    x: Any,
    is_block: Callable[[nn.Module], bool],
    taps: Collection[str] = (),
) -> tuple[Any, dict[str, Tensor]]:
    """The output of the last module, and the outputs of the modules that `taps` names ("transition1.relu" inside one).

    A module for which `is_block` is true has an `engine`, and with `can_join_stage` it may be run without being called.
    A consumer's output is computed in channels_last, and keeps this format if only another block reads it.
    """
    names = [name for name, _ in named_modules]
    modules: list[Any] = [module for _, module in named_modules]
    blocks = [i for i, module in enumerate(modules) if is_block(module)]
    first = blocks[0] if blocks else len(modules)
    outputs: dict[str, Tensor] = {}
    plans = None
    if blocks and isinstance(x, Tensor) and choose.may_run_engines(modules[first], x):
        # The first block keeps the plans, which go with it.
        plans = plan.plans_of_network([*modules[first:], *modules[:first]])
    position, saved = 0, [0] * len(modules)
    input_format: torch.memory_format | None = None  # that of x in the plain network, if a stage has kept channels_last
    if plans is not None and choose.may_be_shared(modules[first]) and set(taps).isdisjoint(names[:3]):
        stem = plan.plan_stem(plans, modules, first, x)
        if stem is not None:
            x, position = stem.run(x), STEM_LENGTH

    while position < len(modules):
        name, module, stage = names[position], modules[position], None
        taps_block, hands_on = name in taps, False
        if position in blocks and position + 1 < len(modules) and module.can_join_stage:
            consumer = names[position + 1]
            if f"{consumer}.relu" in taps:
                x, input_format = formatted(x, input_format), None
                x, outputs[f"{consumer}.relu"] = _run_with_rectified(module, modules[position + 1], x, is_block)
                position += 2
                continue
            if plans is not None and isinstance(x, Tensor) and choose.may_be_shared(module):
                if position == first and not taps:
                    saved = plan.num_saved(plans, modules[first:], x)
                if saved is None:
                    x, position = module.run_layers(x, layerwise.run_first_half_plain), position + 1
                    continue
                hands_on = not taps_block and consumer not in taps and blocks[-1] > position + 1
                request = StageRequest(input_format, hands_on, taps_block, saved[(position - first) // 2])
                stage = plan.plan_stage(plans, modules, position, x, request)

        if stage is None:
            x, input_format = module(formatted(x, input_format)), None
            if taps_block:
                outputs[name] = x
            position += 1
            continue
        if taps_block:
            x, input_format = formatted(x, input_format), None
        input_format = input_format or memory_format_of(x) if hands_on else None
        x, *features = stage.run(x)
        if taps_block:
            (outputs[name],) = features
        if names[position + 1] in taps:
            outputs[names[position + 1]] = x
        position += 2
    return x, outputs


def _run_with_rectified(
    block: Any, transition: Any, x: Tensor, is_block: Callable[[nn.Module], bool]
) -> tuple[Tensor, Tensor]:
    """The output of `transition` on the output of `block`, and the output of the transition's ReLU.

    The hooks of a transition get a copy of it, whose forward records the ReLU's output.
    """
    if must_be_called(transition):
        rectified = []

        def forward(x: Tensor) -> Tensor:
            for module in transition:
                x = module(x)
                if module is transition.relu:
                    rectified.append(x)
            return x

        stand_in = copy.copy(transition)
        stand_in.forward = forward
        return stand_in(block(x)), rectified[0]
    norm, relu, *rest = transition
    x, _ = run_sequence([("block", block), ("norm", norm), ("relu", relu)], x, is_block)
    rectified = x
    may_reverse = choose.may_be_shared(block) and choose.may_run_engines(block, x)
    if may_reverse and len(rest) == 2 and _commute(*rest):
        rest.reverse()  # which leaves the convolution a quarter of the pixels
    for module in rest:
        x = module(x)
    return x, rectified


def _commute(conv: Any, pool: nn.Module) -> bool:
    """Whether a convolution and the average pooling after it may run the other way around."""
    if must_be_called(conv) or must_be_called(pool) or not halves(pool, conv):
        return False
    return why_not_conv(conv, conv.weight.dim() - 2, 1) is None
