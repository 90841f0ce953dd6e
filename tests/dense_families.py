"""Dense blocks as in other public models, small: what their layers hold, how they are called, what is concatenated.

Written for these tests from what the models compute. Every block takes `CHANNELS` channels, unless it says otherwise.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, GROWTH, WIDTH, DEPTH = 8, 4, 16, 5


def conv_relu(in_channels: int, out_channels: int, size: int = 3, **options) -> nn.Module:
    padding = size // 2 * options.get("dilation", 1)
    return nn.Sequential(nn.Conv2d(in_channels, out_channels, size, padding=padding, **options), nn.ReLU(inplace=True))


class TakesList(nn.Module):
    """As in "DenseNets Reloaded": a wide depthwise convolution, a norm over channels, a GELU, a scale, and the layer
    itself concatenates the list that it takes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((GROWTH,), 0.5))
        depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        convs = nn.Conv2d(channels, WIDTH, 1), nn.GELU(), nn.Conv2d(WIDTH, GROWTH, 1)
        self.layers = nn.Sequential(depthwise, nn.GroupNorm(1, channels), *convs)

    def forward(self, x: list[Tensor]) -> Tensor:
        return self.layers(torch.cat(x, 1)) * self.scale[:, None, None]


class DenseStage(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(TakesList(CHANNELS + i * GROWTH) for i in range(DEPTH)))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self:
            features.append(layer(features))
        return torch.cat(features, 1)


class SelectsChannels(nn.Module):
    """As where network slimming has pruned: a mask, which is a parameter, selects channels after the first norm."""

    def __init__(self, channels: int, selected: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(channels), nn.Conv2d(selected, GROWTH, 3, padding=1, bias=False)
        self.mask = Selection(channels, selected)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, self.conv(F.relu(self.mask(self.norm(x)), inplace=True))), 1)


class Selection(nn.Module):
    def __init__(self, channels: int, selected: int) -> None:
        super().__init__()
        self.indexes = nn.Parameter((torch.arange(channels) % channels < selected).float())

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.indexes.detach().nonzero()[:, 0]]


def pruned() -> nn.Module:
    widths = [(CHANNELS + i * GROWTH, CHANNELS + i * GROWTH - 3 - i % 2) for i in range(DEPTH)]
    return nn.Sequential(*(SelectsChannels(*each) for each in widths))


