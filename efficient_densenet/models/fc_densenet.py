"""The FC-DenseNet, a DenseNet that labels every pixel, with dense blocks in a downsampling and an upsampling path."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .._checks import check, integer, number
from ..engine.limits import must_be_called
from ..engine.network import run_sequence
from .activations import ActivationFactory, activation_factory
from .base import DenseModel, check_architecture
from .dimensions import CONVOLUTIONS, NORMS, TRANSPOSED_CONVOLUTIONS, modules_for
from .layers import DenseBlock


class FCDenseNet(DenseModel):
    """The One Hundred Layers Tiramisu (Jégou et al., https://arxiv.org/abs/1611.09326): logits for every pixel.

    Args:
        growth_rate: channels that each layer adds.
        block_config: layers in each dense block, an odd number of blocks: the blocks before the middle block form the
            downsampling path, the blocks after it the upsampling path.
        num_init_features: channels of the first convolution.
        drop_rate: dropout after each layer's convolution, and after each downsampling transition's convolution.
        num_classes: channels of the output; 0 makes the classifier the identity, for features of every pixel.
        efficient: True for the best engine here, False for "plain", or an engine's name.
        in_channels: channels of the input images.
        memory_efficient: torchvision's and timm's name for `efficient`, which it replaces if given.
        dims: 1 for signals (N, channels, length), 2 for images, 3 for volumes (N, channels, depth, height, width).
        activation: as in `DenseNet`.
    """

    def __init__(
        self,
        growth_rate: int = 16,
        block_config: Sequence[int] = (4, 5, 7, 10, 12, 15, 12, 10, 7, 5, 4),
        num_init_features: int = 48,
        drop_rate: float = 0.2,
        num_classes: int = 11,
        efficient: bool | str = True,
        *,
        in_channels: int = 3,
        memory_efficient: bool | str | None = None,
        dims: int = 2,
        activation: str | ActivationFactory = "relu",
    ) -> None:
        super().__init__()
        self._keep_arguments(locals())
        check_architecture(growth_rate, block_config, num_init_features, in_pairs=True)
        check("drop_rate", drop_rate, number(0, 1, "[)"))
        check("num_classes", num_classes, integer(0))
        check("in_channels", in_channels, integer(1))
        efficient = efficient if memory_efficient is None else memory_efficient
        self.in_channels, self.num_classes, self.dims = in_channels, num_classes, dims
        self.features = FCFeatures(
            growth_rate, block_config, num_init_features, drop_rate, efficient, in_channels, dims, activation
        )
        self.num_features = self.features.num_output_features
        conv = modules_for(dims).Conv
        self.classifier = conv(self.num_features, num_classes, kernel_size=1) if num_classes else nn.Identity()
        self._initialize()

    def forward(self, x: Tensor) -> Tensor:
        """The logits, (N, num_classes, *spatial), of the input's size."""
        self._check_input(x)
        if must_be_called(self.features):
            return self.classifier(self.features(x))
        x, last_block = self.features.before_last_block(x)
        modules = ("block", last_block), ("classifier", self.classifier)
        return run_sequence(modules, x, lambda module: isinstance(module, DenseBlock))[0]

    def _smallest_input(self, pixels: int) -> int:
        return pixels * 2**self.features.depth

    def _last_block(self) -> nn.Module:
        return self.features.get_submodule(f"denseblock{self.features.depth + 1}")

    def _initialize(self) -> None:
        for module in self.modules():
            if isinstance(module, (*CONVOLUTIONS, *TRANSPOSED_CONVOLUTIONS)):
                nn.init.kaiming_uniform_(module.weight, nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)


class FCFeatures(nn.Module):
    """A convolution, then dense blocks with transitions between them: `depth` transitions down, and `depth` up.

    The output of a block in the downsampling path is concatenated with the upsampled features of the same size. The
    middle block and all later blocks but the last return their new features only. Blocks and transitions are numbered
    consecutively.
    """

    def __init__(
        self,
        growth_rate: int,
        block_config: Sequence[int],
        num_init_features: int,
        drop_rate: float,
        efficient: bool | str,
        in_channels: int,
        dims: int,
        activation: str | ActivationFactory = "relu",
    ) -> None:
        super().__init__()
        self.depth, last = len(block_config) // 2, len(block_config)
        self.conv0 = modules_for(dims).Conv(in_channels, num_init_features, kernel_size=3, padding=1)
        channels, skipped = num_init_features, []
        for i, num_layers in enumerate(block_config, start=1):
            goes_down = i <= self.depth
            settings = growth_rate, 0, drop_rate, efficient, False, dims
            options = {"new_features_only": not goes_down and i < last, "activation": activation}
            block = DenseBlock(num_layers, channels, *settings, bias=True, **options)
            self.add_module(f"denseblock{i}", block)
            channels = block.num_output_features
            if goes_down:
                skipped.append(channels)
                self.add_module(f"transition{i}", TransitionDown(channels, drop_rate, dims, activation))
            elif i < last:
                self.add_module(f"transition{i}", TransitionUp(channels, dims))
                channels += skipped.pop()
        self.num_output_features = channels

    def forward(self, x: Tensor) -> Tensor:
        x, last_block = self.before_last_block(x)
        return last_block(x)

    def before_last_block(self, x: Tensor) -> tuple[Tensor, nn.Module]:
        """The input of the last block, and this block."""
        x, skipped = self.conv0(x), []
        for i in range(1, self.depth + 1):
            block, transition = self.get_submodule(f"denseblock{i}"), self.get_submodule(f"transition{i}")
            modules = ("block", block), ("transition", transition)
            x, outputs = run_sequence(modules, x, lambda module: isinstance(module, DenseBlock), ["block"])
            skipped.append(outputs.pop("block"))
        for i in range(self.depth + 1, 2 * self.depth + 1):
            x = self.get_submodule(f"denseblock{i}")(x)
            x = self.get_submodule(f"transition{i}")(x, skipped.pop())
        return x, self.get_submodule(f"denseblock{2 * self.depth + 1}")


class TransitionDown(nn.Sequential):
    """Norm, activation, a 1×1 convolution to as many channels, dropout, max pooling that halves height and width."""

    def __init__(
        self, channels: int, drop_rate: float, dims: int = 2, activation: str | ActivationFactory = "relu"
    ) -> None:
        super().__init__()
        modules = modules_for(dims)
        self.norm = NORMS[dims](channels)
        self.relu = activation_factory(activation)()
        self.conv = modules.Conv(channels, channels, kernel_size=1)
        self.drop = nn.Dropout(drop_rate)
        self.pool = modules.MaxPool(2)


class TransitionUp(nn.Module):
    """A transposed convolution doubles height and width; the result is cropped and concatenated with `skipped`."""

    def __init__(self, channels: int, dims: int = 2) -> None:
        super().__init__()
        self.conv, self.dims = modules_for(dims).ConvTranspose(channels, channels, kernel_size=3, stride=2), dims

    def forward(self, x: Tensor, skipped: Tensor) -> Tensor:
        x = self.conv(x)
        for dim in range(2, self.dims + 2):
            x = x.narrow(dim, 0, skipped.shape[dim])
        return torch.cat([x, skipped], 1)
