"""What the modules of a dense block hold beside parameters, buffers and children, to be compared at every forward.

A trial verifies a block as it is. An attribute that was neutral then (a scale of 1, a second dropout of rate 0) may be
changed later, and the block's forward computes something else from then on: so its state then is remembered.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from .._mixins import base_class

Fingerprint = tuple[tuple[str, int, tuple[tuple[str, Any], ...]], ...]
"""For each module its class's name, the identity of its forward, and its attributes."""


def fingerprint(block: nn.Module) -> Fingerprint:
    """The state of `block` and all modules inside that a trial takes as given.

    It holds no reference to a module or a tensor. Objects are compared by identity, tensors by identity and version;
    a copy of a module that has such attributes is therefore verified anew.
    """
    return tuple(map(_state, _modules(block)))


def describe_change(before: Fingerprint, after: Fingerprint) -> str:
    """The first difference between two fingerprints, such as "scale of a DenseLayer was 1.0 and is 0.5"."""
    if [state[0] for state in before] != [state[0] for state in after]:
        return "its modules are others"
    for (name, forward, old), (_, new_forward, new) in zip(before, after, strict=True):
        old_values, new_values = dict(old), dict(new)
        if forward != new_forward:
            return f"the forward of a {name} is another"
        for key in {**old_values, **new_values}:
            if old_values.get(key, _MISSING) != new_values.get(key, _MISSING):
                return f"{key} of a {name} {_difference(old_values.get(key, _MISSING), new_values.get(key, _MISSING))}"
    return "nothing"


def _difference(old: Any, new: Any) -> str:
    if all(isinstance(value, (bool, int, float, str)) for value in (old, new)):
        return f"was {old!r} and is {new!r}"
    return "was added" if old is _MISSING else "was removed" if new is _MISSING else "has changed"


def _modules(module: nn.Module) -> Iterator[nn.Module]:
    """Like `module.modules()`, but several times as fast."""
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from _modules(child)


def _state(module: nn.Module) -> tuple[str, int, tuple[tuple[str, Any], ...]]:
    cls = base_class(type(module))
    forward = cls.forward
    # What a module of torch holds is read, or the module called, at every forward. Only a dropout's place is a belief.
    if forward.__module__.startswith("torch.nn.modules."):
        attributes = (("p", module.p), ("inplace", module.inplace)) if isinstance(module, _DropoutNd) else ()
        return cls.__name__, id(forward), attributes
    values = vars(module)
    names = values.keys() - _OF_EVERY_MODULE
    if "_former_parameters" in names:  # a replica holds its parameters as attributes
        names -= values["_former_parameters"].keys() | {"_former_parameters"}
    return cls.__name__, id(forward), tuple((name, _frozen(values[name])) for name in sorted(names))


def _frozen(value: Any, depth: int = 3) -> Any:
    """`value` as something that compares equal only to a value that means the same, and refers to no object."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor):
        return id(value), value._version
    if depth and isinstance(value, (list, tuple)):
        return tuple(_frozen(each, depth - 1) for each in value)
    if depth and isinstance(value, dict):
        return tuple((_frozen(key, depth - 1), _frozen(each, depth - 1)) for key, each in value.items())
    if depth and hasattr(value, "__dict__") and not isinstance(value, (nn.Module, type)) and not callable(value):
        return id(value), _frozen(vars(value), depth - 1)
    return id(value)


_MISSING = object()
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {
    "_conversion",  # of the conversion itself
    "keep_bottleneck",  # which is read at every forward
    "_is_replica",  # what nn.DataParallel makes of a module
}
