"""The weights of a stage's convolutions, in the dtype in which the convolutions compute."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..._torch_private import foreach_copy_
from .spec import NormConv

_CONV_WEIGHT = NormConv._fields.index("conv_weight")


def converted_weights(
    parameters: Sequence[Tensor | None], dtype: torch.dtype, positions: slice | None = None
) -> list[Tensor | None]:
    """A stage's parameters, with the convolution weights at `positions` (None: all) converted to `dtype`.

    All weights are converted in one launch: on a GPU, a launch takes longer than converting one weight.
    """
    tensors, places = list(parameters), range(len(parameters))[positions or slice(None)]
    narrowed, weights = [], []
    for place in places[_CONV_WEIGHT :: len(NormConv._fields)]:
        weight = tensors[place]
        if weight is not None and weight.dtype is not dtype:
            tensors[place] = torch.empty_like(weight, dtype=dtype)
            narrowed.append(tensors[place])
            weights.append(weight)
    if weights:
        foreach_copy_(narrowed, weights)
    return tensors
