"""Why the engine cannot run a dense block without norms: a pure function."""

from itertools import accumulate

from torch import Tensor, nn

from ..._dimensions import DIMENSIONS
from ..changed_modules import modules_inside, why_not_global_changes, why_not_module
from ..refuse import unusual_setting, why_not_activation, why_not_precision
from .parts import ConvBlock, ConvLayer


def why_not(block: nn.Module, parts: ConvBlock, x: Tensor, reads_x: bool = True) -> str | None:
    """Why the parts of `block` cannot run on `x`, or None. They read x itself, or else what other modules compute."""
    dims = x.dim() - 2
    if dims not in DIMENSIONS:
        return f"found an input of {x.dim()} dimensions, where the shared engine takes 3 to 5"
    reason = next(filter(None, (why_not_module(each) for each in modules_inside(block) if each is not block)), None)
    if reason is not None:
        return reason
    for layer in parts.all_layers:
        conv = layer.conv
        if type(conv) is not DIMENSIONS[dims].Conv:
            return f"found a {type(conv).__name__}, where the shared engine takes {DIMENSIONS[dims].Conv.__name__}"
        reason = _unusual_setting(layer, dims)
        if reason is not None:
            return reason
        reason = None if layer.activation is None else why_not_activation(layer.activation)
        if reason is not None:
            return reason
    in_channels = x.shape[1] if reads_x else parts.convolutions[0].in_channels
    return (
        _why_not_widths(parts, in_channels)
        or why_not_precision([((), parts.convolutions)], x)
        or why_not_global_changes()
    )


def _unusual_setting(layer: ConvLayer, dims: int) -> str | None:
    """A setting in which a layer's convolution is not of 1×1 or 3×3 pixels and of the input's spatial size."""
    conv, padding, mode = layer.conv, layer.padding, layer.padding_mode
    if mode == "zeros":
        return unusual_setting(conv, 1 if conv.kernel_size[0] == 1 else 3)
    dilation, sides = conv.dilation[0], conv.padding * 2 if padding is None else padding.padding
    usual = (3,) * dims, (dilation,) * dims, (1,) * dims, 1, (dilation,) * dims * 2
    if mode == "circular" or (conv.kernel_size, conv.dilation, conv.stride, conv.groups, sides) != usual:
        return f"found a padding by {mode!r} of {sides} before a {type(conv).__name__} of {conv.kernel_size}"
    if padding is not None and any(conv.padding):
        return f"found two paddings before a {type(conv).__name__}"
    return None


def _why_not_widths(parts: ConvBlock, in_channels: int) -> str | None:
    """Each convolution must read all channels before it."""
    widths = accumulate((layer.conv.out_channels for layer in parts.layers), initial=in_channels)
    for conv, expected in zip(parts.convolutions, widths, strict=False):
        if conv.in_channels != expected:
            return f"found a convolution of {conv.in_channels} channels, where there are {expected} features"
    return None
