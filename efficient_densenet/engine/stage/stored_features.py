"""The features that a block has stored, found again by a consumer that runs after the block on its own.

An author may call a block and the transition after it one by one. The block's features are then the transition's too:
stored once, with their statistics. The block's node in the autograd graph remembers them without keeping them alive, so
that they last exactly as long as they are saved for its backward, and are never packed or copied for the consumer.
"""

from torch import Tensor
from torch.utils.weak import TensorWeakRef

from .spec import StageSpec


class StoredFeatures:
    """What a node remembers of the features of its block, whose `output` it returns, and of their statistics."""

    def __init__(self, spec: StageSpec, output: Tensor, features: Tensor, statistics: Tensor) -> None:
        self.spec, self.version, self.address = spec, output._version, output.data_ptr()
        self.features, self.statistics = TensorWeakRef(features), statistics


def stored_features(x: Tensor, spec: StageSpec) -> list[Tensor]:
    """The features of x and, unless the norms are frozen, their statistics, if x is the output of a block, unchanged,
    and its features still exist; else nothing.

    Nothing too where the consumer with this specification does not normalize as the layers of the block do.
    """
    stored = getattr(x.grad_fn, "stored_features", None)  # another operation's node has none, an in-place one's neither
    if not isinstance(stored, StoredFeatures) or spec.has_count:
        return []
    if stored.version != x._version or stored.address != x.data_ptr():  # it was changed, or its `.data` replaced
        return []
    features, settings = stored.features(), (spec.frozen, spec.eps, spec.sync_group)
    if features is None or settings != (stored.spec.frozen, stored.spec.eps, stored.spec.sync_group):
        return []
    return [features] if spec.frozen else [features, stored.statistics[:, : features.shape[1]]]
