"""Dense blocks as in other public models, small: what their layers hold, how they are called, what is concatenated.

Written for these tests from what the models compute. Every block takes `CHANNELS` channels.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from third_party_models import LayerHalves
from torch import Tensor, nn

CHANNELS, GROWTH = 6, 4


def conv(in_channels: int, out_channels: int, size: int = 3, dims: int = 2, **options) -> nn.Module:
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    return convolution(in_channels, out_channels, size, padding=size // 2 * options.get("dilation", 1), **options)


class Block(nn.Module):
    """A block of layers `layer(channels)` whose own forward concatenates, in either order, and returns its input too
    or not."""

    def __init__(self, layer, newest_first: bool = False, returns_input: bool = True, depth: int = 3) -> None:
        super().__init__()
        self.newest_first, self.returns_input = newest_first, returns_input
        self.layers = nn.ModuleList(layer(CHANNELS + i * GROWTH) for i in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            output = layer(torch.cat(features, 1))
            features = [output, *features] if self.newest_first else [*features, output]
        if not self.returns_input:
            del features[-1 if self.newest_first else 0]
        return torch.cat(features, 1)


class Concatenating(nn.Module):
    """A layer that concatenates its input and its output."""

    def __init__(self, layer: nn.Module, newest_first: bool) -> None:
        super().__init__()
        self.layer, self.newest_first = layer, newest_first

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.layer(x), x] if self.newest_first else [x, self.layer(x)], 1)


def tiramisu(channels: int) -> nn.Module:
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), conv(channels, GROWTH), nn.Dropout(0.2))


class SqueezeAndExcite(LayerHalves):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.down, self.up = nn.Linear(GROWTH, 2), nn.Linear(2, GROWTH)

    def forward(self, x: Tensor) -> Tensor:
        output = self.second_half(self.first_half(x))
        weight = self.up(F.relu(self.down(output.mean((2, 3))))).sigmoid()
        return output * weight[:, :, None, None]


class TwoDropouts(LayerHalves):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.dropout1, self.dropout2 = nn.Dropout(0.2), nn.Dropout2d(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout2(self.second_half(self.dropout1(self.first_half(x))))


def conv_norm_relu(channels: int) -> nn.Module:
    first = conv(channels, 8, 1), nn.BatchNorm2d(8), nn.ReLU()
    return nn.Sequential(*first, conv(8, GROWTH), nn.BatchNorm2d(GROWTH), nn.ReLU())


def separable(channels: int) -> nn.Module:
    depthwise = conv(channels, channels, groups=channels)
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), depthwise, conv(channels, GROWTH, 1))


def norm_first_of_volumes(channels: int) -> nn.Module:
    """As in gnina: volumes, and each layer is norm, convolution, ReLU."""
    return nn.Sequential(nn.BatchNorm3d(channels), conv(channels, GROWTH, dims=3), nn.ReLU())


def padded_by_reflection(activation: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    """As in DenseFuse: no norms."""
    return lambda channels: nn.Sequential(conv(channels, GROWTH, padding_mode="reflect"), activation())


class AxialConv(nn.Module):
    """As ACSConv: the weight of an image's convolution, a third of it along each axis of a volume."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        self.weight = nn.Parameter(torch.randn(out_channels, in_channels, 3, 3) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        outputs = []
        for axis, weight in enumerate(self.weight.tensor_split(3)):
            padding = [int(axis != each) for each in range(3)]
            outputs.append(F.conv3d(x, weight.unsqueeze(2 + axis), padding=padding))
        return torch.cat(outputs, 1)


def axial(channels: int) -> nn.Module:
    return nn.Sequential(nn.BatchNorm3d(channels), nn.ReLU(), AxialConv(channels, GROWTH))


class ResidualDense(nn.Module):
    """As in ESRGAN: five convolutions with one activation module between them; the last one's output is scaled."""

    def __init__(self, dims: int = 2, channels: int = CHANNELS, growth: int = GROWTH, **options) -> None:
        super().__init__()
        for i in range(4):
            self.add_module(f"conv{i + 1}", conv(channels + i * growth, growth, dims=dims, **options))
        self.conv5 = conv(channels + 4 * growth, channels, dims=dims, **options)
        self.lrelu = nn.LeakyReLU(0.2, inplace=True)
        self.scale = 0.2

    def forward(self, x: Tensor) -> Tensor:
        features = x
        for layer in (self.conv1, self.conv2, self.conv3, self.conv4):
            features = torch.cat((features, self.lrelu(layer(features))), 1)
        return self.conv5(features) * self.scale + x


class WithDropoutAndBuffer(ResidualDense):
    """Dropout in several places, and a buffer that the forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.lrelu = nn.Sequential(nn.ELU(), nn.Dropout2d(0.3))
        self.register_buffer("temperature", torch.full((1,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x) * self.temperature, 0.2, self.training) + x


class ResidualInResidual(nn.Module):
    """As in ESRGAN: RRDB."""

    def __init__(self, channels: int = CHANNELS, growth: int = GROWTH) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(ResidualDense(2, channels, growth) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x) * 0.2 + x
