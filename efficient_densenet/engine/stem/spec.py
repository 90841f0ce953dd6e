"""The four modules of a stem, and their settings as they are in the forward."""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._compilers import specialized
from ..._dimensions import dimensions_of, per_dimension
from ..._tensors import accumulation_dtype, compute_dtype
from ...kernels.activations import ActivationSpec
from ...kernels.max_pooling import MaxPool, max_pool_dtype
from ...norms.frozen import eps_of, uses_running_statistics
from ...norms.sync_batch_norm import sync_group
from ..parts import activation_spec
from ..stage.spec import encode


class StemSpec(NamedTuple):
    """The settings of a stem as plain data, which its operators take as a string.

    `dtype` is the convolution's dtype, under autocast its lower precision; sums and statistics are in
    `accumulation_dtype`.
    """

    dtype: str
    output_dtype: str
    frozen: bool
    eps: float
    sync_group: str | None
    activation: ActivationSpec
    conv: "Conv"
    pool: MaxPool

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def activations(self) -> Sequence[str]:
        return [self.activation.name]

    @property
    def num_outputs(self) -> int:
        return 1

    @property
    def has_count(self) -> bool:
        """Whether the processes of a sync group count their values."""
        return self.sync_group is not None and not self.frozen

    @property
    def accumulation_dtype(self) -> torch.dtype:
        return accumulation_dtype(self.torch_dtype)

    @property
    def encoded(self) -> str:
        """The specification as the string that the operators take."""
        *settings, activation, conv, pool = self
        return encode(*settings, tuple(activation), tuple(conv), tuple(pool))


@lru_cache(maxsize=256)
def decode(text: str) -> StemSpec:
    """The specification whose `encoded` is `text`."""
    *settings, activation, conv, pool = json.loads(text)
    conv, pool = ([tuple(each) if isinstance(each, list) else each for each in values] for values in (conv, pool))
    return StemSpec._make([*settings, ActivationSpec(*activation), Conv._make(conv), MaxPool._make(pool)])


def read_spec(stem: Sequence[Any], x: Tensor) -> StemSpec:
    """The settings of the four modules on x as they are now; a backward uses them even if they have changed since."""
    conv, norm, activation, pool = stem
    assert not isinstance(conv.padding, str)  # `can_share_stem` refuses it
    group, dims = sync_group(norm), x.dim() - 2
    stride, padding, dilation = (per_dimension(each, dims) for each in (conv.stride, conv.padding, conv.dilation))
    convolution = Conv(stride, padding, dilation, int(conv.groups))
    settings = pool.kernel_size, pool.stride, pool.padding, pool.dilation
    kernel_size, stride, padding, dilation = (per_dimension(each, dims) for each in settings)
    return StemSpec(
        dtype=str(compute_dtype(x)).removeprefix("torch."),
        output_dtype=str(output_dtype(x)).removeprefix("torch."),
        frozen=uses_running_statistics(norm),
        eps=specialized(float(eps_of(norm))),
        sync_group=None if group is None else group.name,
        activation=activation_spec(activation),
        conv=convolution,
        pool=MaxPool(kernel_size, stride, padding, dilation, bool(pool.ceil_mode)),
    )


def output_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the stem's output: the convolution's, unless autocast changes it for the pooling (volumes on a
    CPU)."""
    return max_pool_dtype(x, compute_dtype(x))


class Conv(NamedTuple):
    """The settings of the convolution."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return dimensions_of(x).conv(x, weight, bias, *self)

    def backward(
        self, grad_output: Tensor, x: Tensor, weight: Tensor, output_mask: list[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """grad_input, grad_weight and grad_bias; `output_mask` says which of them are needed."""
        output_padding = [0] * len(self.stride)
        settings = self.stride, self.padding, self.dilation, False, output_padding, self.groups
        return torch.ops.aten.convolution_backward(grad_output, x, weight, [weight.shape[0]], *settings, output_mask)
