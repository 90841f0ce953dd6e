"""Dense blocks without norms as in public models, small: written for the tests from what the models compute."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, GROWTH = 6, 4


def conv(in_channels: int, out_channels: int, size: int = 3, dims: int = 2, dilation: int = 1) -> nn.Module:
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    return convolution(in_channels, out_channels, size, padding=size // 2 * dilation, dilation=dilation)


class ResidualDense(nn.Module):
    """As in ESRGAN: five convolutions with one activation module between them; the last one's output is scaled."""

    def __init__(self, dims: int = 2, channels: int | None = None, growth: int | None = None) -> None:
        super().__init__()
        channels, growth = channels or CHANNELS, growth or GROWTH
        for i in range(4):
            self.add_module(f"conv{i + 1}", conv(channels + i * growth, growth, dims=dims))
        self.conv5 = conv(channels + 4 * growth, channels, dims=dims)
        self.lrelu = nn.LeakyReLU(0.2, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y1 = self.lrelu(self.conv1(x))
        y2 = self.lrelu(self.conv2(torch.cat((x, y1), 1)))
        y3 = self.lrelu(self.conv3(torch.cat((x, y1, y2), 1)))
        y4 = self.lrelu(self.conv4(torch.cat((x, y1, y2, y3), 1)))
        return self.conv5(torch.cat((x, y1, y2, y3, y4), 1)) * 0.2 + x


class ScaledByAttribute(ResidualDense):
    """As others have written it: a function with its slope, `mul`, and the scale in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        del self.lrelu
        self.scale = 0.3

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for convolution in (self.conv1, self.conv2, self.conv3, self.conv4):
            features.append(F.leaky_relu(convolution(torch.cat(features, dim=1)), negative_slope=0.1, inplace=True))
        return x + self.conv5(torch.cat(features, dim=1)).mul(self.scale)


class ResidualInResidual(nn.Module):
    def __init__(self, channels: int | None = None, growth: int | None = None) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(ResidualDense(2, channels, growth) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x) * 0.2 + x


class SuperResolution(nn.Module):
    """A network of ESRGAN's blocks."""

    def __init__(self, count: int = 2, channels: int | None = None, growth: int | None = None) -> None:
        super().__init__()
        channels = channels or CHANNELS
        self.first, self.trunk_end, self.last = conv(3, channels), conv(channels, channels), conv(channels, 3)
        self.trunk = nn.Sequential(*(ResidualInResidual(channels, growth) for _ in range(count)))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.trunk_end(self.trunk(x))
        return self.last(F.leaky_relu(F.interpolate(x, scale_factor=2), 0.2))


class Concatenating(nn.Module):
    """As in RDN: a layer that returns its input and its output."""

    def __init__(self, channels: int, by_function: bool = False, growth: int | None = None) -> None:
        super().__init__()
        self.by_function, self.conv = by_function, conv(channels, growth or GROWTH)
        if not by_function:
            self.conv = nn.Sequential(self.conv, nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, F.relu(self.conv(x)) if self.by_function else self.conv(x)], 1)


class LocalFusion(nn.Module):
    """As in RDN: layers that concatenate themselves, and a 1×1 convolution of all features."""

    def __init__(
        self, by_function: bool = False, channels: int | None = None, growth: int | None = None, layers: int = 4
    ) -> None:
        super().__init__()
        channels, growth = channels or CHANNELS, growth or GROWTH
        self.layers = nn.Sequential(*(Concatenating(channels + i * growth, by_function, growth) for i in range(layers)))
        self.fusion = conv(channels + layers * growth, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fusion(self.layers(x)) + x


class FirstLayerApart(nn.Module):
    """As in SRDenseNet: the layers after the first one do not read the block's input, with which they are returned."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Sequential(conv(CHANNELS, GROWTH), nn.ReLU(inplace=True))
        self.layers = nn.Sequential(first, *(Concatenating(i * GROWTH) for i in range(1, 5)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.layers(x)], 1)


class Fusion(nn.Module):
    """As in DenseFuse: the concatenation of all layers is returned, from an nn.Sequential or a loop of the forward."""

    def __init__(self, activation: Callable[[], nn.Module] = nn.ReLU, dims: int = 2, new_only: bool = False) -> None:
        super().__init__()
        self.new_only = new_only
        self.layers = nn.ModuleList(
            nn.Sequential(conv(CHANNELS + i * GROWTH, GROWTH, dims=dims), activation()) for i in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return torch.cat(features[1:] if self.new_only else features, 1)


class ByReflection(nn.Module):
    """As DenseFuse mostly is: a layer pads by reflection, in a module of its own or in its convolution."""

    def __init__(self, channels: int, mode: str | None = None) -> None:
        super().__init__()
        self.pad = nn.Identity() if mode else nn.ReflectionPad2d(1)
        self.conv = nn.Conv2d(channels, GROWTH, 3, padding=1 if mode else 0, padding_mode=mode or "zeros")

    def forward(self, x: Tensor) -> Tensor:
        padded = x if type(self.pad) is nn.Identity else self.pad(x)
        return torch.cat([x, F.relu(self.conv(padded), inplace=True)], 1)


def padded(mode: str | None = None) -> nn.Module:
    return nn.Sequential(*(ByReflection(CHANNELS + i * GROWTH, mode) for i in range(3)))


class FlowEstimator(nn.Module):
    """As in PWC-Net: the newest features first, layers of several widths, and the features returned with the flow."""

    WIDTHS = (8, 8, 6, 4, 2)

    def __init__(self, channels: int | None = None, widths: Sequence[int] | None = None) -> None:
        super().__init__()
        channels = channels or CHANNELS
        for i, width in enumerate(widths or self.WIDTHS):
            self.add_module(f"conv{i + 1}", nn.Sequential(conv(channels, width), nn.LeakyReLU(0.1, inplace=True)))
            channels += width
        self.last = conv(channels, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x1 = torch.cat([self.conv1(x), x], dim=1)
        x2 = torch.cat([self.conv2(x1), x1], dim=1)
        x3 = torch.cat([self.conv3(x2), x2], dim=1)
        x4 = torch.cat([self.conv4(x3), x3], dim=1)
        x5 = torch.cat([self.conv5(x4), x4], dim=1)
        return x5, self.last(x5)


class Dilated(nn.Module):
    """Layers of several dilations, of 1×1 and 3×3 pixels, ended by a convolution with an activation."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((3, 1), (1, 1), (3, 2), (3, 4))
        self.layers = nn.ModuleList(
            conv(CHANNELS + i * GROWTH, GROWTH, size, dilation=dilation) for i, (size, dilation) in enumerate(sizes)
        )
        self.end, self.activation = conv(CHANNELS + 4 * GROWTH, 5), nn.ELU(0.7)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, self.activation(layer(x))], 1)
        return self.end(x).tanh()
