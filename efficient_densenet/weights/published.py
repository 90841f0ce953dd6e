"""torchvision's published ImageNet weights."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from .._extras import need

PUBLISHED = ("densenet121", "densenet161", "densenet169", "densenet201")
"""The variants with weights in torchvision."""
NAMES = ("DEFAULT", "IMAGENET1K_V1")
"""torchvision's names for the weights of each variant."""


class PublishedWeights(NamedTuple):
    """A member of torchvision's `WeightsEnum`."""

    entry: Any

    @property
    def model_arguments(self) -> dict[str, Any]:
        return {"num_classes": len(self.classes), "in_channels": 3}

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.entry.meta["categories"])

    def transforms(self) -> Callable[[Any], Tensor]:
        return self.entry.transforms()

    def source(self) -> Mapping[str, Tensor]:
        """The state dict of the weights, downloaded unless torch.hub's cache has it."""
        try:
            return self.entry.get_state_dict(progress=True, check_hash=True, weights_only=True)
        except (OSError, RuntimeError) as exc:
            reason = str(getattr(exc, "reason", exc)).splitlines()[0]
            raise OSError(
                f"the weights {self.entry} could not be downloaded from {self.entry.url} ({reason}): connect to the "
                "network, or pass a file to load_weights, or as --weights to the demo"
            ) from None


def find_published(name: str, weights: Any) -> PublishedWeights:
    """The weights for the variant `name`, one of `PUBLISHED`.

    `weights` is a `WeightsEnum` member, or its name with or without the name of its class.
    """
    enum = need("torchvision", extra="weights").models.get_model_weights(name)
    if isinstance(weights, enum):
        return PublishedWeights(weights)
    member = str(weights).removeprefix(f"{enum.__name__}.")
    if isinstance(weights, str) and member in enum.__members__:
        return PublishedWeights(enum[member])
    names = ", ".join(map(repr, enum.__members__))
    raise ValueError(f"weights is {weights!r}, but must be one of {names} for {name}, or a file")
