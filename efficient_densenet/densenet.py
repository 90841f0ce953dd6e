"""The DenseNet: its structure and its parameter names. How a dense block is executed is the engines' business."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import engines
from .checks import check_between, check_choice, check_whole
from .dimensions import CONVOLUTIONS, Modules, modules_for
from .engines import plain
from .engines.parts import (
    BlockParts,
    ConsumerParts,
    LayerParts,
    NoPartsError,
    halves,
    register_block,
    register_consumer,
)
from .engines.plain import Squeeze
from .made_classes import original


class DenseLayer(nn.Module):
    """The `growth_rate` new features that a dense block adds in one step, made from all features before them.

    BN-ReLU-1×1-BN-ReLU-3×3 with a bottleneck of `bn_size * growth_rate` channels; BN-ReLU-3×3 where `bn_size` is 0.
    """

    def __init__(
        self,
        num_input_features: int,
        growth_rate: int,
        bn_size: int,
        drop_rate: float,
        keep_bottleneck: bool = False,
        dims: int = 2,
    ) -> None:
        super().__init__()
        modules = modules_for(dims)
        self.drop_rate, self.keep_bottleneck = drop_rate, keep_bottleneck
        self.has_bottleneck = bn_size > 0
        width = bn_size * growth_rate if self.has_bottleneck else growth_rate
        kernel = 1 if self.has_bottleneck else 3
        self.norm1 = modules.Norm(num_input_features)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = modules.Conv(num_input_features, width, kernel, padding=kernel // 2, bias=False)
        if self.has_bottleneck:
            self.norm2 = modules.Norm(width)
            self.relu2 = nn.ReLU(inplace=True)
            self.conv2 = modules.Conv(width, growth_rate, 3, padding=1, bias=False)

    def forward(self, features: Tensor | Sequence[Tensor], squeeze: Squeeze = plain.squeeze) -> Tensor:
        features = [features] if isinstance(features, Tensor) else list(features)
        x = squeeze(self, features)
        if self.has_bottleneck:
            x = self.conv2(self.relu2(self.norm2(x)))
        return F.dropout(x, self.drop_rate, self.training) if self.drop_rate > 0 else x

    def squeeze(self, *features: Tensor) -> Tensor:
        """The first half: what is large and cheap to make again."""
        x = torch.cat(features, 1)  # a copy of a single one too: a ReLU may write into it where the norm is none
        return self.conv1(self.relu1(self.norm1(x)))


class DenseBlock(nn.Module):
    """`num_layers` dense layers, each reading the block's input and everything the layers before it made."""

    def __init__(
        self,
        num_layers: int,
        num_input_features: int,
        growth_rate: int,
        bn_size: int = 4,
        drop_rate: float = 0.0,
        efficient: bool | str = True,
        keep_bottleneck: bool = False,
        dims: int = 2,
    ) -> None:
        super().__init__()
        self.engine = engines.parse(efficient)
        for i in range(num_layers):
            width = num_input_features + i * growth_rate
            layer = DenseLayer(width, growth_rate, bn_size, drop_rate, keep_bottleneck, dims)
            self.add_module(f"denselayer{i + 1}", layer)

    def forward(self, x: Tensor) -> Tensor:
        return engines.run_block(self, x, engines.choose(self, x))

    def run_layers(self, x: Tensor, squeeze: Squeeze) -> Tensor:
        """The same output, made layer by layer, the first half of each by `squeeze`."""
        features = [x]
        for layer in self.children():
            features.append(layer(features, squeeze))
        return torch.cat(features, 1)

    def __prepare_scriptable__(self) -> nn.Module:  # torch.jit.script asks for it first
        raise NotImplementedError("torch.jit.script cannot compile a dense block: use torch.export or torch.jit.trace")


class Transition(nn.Sequential):
    """Between two blocks: fewer channels by a 1×1 convolution, half the height and width by average pooling."""

    def __init__(self, num_input_features: int, num_output_features: int, dims: int = 2) -> None:
        super().__init__()
        modules = modules_for(dims)
        self.norm = modules.Norm(num_input_features)
        self.relu = nn.ReLU(inplace=True)
        self.conv = modules.Conv(num_input_features, num_output_features, kernel_size=1, bias=False)
        self.pool = modules.AvgPool(kernel_size=2, stride=2)


