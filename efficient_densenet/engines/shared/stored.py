"""The features that a block has stored, found again by a consumer that runs after the block on its own.

An author may call a block and the transition after it one by one. The block's features are then the transition's too:
stored once, with their statistics. The block's node in the autograd graph remembers them without keeping them alive, so
that they last exactly as long as they are saved for its backward, and are never packed or copied for the consumer.
"""

from torch import Tensor
from torch.utils.weak import TensorWeakRef

from .plan import StagePlan
from .statistics import SharedStatistics


class StoredFeatures:
    """What a node remembers of the features of its block, whose `output` it returns."""

    def __init__(self, output: Tensor, statistics: SharedStatistics) -> None:
        self.version = output._version
        self.features = TensorWeakRef(statistics.features)
        self.settings = statistics.frozen, statistics.eps, statistics.sync_group
        self.statistics = statistics.mean, statistics.unbiased_variances, statistics.inv_std, statistics.count


def stored_statistics(x: Tensor, plan: StagePlan) -> SharedStatistics | None:
    """The features of x and their statistics, if x is the output of a block, unchanged, and its features still exist.

    None too where the consumer of `plan` does not normalize as the layers of the block do.
    """
    stored = getattr(x.grad_fn, "stored_features", None)  # another operation's node has none, an in-place one's neither
    if not isinstance(stored, StoredFeatures) or stored.version != x._version:
        return None
    features = stored.features()
    if features is None or stored.settings != (plan.frozen, plan.eps, plan.sync_group):
        return None
    statistics = SharedStatistics(features, plan.order, *stored.settings)
    statistics.mean, statistics.unbiased_variances, statistics.inv_std, statistics.count = stored.statistics
    return statistics
