"""Weights from files, dicts and torchvision's registry into a model: everything that fits, or nothing."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import check_choice
from .._extras import need
from .key_names import is_keras_kernel, new_names

Source = str | os.PathLike | Mapping[str, Any]

INSIDE = ("state_dict", "model_state_dict", "model_state", "model", "state", "weights")
"""Where training programs put a model's tensors among other things, the first that is there."""

PUBLISHED = ("densenet121", "densenet161", "densenet169", "densenet201")
"""The variants that torchvision has weights of."""

_FIRST = "features.conv0.weight"
_MOST_LISTED = 30  # of each kind, in a message


@dataclass
class WeightsReport:
    """What became of each tensor.

    Attributes:
        used: names in the source of all that the model has now.
        renamed: of these, the ones that the model has by another name, and that name.
        skipped: names in the source of what was left there, as asked.
        kept: the model's names of what it kept: what was to be skipped, and counts of batches that sources do not have.
        adapted: the model's names of what was summed or repeated over input channels.
    """

    used: list[str] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    adapted: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        text = f"{len(self.used)} tensors used, {len(self.renamed)} of them by another name"
        for word in ("skipped", "kept", "adapted"):
            names = getattr(self, word)
            text += f"; {word}: {_listed(names)}" if names else ""
        return text


def load_weights(
    model: nn.Module, source: Source, *, skip: str | Sequence[str] = (), adapt_input: str | None = None
) -> WeightsReport:
    """Give `model` the tensors of `source`, whoever's names they have, and tell what became of each.

    What does not fit is refused in one message, and then nothing in the model has changed.

    Args:
        model: a DenseNet of this package, or another that has one of the layouts itself.
        source: a file of `torch.save` (tensors only: no code in it is run) or of safetensors, or a dict. The tensors
            may lie in a dict inside, such as "state_dict". Names may be torchvision's, new or old, timm's, MONAI's,
            gpleiss's, those of `DataParallel` and `torch.compile`, or of keras.applications: layers and variables
            joined by "/", "_" or ".", where a `kernel` has Keras's order of dimensions and a `weight` torch's. (The eps
            of Keras's norms is 1.001e-5, which the model's stays without.)
        skip: names, or beginnings of names, of what is left alone in the source and in the model: "classifier" for
            another number of classes.
        adapt_input: how a first convolution for another number of input channels is made. "sum": each new channel gets
            its share of the sum over the old ones, so that one grey channel is worth three equal ones. "repeat": the
            new channels take the old ones in turn, scaled by how many fewer there were.
    """
    if adapt_input is not None:
        check_choice("adapt_input", adapt_input, ("sum", "repeat"))
    skip = (skip,) if isinstance(skip, str) else tuple(skip)
    found, state = read_tensors(source), model.state_dict()
    theirs = {name: key for key, name in new_names(found).items()}
    ours = {name: key for key, name in new_names(state).items()}
    skipped = {name for names in (theirs, ours) for name in names if _is_in(name, skip) or _is_in(names[name], skip)}

    fitting = [name for name in theirs if name in ours and name not in skipped]
    absent = [name for name in ours if name not in fitting]

    new, adapted, misshapen = {}, [], []
    for name in fitting:
        key, old = theirs[name], state[ours[name]]
        tensor = _as_torch_s(key, found[key])
        if name == _FIRST and adapt_input and _differs_in_input(tensor, old):
            tensor = _adapted(tensor, old.shape[1], adapt_input)
            adapted.append(ours[name])
        if _shape(tensor) != old.shape:
            misshapen.append(f"{key} ({_size(tensor)}, and the model's is {_size(old)})")
        new[ours[name]] = tensor
    extra = [key for name, key in theirs.items() if name not in ours and name not in skipped]
    missing = [ours[n] for n in absent if n not in skipped and not n.endswith("num_batches_tracked")]
    if missing or extra or misshapen:
        raise ValueError(_refusal(source, missing, extra, misshapen))
    model.load_state_dict({**state, **new})
    return WeightsReport(
        used=[theirs[name] for name in fitting],
        renamed={theirs[name]: ours[name] for name in fitting if theirs[name] != ours[name]},
        skipped=[key for name, key in theirs.items() if name in skipped],
        kept=[ours[name] for name in absent],
        adapted=adapted,
    )


def read_tensors(source: Source) -> Mapping[str, Any]:
    """The model's tensors in a file, or in a dict that may hold other things too."""
    content = source if isinstance(source, Mapping) else _read(Path(source))
    found = _state_dict(content)
    if found is None:
        keys = f", but {_listed(list(map(str, content)))}" if isinstance(content, Mapping) else ""
        raise ValueError(
            f"{_name(source)} holds no tensors by name{keys}: give a model's state dict, or a dict with one inside as "
            f"{', '.join(map(repr, INSIDE))}"
        )
    return found


