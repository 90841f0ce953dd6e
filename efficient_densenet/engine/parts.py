"""The parts of a dense block, of this package or any other: all that the shared engine knows about modules.

Parts are never stored on a module, so that copies and replicas of a model use their own. They are read when a block is
first seen, and again when anything inside it has changed.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from .._compilers import constant_to_compilers
from .._dimensions import DIMENSIONS
from .._mixins import original_class
from .._torch_private import class_before_fully_shard
from ..kernels.activations import RELU_SPEC, ActivationSpec, spec_of
from ..norms.batch_norm import TORCH_CLASSES, UpdatesOnce
from ..norms.frozen import is_frozen_batch_norm
from ..norms.sync_batch_norm import SynchronizedNorm

Norm: TypeAlias = Any
"""A module with the attributes of a batch norm, PyTorch's or another library's: no PyTorch class covers all of them."""


class NoPartsError(Exception):
    """Raised for a block whose parts cannot be determined; the message starts with "found", as in "found a PReLU"."""


@dataclass(frozen=True)
class LayerParts:
    """A dense layer: norm, activation, 3×3 convolution; perhaps after norm, activation, 1×1 convolution.

    The shared engine is not used where `module` or anything inside has a hook. A reader must raise `NoPartsError` for a
    layer that computes anything else.

    Attributes:
        module: the whole layer.
        norm1: the first norm.
        conv1: the first convolution.
        norm2: the second norm, in a layer with a bottleneck.
        conv2: the second convolution, in such a layer.
        activations: the activation modules: one for each norm, one for all of them, or none for ReLUs without a module.
        drop_rate: the probability of dropout after the last convolution; 0 for a layer in evaluation mode.
        dropout: the dropout function, called with the features and `drop_rate`.
        keep_bottleneck: True for the shared engine to save the bottleneck for backward, False to recompute it, None to
            save it where the step's peak stays as it is.
    """

    module: nn.Module
    norm1: Norm
    conv1: _ConvNd
    norm2: Norm | None = None
    conv2: _ConvNd | None = None
    activations: tuple[nn.Module, ...] = ()
    drop_rate: float = 0.0
    dropout: Callable[[Tensor, float], Tensor] = F.dropout
    keep_bottleneck: bool | None = None

    @property
    def last_conv(self) -> _ConvNd:
        """The convolution that computes the new features."""
        return self.conv1 if self.conv2 is None else self.conv2

    def activation(self, i: int) -> nn.Module | None:
        """The activation after norm i; None for a ReLU without a module."""
        return self.activations[min(i, len(self.activations) - 1)] if self.activations else None

    @property
    def norms(self) -> tuple[Norm, ...]:
        return (self.norm1,) if self.norm2 is None else (self.norm1, self.norm2)

    @property
    def convolutions(self) -> tuple[_ConvNd, ...]:
        return (self.conv1,) if self.conv2 is None else (self.conv1, self.conv2)


@dataclass(frozen=True)
class BlockParts:
    """The layers of a dense block; each reads the block's input and the outputs of all layers before it.

    `newest_first` says that a layer's output is concatenated before the features that it read, not after them.
    `new_features_only` says that the block returns the outputs of its layers without its input, in the same order.
    """

    layers: tuple[LayerParts, ...]
    newest_first: bool = False
    new_features_only: bool = False


@dataclass(frozen=True)
class ConsumerParts:
    """The consumer of a block's output: a norm, or norm, activation, 1×1 convolution and perhaps pooling by two; or a
    1×1 convolution alone, such as a classifier of pixels.

    Attributes:
        norm, conv: the norm and the convolution; None for the one that there is not.
        pools: True if average pooling with kernel size and stride 2 follows the convolution.
        max_pools: True if max pooling does, after dropout of the rate `drop_rate` by the function `dropout`.
        activations: the activation between the norm and the convolution; empty for a ReLU without a module.
        after: a function to apply to the result, such as a ReLU or another pooling; autograd differentiates it.
    """

    norm: Any
    conv: _ConvNd | None = None
    pools: bool = False
    activations: tuple[nn.Module, ...] = ()
    after: Callable[[Tensor], Tensor] | None = None
    max_pools: bool = False
    drop_rate: float = 0.0
    dropout: Callable[[Tensor, float], Tensor] = F.dropout

    @property
    def activation(self) -> nn.Module | None:
        """The activation before the convolution; None for a ReLU without a module."""
        return self.activations[0] if self.activations else None


NORMS: tuple[type[nn.Module], ...] = (*TORCH_CLASSES, *TORCH_CLASSES.values())
"""The classes that normalize as nn.BatchNorm does. A subclass that also applies an activation may be added if every
reader lists that activation among the parts."""

_POOLS: dict[str, dict[Any, Any]] = {
    kind: {each.Conv: getattr(each, kind) for each in DIMENSIONS.values()} for kind in ("AvgPool", "MaxPool")
}
_BLOCKS: dict[type[nn.Module], Callable[[Any], BlockParts]] = {}


def register_block(cls: type[nn.Module], reader: Callable[[Any], BlockParts]) -> None:
    """Register the function that returns the parts of a block of class `cls` or of a subclass.

    Args:
        cls: the class of dense blocks.
        reader: returns the parts of a block, or raises `NoPartsError`. It is called when a block is first seen, and
            again when a module inside, or an attribute that is no list or dict, has changed.
    """
    if not isinstance(cls, type) or not callable(reader):
        raise TypeError(f"found {cls!r} and {reader!r}, but register_block needs a class, and a function of its blocks")
    _BLOCKS[cls] = reader


def parts_of(block: nn.Module) -> BlockParts:
    """The current parts of `block`: from its method `dense_parts()`, if it has one, or from its class's reader."""
    dense_parts = getattr(block, "dense_parts", None)
    if dense_parts is not None:
        return dense_parts()
    reader = block_reader(block)
    if reader is None:
        raise NoPartsError(
            f"found a block of class {type(block).__name__}, which has no dense_parts() and no registered reader"
        )
    return reader(block)


