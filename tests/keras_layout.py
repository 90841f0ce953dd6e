"""A state dict in the layout of keras.applications."""

import numpy as np
from torch import Tensor

IN_KERAS = {"norm1": "0_bn", "conv1": "1_conv", "norm2": "1_bn", "conv2": "2_conv"}
KERAS_VARIABLES = {"bias": "beta", "running_mean": "moving_mean", "running_var": "moving_variance"}


def _keras_name(key: str, sep: str) -> str | None:
    """Return the name of the variable in keras.applications: that of its layer, the separator, and its own."""
    *modules, kind = key.removeprefix("features.").split(".")
    is_norm = any("norm" in module for module in modules)
    variable = {**KERAS_VARIABLES, "weight": "gamma"}.get(kind) if is_norm else {"weight": "kernel"}.get(kind, kind)
    if variable is None:
        return None  # Keras counts no batches
    block = modules[0].removeprefix("denseblock").removeprefix("transition")
    if modules[0].startswith("denseblock"):
        layer = f"conv{int(block) + 1}_block{modules[1].removeprefix('denselayer')}_{IN_KERAS[modules[2]]}"
    elif modules[0].startswith("transition"):
        layer = f"pool{int(block) + 1}_{'bn' if is_norm else 'conv'}"
    else:
        layer = {"conv0": "conv1_conv", "norm0": "conv1_bn", "norm5": "bn", "classifier": "predictions"}[modules[0]]
    return f"{layer}{sep}{variable}"


def as_keras(state: dict[str, Tensor], sep: str, suffix: str = "", torch_s: bool = False) -> dict[str, np.ndarray]:
    renamed = {}
    for key, tensor in state.items():
        name = _keras_name(key, sep)
        if name is None:
            continue
        if torch_s:
            name = name.rpartition(sep)[0] + sep + key.rpartition(".")[2]
        elif name.endswith("kernel"):
            tensor = tensor.permute(2, 3, 1, 0) if tensor.dim() == 4 else tensor.t()
        renamed[name + suffix] = tensor.numpy().copy()
    return renamed
