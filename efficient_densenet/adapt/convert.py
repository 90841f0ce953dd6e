"""Convert every dense block of a model in place, and restore the blocks."""

import logging
import warnings
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

import torch
from torch import nn

from .._checks import check_module
from .._mixins import add_mixin, remove_mixin
from ..engine import choose, plan
from ..engine.choose import Engine, EngineName
from ..engine.parts import NoPartsError
from ..models.layers import DenseBlock
from .converted import ConvertedBlock, convert_block, restore_block
from .errors import NotRunError, SideEffectError, VerificationError
from .read import Parts
from .recipes import WHOLE, Recipe
from .report import Changed, Report
from .sequences import (
    BlocksInARow,
    ConvertedSequence,
    has_converted_blocks,
    holds_converted_blocks,
    stages_of,
)
from .structure import (
    count_layers,
    dimensions,
    first_conv,
    has_forward,
    layers_in,
    layers_in_a_row,
    looks_dense,
    may_be_block,
)
from .transitions import ConvertedTransition, convert_transition, restore_transition, transition_width

Model = TypeVar("Model", bound=nn.Module)

logger = logging.getLogger(__name__.partition(".")[0])


def make_efficient(model: Model, engine: bool | EngineName = True) -> Model:
    """Run every dense block in `model` by `engine`, in place, and return `model`.

    What was changed, what was not, and why, is in `conversion_report(model)`; a line of it is logged. Where nothing was
    converted, a warning says so.

    Args:
        model: any module, such as a DenseNet, a network with a DenseNet inside, or a wrapped model. Blocks of this
            package are set to `engine`; blocks of other libraries are converted.
        engine: True for the best engine for each block, or a name, as for `DenseNet(efficient=...)`. Another call can
            change the engine, and verifies blocks again that have changed.
    """
    check_module("make_efficient", model)
    report = convert(model, engine)
    vars(model)["_conversion_report"] = report
    if report:
        logger.info("make_efficient: %s", report.summary())
    else:
        warnings.warn(f"make_efficient has converted nothing: {report.summary()}", stacklevel=2)
    return model


def conversion_report(model: nn.Module) -> Report:
    """What the last `make_efficient(model)` changed, what it did not, and why."""
    check_module("conversion_report", model)
    report = vars(model).get("_conversion_report")
    if report is None:
        raise ValueError(
            f"conversion_report needs a model that make_efficient has returned, found a {type(model).__name__} without "
            "a report: call make_efficient(model) with the same model first"
        )
    return report


def convert(model: nn.Module, engine: bool | EngineName = True) -> Report:
    """Run every dense block in `model` by `engine`, and report it."""
    parsed, report = choose.parse(engine), Report()
    _convert_tree("", model, parsed, report, set())
    for module in [*model.modules()][::-1]:  # inner sequences first
        if has_converted_blocks(module):
            add_mixin(module, ConvertedSequence)
        elif isinstance(module, ConvertedSequence) and not holds_converted_blocks(module):
            remove_mixin(module, ConvertedSequence)
    report.transitions = _convert_transitions(model, parsed)
    _merge_rows(model, report, parsed)
    return report


def restore(model: nn.Module) -> nn.Module:
    """Undo `make_efficient`, in place, and return `model`."""
    check_module("restore", model)
    vars(model).pop("_conversion_report", None)
    for module in list(model.modules()):
        if isinstance(module, ConvertedSequence):
            remove_mixin(module, ConvertedSequence)
        if isinstance(module, ConvertedTransition):
            restore_transition(module)
        if isinstance(module, ConvertedBlock):
            restore_block(module)
        if isinstance(module, DenseBlock) and "_original_engine" in vars(module):
            module.engine = vars(module).pop("_original_engine")
    plan.forget(model)
    return model


def _convert_tree(
    name: str,
    module: nn.Module,
    engine: Engine | None,
    report: Report,
    visited: set[nn.Module],
    may_be_layer: bool = False,
) -> bool:
    """Convert `module` or, if it is not a dense block, the blocks inside it; return whether any was converted."""
    if module in visited or isinstance(module, torch.jit.ScriptModule):
        return False
    visited.add(module)
    reason = _convert(module, engine, may_be_layer)
    if reason is None:
        report.changed.append(_changed(name, module, engine))
        return True
    children = {f"{name}.{key}" if name else key: child for key, child in module.named_children()}
    layers = layers_in_a_row(module)
    converted = [_convert_tree(key, child, engine, report, visited, child in layers) for key, child in children.items()]
    if not looks_dense(module) or any(converted):
        return any(converted)
    for key, child in children.items():
        if layers_in(child) == layers_in(module):
            report.unchanged.pop(key, None)  # a container of this block's layers
    cannot_run = isinstance(reason, (NotRunError, SideEffectError)) or not has_forward(module)
    if not (cannot_run or count_layers(module) < 2 or engine in (Engine.PLAIN, Engine.SHARED)):
        found = str(reason) if str(reason).startswith("found") else f"found that it {reason}"
        with suppress(NoPartsError, VerificationError):
            convert_block(module, engine, found)
            report.changed.append(_changed(name, module, engine))
            return True
    report.unchanged[name] = str(reason)
    return False


