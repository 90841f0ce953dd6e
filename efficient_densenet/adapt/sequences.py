"""Converted sequences: a mixin for every nn.Sequential that has converted blocks among its modules."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from .._compilers import may_read_converted_modules
from ..engine import choose
from ..engine.changed_modules import must_be_called
from ..engine.network import run_sequence
from .converted import ConvertedBlock
from .stages import is_block, stages
from .verified import KeepsSignature

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
        return run_sequence(stages_of(self), args[0], is_block)[0]


def stages_of(sequence: nn.Sequential) -> list[tuple[str, nn.Module]]:
    """The stages of a sequence. A stage may begin or end in a converted sequence inside."""
    return stages(_flattened("", sequence))


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