EngineBlock: TypeAlias = Any
"""A module that engines run, the models' `DenseBlock` or adapt's `ConvertedBlock`. Both have

- `engine`: the requested engine; None leaves the choice to `choose`;
- `can_join_stage`: whether an engine may run the block without calling it;
- `run_layers(x, run_first_half)`: the output, layer by layer, the first half of each by `run_first_half`;
- `why_not_recompute()`: why no engine but plain may run the block, or None;
- `keep_bottlenecks(layers)`: lets the shared engine save the bottlenecks of these layers, and recompute the others'.
"""


def is_engine_block(module: nn.Module) -> bool:
    """Whether `module` is an `EngineBlock`."""
    return hasattr(module, "keep_bottlenecks")


def block_reader(block: nn.Module) -> Callable[[Any], BlockParts] | None:
    """The reader that was registered for the class of `block` or for the nearest of its base classes."""
    for cls in type(block).__mro__:
        if cls in _BLOCKS:
            return _BLOCKS[cls]
    return None


def consumer_parts(module: nn.Module) -> ConsumerParts | None:
    """The parts of `module`, with which the shared engine runs it together with the block before it; None if unknown.

    They come from the module's method `consumer_parts()`, or are those of a norm or of the modules of a sequence.
    """
    own_parts = getattr(module, "consumer_parts", None)
    if own_parts is not None:
        return own_parts()
    modules = list(cast(nn.Sequential, module)) if _runs_as_sequence(type(module)) else [module]
    if modules and isinstance(modules[0], _ConvNd):
        return ConsumerParts(None, modules[0], after=composed(*modules[1:]))
    if not (modules and is_norm(modules[0])):
        return None
    norm, *rest = modules
    activations = list(activations_of(norm))
    if rest and not activations and is_activation(rest[0]):
        activations.append(rest[0])
        rest = rest[1:]
    conv = rest[0] if rest else None
    if not (activations and isinstance(conv, _ConvNd)):
        return ConsumerParts(norm, after=composed(*activations, *rest))
    rest = rest[1:]
    dropout = rest[0] if rest and type(rest[0]) is nn.Dropout else None
    pooling = rest if dropout is None else rest[1:]
    if pooling and halves(pooling[0], conv, "MaxPool"):
        rate = dropout.p if dropout is not None and dropout.training else 0.0
        after = composed(*pooling[1:])
        return ConsumerParts(norm, conv, False, tuple(activations), after, max_pools=True, drop_rate=rate)
    pools = len(rest) > 0 and halves(rest[0], conv)
    return ConsumerParts(norm, conv, pools, tuple(activations), composed(*rest[pools:]))


