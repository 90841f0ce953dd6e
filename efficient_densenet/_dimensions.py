"""PyTorch's classes and functions for signals, images and volumes, by the number of spatial dimensions."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd


class Dimensions(NamedTuple):
    """Module classes, functions, and words for messages."""

    Conv: Callable[..., _ConvNd]
    ConvTranspose: Callable[..., _ConvNd]
    BatchNorm: type[_BatchNorm]
    AvgPool: Callable[..., nn.Module]
    MaxPool: Callable[..., nn.Module]
    conv: Callable[..., Tensor]
    avg_pool: Callable[..., Tensor]
    max_pool: Callable
    adaptive_avg_pool: Callable[..., Tensor]
    inputs: str
    sides: tuple[str, ...]


_SIGNALS = Dimensions(
    *(nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d, nn.AvgPool1d, nn.MaxPool1d),
    *(F.conv1d, F.avg_pool1d, F.max_pool1d, F.adaptive_avg_pool1d),
    inputs="signals",
    sides=("length",),
)
_IMAGES = Dimensions(
    *(nn.Conv2d, nn.ConvTranspose2d, nn.BatchNorm2d, nn.AvgPool2d, nn.MaxPool2d),
    *(F.conv2d, F.avg_pool2d, F.max_pool2d, F.adaptive_avg_pool2d),
    inputs="images",
    sides=("height", "width"),
)
_VOLUMES = Dimensions(
    *(nn.Conv3d, nn.ConvTranspose3d, nn.BatchNorm3d, nn.AvgPool3d, nn.MaxPool3d),
    *(F.conv3d, F.avg_pool3d, F.max_pool3d, F.adaptive_avg_pool3d),
    inputs="volumes",
    sides=("depth", "height", "width"),
)
DIMENSIONS = {1: _SIGNALS, 2: _IMAGES, 3: _VOLUMES}


def dimensions_of(x: Tensor) -> Dimensions:
    """The entry for x, (N, channels, *spatial)."""
    return DIMENSIONS[x.dim() - 2]


def classes(name: str) -> tuple[type[Any], ...]:
    """The module classes of this name, such as "Conv", for each number of dimensions."""
    return tuple(getattr(dimensions, name) for dimensions in DIMENSIONS.values())


def per_dimension(setting: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """PyTorch takes one number for all dimensions, alone or in a sequence; NumPy's integers too, but operators do
    not."""
    numbers = tuple(map(int, setting if isinstance(setting, (tuple, list)) else [cast(int, setting)]))
    return numbers * dims if len(numbers) == 1 else numbers
