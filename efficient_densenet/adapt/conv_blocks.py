"""Dense blocks without norms, such as the residual dense blocks of super-resolution: converted in place.

A block is recognized by its convolutions, each of which reads all channels before it. Its forward is traced, to see how
it concatenates, which activations follow, and what it computes of the results; a trial verifies what was read.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from .._compilers import may_read_converted_modules
from .._mixins import add_mixin, remove_mixin
from ..checkpoint.parameters import parameters_of
from ..engine import choose, conv_block
from ..engine.choose import Engine
from ..engine.conv_block.refuse import why_not
from ..engine.parts import NoPartsError
from .conv_recipe import Recipe, run_plain
from .conv_trace import looks_like_conv_block, read_recipe
from .fingerprint import fingerprint
from .report import Changed
from .sample import Sample
from .saved import saved_values_per_pixel
from .structure import first_conv
from .trial import VerificationError, trial
from .verified import Verified, VerifiedModule
from .verify import describe_difference


@dataclass
class ConvConversion(Verified):
    """The state of a converted block: how its forward uses its layers, and the engine that was asked for."""

    recipe: Recipe = field(kw_only=True)
    engine: Engine | None = None


class ConvertedConvBlock(VerifiedModule):
    """Mixin: a dense block without norms that the shared engine runs wherever its own forward would save more."""

    _conversion: ConvConversion

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != 1 or not isinstance(args[0], Tensor) or not self._is_engines(args[0]):
            return super().forward(*args, **kwargs)
        return self._conversion.recipe.run(self, args[0], conv_block.run)

    def _is_engines(self, x: Tensor) -> bool:
        """Whether the engine runs the block on x."""
        if not (may_read_converted_modules() and torch.is_grad_enabled() and choose.may_run_engines(self, x)):
            return False
        if not (x.requires_grad or any(parameter.requires_grad for parameter in parameters_of(self))):
            return False
        reason = self._state_change()
        reason = f"found that {reason} since it was verified" if reason else self._why_not(x)
        if reason is not None and self._conversion.engine is Engine.SHARED:
            raise RuntimeError(f"engine 'shared' cannot run here: {reason}; use efficient=True, which finds one")
        if reason is not None:
            choose.warn_once(f"falling back from engine 'shared' to 'plain': {reason}")
        return reason is None

    def __prepare_scriptable__(self) -> nn.Module:  # torch.jit.script calls this first
        raise NotImplementedError("torch.jit.script cannot compile a converted dense block: restore(model) first")

    def _why_not(self, x: Tensor) -> str | None:
        return _why_not(self, self._conversion.recipe, x)


def convert_conv_block(block: nn.Module, engine: Engine | None) -> bool:
    """Convert `block` if it is a dense block without norms, and return whether it is."""
    if isinstance(block, ConvertedConvBlock):
        restore_conv_block(block)
    if engine not in (None, Engine.SHARED) or not looks_like_conv_block(block):
        return False
    try:
        recipe = read_recipe(block)
        _verify(block, recipe)
    except (NoPartsError, VerificationError):
        return False
    add_mixin(block, ConvertedConvBlock)
    cast(ConvertedConvBlock, block)._conversion = ConvConversion(fingerprint(block), engine, recipe=recipe)
    return True


def restore_conv_block(block: ConvertedConvBlock) -> None:
    """Undo `convert_conv_block`."""
    remove_mixin(block, ConvertedConvBlock)
    vars(block).pop("_conversion", None)


def report_conv_block(name: str, block: ConvertedConvBlock) -> Changed:
    """The report's entry for a converted block; what is saved is measured in a trial."""
    recipe: Recipe = block._conversion.recipe
    engines = partial(recipe.run, block, run_row=conv_block.run)
    with trial(block, _sample(block)) as run:
        plain = super(ConvertedConvBlock, block).forward
        kept_before, kept = (saved_values_per_pixel(run, _joined(forward)) for forward in (plain, engines))
    return Changed(name, len(recipe.layers), Engine.SHARED.value, kept_before, kept)


def _verify(block: nn.Module, recipe: Recipe) -> None:
    """Raise `VerificationError` unless the parts compute the results of the block's forward."""
    conv = first_conv(block)
    example = conv.weight.new_empty(2, conv.in_channels, *([3] * len(conv.kernel_size)))
    reason = _why_not(block, recipe, example)
    if reason is not None:
        raise VerificationError(reason)
    with trial(block, _sample(block)) as run:
        results = list(run.run(_joined(block.forward)))
        difference = describe_difference(results, run, _joined(partial(recipe.run, block, run_row=run_plain)))
    if difference is not None:
        raise VerificationError(difference)


def _why_not(block: nn.Module, recipe: Recipe, x: Tensor) -> str | None:
    """Why the engine cannot run `block` on x, or None."""
    return why_not(block, recipe.parts(block), x, reads_x=recipe.reads.name == recipe.argument)


def _sample(block: nn.Module) -> Sample:
    return Sample(first_conv(block).in_channels)


def _joined(forward: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """The forward, whose results are concatenated: a trial compares one tensor."""

    def joined(x: Tensor) -> Tensor:
        output = forward(x)
        return torch.cat(list(output), 1) if isinstance(output, (tuple, list)) else output

    return joined
