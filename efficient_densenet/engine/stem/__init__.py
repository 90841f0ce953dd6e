"""The ImageNet stem as one PyTorch operator: output = max_pool(f(batch_norm(conv(x)))), f an activation.

z = conv(x), the input of the norm, is the largest tensor of the whole network. It is not saved for backward: x, the
parameters and the batch statistics are, and the backward recomputes z once, in full. The tensors computed from z (its
normalized values, and the gradient of the pooling's input) exist for one tile at a time: on an NVIDIA GPU a tile of
a Triton kernel, elsewhere some images or, where one image is too large, some channels of it (`kernels.stem`).

With μ and var the statistics of z, r = 1 / sqrt(var + eps), x̂ = (z − μ) · r, and y = f(γ · x̂ + β) for the norm's
weight γ and bias β, the backward passes over the tiles twice: the gradient of any pixel needs sums over all pixels.

1. The pooling is recomputed, and the indices of its maxima are stored in int32 (Triton's kernels store positions
   within the windows, in int8): −1 where a ReLU is inactive.
   With g = the gradient of γ · x̂ + β, which is zero except at the maxima, the norm's grad_bias = Σ g and
   grad_weight = Σ g · x̂.
2. g is grad_output scattered to the indices, times f'(γ · x̂ + β) unless f is a ReLU, and
   grad_z = γ · r · (g − mean(g) − x̂ · mean(g · x̂)); where the norm is frozen, grad_z = γ · r · g. It is written over
   z. Then `convolution_backward`, some images at a time, computes grad_input and the convolution's grad_weight. The
   convolution's grad_bias, zero unless the norm is frozen, is computed from the norm's grad_bias.

One of several equal maxima gets the gradient. The pooling is PyTorch's own, on the values that the plain modules would
pool, so it chooses the same maximum as they do. Triton's kernels follow PyTorch's rule.
"""

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor, nn

from ..operator import run_operator
from ..parts import weight_and_bias
from ..refuse import can_share_stem
from ..stage.running_statistics import NormUpdate, update_running_statistics
from .operator import STEM, StemInputs
from .spec import Stem, StemSpec, output_dtype, read_spec

__all__ = ["Stem", "output_dtype", "run", "stem_at_the_start"]


def stem_at_the_start(modules: Sequence[nn.Module], x: Tensor) -> Stem | None:
    """The first four of `modules`, where they are a stem that can run as one node on `x`."""
    stem = Stem(*cast("Sequence[Any]", modules[:4])) if len(modules) >= 4 else None
    return stem if stem is not None and can_share_stem(*stem, x) else None


def run(stem: Stem, x: Tensor) -> Tensor:
    """The output of the four modules on `x`."""
    return run_with_parameters(read_spec(stem, x), stem, x, (*weight_and_bias(stem.norm), *weight_and_bias(stem.conv)))


def run_with_parameters(spec: StemSpec, stem: Stem, x: Tensor, parameters: Sequence[Tensor | None]) -> Tensor:
    """The output with these parameters: the weights and biases of the norm and of the convolution."""
    norm = stem.norm
    running = (norm.running_mean, norm.running_var) if spec.frozen else ()
    output, statistics, *_ = run_operator(STEM, spec, StemInputs(x, parameters, running))
    if not spec.frozen:
        update_running_statistics([NormUpdate(norm, slice(0, statistics.shape[1]))], statistics)
    return output
