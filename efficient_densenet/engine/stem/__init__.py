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
from typing import Any

from torch import Tensor

from ..operator import run_operator
from ..parts import place_of
from ..stage.running_statistics import NormUpdate, RunningStatistics
from .operator import STEM, StemInputs
from .spec import output_dtype, read_spec

__all__ = ["STEM_LENGTH", "StemPlan", "output_dtype"]

STEM_LENGTH = 4
"""A stem's modules: convolution, norm, activation, max pooling."""


class StemPlan:
    """The four modules of a stem as they are run on inputs like `x`; the attributes are those of a `StagePlan`."""

    def __init__(self, stem: Sequence[Any], x: Tensor) -> None:
        conv, norm, *_ = stem
        self.spec = read_spec(stem, x)
        self.num_channels = conv.weight.shape[0]
        names = ("running_mean", "running_var") if self.spec.frozen else ()
        self.places = [place_of(module, name) for module in (norm, conv) for name in ("weight", "bias")]
        self.places += [place_of(norm, name) for name in names]
        updates = () if self.spec.frozen else [NormUpdate(norm, slice(0, self.num_channels))]
        self.statistics = RunningStatistics(updates)

    def run(self, x: Tensor) -> Tensor:
        """The output of the four modules on `x`."""
        tensors = [values[name] for values, name in self.places]
        parameters, running = tensors[:4], tensors[4:]
        output, statistics, *_ = run_operator(STEM, self.spec, StemInputs(x, parameters, running))
        self.statistics.update(statistics, parameters)
        return output
