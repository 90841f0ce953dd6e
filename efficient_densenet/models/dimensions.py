"""The module classes of a DenseNet for signals (1-D), images (2-D) or volumes (3-D)."""

from collections.abc import Callable
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from .._checks import check_choice
from ..norms.batch_norm import CpBatchNorm1d, CpBatchNorm2d, CpBatchNorm3d


class Modules(NamedTuple):
    Conv: Callable[..., _ConvNd]
    Norm: Callable[..., nn.Module]
    AvgPool: Callable[..., nn.Module]
    MaxPool: Callable[..., nn.Module]
    ConvTranspose: Callable[..., nn.Module]
    adaptive_avg_pool: Callable[[Tensor, int], Tensor]
    inputs: str
    sides: tuple[str, ...]


_MODULES = {
    1: Modules(
        nn.Conv1d,
        CpBatchNorm1d,
        nn.AvgPool1d,
        nn.MaxPool1d,
        nn.ConvTranspose1d,
        F.adaptive_avg_pool1d,
        "signals",
        ("length",),
    ),
    2: Modules(
        nn.Conv2d,
        CpBatchNorm2d,
        nn.AvgPool2d,
        nn.MaxPool2d,
        nn.ConvTranspose2d,
        F.adaptive_avg_pool2d,
        "images",
        ("height", "width"),
    ),
    3: Modules(
        nn.Conv3d,
        CpBatchNorm3d,
        nn.AvgPool3d,
        nn.MaxPool3d,
        nn.ConvTranspose3d,
        F.adaptive_avg_pool3d,
        "volumes",
        ("depth", "height", "width"),
    ),
}
CONVOLUTIONS = nn.Conv1d, nn.Conv2d, nn.Conv3d
TRANSPOSED_CONVOLUTIONS = nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d


def modules_for(dims: int) -> Modules:
    check_choice("dims", dims, tuple(_MODULES))
    return _MODULES[dims]
