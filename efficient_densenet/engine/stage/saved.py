"""What a stage's forward saves for its backward, as a record: the features once, and little for each layer."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .spec import StageSpec


class SavedStage(NamedTuple):
    """What the backward of a stage reads.

    Attributes:
        features: (pixels, channels), centered unless the norms are frozen.
        statistics: the matrix of `ForwardStatistics`.
        count: how many values of a channel the processes of the sync group have, if there is one.
        bottlenecks: (pixels, width) of each layer that keeps it.
        dropout_masks, parameters: those of `StageInputs`.
    """

    features: Tensor
    statistics: Tensor
    count: Tensor | None
    bottlenecks: Sequence[Tensor]
    dropout_masks: Sequence[Tensor]
    parameters: Sequence[Tensor | None]

    @classmethod
    def of(
        cls,
        spec: StageSpec,
        computed: Sequence[Tensor],
        dropout_masks: Sequence[Tensor],
        parameters: Sequence[Tensor | None],
    ) -> "SavedStage":
        """From what a forward has computed: `Forward.saved`, after what had been stored before it."""
        features, statistics, *rest = computed
        count = rest.pop(0) if spec.has_count else None
        return cls(features, statistics, count, rest, dropout_masks, parameters)

    def flatten(self) -> list[Tensor | None]:
        """As `save_for_backward` takes it."""
        return [
            *(self.features, self.statistics, self.count),
            *(*self.bottlenecks, *self.dropout_masks, *self.parameters),
        ]

    @classmethod
    def unflatten(cls, spec: StageSpec, tensors: Sequence[Any]) -> "SavedStage":
        """The record again, from `ctx.saved_tensors`."""
        start = 3 + sum(layer.keep_bottleneck for layer in spec.layers)
        stop = start + sum(1 for layer in spec.layers if layer.drop_rate)
        return cls._make([*tensors[:3], tensors[3:start], tensors[start:stop], tensors[stop:]])
