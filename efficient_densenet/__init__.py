"""DenseNets in PyTorch that train in far less memory, with the same numbers."""

from ._version import __version__
from .adapt import conversion_report, make_efficient, register_block, restore
from .checkpoint import CheckpointFunction
from .models.densenet import DenseNet, features
from .models.fc_densenet import FCDenseNet
from .models.layers import DenseBlock, DenseLayer, Transition
from .models.zoo import (
    create_model,
    densenet121,
    densenet161,
    densenet169,
    densenet201,
    densenet232_48,
    densenet264,
    densenet264_48,
    densenet_40_12,
    densenet_100_12,
    densenet_100_24,
    densenet_bc_40_36,
    densenet_bc_40_48,
    densenet_bc_40_60,
    densenet_bc_100_12,
    densenet_bc_190_40,
    densenet_bc_250_24,
    fc_densenet56,
    fc_densenet67,
    fc_densenet103,
    list_models,
)
from .norms.batch_norm import (
    CpBatchNorm1d,
    CpBatchNorm2d,
    CpBatchNorm3d,
    CpSyncBatchNorm,
    convert_batchnorm,
    cp_BatchNorm2d,
    restore_batchnorm,
)
from .weights.key_names import rename_keys
from .weights.load import WeightsReport, load_weights
from .weights.named import weights_classes, weights_transforms

__all__ = [
    "CheckpointFunction",
    "CpBatchNorm1d",
    "CpBatchNorm2d",
    "CpBatchNorm3d",
    "CpSyncBatchNorm",
    "DenseBlock",
    "DenseLayer",
    "DenseNet",
    "FCDenseNet",
    "Transition",
    "WeightsReport",
    "__version__",
    "conversion_report",
    "convert_batchnorm",
    "cp_BatchNorm2d",
    "create_model",
    "densenet121",
    "densenet161",
    "densenet169",
    "densenet201",
    "densenet232_48",
    "densenet264",
    "densenet264_48",
    "densenet_40_12",
    "densenet_100_12",
    "densenet_100_24",
    "densenet_bc_40_36",
    "densenet_bc_40_48",
    "densenet_bc_40_60",
    "densenet_bc_100_12",
    "densenet_bc_190_40",
    "densenet_bc_250_24",
    "fc_densenet56",
    "fc_densenet67",
    "fc_densenet103",
    "features",
    "list_models",
    "load_weights",
    "make_efficient",
    "register_block",
    "rename_keys",
    "restore",
    "restore_batchnorm",
    "weights_classes",
    "weights_transforms",
]
