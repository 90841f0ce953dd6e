"""The FC-DenseNet, a DenseNet that labels every pixel, with dense blocks in a downsampling and an upsampling path."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .._checks import check, integer, number
from .._torch_private import has_global_module_hooks
from ..engine.choose import EngineName, may_run_engines
from ..engine.limits import must_be_called
from ..engine.skip import run_down, run_up
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
        efficient: bool | EngineName = True,
        *,
        in_channels: int = 3,
        memory_efficient: bool | EngineName | None = None,
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
        is_seen = must_be_called(self.features) or has_global_module_hooks()
        if is_seen or not may_run_engines(self.features, x):  # as in a graph that torch.fx or torch.export makes
            return self.classifier(self.features(x))
        return self.features.run(x, self.classifier)

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
        efficient: bool | EngineName,
        in_channels: int,
        dims: int,
        activation: str | ActivationFactory = "relu",
    ) -> None:
        super().__init__()
        self.depth, last = len(block_config) // 2, len(block_config)
        # What each block on the way down leaves for the one of its size on the way up: what that reads and adds.
        new = [growth_rate * num_layers for num_layers in block_config]
        self.rooms = list(zip(new[-2 : self.depth - 1 : -1], new[: -self.depth - 1 : -1], strict=True))
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
        return self.run(x)

    def run(self, x: Tensor, classifier: nn.Module | None = None) -> Tensor:
        """The features, or the output of the classifier, which reads them where they are stored."""
        x, skipped = self.conv0(x), []
        blocks = [getattr(self, f"denseblock{i}") for i in range(1, 2 * self.depth + 2)]
        transitions = [getattr(self, f"transition{i}") for i in range(1, 2 * self.depth + 1)]
        for i in range(self.depth):
            x, output = run_down(blocks[i], transitions[i], x, self.rooms[i])
            skipped.append(output)
        x = blocks[self.depth](x)
        for i in range(self.depth, 2 * self.depth):
            last = classifier if i == 2 * self.depth - 1 else None
            x = run_up(transitions[i], blocks[i + 1], last, x, skipped.pop())
        return x


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
        self.conv = modules_for(dims).ConvTranspose(channels, channels, kernel_size=3, stride=2)

    def forward(self, x: Tensor, skipped: Tensor) -> Tensor:
        return torch.cat([self.upsampled(x, skipped.shape[2:]), skipped], 1)

    def upsampled(self, x: Tensor, size: Sequence[int]) -> Tensor:
        """The result of the convolution, cropped to this size."""
        x = self.conv(x)
        for dim in range(len(self.conv.kernel_size)):  # torch.fx cannot iterate over sizes
            x = x.narrow(dim + 2, 0, size[dim])
        return x
