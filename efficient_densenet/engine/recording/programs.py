"""The recorded programs by their keys: the first run with a key is direct, the second is recorded, the others are
replayed."""

import contextlib
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._torch_private import PREDICTION, functorch_is_active, has_dispatch_mode, why_not
from ...kernels.convolution import precision
from .program import LayoutChangedError, Program
from .recorder import Recorder

VARIABLE = "EFFICIENT_DENSENET_RECORDING"
MODES = {
    "on": "replay what a stage did before, where nothing but values has changed (the default)",
    "off": "run a stage's own code in each step",
}

MAX_PROGRAMS = 512
"""The most keys that are remembered. A network has two for each stage and size of images; recording takes as long as
two direct runs, or more on few pixels, so that keys should not be forgotten before they are met again."""

ORDINARY_TYPES = {Tensor, torch.nn.Parameter, type(None)}
"""Others, tensor subclasses, may have no memory, and see operations themselves."""

_SEEN = object()
_programs: OrderedDict[Hashable, Any] = OrderedDict()
"""For each key, the least recently used first: `_SEEN`, a `Program`, or the reason why there can be none."""


def mode() -> str:
    """The user's choice by the environment variable."""
    chosen = os.environ.get(VARIABLE, "on")
    if chosen not in MODES:
        raise ValueError(f"{VARIABLE} is {chosen!r}, but must be one of {', '.join(MODES)}")
    return chosen


def run(
    function: Callable[[], list[Tensor]],
    settings: Hashable,
    externals: Sequence[Tensor | None],
    written: Sequence[Tensor] = (),
) -> list[Tensor]:
    """What `function` returns. It reads the tensors `externals` and changes of them those in `written` alone; all else
    on which it depends is in `settings`, or the same in the whole process.
    """
    types, tensors = list(map(type, externals)), [each for each in externals if each is not None]
    if not _can_record(types, tensors[0].device.type):
        return function()
    addresses = list(map(Tensor.data_ptr, tensors))
    key = _Key((settings, types), tensors, addresses)
    entry = _programs.get(key)
    if isinstance(entry, Program):
        # Another thread may have removed it: there is no lock that a fork could copy.
        with contextlib.suppress(KeyError):
            _programs.move_to_end(key)
        if not entry.fits(addresses):
            return function()
        with contextlib.suppress(LayoutChangedError):
            return entry.run(tensors, addresses)
        entry = None  # it is recorded anew
    if entry is None:
        _remember(key, _SEEN)
        return function()
    if entry is not _SEEN:
        return function()
    recorder = Recorder(tensors, written)
    with recorder.recording():
        outputs = function()
    _remember(key, recorder.reason or Program(recorder, outputs))
    return outputs


def forget() -> None:
    """Forget all programs."""
    _programs.clear()


def entries() -> list[Any]:
    """What is known of each key: a program, the reason why there can be none, or that one run was seen."""
    return list(_programs.values())


def _remember(key: Hashable, entry: Any) -> None:
    _programs[key] = entry
    while len(_programs) > MAX_PROGRAMS:
        _programs.popitem(last=False)


def _can_record(types: Sequence[type], device: str) -> bool:
    """Whether the run's tensors are ordinary ones with memory, and nobody else sees its operations."""
    if not ORDINARY_TYPES.issuperset(types) or has_dispatch_mode() or functorch_is_active():
        return False
    return device in ("cpu", "cuda") and mode() == "on" and why_not(PREDICTION) is None


class _Key:
    """All on which the code depends that records: see `run`. To hash all of it would take as long as to read it, so
    only the settings and the first layout are hashed."""

    __slots__ = ("_hash", "_parts")

    def __init__(
        self, settings: tuple[Hashable, list[type]], tensors: Sequence[Tensor], addresses: Sequence[int]
    ) -> None:
        layouts = [(each.dtype, each.device, each.shape, each.stride()) for each in tensors]
        alignments = [address & 15 for address in addresses]
        self._parts = settings, precision(), torch.get_num_threads(), layouts, alignments
        self._hash = hash((settings[0], layouts[0]))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._parts == other._parts
