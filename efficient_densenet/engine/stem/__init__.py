"""The ImageNet stem as one PyTorch operator: output = max_pool(relu(batch_norm(conv(x)))).

z = conv(x), the input of the norm, is the largest tensor of the whole network. It is not saved for backward: x, the
parameters and the batch statistics are, and the backward recomputes z once, in full. What follows from z (its
normalized values, and their gradient before the pooling) exists for a tile at a time: on an NVIDIA GPU a tile of
a Triton kernel, elsewhere some images or, where one image is too large, some channels of it (`kernels.stem`).

With x̂ = (z − μ) · r, r = 1 / sqrt(var + eps), and y = relu(γ · x̂ + β), the backward passes over the tiles twice, since
the sums over all pixels must be known before the gradient of any:

1. The pooling is recomputed, and the indices of its maxima are stored in int32 (Triton's kernels store their places
   within the windows, in int8): −1 where the ReLU is inactive.
   With g = the gradient of γ · x̂ + β, which is zero but at the maxima, the norm's grad_bias = Σ g and
   grad_weight = Σ g · x̂.
2. g is grad_output scattered to the indices, and grad_z = γ · r · (g − mean(g) − x̂ · mean(g · x̂)); where the norm is
   frozen, grad_z = γ · r · g. It is written over z. Then `convolution_backward`, some images at a time, computes
   grad_input and the convolution's grad_weight. Its grad_bias, zero unless the norm is frozen, follows from the norm's.

Where maxima are equal, PyTorch decides which gets the gradient: the pooling is PyTorch's own, on the values that the
plain modules would pool, so it decides alike. Triton's kernels follow its rule.
"""

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor, nn

from ..refuse import can_share_stem
from .autograd import apply
from .spec import Stem, output_dtype, read_spec

__all__ = ["Stem", "output_dtype", "run", "stem_at_the_start"]


def stem_at_the_start(modules: Sequence[nn.Module], x: Tensor) -> Stem | None:
    """The first four of `modules`, where they are a stem that can run as one node on `x`."""
    stem = Stem(*cast("Sequence[Any]", modules[:4])) if len(modules) >= 4 else None
    return stem if stem is not None and can_share_stem(*stem, x) else None


def run(stem: Stem, x: Tensor) -> Tensor:
    """The output of the four modules on `x`."""
    conv, norm = stem.conv, stem.norm
    return apply(read_spec(stem, x), norm, x, norm.weight, norm.bias, conv.weight, conv.bias)
