"""Other people's DenseNets, in place: `make_efficient(model)` gives every dense block inside an engine of ours.

A block is told by its structure, and believed after a trial: its own forward must do what its parts say. The model
stays the same object with the same parameters, names and hooks; of a converted module only the class changes, to one of
the same name that is made from it. `restore(model)` gives the classes back.
"""

from itertools import pairwise

from torch import nn
from torch.nn.modules.conv import _ConvNd

from .._mixins import add_mixin, remove_mixin
from ..engines import dispatch as engines
from ..engines.dispatch import Engine
from ..engines.eligibility import joined_consumer
from ..engines.parts import BlockParts, LayerParts, NoPartsError, register_block
from ..models.layers import DenseBlock
from .converted import ConvertedBlock, ConvertedSequence, convert_block, restore_block
from .read import layers_in, looks_dense, read_block
from .report import Changed, Report, kept
from .trial import DifferentError

__all__ = ["BlockParts", "Changed", "LayerParts", "Report", "make_efficient", "register_block", "restore"]


def make_efficient(model: nn.Module, engine: bool | str = True) -> Report:
    """Run every dense block in `model` by `engine`, and tell what was changed and what was not.

    Args:
        model: any module: a DenseNet, a network that has one inside, a wrapped one. Blocks of ours are set to `engine`.
        engine: True for the best one for each block, or a name, as `DenseNet(efficient=...)` takes them. Called again
            with another, it changes it.
    """
    chosen, report = engines.parse(engine), Report()
    _visit("", model, chosen, report, set())
    for name, module in model.named_modules():
        if _has_blocks_in_turn(module):
            if not isinstance(module, ConvertedSequence):
                add_mixin(module, ConvertedSequence)
            if any(_can_join(*pair) for pair in pairwise(module)):
                report.joined.append(name)
    return report


def restore(model: nn.Module) -> nn.Module:
    """Undo `make_efficient`, and return `model`."""
    for module in list(model.modules()):
        if isinstance(module, ConvertedSequence):
            remove_mixin(module, ConvertedSequence)
        if isinstance(module, ConvertedBlock):
            restore_block(module)
        if "_engine_before" in vars(module):
            module.engine = vars(module).pop("_engine_before")
    return model


def _visit(name: str, module: nn.Module, engine: Engine | None, report: Report, seen: set[nn.Module]) -> bool:
    """Convert `module`, or what is inside; whether anything was."""
    if module in seen:
        return False
    seen.add(module)
    reason = _convert(module, engine)
    if reason is None:
        report.changed.append(_changed(name, module, engine))
        return True
    layers = layers_in(module) if looks_dense(module) else []  # a layer alone is no block
    children = [(child, inside) for child, inside in module.named_children() if inside not in layers]
    found = [_visit(f"{name}.{child}" if name else child, inside, engine, report, seen) for child, inside in children]
    if looks_dense(module) and not any(found):
        report.unchanged[name] = reason
    return any(found)


def _convert(module: nn.Module, engine: Engine | None) -> str | None:
    """Convert `module` itself; why not, if not."""
    if isinstance(module, ConvertedBlock):
        module._conversion.engine = engine
    elif isinstance(module, DenseBlock):
        vars(module).setdefault("_engine_before", module.engine)
        module.engine = engine
    else:
        try:
            convert_block(module, engine)
        except (NoPartsError, DifferentError) as reason:
            return str(reason)
    return None


def _changed(name: str, block: nn.Module, engine: Engine | None) -> Changed:
    reason = _why_not(engine or Engine.SHARED, block)
    used = engine or (Engine.SHARED if reason is None else Engine.CHECKPOINT)
    then = "" if reason is None else f" since {reason}" if engine is None else f", which will raise: {reason}"
    try:
        parts = read_block(block)
    except NoPartsError:  # it was converted before, and has been altered since
        return Changed(name, len(layers_in(block)), used.value + then, 0, 0)
    return Changed(name, len(parts.layers), used.value + then, kept(parts, Engine.PLAIN.value), kept(parts, used.value))


def _why_not(engine: Engine, block: nn.Module) -> str | None:
    conv = next(module for module in block.modules() if isinstance(module, _ConvNd))
    some = next(conv.parameters())  # not its weight, which may be a parametrization's to compute
    return engines.why_not(engine, block, some.new_empty(2, conv.in_channels, *([3] * len(conv.kernel_size))))


def _has_blocks_in_turn(module: nn.Module) -> bool:
    """Whether this is a plain sequence with a converted block in it."""
    if isinstance(module, ConvertedSequence):
        return True
    plain = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return plain and "forward" not in vars(module) and any(isinstance(child, ConvertedBlock) for child in module)


def _can_join(block: nn.Module, after: nn.Module) -> bool:
    if not isinstance(block, ConvertedBlock) or block.engine not in (None, Engine.SHARED):
        return False
    return _why_not(Engine.SHARED, block) is None and joined_consumer(block.dense_parts(), after) is not None