def _layer_parts(layer: nn.Module) -> LayerParts:
    if original(layer) is not DenseLayer:
        raise NoPartsError(
            f"found a layer of class {type(layer).__name__}, which may do other things than a dense layer"
        )
    norm2, conv2, relu2 = (layer.norm2, layer.conv2, (layer.relu2,)) if layer.has_bottleneck else (None, None, ())
    return LayerParts(
        layer,
        *(layer.norm1, layer.conv1, norm2, conv2),
        activations=(layer.relu1, *relu2),
        drop_rate=layer.drop_rate if layer.training else 0.0,
        keep_bottleneck=layer.keep_bottleneck,
    )


def _block_parts(block: nn.Module) -> BlockParts:
    return BlockParts(tuple(map(_layer_parts, block.children())))


def _transition_parts(transition: nn.Module) -> ConsumerParts | None:
    if list(transition._modules) != ["norm", "relu", "conv", "pool"]:
        return None
    norm, relu, conv, pool = transition
    pools = halves(pool)
    return ConsumerParts(norm, conv, pools, activations=(relu,), after=None if pools else pool)


register_block(DenseBlock, _block_parts)
register_consumer(Transition, _transition_parts)


class Features(nn.Sequential):
    """Stem, blocks, transitions and the last norm in turn; a block runs together with what consumes it where it can."""

    def forward(self, x: Tensor) -> Tensor:
        modules = list(self)
        while modules:
            module = modules.pop(0)
            if modules and isinstance(module, DenseBlock) and type(module).forward is DenseBlock.forward:
                x, consumed = engines.run_stage(module, modules[0], x)
                modules = modules[consumed:]
            else:
                x = module(x)
        return x


class DenseNet(nn.Module):
    """A densely connected network (Huang et al., https://arxiv.org/abs/1608.06993), with or without bottlenecks.

    Args:
        growth_rate: channels that each layer adds (k in the paper).
        block_config: layers in each dense block; any number of blocks.
        compression: share of the channels that a transition keeps, in (0, 1].
        num_init_features: channels of the first convolution.
        bn_size: bottleneck width in multiples of `growth_rate`; 0 or None for layers without a bottleneck.
        drop_rate: dropout after each layer's last convolution.
        num_classes: size of the classifier's output; 0 makes it the identity, for pooled features.
        small_inputs: True for a 3×3 stem (CIFAR), False for the 7×7 stem with pooling (ImageNet).
        efficient: True for the best engine here, False for "plain", or an engine's name.
        in_channels: channels of the input pictures.
        init: "fan_out" draws convolutions as the original Torch code did for CIFAR, "fan_in" as torchvision does; the
            default is fan_out with small inputs and fan_in otherwise.
        memory_efficient: torchvision's and timm's word for `efficient`; given, it takes its place.
        keep_bottleneck: True for the shared engine to keep each layer's bottleneck rather than make it again: twice the
            memory, a sixth less time. A layer's own attribute of this name can be set at any time.
        dims: 1 for signals (N, channels, length), 2 for pictures, 3 for volumes (N, channels, depth, height, width).
    """

    def __init__(
        self,
        growth_rate: int = 12,
        block_config: Sequence[int] = (16, 16, 16),
        compression: float = 0.5,
        num_init_features: int = 24,
        bn_size: int | None = 4,
        drop_rate: float = 0.0,
        num_classes: int = 10,
        small_inputs: bool = True,
        efficient: bool | str = True,
        *,
        in_channels: int = 3,
        init: str | None = None,
        memory_efficient: bool | str | None = None,
        keep_bottleneck: bool = False,
        dims: int = 2,
    ) -> None:
        super().__init__()
        modules = modules_for(dims)
        bn_size = bn_size or 0
        init = init or ("fan_out" if small_inputs else "fan_in")
        efficient = efficient if memory_efficient is None else memory_efficient
        _check_arguments(
            growth_rate,
            block_config,
            compression,
            num_init_features,
            bn_size,
            drop_rate,
            num_classes,
            in_channels,
            init,
        )
        self.in_channels, self.dims = in_channels, dims
        self.smallest_input = _smallest_input(len(block_config), small_inputs)
        self.features = Features(_stem(in_channels, num_init_features, small_inputs, modules))
        channels = num_init_features
        for i, num_layers in enumerate(block_config, start=1):
            block = DenseBlock(num_layers, channels, growth_rate, bn_size, drop_rate, efficient, keep_bottleneck, dims)
            self.features.add_module(f"denseblock{i}", block)
            channels += num_layers * growth_rate
            if i < len(block_config):
                compressed = max(int(channels * compression), 1)
                self.features.add_module(f"transition{i}", Transition(channels, compressed, dims))
                channels = compressed
        self.features.add_module("norm5", modules.Norm(channels))
        self.num_features = channels
        self.classifier = nn.Linear(channels, num_classes) if num_classes else nn.Identity()
        self._initialise(init)

    def forward(self, x: Tensor) -> Tensor:
        self._check_input(x)
        # Not in place: a backward hook on the last norm (Grad-CAM) makes its output a view that must not be written.
        x = F.relu(self.features(x))
        x = modules_for(self.dims).adaptive_avg_pool(x, 1).flatten(1)
        return self.classifier(x)

    def set_engine(self, efficient: bool | str) -> "DenseNet":
        """Run every dense block by this engine from now on; nothing else about the model changes."""
        engine = engines.parse(efficient)
        for module in self.modules():
            if isinstance(module, DenseBlock):
                module.engine = engine
        return self

    @property
    def engine(self) -> str:
        """The engine's name in words; what `efficient=True` chose is in brackets."""
        return engines.describe(next(m.engine for m in self.modules() if isinstance(m, DenseBlock)))

    def _initialise(self, init: str) -> None:
        for module in self.modules():
            if isinstance(module, CONVOLUTIONS):
                nn.init.kaiming_normal_(module.weight, mode=init, nonlinearity="relu")
            elif isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def _check_input(self, x: Tensor) -> None:
        if torch.jit.is_tracing() or torch.compiler.is_compiling():
            return  # A tracer would take the sizes it is shown for the only ones allowed.
        if x.dim() != self.dims + 2 or x.shape[1] != self.in_channels:
            sides = ", ".join(modules_for(self.dims).sides)
            raise ValueError(
                f"found an input of shape {tuple(x.shape)}, but this model needs (N, {self.in_channels}, {sides})"
            )
        if min(x.shape[2:]) < self.smallest_input:
            found, least = ("×".join(map(str, sizes)) for sizes in (x.shape[2:], [self.smallest_input] * self.dims))
            raise ValueError(
                f"found {modules_for(self.dims).inputs} of {found}, but this model's poolings need at least {least}: "
                "enlarge them, or use fewer blocks"
            )


