"""The modules of dense blocks, and the transitions between blocks. The engines decide how a block is run."""

from collections.abc import Collection, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._torch_private import class_before_fully_shard
from ..engine import choose, layerwise
from ..engine.choose import EngineName
from ..engine.layerwise import RunFirstHalf
from ..engine.parts import BlockParts, LayerParts, NoPartsError, register_block
from ..engine.sharded import why_sharded
from .activations import ActivationFactory, activation_factory
from .dimensions import NORMS, modules_for


class DenseLayer(nn.Module):
    """Computes `growth_rate` new channels from all channels before them.

    BN-ReLU-1×1-BN-ReLU-3×3 with a bottleneck of `bn_size * growth_rate` channels; BN-ReLU-3×3 where `bn_size` is 0.
    Another `activation` than ReLU has the names `relu1` and `relu2` too.
    """

    def __init__(
        self,
        num_input_features: int,
        growth_rate: int,
        bn_size: int,
        drop_rate: float,
        keep_bottleneck: bool | None = None,
        dims: int = 2,
        *,
        bias: bool = False,
        activation: str | ActivationFactory = "relu",
    ) -> None:
        super().__init__()
        modules, make_activation = modules_for(dims), activation_factory(activation)
        self.drop_rate, self.keep_bottleneck = drop_rate, keep_bottleneck
        self.has_bottleneck = bn_size > 0
        width = bn_size * growth_rate if self.has_bottleneck else growth_rate
        kernel_size = 1 if self.has_bottleneck else 3
        self.norm1 = NORMS[dims](num_input_features)
        self.relu1 = make_activation()
        self.conv1 = modules.Conv(num_input_features, width, kernel_size, padding=kernel_size // 2, bias=bias)
        if self.has_bottleneck:
            self.norm2 = NORMS[dims](width)
            self.relu2 = make_activation()
            self.conv2 = modules.Conv(width, growth_rate, 3, padding=1, bias=bias)

    def forward(
        self,
        features: Tensor | Sequence[Tensor],
        run_first_half: RunFirstHalf = layerwise.run_first_half_plain,
    ) -> Tensor:
        features = [features] if isinstance(features, Tensor) else list(features)
        x = run_first_half(self, features)
        if self.has_bottleneck:
            x = self.conv2(self.relu2(self.norm2(x)))
        return F.dropout(x, self.drop_rate, self.training) if self.drop_rate > 0 else x

    def first_half(self, *features: Tensor) -> Tensor:
        """Concatenation, norm1, relu1 and conv1, whose saved tensors are large and cheap to recompute."""
        x = torch.cat(features, 1)  # copies a single tensor too, since an in-place ReLU may write into it
        return self.conv1(self.relu1(self.norm1(x)))


class DenseBlock(nn.Module):
    """`num_layers` dense layers, each of which reads the block's input and the outputs of all layers before it.

    The output is the concatenation of the input and the layers' outputs; with `new_features_only`, of the layers'
    outputs alone. With `bias` the convolutions have biases. `activation` is as in `DenseNet`.
    """

    def __init__(
        self,
        num_layers: int,
        num_input_features: int,
        growth_rate: int,
        bn_size: int = 4,
        drop_rate: float = 0.0,
        efficient: bool | EngineName = True,
        keep_bottleneck: bool | None = None,
        dims: int = 2,
        *,
        bias: bool = False,
        new_features_only: bool = False,
        activation: str | ActivationFactory = "relu",
    ) -> None:
        super().__init__()
        self.engine, self.new_features_only = choose.parse(efficient), new_features_only
        self.num_output_features = num_layers * growth_rate + (0 if new_features_only else num_input_features)
        for i in range(num_layers):
            channels = num_input_features + i * growth_rate
            settings = growth_rate, bn_size, drop_rate, keep_bottleneck, dims
            layer = DenseLayer(channels, *settings, bias=bias, activation=activation)
            self.add_module(f"denselayer{i + 1}", layer)

    def forward(self, x: Tensor) -> Tensor:
        return choose.run_block(self, x, choose.plan_block(self, x))

    @property
    def can_join_stage(self) -> bool:
        """Whether an engine may run this block without calling it: not if a subclass has a forward of its own."""
        return type(self).forward is DenseBlock.forward

    def run_layers(self, x: Tensor, run_first_half: RunFirstHalf) -> Tensor:
        """The block's output computed layer by layer, the first half of each by `run_first_half`."""
        features = [x]
        for layer in self.children():
            features.append(layer(features, run_first_half))
        return torch.cat(features[1:] if self.new_features_only else features, 1)

    def why_not_recompute(self) -> None:
        """None: these layers, whose own forward the engines run, can always be recomputed."""

    def keep_bottlenecks(self, layers: Collection[int]) -> None:
        for i, layer in enumerate(self.children()):
            cast(DenseLayer, layer).keep_bottleneck = i in layers

    def __prepare_scriptable__(self) -> nn.Module:  # torch.jit.script calls this first
        raise NotImplementedError("torch.jit.script cannot compile a dense block: use torch.export or torch.jit.trace")


class Transition(nn.Sequential):
    """Between two blocks: a 1×1 convolution reduces the channels, average pooling halves the height and width."""

    def __init__(
        self,
        num_input_features: int,
        num_output_features: int,
        dims: int = 2,
        *,
        activation: str | ActivationFactory = "relu",
    ) -> None:
        super().__init__()
        modules = modules_for(dims)
        self.norm = NORMS[dims](num_input_features)
        self.relu = activation_factory(activation)()
        self.conv = modules.Conv(num_input_features, num_output_features, kernel_size=1, bias=False)
        self.pool = modules.AvgPool(kernel_size=2, stride=2)


def _layer_parts(module: nn.Module) -> LayerParts:
    if class_before_fully_shard(type(module)) is not DenseLayer:
        raise NoPartsError(
            why_sharded(module)
            or f"found a layer of class {type(module).__name__}, which may do other things than a dense layer"
        )
    layer, modules = cast(DenseLayer, module), cast("dict[str, Any]", module._modules)
    norm1, conv1, norm2, conv2, activations = modules["norm1"], modules["conv1"], None, None, (modules["relu1"],)
    if layer.has_bottleneck:
        norm2, conv2, activations = modules["norm2"], modules["conv2"], (*activations, modules["relu2"])
    return LayerParts(
        *(layer, norm1, conv1, norm2, conv2, activations),
        drop_rate=layer.drop_rate if layer.training else 0.0,
        keep_bottleneck=layer.keep_bottleneck,
    )


def _block_parts(block: nn.Module) -> BlockParts:
    new_features_only = cast(DenseBlock, block).new_features_only
    return BlockParts(tuple(map(_layer_parts, block.children())), new_features_only=new_features_only)


register_block(DenseBlock, _block_parts)
