"""Reading the key layouts of other libraries and of older versions."""

import re
from collections.abc import Mapping

from torch import Tensor

_RENAMES = (
    (r"^(?:module\.|_orig_mod\.)+", ""),  # nn.DataParallel, torch.compile
    (r"^features\.norm_final\.", "features.norm5."),  # gpleiss/efficient_densenet_pytorch
    (r"\.(norm|relu|conv)\.([12])\.", r".\1\2."),  # torchvision before 0.3: denselayer1.norm.1.weight
)


def rename_keys(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under this package's names, which are torchvision's; names already right stay as they are."""
    renamed: dict[str, Tensor] = {}
    sources: dict[str, str] = {}
    for key, tensor in state_dict.items():
        name = key
        for pattern, replacement in _RENAMES:
            name = re.sub(pattern, replacement, name)
        if name in renamed:
            raise ValueError(f"found both {sources[name]!r} and {key!r}, which are the same tensor {name!r}: drop one")
        renamed[name], sources[name] = tensor, key
    return renamed
