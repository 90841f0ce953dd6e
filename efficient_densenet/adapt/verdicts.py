"""Results of trials, which blocks of equal structure share within one call of `make_efficient`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from torch import Tensor, nn

from ..engine.parts import NoPartsError
from .fingerprint import class_as_written, fingerprint
from .outside import is_known
from .structure import custom_norms_in
from .trial import VerificationError

Found = TypeVar("Found")

_verdicts: ContextVar[dict[Any, Any] | None] = ContextVar("verdicts", default=None)
"""What was found, or the error that was raised, by the question and the structure of a block."""


@contextmanager
def shared_verdicts() -> Iterator[None]:
    """In this context, `verdict` answers a question once for all blocks of equal structure."""
    token = _verdicts.set({})
    try:
        yield
    finally:
        _verdicts.reset(token)


def verdict(block: nn.Module, question: Any, find: Callable[[], Found]) -> Found:
    """The result of `find`, or what it has found for an equal block and question before."""
    verdicts, structure = _verdicts.get(), _structure(block)
    if verdicts is None or structure is None:
        return find()
    key = question, structure
    if key not in verdicts:
        try:
            verdicts[key] = find()
        except (NoPartsError, VerificationError) as failure:
            verdicts[key] = failure
    found = verdicts[key]
    if isinstance(found, Exception):
        raise found
    return found


def _structure(block: nn.Module) -> Any:
    """All of a block on which a trial depends, in a form that can be compared; None if there may be more: values of a
    vector among an author's parameters, which may be a mask, or what other code has put into torch's modules. A trial
    changes norms with a forward of their own, so that each block of these needs one."""
    if custom_norms_in(block):
        return None
    places: dict[int, int] = {}
    described = []
    for name, module in block.named_modules(remove_duplicate=False):
        is_torchs, settings = is_known(class_as_written(module)), []
        for key, value in vars(module).items():
            if isinstance(value, Tensor) or (is_torchs and key not in _OF_EVERY_MODULE and not _is_plain(value)):
                return None
            if key not in _OF_EVERY_MODULE and _is_plain(value):
                settings.append((key, repr(value)))
        if not is_torchs and any(each is not None and each.dim() < 2 for each in module._parameters.values()):
            return None
        tensors = [
            (key, None if each is None else (*_kind(each), _place(each, places)))
            for key, each in (*module._parameters.items(), *module._buffers.items())
        ]
        described.append((name, type(module), _place(module, places), tuple(settings), tuple(tensors)))
    return fingerprint(block), tuple(described)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return type(tensor), tensor.dtype, tensor.device, tuple(tensor.shape), tensor.requires_grad


def _place(value: Any, places: dict[int, int]) -> int:
    """The number of a module or tensor, by which those that occur several times are recognized."""
    return places.setdefault(id(value), len(places))


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
