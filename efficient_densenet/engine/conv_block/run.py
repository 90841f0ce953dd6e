"""Runs a dense block without norms: reads its specification from its modules."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from ..._tensors import CHANNELS_LAST, compute_dtype, memory_format_of
from ...kernels.activations import IDENTITY
from ..library import run_operator
from ..parts import activation_spec, weight_and_bias
from .autograd import conv_block
from .parts import ConvBlock, ConvLayer
from .spec import ConvBlockSpec, ConvSpec


def run(block: ConvBlock, x: Tensor) -> Sequence[Tensor]:
    """The output of the last convolution, if there is one, and the features, if they are returned."""
    parameters: list[Tensor | None] = []
    for conv, _, _ in block.all_layers:
        parameters += weight_and_bias(conv)
    spec = _read_spec(block, x)
    return run_operator("conv_block", conv_block, spec, (x, parameters))[: spec.num_outputs]


def _read_spec(block: ConvBlock, x: Tensor) -> ConvBlockSpec:
    is_channels_last = memory_format_of(x) is not torch.contiguous_format
    weights_are = block.new_features_only and all(_is_channels_last(layer.conv) for layer in block.layers)
    return ConvBlockSpec(
        dtype=str(compute_dtype(x)).removeprefix("torch."),
        channels_last=is_channels_last or weights_are,
        last_channels_last=is_channels_last or (block.last is not None and _is_channels_last(block.last.conv)),
        in_channels=x.shape[1],
        newest_first=block.newest_first,
        returns_features=block.returns_features,
        new_features_only=block.new_features_only,
        layers=tuple(map(_read_layer, block.layers)),
        last=None if block.last is None else _read_layer(block.last),
    )


def _is_channels_last(conv: _ConvNd) -> bool:
    """Whether the convolution's output is in channels_last even where its input is not. For the strides of a 1×1
    convolution, both memory formats are the same to `is_contiguous`."""
    weight = conv.weight
    return weight.dim() in CHANNELS_LAST and weight.stride(1) == 1 and weight.stride(-1) == weight.shape[1]


def _read_layer(layer: ConvLayer) -> ConvSpec:
    conv, activation = layer.conv, layer.activation
    spec = activation_spec(activation, default=IDENTITY)
    return ConvSpec(int(conv.out_channels), int(conv.kernel_size[0]), int(conv.dilation[0]), spec, layer.padding_mode)
