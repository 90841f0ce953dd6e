"""`load_weights`: load a file or a state dict of any known layout into a model, all of it or nothing."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .._checks import check, choice
from .key_names import is_keras_kernel, new_names
from .source import Source, is_array, join_names, read_state_dict, source_name

_FIRST_CONV = "features.conv0.weight"


@dataclass
class WeightsReport:
    """What `load_weights` did with each tensor.

    Attributes:
        used: names in the source of the tensors that were loaded.
        renamed: the names in `used` that differ from the model's, mapped to the model's.
        skipped: names in the source of the tensors that were skipped, as requested.
        kept: names in the model of the tensors that were not loaded: tensors to skip, and `num_batches_tracked` if
            the source does not have it.
        adapted: names in the model of the weights that were adapted to another number of input channels.
    """

    used: list[str] = field(default_factory=list)
    renamed: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    adapted: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        text = f"{len(self.used)} tensors used, {len(self.renamed)} of them by another name"
        for attribute in ("skipped", "kept", "adapted"):
            names = getattr(self, attribute)
            text += f"; {attribute}: {join_names(names)}" if names else ""
        return text


def load_weights(
    model: nn.Module, source: Source, *, skip: str | Sequence[str] = (), adapt_input: str | None = None
) -> WeightsReport:
    """Load the tensors of `source` into `model`, whichever library named them, and report what was done with each.

    If tensors are missing, unknown, of another shape or of another kind (sparse, quantized, complex, without data), one
    error lists all of them, and the model is unchanged.

    Args:
        model: a DenseNet of this package, or another model with one of the known layouts.
        source: a file of `torch.save` (read with `weights_only=True`) or of safetensors, or a dict. The state dict may
            be nested in a dict, under a key such as "state_dict". Names may be as in torchvision, new or old, timm,
            MONAI, gpleiss/efficient_densenet_pytorch, `DataParallel`, `torch.compile`, or keras.applications. Keras's
            layer and variable names are joined by "/", "_" or "."; a `kernel` has Keras's order of dimensions, a
            `weight` PyTorch's. (Keras's norms have eps 1.001e-5. The model's eps is not changed.)
        skip: names, or prefixes of names, of tensors to skip in the source and in the model, such as "classifier" for
            another number of classes.
        adapt_input: how to adapt the first convolution to another number of input channels. "sum" divides the sum
            over the old channels equally among the new ones, so that one gray channel counts as three equal channels.
            "repeat" repeats the old channels cyclically, scaled by old / new number of channels.
    """
    if adapt_input is not None:
        check("adapt_input", adapt_input, choice("sum", "repeat"))
    skip = (skip,) if isinstance(skip, str) else tuple(skip)
    loaded, state = read_state_dict(source), model.state_dict()
    theirs = {name: key for key, name in new_names(loaded).items()}
    ours = {name: key for key, name in new_names(state).items()}
    skipped = {
        name for names in (theirs, ours) for name in names if _has_prefix(name, skip) or _has_prefix(names[name], skip)
    }
    _check_prefixes(skip, [*theirs, *theirs.values(), *ours, *ours.values()])
    common = [name for name in theirs if name in ours and name not in skipped]
    not_loaded = [name for name in ours if name not in common]

    new, adapted, mismatched, unusual = {}, [], [], []
    for name in common:
        key, old = theirs[name], state[ours[name]]
        value = loaded[key]
        if isinstance(value, Tensor):  # can it be copied into the model's, whatever its shape?
            is_dense = value.layout is torch.strided and not value.is_nested
            if not is_dense or value.is_quantized or value.is_complex() or (value.is_meta and not old.is_meta):
                unusual.append(key)
                continue
        tensor = _in_torch_layout(key, loaded[key])
        shape = list(_shape(tensor) or ())
        if name == _FIRST_CONV and adapt_input and len(shape) == old.dim() and shape[1] != old.shape[1]:
            channels = old.shape[1]
            if adapt_input == "sum":
                tensor = tensor.sum(1, keepdim=True).expand(-1, channels, *shape[2:]) / channels
            else:
                tensor = tensor[:, torch.arange(channels) % shape[1]] * (shape[1] / channels)
            adapted.append(ours[name])
        if _shape(tensor) != old.shape:
            mismatched.append(f"{key} ({_format_shape(tensor)}, and the model's is {_format_shape(old)})")
        new[ours[name]] = tensor
    unexpected = [key for name, key in theirs.items() if name not in ours and name not in skipped]
    missing = [ours[n] for n in not_loaded if n not in skipped and not n.endswith("num_batches_tracked")]
    if missing or unexpected or mismatched or unusual:
        groups = {
            "missing": missing,
            "not in the model": unexpected,
            "of another shape": mismatched,
            "not dense real tensors with data": unusual,
        }
        listed = "; ".join(f"{group}: {join_names(names)}" for group, names in groups.items() if names)
        raise ValueError(
            f"{source_name(source)} does not fit the model, which is unchanged: {listed}. To load the rest, list what "
            "to skip, as in load_weights(..., skip=('classifier',)); for another number of input channels, give "
            "adapt_input"
        )
    model.load_state_dict({**state, **new})
    return WeightsReport(
        used=[theirs[name] for name in common],
        renamed={theirs[name]: ours[name] for name in common if theirs[name] != ours[name]},
        skipped=[key for name, key in theirs.items() if name in skipped],
        kept=[ours[name] for name in not_loaded],
        adapted=adapted,
    )


def model_arguments(source: Source) -> dict[str, int]:
    """The numbers of classes and of input channels that the sizes in `source` say, as arguments of a model."""
    loaded, found = read_state_dict(source), dict[str, int]()
    for key, name in new_names(loaded).items():
        if name in ("classifier.weight", _FIRST_CONV):
            shape = _shape(_in_torch_layout(key, loaded[key])) or ()
            if len(shape) > 1:  # else `load_weights` refuses it
                found |= {"in_channels": shape[1]} if name == _FIRST_CONV else {"num_classes": shape[0]}
    return found


def _in_torch_layout(key: str, value: Any) -> Any:
    """Return an array of numbers as a tensor with PyTorch's order of dimensions, and any other value unchanged."""
    if not is_array(value):
        return value
    try:
        tensor = torch.as_tensor(value)
    except TypeError:
        return value
    if is_keras_kernel(key) and tensor.dim() in (2, 4):
        return tensor.permute(3, 2, 0, 1) if tensor.dim() == 4 else tensor.t()
    return tensor


def _check_prefixes(prefixes: Sequence[str], names: Sequence[str]) -> None:
    """Raise ValueError for a prefix of no name. `num_batches_tracked` is allowed: old files do not have it."""
    for prefix in prefixes:
        if prefix.endswith("num_batches_tracked") or any(_has_prefix(name, (prefix,)) for name in names):
            continue
        parts = {name[:end] for name in names for end in range(len(name) + 1) if name[end : end + 1] in (".", "")}
        near = difflib.get_close_matches(prefix, parts, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"skip has {prefix!r}, with which no name begins: {hint}leave it out, or give another prefix")


def _has_prefix(name: str, prefixes: Sequence[str]) -> bool:
    return any(name == prefix or name.startswith(prefix.rstrip(".") + ".") for prefix in prefixes)


def _shape(value: Any) -> torch.Size | None:
    return value.shape if isinstance(value, Tensor) else None


def _format_shape(value: Any) -> str:
    return "×".join(map(str, value.shape)) or "a number" if isinstance(value, Tensor) else type(value).__name__
