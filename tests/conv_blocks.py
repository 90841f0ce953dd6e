"""Dense blocks without norms, as in public networks for super-resolution, fusion of images and optical flow."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ResidualDenseBlock(nn.Module):
    """ESRGAN's: four convolutions with one LeakyReLU, a fifth without, scaled and added to the input."""

    def __init__(self, channels: int = 16, growth_rate: int = 8) -> None:
        super().__init__()
        for i in range(5):
            out_channels = growth_rate if i < 4 else channels
            self.add_module(f"conv{i + 1}", nn.Conv2d(channels + i * growth_rate, out_channels, 3, padding=1))
        self.act = nn.LeakyReLU(0.2, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        first = self.act(self.conv1(x))
        second = self.act(self.conv2(torch.cat((x, first), 1)))
        third = self.act(self.conv3(torch.cat((x, first, second), 1)))
        fourth = self.act(self.conv4(torch.cat((x, first, second, third), 1)))
        return self.conv5(torch.cat((x, first, second, third, fourth), 1)) * 0.2 + x


class ResidualInResidual(nn.Module):
    def __init__(self, channels: int, growth_rate: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ResidualDenseBlock(channels, growth_rate) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        output = x
        for block in self.blocks:
            output = block(output)
        return output * 0.2 + x


class RRDBNet(nn.Module):
    """ESRGAN's network, without its upsampling."""

    def __init__(self, channels: int = 16, growth_rate: int = 8, blocks: int = 2) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.body = nn.Sequential(*(ResidualInResidual(channels, growth_rate) for _ in range(blocks)))
        self.last = nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        features = self.first(x)
        return self.last(features + self.body(features))


class ConcatenatingLayer(nn.Module):
    def __init__(self, in_channels: int, growth_rate: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, growth_rate, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, F.relu(self.conv(x))], dim=1)


class RDNBlock(nn.Module):
    """RDN's: layers that concatenate by themselves, a 1×1 convolution, and the input added."""

    def __init__(self, channels: int = 8, growth_rate: int = 8, layers: int = 4) -> None:
        super().__init__()
        layers = [ConcatenatingLayer(channels + i * growth_rate, growth_rate) for i in range(layers)]
        self.layers = nn.Sequential(*layers)
        self.fusion = nn.Conv2d(channels + len(layers) * growth_rate, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fusion(self.layers(x))


class DenseFuseBlock(nn.Module):
    """DenseFuse's and SRDenseNet's: all features are returned."""

    def __init__(self, channels: int = 8, growth_rate: int = 8, layers: int = 3, act: nn.Module | None = None) -> None:
        super().__init__()
        convolutions = (nn.Conv2d(channels + i * growth_rate, growth_rate, 3, padding=1) for i in range(layers))
        self.convolutions, self.act = nn.ModuleList(convolutions), act or nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convolutions:
            x = torch.cat([x, self.act(conv(x))], 1)
        return x


class FlowEstimator(nn.Module):
    """PWC-Net's: newest features first, layers of unequal widths, and the flow beside the features."""

    def __init__(self, channels: int = 10, widths: tuple[int, ...] = (12, 12, 8, 6, 4)) -> None:
        super().__init__()
        layers = []
        for width in widths:
            layers.append(nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), nn.LeakyReLU(0.1, inplace=True)))
            channels += width
        self.layers, self.flow = nn.ModuleList(layers), nn.Conv2d(channels, 2, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = torch.cat([layer(x), x], 1)
        return x, self.flow(x)