@constant_to_compilers
def _runs_as_sequence(cls: type[nn.Module]) -> bool:
    return cls.forward is nn.Sequential.forward


def composed(*modules: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor] | None:
    """The modules, or functions, as one function; None if there are none."""
    return (lambda x: functools.reduce(lambda value, module: module(value), modules, x)) if modules else None


def is_norm(module: nn.Module) -> bool:
    """Whether `module` is a FrozenBatchNorm2d or a batch norm. A batch norm may be under the exactly-once rule, and may
    apply an activation."""
    if type(module) in NORMS:
        return True
    cls = _class(module)
    from_timm = cls.__name__ in ("BatchNormAct2d", "SyncBatchNormAct") and cls.__module__.startswith("timm.")
    return cls in NORMS or from_timm or is_frozen_batch_norm(module)


def is_activation(module: nn.Module) -> bool:
    """Whether the shared engine has this activation."""
    return spec_of(module) is not None


def activation_spec(module: nn.Module | None) -> ActivationSpec:
    """The settings of an activation that the engine runs; those of a ReLU where there is no module."""
    spec = RELU_SPEC if module is None else spec_of(module)
    assert spec is not None  # or the block would have been refused
    return spec


def activations_of(norm: Norm) -> tuple[nn.Module, ...]:
    """The activation modules inside a norm that applies one to its result, such as timm's BatchNormAct2d."""
    modules = () if _class(norm) in NORMS else norm.children()  # PyTorch's own call none
    return tuple(module for module in modules if type(module) is not nn.Identity)


def _class(module: nn.Module) -> type[nn.Module]:
    return class_before_fully_shard(original_class(module, UpdatesOnce, SynchronizedNorm))


Place: TypeAlias = tuple[dict[str, Any], str]
"""Where a module holds a tensor, which may be another one in each forward: in a dict, by its name."""


def place_of(module: Any, name: str) -> Place:
    """The place of `module.<name>`, a parameter or a buffer; in a replica of nn.DataParallel, a plain attribute."""
    dicts = module._parameters, module._buffers, module.__dict__
    for values in dicts:  # compilers of PyTorch 2.6 to 2.10 cannot trace `next` with a default
        if name in values:
            return values, name
    return module._parameters, name


def halves(pool: Any, conv: nn.Module, kind: str = "AvgPool") -> bool:
    """Whether `pool` is pooling of this kind, of as many dimensions as the convolution `conv` has, with kernel size and
    stride 2 in each and without padding, dilation or indices."""
    if type(pool) is not _POOLS[kind].get(type(conv)) or pool.ceil_mode or getattr(pool, "return_indices", False):
        return False
    sizes = {*_as_tuple(pool.kernel_size), *_as_tuple(pool.stride)}
    others = {*_as_tuple(pool.padding), *(each - 1 for each in _as_tuple(getattr(pool, "dilation", 1)))}
    return sizes == {2} and others == {0} and not getattr(pool, "divisor_override", None)


def _as_tuple(value: int | Sequence[int]) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (cast(int, value),)
