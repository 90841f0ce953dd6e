"""How a block's forward uses its layers: what structure does not show, and a trial of the forward finds out."""

from dataclasses import dataclass
from typing import NamedTuple


class LayerCall(NamedTuple):
    """How to call a layer whole.

    Attributes:
        separately: True for the features as arguments, `layer(*features)`, False for one tensor.
        returns_input: True if the layer returns its input beside its output, on the side that the block's order says.
    """

    separately: bool = False
    returns_input: bool = False


@dataclass(frozen=True)
class ConnectionPattern:
    """How a block's forward uses its layers.

    Attributes:
        newest_first, new_features_only: as in `BlockParts`.
        is_layer: True for a single layer that concatenates its input and its output, and so is a block by itself.
        layer_call: how to call the layers whole, where their own parts do not describe them; None where they do.
    """

    newest_first: bool = False
    new_features_only: bool = False
    is_layer: bool = False
    layer_call: LayerCall | None = None
