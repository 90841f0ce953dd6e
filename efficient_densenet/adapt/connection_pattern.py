"""How a block's forward uses its layers. Structure does not show it; a trial of the forward finds it out."""

from dataclasses import dataclass
from typing import NamedTuple

from .layer_parts import LayerCalls


class LayerCall(NamedTuple):
    """How to call a layer whole.

    Attributes:
        separately: True to pass the features as arguments, `layer(*features)`, False to pass their concatenation.
        returns_input: True if the layer returns the concatenation of its input and output, in the block's order.
        as_list: True to pass the features as one list, `layer(features)`.
    """

    separately: bool = False
    returns_input: bool = False
    as_list: bool = False


@dataclass(frozen=True)
class ConnectionPattern:
    """How a block's forward uses its layers.

    Attributes:
        newest_first, new_features_only: as in `BlockParts`.
        is_layer: True for a single layer that concatenates its input and its output, and so is a block by itself.
        layer_call: how to call whole layers, if their parts do not describe them; None if they do.
        calls: what each layer calls, where the parts of the layers describe them.
    """

    newest_first: bool = False
    new_features_only: bool = False
    is_layer: bool = False
    layer_call: LayerCall | None = None
    calls: tuple[LayerCalls, ...] = ()


WHOLE = ConnectionPattern(is_layer=True, layer_call=LayerCall())
"""A block that is recomputed as a whole, since its layers are not those of a growing concatenation."""
