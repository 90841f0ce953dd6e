"""Converted sequences: a mixin for every nn.Sequential that has converted blocks among its modules.

Some networks are flat, with all layers in one nn.Sequential, or have a transition at the start or the end of each
sequence. The blocks in a row that are created here exist for one forward only.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from torch import Tensor, nn

from .._compilers import may_read_converted_modules
from ..engine import choose
from ..engine.choose import Engine
from ..engine.layerwise import RunFirstHalf
from ..engine.limits import must_be_called, normalize_alike
from ..engine.network import run_sequence
from ..engine.parts import BlockParts, LayerParts, NoPartsError
from .converted import ConvertedBlock
from .verified import KeepsSignature, VerifiedModule

if TYPE_CHECKING:
    _SequentialMixin = nn.Sequential
else:
    _SequentialMixin = object


class ConvertedSequence(KeepsSignature, _SequentialMixin):
    """Mixin: an nn.Sequential that runs each converted block together with the module after it, and the modules before
    the first block as a stem, if the shared engine can."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        takes_tensor = not kwargs and len(args) == 1 and isinstance(args[0], Tensor) and may_read_converted_modules()
        if not takes_tensor or not choose.may_run_engines(self, args[0]):
            return super().forward(*args, **kwargs)
        if type(args[0]) is not Tensor:
            verified = (each for each in self.modules() if isinstance(each, VerifiedModule))
            if any(each.reads_class_of(args[0]) for each in verified):
                return super().forward(*args, **kwargs)
        return run_sequence(stages_of(self), args[0], is_block)[0]


class BlocksInARow(nn.Sequential):
    """Consecutive converted blocks, each of which continues the concatenation of the previous block, as one block."""

    can_join_stage = True
    lives_for_one_forward = True

    def __init__(self, blocks: Sequence[ConvertedBlock], parts: BlockParts) -> None:
        super().__init__(*blocks)
        self.engine, self._parts = blocks[0].engine, parts

    def dense_parts(self) -> BlockParts:
        return self._parts

    def run_layers(self, x: Tensor, run_first_half: RunFirstHalf) -> Tensor:
        for block in self:
            x = cast(ConvertedBlock, block).run_layers(x, run_first_half)
        return x

    def why_not_recompute(self) -> str | None:
        return next(filter(None, (cast(ConvertedBlock, block).why_not_recompute() for block in self)), None)


def is_block(module: nn.Module) -> TypeGuard[ConvertedBlock | BlocksInARow]:
    return isinstance(module, (ConvertedBlock, BlocksInARow))


def stages_of(sequence: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """The modules of a sequence, and of the converted sequences inside, where a stage may begin or end; consecutive
    blocks are joined to one block."""
    rest, grouped = list(_flattened("", sequence)), []
    while rest:
        name, module = rest[0]
        group, together = [module], module
        if isinstance(module, ConvertedBlock):
            group, together = _blocks_in_a_row(module, [each for _, each in rest[1:]])
        grouped.append((name, together))
        rest = rest[len(group) :]
    return grouped


def _blocks_in_a_row(first: ConvertedBlock, others: Sequence[nn.Module]) -> tuple[Sequence[nn.Module], nn.Module]:
    """`first` and the following blocks that run with it as one block, and this one block."""
    parts = _parts(first) if others and isinstance(others[0], ConvertedBlock) else None
    if parts is None:
        return [first], first
    blocks, layers = [first], list(parts.layers)
    for block in others:
        if not isinstance(block, ConvertedBlock):
            break
        following = _parts(block)
        if following is None or not _continues(parts, layers, following) or block.engine is not first.engine:
            break
        blocks.append(block)
        layers += following.layers
    return blocks, first if len(blocks) == 1 else BlocksInARow(blocks, replace(parts, layers=tuple(layers)))


def _parts(module: ConvertedBlock) -> BlockParts | None:
    """The parts of a converted block that the shared engine may run without calling it, or else None."""
    if module.engine not in (None, Engine.SHARED) or must_be_called(module):
        return None
    try:
        parts = module.dense_parts()
    except NoPartsError:
        return None
    return None if parts.new_features_only else parts


def _continues(first: BlockParts, layers: Sequence[LayerParts], following: BlockParts) -> bool:
    """Whether the layers of `following` read the concatenation of `layers`, which begin with the layers of `first`."""
    last, layer = layers[-1], following.layers[0]
    growth_rate = last.last_conv.out_channels
    return (
        first.newest_first == following.newest_first
        and layer.last_conv.out_channels == growth_rate
        and layer.conv1.in_channels == last.conv1.in_channels + growth_rate
        and normalize_alike(last.norm1, layer.norm1)
    )


def _flattened(prefix: str, sequence: nn.Sequential) -> Iterable[tuple[str, nn.Module]]:
    for key, module in cast(dict[str, nn.Module], sequence._modules).items():
        if isinstance(module, ConvertedSequence) and not must_be_called(module):
            yield from _flattened(f"{prefix}{key}.", module)
        else:
            yield f"{prefix}{key}", module


def has_converted_blocks(module: nn.Module) -> bool:
    """Whether `module` runs as nn.Sequential does, and has converted blocks among its modules or their sequences."""
    if not isinstance(module, nn.Sequential) or isinstance(module, ConvertedBlock):
        return False
    if type(module).forward is not nn.Sequential.forward or "forward" in vars(module):
        return False
    return holds_converted_blocks(module)


def holds_converted_blocks(sequence: nn.Sequential) -> bool:
    return any(isinstance(child, (ConvertedBlock, ConvertedSequence)) for child in sequence)
