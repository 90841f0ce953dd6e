"""The state-dict keys of other libraries and of older versions, renamed to this package's."""

import re
from collections.abc import Iterable, Mapping

from torch import Tensor

_WRAPPERS = r"module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module"
_RENAMES = (
    (rf"(?:(?<=^)|(?<=\.))(?:{_WRAPPERS})\.", ""),  # nn.DataParallel, torch.compile, FSDP, checkpoint
    (r"^model\.(?=features\.|class)", ""),  # Lightning modules
    (r"^features_(?=conv|norm|denseblock|transition)", "features."),  # timm with features_only
    (r"^features\.norm_final\.", "features.norm5."),  # gpleiss/efficient_densenet_pytorch
    (r"\.(norm|relu|conv)\.([12])\.", r".\1\2."),  # torchvision before 0.3: denselayer1.norm.1.weight
    (r"(\.denselayer\d+)\.layers\.", r"\1."),  # MONAI
    (r"^class_layers\.out\.", "classifier."),
)

_KERAS_VARIABLES = {
    "kernel": "weight",
    "gamma": "weight",
    "beta": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}
_KERAS_KEY = re.compile(
    rf"(.+)[/._]({'|'.join(_KERAS_VARIABLES)}|weight|bias|running_mean|running_var|num_batches_tracked)(?::0)?"
)
_KERAS_TO_OURS = {"0_bn": "norm1", "1_conv": "conv1", "1_bn": "norm2", "2_conv": "conv2"}


def rename_keys(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the keys of a state dict to this package's, which are torchvision's. Keys that have the right name
    stay."""
    names = new_names(state_dict)
    return {names[key]: tensor for key, tensor in state_dict.items()}


def new_names(keys: Iterable[str]) -> dict[str, str]:
    """Map each key of any known layout to this package's name."""
    names: dict[str, str] = {}
    sources: dict[str, str] = {}
    for key in keys:
        name = key
        for pattern, replacement in _RENAMES:
            name = re.sub(pattern, replacement, name)
        name = _from_keras(name) or name
        if name in sources:
            raise ValueError(f"found both {sources[name]!r} and {key!r}, which are the same tensor {name!r}: drop one")
        names[key], sources[name] = name, key
    return names


def is_keras_kernel(key: str) -> bool:
    """Return True for a weight in Keras's layout: (height, width, in, out) or (in, out)."""
    return re.search(r"[/._]kernel(?::0)?$", key) is not None


def _from_keras(key: str) -> str | None:
    """Return this package's name for a variable of keras.applications, such as `conv2_block1_0_bn/gamma`."""
    parts = _KERAS_KEY.fullmatch(key)
    if parts is None:
        return None
    layer = re.sub(r"[/.]", "_", parts[1])
    half = len(layer) // 2
    if layer[:half] == layer[half + 1 :]:  # HDF5 files repeat the group: bn/bn/gamma:0
        layer = layer[:half]
    module = {"conv1_conv": "features.conv0", "conv1_bn": "features.norm0", "bn": "features.norm5"}.get(layer)
    if match := re.fullmatch(r"conv(\d+)_block(\d+)_([012]_(?:bn|conv))", layer):
        part = _KERAS_TO_OURS.get(match[3])
        module = part and f"features.denseblock{int(match[1]) - 1}.denselayer{match[2]}.{part}"
    elif match := re.fullmatch(r"pool(\d+)_(bn|conv)", layer):
        module = f"features.transition{int(match[1]) - 1}.{'norm' if match[2] == 'bn' else 'conv'}"
    elif re.fullmatch(r"predictions|fc\d*", layer):
        module = "classifier"
    return module and f"{module}.{_KERAS_VARIABLES.get(parts[2], parts[2])}"
