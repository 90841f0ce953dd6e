"""The weights of a stage's convolutions, in the dtype and the memory format in which the convolutions read them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..._torch_private import foreach_copy_
from ...kernels.interface import Kernels
from .spec import NormConv

_CONV_WEIGHT = NormConv._fields.index("conv_weight")


def converted_weights(parameters: Sequence[Tensor | None], dtype: torch.dtype, kernels: Kernels) -> list[Tensor | None]:
    """A stage's parameters, with the convolution weights converted to `dtype`, and those of 3×3 convolutions in the
    memory format that the kernels read.

    All weights are converted in one launch: on a GPU, a launch takes longer than converting one weight.
    """
    tensors, narrowed, weights = list(parameters), [], []
    weight_places = range(len(parameters))[_CONV_WEIGHT :: len(NormConv._fields)]
    for place in weight_places:
        weight = tensors[place]
        if weight is not None and weight.dtype is not dtype:
            tensors[place] = torch.empty_like(weight, dtype=dtype)
            narrowed.append(tensors[place])
            weights.append(weight)
    if weights:
        foreach_copy_(narrowed, weights)
    with_taps = {
        place: weight for place in weight_places if (weight := tensors[place]) is not None and weight.shape[-1] == 3
    }
    arranged = kernels.arranged_weights(list(with_taps.values()))
    for place, weight in zip(with_taps, arranged, strict=True):
        tensors[place] = weight
    return tensors
