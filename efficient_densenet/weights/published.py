"""torchvision's published ImageNet weights of the variants that it has."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from .._extras import need
from .load import WeightsReport, load_weights

PUBLISHED = ("densenet121", "densenet161", "densenet169", "densenet201")
"""The variants that torchvision has weights for."""


def load_published(
    model: nn.Module, name: str, weights: Any, skip: Sequence[str] = (), adapt_input: str | None = None
) -> WeightsReport:
    """Download torchvision's weights for the variant `name`, and load them into `model`."""
    entry = published_weights(name, weights)
    try:
        state_dict = entry.get_state_dict(progress=True, check_hash=True, weights_only=True)
    except (OSError, RuntimeError) as exc:
        reason = str(getattr(exc, "reason", exc)).splitlines()[0]
        raise OSError(
            f"the weights {entry} could not be downloaded from {entry.url} ({reason}): connect to the network, or pass "
            "a file to load_weights"
        ) from None
    return load_weights(model, state_dict, skip=skip, adapt_input=adapt_input)


def weights_transforms(name: str, weights: Any = "DEFAULT") -> Callable[[Any], Tensor]:
    """Return the transforms that torchvision evaluates these weights with, from an image to a normalized tensor."""
    return published_weights(name, weights).transforms()


def published_weights(name: str, weights: Any) -> Any:
    """Return torchvision's `WeightsEnum` member for the variant `name`.

    `weights` is such a member, or its name with or without the name of its class.
    """
    if name not in PUBLISHED:
        raise ValueError(f"torchvision has no weights for {name!r}, but for {', '.join(PUBLISHED)}: leave weights out")
    enum = need("torchvision", extra="weights").models.get_model_weights(name)
    if isinstance(weights, enum):
        return weights
    member = str(weights).removeprefix(f"{enum.__name__}.")
    if isinstance(weights, str) and member in enum.__members__:
        return enum[member]
    raise ValueError(f"weights is {weights!r}, but must be one of {', '.join(map(repr, enum.__members__))} for {name}")
