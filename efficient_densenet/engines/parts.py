"""What a dense block is made of, whoever wrote it: all that the shared engine knows about modules.

Parts are read again at every forward and never kept on a module, so that copies and replicas have their own.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from .._mixins import original
from ..norms.batch_norm import ComputesAsTorch, CpBatchNorm1d, CpBatchNorm2d, CpBatchNorm3d, UpdatesOnce
from ..norms.sync_batch_norm import SyncedBatchNorm1d, SyncedBatchNorm2d, SyncedBatchNorm3d


class NoPartsError(Exception):
    """A block that nobody knows the parts of; the message says what was found, as "found …, which …"."""


@dataclass(frozen=True)
class LayerParts:
    """Norm, ReLU and a 3×3 convolution; or norm, ReLU, a 1×1 convolution and then the same; and then dropout.

    A hook on `module`, the layer, or on anything inside it, keeps the shared engine away. `activations` are the modules
    that stand for the ReLUs, where there are any; whatever else a layer may run is the reader's to refuse.
    """

    module: nn.Module
    norm1: nn.Module
    conv1: nn.Module
    norm2: nn.Module | None = None
    conv2: nn.Module | None = None
    activations: tuple[nn.Module, ...] = ()
    drop_rate: float = 0.0  # zero where the layer drops nothing because it is not training
    dropout: Callable[[Tensor, float], Tensor] = F.dropout
    keep_bottleneck: bool = False

    @property
    def last(self) -> nn.Module:
        """The convolution that makes the new features."""
        return self.conv1 if self.conv2 is None else self.conv2

    @property
    def dilation(self) -> int:
        """How far apart the pixels are that it reads."""
        return self.last.dilation[0]

    @property
    def norms(self) -> tuple[nn.Module, ...]:
        return (self.norm1,) if self.norm2 is None else (self.norm1, self.norm2)

    @property
    def convolutions(self) -> tuple[nn.Module, ...]:
        return (self.conv1,) if self.conv2 is None else (self.conv1, self.conv2)


@dataclass(frozen=True)
class BlockParts:
    """Layers, each of which reads the block's input and what all layers before it made.

    `newest_first` tells that new features are put before the old ones, not after them.
    """

    layers: tuple[LayerParts, ...]
    newest_first: bool = False


@dataclass(frozen=True)
class ConsumerParts:
    """What reads a block's output: a norm; or a norm, ReLU, a 1×1 convolution and perhaps the mean of 2×2 pixels.

    `after` is what else is done to the result, such as a ReLU or another pooling; its gradient is autograd's.
    """

    norm: nn.Module
    conv: nn.Module | None = None
    pools: bool = False
    activations: tuple[nn.Module, ...] = ()
    after: Callable[[Tensor], Tensor] | None = None


BlockReader = Callable[[nn.Module], BlockParts]
ConsumerReader = Callable[[nn.Module], ConsumerParts | None]
Reader = TypeVar("Reader", BlockReader, ConsumerReader)

NORMS: set[type[nn.Module]] = {
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    CpBatchNorm1d,
    CpBatchNorm2d,
    CpBatchNorm3d,
    SyncedBatchNorm1d,
    SyncedBatchNorm2d,
    SyncedBatchNorm3d,
}
"""The classes that normalise as nn.BatchNorm does. One that rectifies too may be added, if it is a subclass and every
reader tells of its activation."""

_BLOCKS: dict[type[nn.Module], BlockReader] = {}
_CONSUMERS: dict[type[nn.Module], ConsumerReader] = dict.fromkeys(NORMS, ConsumerParts)


def register_block(cls: type[nn.Module], reader: BlockReader) -> None:
    """Have `reader` tell the parts of blocks of this class and of its subclasses; it may raise `NoPartsError`."""
    _BLOCKS[cls] = reader


def register_consumer(cls: type[nn.Module], reader: ConsumerReader) -> None:
    """Have `reader` tell the parts of modules of exactly this class, or None where they cannot be told."""
    _CONSUMERS[cls] = reader


def parts_of(block: nn.Module) -> BlockParts:
    """The parts of a block as they are now: what its own `dense_parts()` says, or else what a reader does."""
    supplied = getattr(block, "dense_parts", None)
    if supplied is not None:
        return supplied()
    reader = block_reader(block)
    if reader is None:
        raise NoPartsError(
            f"found a block of class {type(block).__name__}, which may do other things than a dense block"
        )
    return reader(block)


def block_reader(block: nn.Module) -> BlockReader | None:
    """What was registered for the class of `block`, or for one that it comes from."""
    return next((_BLOCKS[cls] for cls in type(block).__mro__ if cls in _BLOCKS), None)


def consumer_parts(module: nn.Module) -> ConsumerParts | None:
    """The parts of what may run together with the block before it: what its own `consumer_parts()` says, or a reader;
    None where nobody knows them."""
    supplied = getattr(module, "consumer_parts", None)
    if supplied is not None:
        return supplied()
    reader = _CONSUMERS.get(_class(module))
    if reader is not None:
        return reader(module)
    if type(module).forward is nn.Sequential.forward:
        return _sequence_parts(*module)
    return _sequence_parts(module) if is_norm(module) else None


def _sequence_parts(*modules: nn.Module) -> ConsumerParts | None:
    """The parts of modules that run in turn."""
    if not (modules and is_norm(modules[0])):
        return None
    norm, *rest = modules
    activations = [*activations_of(norm), *(rest.pop(0) for _ in rest[:1] if type(rest[0]) is nn.ReLU)]
    if not (activations and rest and isinstance(rest[0], _ConvNd)):
        return ConsumerParts(norm, after=_in_turn(*activations, *rest))
    conv, *rest = rest
    pools = bool(rest) and halves(rest[0])
    return ConsumerParts(norm, conv, pools, tuple(activations), _in_turn(*rest[pools:]))


def _in_turn(*modules: nn.Module) -> Callable[[Tensor], Tensor] | None:
    return (lambda x: functools.reduce(lambda value, module: module(value), modules, x)) if modules else None


def is_norm(module: nn.Module) -> bool:
    """Whether this is a batch norm, under the exactly-once rule or not, perhaps with an activation of its own."""
    cls = _class(module)
    timms = cls.__name__ == "BatchNormAct2d" and cls.__module__.startswith("timm.")
    return cls in NORMS or timms or isinstance(module, ComputesAsTorch)


def activations_of(norm: nn.Module) -> tuple[nn.Module, ...]:
    """What a norm that is not only one does to its result."""
    return tuple(module for module in norm.children() if type(module) is not nn.Identity)


def _class(module: nn.Module) -> type[nn.Module]:
    return original(module, UpdatesOnce)


def halves(pool: nn.Module) -> bool:
    """Whether `pool` is the mean of every 2×2 pixels (or as many in other dimensions), as transitions have it."""
    if type(pool) not in (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d) or pool.ceil_mode:
        return False
    sizes = (size for given in (pool.kernel_size, pool.stride) for size in _each(given))
    return set(sizes) == {2} and set(_each(pool.padding)) == {0} and not getattr(pool, "divisor_override", None)


def _each(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return value if isinstance(value, tuple) else (value,)
