"""The modules of a DenseNet for signals (1-D), images (2-D) or volumes (3-D)."""

from torch.nn.modules.conv import _ConvNd

from .._checks import check, choice
from .._dimensions import DIMENSIONS, Dimensions, classes
from ..norms.batch_norm import CpBatchNorm1d, CpBatchNorm2d, CpBatchNorm3d

NORMS = {1: CpBatchNorm1d, 2: CpBatchNorm2d, 3: CpBatchNorm3d}
CONVOLUTIONS: tuple[type[_ConvNd], ...] = classes("Conv")
TRANSPOSED_CONVOLUTIONS: tuple[type[_ConvNd], ...] = classes("ConvTranspose")


def modules_for(dims: int) -> Dimensions:
    check("dims", dims, choice(*DIMENSIONS))
    return DIMENSIONS[dims]
