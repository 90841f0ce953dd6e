"""The four modules of a stem, and their settings as they are in the forward."""

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.pooling import _MaxPoolNd

from ..._compilers import specialized
from ..._dimensions import dimensions_of
from ..._tensors import accumulation_dtype, compute_dtype
from ...kernels.activations import ActivationSpec
from ...kernels.max_pooling import MaxPool
from ...norms.frozen import eps_of, uses_running_statistics
from ...norms.sync_batch_norm import sync_group
from ..parts import Norm, activation_spec
from ..stage.spec import encode


class Stem(NamedTuple):
    """The modules as they stand in a network, each of exactly the usual class."""

    conv: _ConvNd
    norm: Norm
    activation: nn.Module
    pool: _MaxPoolNd


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
    conv, pool = (map(_hashable, values) for values in (conv, pool))
    return StemSpec._make([*settings, ActivationSpec(*activation), Conv._make(conv), MaxPool._make(pool)])


def _hashable(setting: Any) -> Any:
    return tuple(setting) if isinstance(setting, list) else setting


def read_spec(stem: Stem, x: Tensor) -> StemSpec:
    """The settings of the four modules on x as they are now; a backward uses them even if they have changed since."""
    conv, norm, activation, pool = stem
    assert not isinstance(conv.padding, str)  # `can_share_stem` refuses it
    settings = pool.kernel_size, pool.stride, pool.padding, pool.dilation
    kernel_size, stride, padding, dilation = (_per_dim(setting, x.dim() - 2) for setting in settings)
    group = sync_group(norm)
    return StemSpec(
        dtype=str(compute_dtype(x)).removeprefix("torch."),
        output_dtype=str(output_dtype(x)).removeprefix("torch."),
        frozen=uses_running_statistics(norm),
        eps=specialized(float(eps_of(norm))),
        sync_group=None if group is None else group.name,
        activation=activation_spec(activation),
        conv=Conv(_integers(conv.stride), _integers(conv.padding), _integers(conv.dilation), int(conv.groups)),
        pool=MaxPool(kernel_size, stride, padding, dilation, bool(pool.ceil_mode)),
    )


def output_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the stem's output: the convolution's, unless autocast changes it for the pooling (volumes on a
    CPU)."""
    return dimensions_of(x).max_pool(x.new_zeros([1] * x.dim(), dtype=compute_dtype(x)), 1).dtype


def _per_dim(setting: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """PyTorch takes one number for all dimensions, alone or in a sequence."""
    numbers = _integers(setting) if isinstance(setting, (tuple, list)) else (int(cast(int, setting)),)
    return numbers * dims if len(numbers) == 1 else numbers


def _integers(setting: Iterable[int]) -> tuple[int, ...]:
    """Python's integers: modules accept NumPy's too, but operators do not."""
    return tuple(map(int, setting))


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
