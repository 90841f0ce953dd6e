"""Convert every dense block of a model in place, and restore them."""

from itertools import pairwise
from typing import TypeGuard

from torch import nn
from torch.nn.modules.conv import _ConvNd

from .._mixins import add_mixin, remove_mixin
from ..engines import dispatch
from ..engines.dispatch import Engine
from ..engines.eligibility import joined_consumer
from ..engines.parts import NoPartsError
from ..models.layers import DenseBlock
from .converted import ConvertedBlock, ConvertedSequence, convert_block, restore_block
from .report import Changed, Report, saved_values_per_pixel
from .structure import layers_in, looks_dense, read_block
from .verify import VerificationError


def make_efficient(model: nn.Module, engine: bool | str = True) -> Report:
    """Run every dense block in `model` by `engine`, and report what was changed, what was not, and why.

    Args:
        model: any module: a DenseNet, a network that has one inside, a wrapped one. Blocks of this package are set to
            `engine`; those of other libraries are converted.
        engine: True for the best one for each block, or a name, as for `DenseNet(efficient=...)`. Another call with
            another engine changes it.
    """
    parsed, report = dispatch.parse(engine), Report()
    _convert_tree("", model, parsed, report, set())
    for name, module in model.named_modules():
        if _has_converted_blocks(module):
            if not isinstance(module, ConvertedSequence):
                add_mixin(module, ConvertedSequence)
            if any(_can_join(*pair) for pair in pairwise(module)):
                report.joined.append(name)
    return report


def restore(model: nn.Module) -> nn.Module:
    """Undo `make_efficient`, in place, and return `model`."""
    for module in list(model.modules()):
        if isinstance(module, ConvertedSequence):
            remove_mixin(module, ConvertedSequence)
        if isinstance(module, ConvertedBlock):
            restore_block(module)
        if isinstance(module, DenseBlock) and "_original_engine" in vars(module):
            module.engine = vars(module).pop("_original_engine")
    return model


def _convert_tree(name: str, module: nn.Module, engine: Engine | None, report: Report, visited: set[nn.Module]) -> bool:
    """Convert `module` or, if it is not a dense block, those inside it; return whether any was converted."""
    if module in visited:
        return False
    visited.add(module)
    reason = _convert(module, engine)
    if reason is None:
        report.changed.append(_changed(name, module, engine))
        return True
    layers = layers_in(module) if looks_dense(module) else []  # a layer alone is not a block
    children = [(key, child) for key, child in module.named_children() if child not in layers]
    converted = [
        _convert_tree(f"{name}.{key}" if name else key, child, engine, report, visited) for key, child in children
    ]
    if looks_dense(module) and not any(converted):
        report.unchanged[name] = reason
    return any(converted)


def _convert(module: nn.Module, engine: Engine | None) -> str | None:
    """Convert `module` itself; return the reason if it cannot be converted, and None if it was."""
    if isinstance(module, ConvertedBlock):
        module._conversion.engine = engine
    elif isinstance(module, DenseBlock):
        vars(module).setdefault("_original_engine", module.engine)
        module.engine = engine
    else:
        try:
            convert_block(module, engine)
        except (NoPartsError, VerificationError) as reason:
            return str(reason)
    return None


def _changed(name: str, block: nn.Module, engine: Engine | None) -> Changed:
    """The report's entry for a converted block."""
    reason = _why_not(engine or Engine.SHARED, block)
    used = engine or (Engine.SHARED if reason is None else Engine.CHECKPOINT)
    text = used.value
    if reason is not None:
        text += f" ({reason})" if engine is None else f", which will raise: {reason}"
    try:
        parts = read_block(block)
    except NoPartsError:  # the block was converted before, and has been altered since
        return Changed(name, len(layers_in(block)), text, 0, 0)
    saved_by_plain, saved = (saved_values_per_pixel(parts, each) for each in (Engine.PLAIN, used))
    return Changed(name, len(parts.layers), text, saved_by_plain, saved)


def _why_not(engine: Engine, block: nn.Module) -> str | None:
    """Why `engine` cannot run `block` on a small input of the parameters' dtype and device."""
    conv = next(module for module in block.modules() if isinstance(module, _ConvNd))
    parameter = next(conv.parameters())  # not conv.weight, which a parametrization would compute
    return dispatch.why_not(engine, block, parameter.new_empty(2, conv.in_channels, *([3] * len(conv.kernel_size))))


def _has_converted_blocks(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Whether `module` has children that are converted blocks and runs as nn.Sequential does."""
    if isinstance(module, ConvertedSequence):
        return True
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return False
    return "forward" not in vars(module) and any(isinstance(child, ConvertedBlock) for child in module)


def _can_join(block: nn.Module, consumer: nn.Module) -> bool:
    """Whether the shared engine can run a converted block together with the module after it."""
    if not isinstance(block, ConvertedBlock) or block.engine not in (None, Engine.SHARED):
        return False
    return _why_not(Engine.SHARED, block) is None and joined_consumer(block.dense_parts(), consumer) is not None