class IndexedConv(nn.Module):
    """As in a condensed network: chosen channels, norm, ReLU, a convolution in groups, and the groups shuffled."""

    def __init__(self, in_channels: int, out_channels: int, groups: int = 2) -> None:
        super().__init__()
        self.register_buffer("index", torch.randperm(in_channels))
        self.norm, self.groups = nn.BatchNorm2d(in_channels), groups
        self.conv = nn.Conv2d(in_channels, out_channels, 1, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output = self.conv(F.relu(self.norm(x.index_select(1, self.index))))
        return output.unflatten(1, (self.groups, -1)).transpose(1, 2).flatten(1, 2)


class Reactivates(nn.Module):
    """As in CondenseNetV2: a layer adds to the features that it reads, and concatenates its output before them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = IndexedConv(channels, WIDTH)
        norm, conv = nn.BatchNorm2d(WIDTH), nn.Conv2d(WIDTH, GROWTH, 3, padding=1, groups=2, bias=False)
        self.conv2 = nn.Sequential(norm, nn.ReLU(), conv)
        self.reactivation = IndexedConv(GROWTH, channels)

    def forward(self, x: Tensor) -> Tensor:
        new = self.conv2(self.conv1(x))
        return torch.cat([x + self.reactivation(new), new], 1)


def condensed() -> nn.Module:
    return nn.Sequential(*(Reactivates(CHANNELS + i * GROWTH) for i in range(DEPTH)))


def conv_norm_relu(in_channels: int, out_channels: int, stride: int = 1) -> nn.Module:
    conv1, conv2 = nn.Conv2d(in_channels, WIDTH, 1), nn.Conv2d(WIDTH, out_channels, 3, stride, padding=1)
    relus = nn.ReLU(inplace=True), nn.ReLU(inplace=True)
    return nn.Sequential(conv1, nn.BatchNorm2d(WIDTH), relus[0], conv2, nn.BatchNorm2d(out_channels), relus[1])


class TwoScales(nn.Module):
    """As in MSDNet: a layer takes images in two sizes, and concatenates in both."""

    def __init__(self, channels: int, coarse_channels: int) -> None:
        super().__init__()
        self.fine = conv_norm_relu(channels, GROWTH)
        self.down = conv_norm_relu(channels, GROWTH // 2, stride=2)
        self.coarse = conv_norm_relu(coarse_channels, GROWTH // 2)

    def forward(self, x: list[Tensor]) -> list[Tensor]:
        fine, coarse = x
        new = [coarse, self.down(fine), self.coarse(coarse)]
        return [torch.cat([fine, self.fine(fine)], 1), torch.cat(new, 1)]


class MultiScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(CHANNELS, CHANNELS, 3, stride=2, padding=1)
        layers = (TwoScales(CHANNELS + i * GROWTH, CHANNELS + i * GROWTH) for i in range(DEPTH))
        self.blocks = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        fine, coarse = self.blocks([x, self.first(x)])
        return torch.cat([F.avg_pool2d(fine, 2), coarse], 1)


class NormFirst(nn.Module):
    """As in gnina: volumes, and each layer is norm, convolution, ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self._layer(CHANNELS + i * GROWTH) for i in range(DEPTH))

    @staticmethod
    def _layer(channels: int) -> nn.Module:
        return nn.Sequential(nn.BatchNorm3d(channels), nn.Conv3d(channels, GROWTH, 3, padding="same"), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for block in self.blocks:
            features.append(block(torch.cat(features, 1)))
        return torch.cat(features, 1)


class SkipsFeatures(nn.Module):
    """As in DSNet for counting crowds: dilated layers without norms, one of which does not read all before it."""

    def __init__(self) -> None:
        super().__init__()

        def layer(channels: int, dilation: int) -> nn.Module:
            return nn.Sequential(conv_relu(channels, WIDTH, 1), conv_relu(WIDTH, GROWTH, dilation=dilation))

        self.conv1, self.conv2 = layer(CHANNELS, 1), layer(CHANNELS + GROWTH, 2)
        self.conv3 = layer(CHANNELS + 2 * GROWTH, 3)
        self.conv4 = conv_relu(CHANNELS + 2 * GROWTH, CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        first = self.conv1(x)
        second = self.conv2(torch.cat([x, first], 1))
        third = self.conv3(torch.cat([x, first, second], 1))
        return self.conv4(torch.cat([x, second, third], 1))


class DilatedDense(nn.Module):
    """As in CMGAN: modules found by their names in a loop, the newest features first, and only the last returned."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.pad = nn.ConstantPad2d((1, 1, 1, 0), 0.0)
        for i in range(4):
            self.add_module(f"pad{i + 1}", nn.ConstantPad2d((1, 1, 2**i, 0), 0.0))
            conv = nn.Conv2d(CHANNELS * (i + 1), CHANNELS, (2, 3), dilation=(2**i, 1))
            self.add_module(f"conv{i + 1}", conv)
            self.add_module(f"norm{i + 1}", self.norm())
            self.add_module(f"prelu{i + 1}", nn.PReLU(CHANNELS))

    def norm(self) -> nn.Module:
        return nn.InstanceNorm2d(CHANNELS, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        skip = x
        for i in range(1, 5):
            output = skip
            for name in ("pad", "conv", "norm", "prelu"):
                output = getattr(self, f"{name}{i}")(output)
            skip = torch.cat([output, skip], 1)
        return output


class Numbered(nn.Module):
    """Layers of a usual kind, which are modules of the block itself."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(DEPTH):
            channels = CHANNELS + i * GROWTH
            self.add_module(f"norm{i}", nn.BatchNorm2d(channels))
            self.add_module(f"relu{i}", nn.ReLU(inplace=True))
            self.add_module(f"conv{i}", nn.Conv2d(channels, GROWTH, 3, padding=1))
            self.add_module(f"dropout{i}", nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(DEPTH):
            output = x
            for name in ("norm", "relu", "conv", "dropout"):
                output = getattr(self, f"{name}{i}")(output)
            x = torch.cat([x, output], 1)
        return x


class RowsOfOneLength(DilatedDense):
    """As in TSTNN: a norm over the rows of images, which are of one length."""

    LENGTH = 20

    def norm(self) -> nn.Module:
        return nn.LayerNorm(self.LENGTH)


class ReturnsTheLast(nn.Module):
    """As in MP-SENet: a list of layers, the newest features first, and only the last returned."""

    def __init__(self) -> None:
        super().__init__()
        self.dense_block = nn.ModuleList([])
        for i in range(4):
            dilation = 2**i, 1
            conv = nn.Conv2d(CHANNELS * (i + 1), CHANNELS, 3, dilation=dilation, padding=dilation)
            self.dense_block.append(nn.Sequential(conv, nn.InstanceNorm2d(CHANNELS, affine=True), nn.PReLU(CHANNELS)))

    def forward(self, x: Tensor) -> Tensor:
        skip = x
        for layer in self.dense_block:
            x = layer(skip)
            skip = torch.cat([x, skip], 1)
        return x


class Concatenating(nn.Module):
    """As in survae: two convolutions with ReLUs in place, perhaps dropout between, and the layer concatenates."""

    def __init__(self, channels: int, drop_rate: float) -> None:
        super().__init__()
        dropout = [nn.Dropout(drop_rate)] if drop_rate else []
        self.nn = nn.Sequential(*conv_relu(channels, channels, 1), *dropout, *conv_relu(channels, GROWTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.nn(x)], 1)


def ended_by_a_convolution(drop_rate: float = 0.0) -> nn.Module:
    layers = [Concatenating(CHANNELS + i * GROWTH, drop_rate) for i in range(DEPTH)]
    return nn.Sequential(*layers, nn.Conv2d(CHANNELS + DEPTH * GROWTH, CHANNELS, 1))


class Gate(nn.Module):
    """As at the end of a block of DenseFlow: a convolution to twice the channels, half of which gate the others."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 2 * CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        output, gate = self.conv(x).chunk(2, 1)
        return output * gate.sigmoid()


def ended_by_a_gate() -> nn.Module:
    layers = [Concatenating(CHANNELS + i * GROWTH, 0.2) for i in range(DEPTH)]
    return nn.Sequential(*layers, Gate(CHANNELS + DEPTH * GROWTH))


class BottleneckLayer(nn.Sequential):
    """A layer of torchvision's kind with another activation; it takes a list of features or their concatenation."""

    def __init__(self, channels: int, activation: type[nn.Module], drop_rate: float) -> None:
        super().__init__()
        self.norm1, self.act1 = nn.BatchNorm2d(channels), activation(inplace=True)
        self.conv1 = nn.Conv2d(channels, WIDTH, 1, bias=False)
        self.norm2, self.act2 = nn.BatchNorm2d(WIDTH), activation(inplace=True)
        self.conv2, self.drop_rate = nn.Conv2d(WIDTH, GROWTH, 3, padding=1, bias=False), drop_rate

    def forward(self, x: Tensor | list[Tensor]) -> Tensor:
        x = super().forward(x if isinstance(x, Tensor) else torch.cat(x, 1))
        return F.dropout(x, self.drop_rate, self.training) if self.drop_rate else x


class BottleneckBlock(nn.ModuleDict):
    """As in libauc (ELU), or with Mish, as in torch_ecg."""

    def __init__(self, activation: type[nn.Module] = nn.ELU, drop_rate: float = 0.0) -> None:
        super().__init__()
        for i in range(DEPTH):
            self[f"denselayer{i + 1}"] = BottleneckLayer(CHANNELS + i * GROWTH, activation, drop_rate)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


class FlowDecoder(nn.Module):
    """As in PWC-Net: dense lines in the forward of a network that has other modules too, the newest features first."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_relu(3, CHANNELS), conv_relu(CHANNELS, CHANNELS))
        channels = CHANNELS
        for i, growth in enumerate((12, 8, 4)):
            self.add_module(f"conv6_{i}", conv_relu(channels, growth))
            channels += growth
        self.flow = nn.Conv2d(channels, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for i in range(3):
            x = torch.cat([self.get_submodule(f"conv6_{i}")(x), x], 1)
        return self.flow(x)


class TakesPair(nn.Sequential):
    """As in DexiNed: a block takes two tensors, and adds."""

    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        first, second = x
        return 0.5 * (super().forward(F.relu(first)) + second), second


class DenseBlockOfPairs(nn.Sequential):
    def __init__(self) -> None:
        width, layers = 2 * CHANNELS, []
        for channels in (CHANNELS, width):
            convs = [nn.Conv2d(channels, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)]
            norms = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
            layers.append(TakesPair(convs[0], norms[0], nn.ReLU(inplace=True), convs[1], norms[1]))
        super().__init__(*layers)


class Edges(nn.Module):
    """A network that uses such a block, and adds in its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.side, self.dense = nn.Conv2d(CHANNELS, 2 * CHANNELS, 1), DenseBlockOfPairs()

    def forward(self, x: Tensor) -> Tensor:
        output, side = self.dense([x, self.side(x)])
        return output + side
