"""The features of a block that runs without its consumer, for the consumer that a model calls separately after it."""

from torch import Tensor
from torch.utils.weak import TensorWeakRef

from .spec import StageSpec


class BlockFeatures:
    """The features of a block without a consumer, and their statistics, as attributes of the block's node.

    A model may call a block and the transition after it separately. The transition then uses the block's features and
    statistics, which are stored only once. The reference to the features is weak: they live exactly as long as they are
    saved for the block's backward, and are never packed or copied for the consumer.
    """

    def __init__(self, spec: StageSpec, output: Tensor, features: Tensor, statistics: Tensor) -> None:
        self.spec, self.version, self.address = spec, output._version, output.data_ptr()
        self.features, self.statistics = TensorWeakRef(features), statistics


def remember_features(spec: StageSpec, output: Tensor, features: Tensor, statistics: Tensor) -> None:
    """Let a consumer of a block's output find the features. Only an ordinary output, with a node, has them."""
    if spec.consumer is None and not spec.new_features_only and type(output) is Tensor and output.grad_fn is not None:
        output.grad_fn.block_features = BlockFeatures(spec, output, features, statistics)  # pyright: ignore[reportAttributeAccessIssue]


def stored_features(x: Tensor, spec: StageSpec) -> list[Tensor]:
    """The stored features of the block whose output is x and, unless the norms are frozen, their statistics.

    The list is empty if x is not a block's output or was changed, if the features do not exist any more, or if the
    consumer with this specification does not normalize as the layers of the block do.
    """
    block = getattr(x.grad_fn, "block_features", None)  # no other node has it, as after an in-place operation
    if not isinstance(block, BlockFeatures) or spec.has_count:
        return []
    if block.version != x._version or block.address != x.data_ptr():  # it was changed, or its `.data` replaced
        return []
    features, settings = block.features(), (spec.frozen, spec.eps, spec.sync_group)
    if features is None or settings != (block.spec.frozen, block.spec.eps, block.spec.sync_group):
        return []
    return [features] if spec.frozen else [features, block.statistics[:, : features.shape[1]]]