def _stem(
    in_channels: int, num_init_features: int, small_inputs: bool, modules: Modules
) -> OrderedDict[str, nn.Module]:
    if small_inputs:
        return OrderedDict(conv0=modules.Conv(in_channels, num_init_features, kernel_size=3, padding=1, bias=False))
    return OrderedDict(
        conv0=modules.Conv(in_channels, num_init_features, kernel_size=7, stride=2, padding=3, bias=False),
        norm0=modules.Norm(num_init_features),
        relu0=nn.ReLU(inplace=True),
        pool0=modules.MaxPool(kernel_size=3, stride=2, padding=1),
    )


def _smallest_input(num_blocks: int, small_inputs: bool) -> int:
    """The least size of each side that leaves one pixel to the last block.

    A transition halves rounding down; the ImageNet stem halves twice rounding up.
    """
    before_first_block = 2 ** (num_blocks - 1)
    return before_first_block if small_inputs else 4 * (before_first_block - 1) + 1


def _check_arguments(
    growth_rate: Any,
    block_config: Any,
    compression: Any,
    num_init_features: Any,
    bn_size: Any,
    drop_rate: Any,
    num_classes: Any,
    in_channels: Any,
    init: Any,
) -> None:
    check_whole("growth_rate", growth_rate, at_least=1)
    if not isinstance(block_config, Sequence) or isinstance(block_config, str) or not block_config:
        raise ValueError(
            f"block_config is {block_config!r}, but must list the layers of each block, such as (16, 16, 16)"
        )
    for layers in block_config:
        check_whole("a number of layers in block_config", layers, at_least=1)
    check_between("compression", compression, 0, 1, "(]")
    check_whole("num_init_features", num_init_features, at_least=1)
    check_whole("bn_size", bn_size, at_least=0)
    check_between("drop_rate", drop_rate, 0, 1, "[)")
    check_whole("num_classes", num_classes, at_least=0)
    check_whole("in_channels", in_channels, at_least=1)
    check_choice("init", init, ("fan_out", "fan_in"))
