"""The stages of a converted sequence: consecutive blocks as one block, and the modules of a transition as one module.

Some networks are flat, with all layers in one nn.Sequential, or have a transition at the start or the end of each
sequence. The modules that are created here exist for one forward only.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeGuard, cast

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ..engine.changed_modules import must_be_called
from ..engine.choose import Engine
from ..engine.layerwise import RunFirstHalf
from ..engine.parts import BlockParts, LayerParts, NoPartsError, halves, is_activation, is_norm
from ..engine.refuse import normalize_alike
from .converted import ConvertedBlock


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


class _ModulesInARow(nn.Sequential):
    """The modules of a transition as one module."""

    lives_for_one_forward = True


def is_block(module: nn.Module) -> TypeGuard[ConvertedBlock | BlocksInARow]:
    return isinstance(module, (ConvertedBlock, BlocksInARow))


def stages(modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """The modules of a sequence. Consecutive blocks are joined to one block, the modules of a transition to one
    module."""
    rest, grouped = list(modules), []
    while rest:
        name, module = rest[0]
        group, together = [module], module
        if isinstance(module, ConvertedBlock):
            group, together = _blocks_in_a_row(module, [each for _, each in rest[1:]])
        elif grouped and is_block(grouped[-1][1]):
            group = _transition([each for _, each in rest])
            together = module if len(group) == 1 else _ModulesInARow(*group)
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


def _transition(modules: Sequence[nn.Module]) -> Sequence[nn.Module]:
    """The first of `modules` that may form a transition: norm, activation, 1×1 convolution, average pooling."""
    expected, count = (is_norm, is_activation, _is_conv1x1, halves), 0
    for is_expected, module in zip(expected[: len(modules)], modules[: len(expected)], strict=True):
        if must_be_called(module) or not is_expected(module):
            break
        count += 1
    return modules[: max(1, count)]


def _is_conv1x1(module: nn.Module) -> bool:
    return isinstance(module, _ConvNd) and set(module.kernel_size) == {1}
