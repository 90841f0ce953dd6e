"""The state of a dense block's modules besides parameters, buffers and children, which is compared at every forward.

A trace verifies a block with its current state. An attribute that had no effect in the trace (a scale of 1, a second
dropout of rate 0) may be changed later, and change the results of the block's forward. So the state is saved.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from ..norms.batch_norm import TORCH_CLASSES
from .code import Code, DropRate, Number, is_drop_rate
from .known import OF_EVERY_MODULE, class_as_written, is_known


class State(NamedTuple):
    """The name of a module's class, and the constants that code reads of the module."""

    name: str
    values: tuple[tuple[str, Any], ...]


class TensorNames(tuple[str, ...]):
    """The names of the parameters and buffers of one of torch's modules. Names may disappear, as by sharding. A new
    name, such as `weight_orig`, means that the weight is now computed from this parameter."""


class Fingerprint(NamedTuple):
    """The states of the modules of a block, and of the code of their authors. It holds no module and no tensor, and is
    the same for a copy of the block.

    Attributes:
        outside: the code of functions, and the constants that they read outside of modules, with descriptions.
        unknown, by_parts: as in `Code`.
        ties: for each module the first place of it, where one module has several.
        with_settings: whether the settings of all of torch's modules belong to it, or only those that code reads.
    """

    modules: tuple[State, ...]
    outside: tuple[tuple[str, Any], ...]
    unknown: str | None
    by_parts: str | None
    ties: tuple[int, ...] = ()
    with_settings: bool = False


def fingerprint(block: nn.Module, with_settings: bool = False) -> Fingerprint:
    """The state of `block` and all modules inside that a trace takes as given."""
    modules = list(_modules(block))
    code = Code(modules)
    first: dict[nn.Module, int] = {}
    ties = tuple(first.setdefault(module, i) for i, module in enumerate(modules))
    states = tuple(_state(*each, with_settings) for each in zip(modules, code.values, strict=True))
    ties = ties if len(first) < len(ties) else ()
    return Fingerprint(states, tuple(code.outside), code.unknown, code.by_parts, ties, with_settings)


def plain_attributes(block: nn.Module) -> tuple[tuple[tuple[str, bool | int | float | str], ...], ...]:
    """The names and values of the numbers, flags and strings that each author's module in `block` holds."""
    return tuple(
        tuple((name, value) for name, value in vars(module).items() if isinstance(value, (bool, int, float, str)))
        if not is_known(class_as_written(module))
        else ()
        for module in block.modules()
    )


def holds_attributes(block: nn.Module, attributes: tuple[tuple[tuple[str, Any], ...], ...]) -> bool:
    """Whether `attributes` equal `plain_attributes(block)`. A compiler that traces this recompiles when one changes."""
    pairs = zip(block.modules(), attributes, strict=True)
    return all(getattr(module, name) == value for module, values in pairs for name, value in values)


def change_since(before: Fingerprint, block: nn.Module) -> str | None:
    """The first change of a block's state, such as "scale of a DenseLayer was 1.0 and is 0.5", or None."""
    after = fingerprint(block, before.with_settings)
    if after == before:
        return None
    if len(before.modules) != len(after.modules):
        return "it has other modules"
    for old, new in zip(before.modules, after.modules, strict=True):
        if old.name != new.name:
            return f"a {old.name} has become a {new.name}"
    for old, new in zip(before.modules, after.modules, strict=True):
        change = _change(old, new)
        if change is not None:
            return change
    if before.ties != after.ties:
        return "other modules have several names"
    for (what, old), (_, new) in zip(before.outside, after.outside, strict=False):
        if old != new:
            return f"{what} {_difference(old, new)}"
    if (before.unknown is None, before.by_parts is None) == (after.unknown is None, after.by_parts is None):
        return "its code has changed" if len(before.outside) != len(after.outside) else None
    return (after.unknown or after.by_parts or before.by_parts or "").removeprefix("found that ")


def _change(old: State, new: State) -> str | None:
    """The first change of a module's attributes."""
    old_values, new_values = dict(old.values), dict(new.values)
    for key in {**old_values, **new_values}:
        before, after = old_values.get(key, _MISSING), new_values.get(key, _MISSING)
        verified_for_any = isinstance(before, DropRate) and before.value != 0 and isinstance(after, DropRate)
        if isinstance(before, TensorNames) and isinstance(after, TensorNames):
            added = [name for name in after if name not in before]
            if added:
                return f"{added[0]} of a {old.name} was added"
        elif before != after and not verified_for_any:
            return f"{key} of a {old.name} {_difference(before, after)}"
    return None


def _difference(old: Any, new: Any) -> str:
    old, new = (value.value if isinstance(value, (DropRate, Number)) else value for value in (old, new))
    if all(isinstance(value, (bool, int, float, str)) for value in (old, new)):
        return f"was {old!r} and is {new!r}"
    return "was added" if old is _MISSING else "was removed" if new is _MISSING else "has changed"


def _modules(module: nn.Module) -> Iterator[nn.Module]:
    """Like `module.modules()`, but several times as fast."""
    yield module
    for child in module._modules.values():
        if child is not None:
            yield from _modules(child)


def _state(module: nn.Module, values: dict[str, Any], with_settings: bool) -> State:
    """The state of a module. `with_settings` adds all settings of torch's modules without tensors."""
    cls = class_as_written(module)
    if isinstance(module, _DropoutNd):
        others = (each for each in sorted(values.items()) if each[0] not in ("p", "inplace"))
        return State(cls.__name__, (("p", DropRate(module.p)), ("inplace", module.inplace), *others))
    if not is_known(cls):
        return State(cls.__name__, tuple(sorted(values.items())))
    name = "BatchNorm" if cls in _BATCH_NORMS else cls.__name__
    tensors = TensorNames((*(module._parameters or vars(module).get("_former_parameters", ())), *module._buffers))
    if with_settings and not tensors:
        values = {name: value for name, value in vars(module).items() if name not in OF_EVERY_MODULE}
    return State(name, (("names of tensors", tensors), *sorted(values.items())))


def drop_rates(module: nn.Module) -> list[str]:
    """The names of the attributes of `module` that are rates of dropout, which are verified for any value."""
    if isinstance(module, _DropoutNd):
        return ["p"] if module.p else []
    if is_known(class_as_written(module)):
        return []
    return [name for name, value in vars(module).items() if value and is_drop_rate(name, value)]


_BATCH_NORMS = set(TORCH_CLASSES.values())
"""One of them may become another, as by `convert_sync_batchnorm`: engines read which it is at every forward."""

_MISSING = object()