def _convert(module: nn.Module, engine: Engine | None, may_be_layer: bool) -> Exception | None:
    """Convert `module` itself; return the reason if it cannot be converted, and None if it was."""
    if isinstance(module, ConvertedBlock):
        if module.why_not_recompute() is None and module._conversion.pattern != WHOLE:
            module._conversion = replace(module._conversion, engine=engine)
            return None
        restore_block(module)  # it may be converted another way now
    if isinstance(module, DenseBlock):
        vars(module).setdefault("_original_engine", module.engine)
        module.engine = engine
    elif not has_forward(module):
        return NoPartsError(
            f"found a {type(module).__name__}, whose layers the author's forward calls one by one; a module is needed "
            "whose own forward is the dense block"
        )
    elif not may_be_block(module, may_be_layer):
        return NoPartsError(f"found a {type(module).__name__}, which looks like no dense block")
    else:
        try:
            convert_block(module, engine)
        except (NoPartsError, VerificationError) as reason:
            return reason
    return None


def _convert_transitions(model: nn.Module, engine: Engine | None) -> list[str]:
    """Convert the modules that look like transitions and read as many channels as a converted block returns.

    Only the shared engine runs transitions; for another engine, converted transitions are restored.
    """
    if engine not in (None, Engine.SHARED):
        for module in model.modules():
            if isinstance(module, ConvertedTransition):
                restore_transition(module)
        return []
    blocks, widths, names = [each for each in model.modules() if isinstance(each, ConvertedBlock)], set[int](), []
    for block in blocks:
        with suppress(NoPartsError):
            last = block.dense_parts().layers[-1]
            widths.add(last.conv1.in_channels + last.last_conv.out_channels)
    inside = {module for block in blocks for module in block.modules()}
    for name, module in model.named_modules():
        if module in inside or transition_width(module) not in widths:
            continue
        if isinstance(module, ConvertedTransition) or convert_transition(module):
            names.append(name)
            inside.update(module.modules())
    return names


def _changed(name: str, block: nn.Module, engine: Engine | None) -> Changed:
    """The report's entry for a converted block."""
    conv, used, recomputes = first_conv(block), engine or Engine.SHARED, ""
    parameter = next(conv.parameters())  # not conv.weight, which a parametrization would compute
    small_input = parameter.new_empty(2, conv.in_channels, *([3] * dimensions(block)))
    reason = choose.why_not(used, block, small_input)
    if engine is None and reason is not None:
        can_recompute = choose.why_not(Engine.CHECKPOINT, block, small_input) is None
        used = Engine.CHECKPOINT if can_recompute else Engine.PLAIN
    text = used.value
    if reason is not None:
        text += f" ({reason})" if engine is None else f", which will raise: {reason}"
    pattern = None
    if isinstance(block, ConvertedBlock):
        pattern = block._conversion.pattern
        block.update_norms_once(used)
        if used in (Engine.CHECKPOINT, Engine.OFFICIAL) and block.why_not_recompute() is None:
            recomputes = "the block whole" if pattern == WHOLE else "each layer whole"
    if isinstance(pattern, Recipe):
        layers = len(pattern.calls) or (count_layers(block) if looks_dense(block) else 1)
    else:
        layers = len(pattern.layers) if isinstance(pattern, Parts) and pattern.layers else count_layers(block)
    return Changed(name, layers, text, recomputes)


def _merge_rows(model: nn.Module, report: Report, engine: Engine | None) -> None:
    """Report blocks in a row as one."""
    names = {module: name for name, module in model.named_modules()}
    for sequence in names:
        rows = stages_of(sequence) if isinstance(sequence, ConvertedSequence) else ()
        for _, row in rows:
            if isinstance(row, BlocksInARow):
                inside = [names[each] for each in row]
                report.merge(inside, _changed(f"{inside[0]} to {inside[-1]}", row, engine))