def load_published(
    model: nn.Module, name: str, weights: Any, skip: Sequence[str] = (), adapt_input: str | None = None
) -> WeightsReport:
    """Give `model` the weights that torchvision's registry has for the variant called `name`."""
    chosen = published_weights(name, weights)
    try:
        found = chosen.get_state_dict(progress=True, check_hash=True, weights_only=True)
    except (OSError, RuntimeError) as exc:
        reason = str(getattr(exc, "reason", exc)).splitlines()[0]
        raise OSError(
            f"the weights {chosen} could not be fetched from {chosen.url} ({reason}): connect to the network, or give "
            "load_weights a file that you have"
        ) from None
    return load_weights(model, found, skip=skip, adapt_input=adapt_input)


def weights_transforms(name: str, weights: Any = "DEFAULT") -> Callable[[Any], Tensor]:
    """The transforms that torchvision says these weights were measured with: a picture in, a normalised tensor out."""
    return published_weights(name, weights).transforms()


def published_weights(name: str, weights: Any) -> Any:
    """torchvision's entry for the weights that a user means: one itself, or its name with or without its class."""
    if name not in PUBLISHED:
        raise ValueError(f"torchvision has no weights for {name!r}, but for {', '.join(PUBLISHED)}: leave weights out")
    family = need("torchvision", extra="weights").models.get_model_weights(name)
    word = str(weights).removeprefix(f"{family.__name__}.")
    if isinstance(weights, family):
        return weights
    if isinstance(weights, str) and word in family.__members__:
        return family[word]
    raise ValueError(
        f"weights is {weights!r}, but must be one of {', '.join(map(repr, family.__members__))} for {name}"
    )


def _read(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"{path} is no file: give one that torch.save or safetensors wrote")
    read: Callable[[Path], Any] = partial(torch.load, map_location="cpu", weights_only=True)
    if path.suffix == ".safetensors":
        need("safetensors", extra="weights")
        read = need("safetensors.torch", extra="weights").load_file
    try:
        return read(path)
    except Exception as exc:  # a damaged archive can fail in any way
        raise ValueError(
            f"{path} is truncated, damaged or not of tensors only ({type(exc).__name__}): copy it again, or save the "
            "model's state_dict() where it was made"
        ) from None


def _state_dict(value: Any) -> Mapping[str, Any] | None:
    if not isinstance(value, Mapping):
        return None
    inside = (_state_dict(value.get(key)) for key in INSIDE)
    own = value if any(map(_is_tensor, value.values())) and all(isinstance(key, str) for key in value) else None
    return next((found for found in inside if found is not None), own)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or hasattr(value, "__array__")


def _as_torch_s(key: str, value: Any) -> Any:
    """A tensor with its dimensions in torch's order; what is none stays what it is."""
    if not _is_tensor(value):
        return value
    tensor = torch.as_tensor(value)
    if is_keras_kernel(key) and tensor.dim() in (2, 4):
        return tensor.permute(3, 2, 0, 1) if tensor.dim() == 4 else tensor.t()
    return tensor


def _differs_in_input(tensor: Any, old: Tensor) -> bool:
    shape = _shape(tensor)
    return shape is not None and len(shape) == old.dim() and shape[1] != old.shape[1]


def _adapted(weight: Tensor, channels: int, how: str) -> Tensor:
    if how == "sum":
        return weight.sum(1, keepdim=True).expand(-1, channels, *weight.shape[2:]) / channels
    turns = torch.arange(channels) % weight.shape[1]
    return weight[:, turns] * (weight.shape[1] / channels)


def _is_in(name: str, parts: Sequence[str]) -> bool:
    return any(name == part or name.startswith(part.rstrip(".") + ".") for part in parts)


def _shape(value: Any) -> torch.Size | None:
    return value.shape if isinstance(value, Tensor) else None


def _size(value: Any) -> str:
    return "×".join(map(str, value.shape)) or "a number" if isinstance(value, Tensor) else type(value).__name__


def _refusal(source: Source, missing: list[str], extra: list[str], misshapen: list[str]) -> str:
    kinds = {"missing": missing, "not in the model": extra, "of another shape": misshapen}
    listed = "; ".join(f"{kind}: {_listed(names)}" for kind, names in kinds.items() if names)
    return (
        f"{_name(source)} does not fit the model, which was left as it is. {listed}. To load the rest, name what to "
        "leave alone, as in skip=('classifier',); give adapt_input for another number of input channels"
    )


def _name(source: Source) -> str:
    return "the dict" if isinstance(source, Mapping) else str(source)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return ", ".join(names[:_MOST_LISTED]) + more
