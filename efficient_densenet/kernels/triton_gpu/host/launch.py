"""Launching a Triton kernel at little cost to the host: all launches go through `launch`.

`kernel[grid](...)` looks up the compiled kernel at every launch, by properties of each argument. The lookup takes the
host several times as long as the launch, and a step has hundreds of launches. `kernel[grid](...)` also returns the
compiled kernel. Later launches for which Triton would choose the same compiled kernel call its launcher directly.

Only this file uses undocumented parts of Triton: `CompiledKernel.run`, the order of its arguments, and the place of
launch hooks. Versions of Triton that this file does not know, and interpreted kernels, are launched by
`kernel[grid](...)` alone.
"""

import functools
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch
import triton
from torch import Tensor
from triton.runtime import driver

from ...._torch_private import without_dispatch_modes
from ... import launches

MAX_INT32 = 2**31 - 1
"""The largest size that Triton passes as int32. For a larger one it compiles the kernel with an int64."""

_OPTIONS = {"enable_fp_fusion": True}
"""Triton's default up to 3.9, which warns that the default will change."""


class _Launcher(NamedTuple):
    """A compiled kernel, and the constants that all its launches pass."""

    run: Callable[..., None]
    function: int
    metadata: Any
    constants: tuple[Any, ...]
    get_current_stream: Callable[[int], int]
    kept_alive: tuple[Any, Any]


_launchers: dict[tuple[Any, ...], dict[tuple[Any, ...], _Launcher]] = {}
"""Launchers by the kernel, the properties of the numbers, and the constants; then by those of the tensors. The key
contains the id of a kernel, which stays valid: the launcher keeps the kernel alive."""


class Launch:
    """All of a launch but its tensors. It depends on their sizes only, and is the same in each step of a training.

    Args:
        kernel: a function decorated by `triton.jit`. Its parameters are tensors, then numbers, then `tl.constexpr`.
        grid: the number of program instances on each of up to three axes.
        numbers: integers and floating-point numbers.
        constants: `tl.constexpr` parameters, and options such as `num_warps`.
    """

    def __init__(self, kernel: Any, grid: tuple[int, ...], *numbers: float, **constants: Any) -> None:
        self.kernel, self.grid, self.numbers, self.constants = kernel, grid, numbers, constants
        self.three_axes = (*grid, 1, 1)[:3]
        self.options = _OPTIONS | constants
        key = id(kernel), *map(_specialization, numbers), *constants.items()
        self.launchers = _launchers.setdefault(key, {})
        """Launchers by the properties for which Triton compiles anew: the device, dtypes, alignments to 16 bytes."""


def _specialization(number: float) -> tuple[Any, ...]:
    """The properties of a number for which Triton may compile a kernel of its own."""
    return type(number), number == 1, number % 16 == 0, number <= MAX_INT32


cached = functools.lru_cache(maxsize=4096)
"""A cache for functions that make launches. With images of one size, a kind has as many as the model has layers."""


@cached
def cached_launch(kernel: Any, grid: tuple[int, ...], *numbers: float, **constants: Any) -> Launch:
    """The launch with these arguments, made once. A function with fewer arguments takes less time to find its own."""
    return Launch(kernel, grid, *numbers, **constants)


def launch(prepared: Launch, *tensors: Tensor | None) -> None:
    """Launch on the device of the first tensor, which need not be the current device.

    None takes the place of a tensor that the kernel does not read with these constants.
    """
    if (recorder := launches.recorder()) is not None:
        recorder.launched(Launches, prepared, [None if each is None else recorder.argument(each) for each in tensors])
    with without_dispatch_modes() if recorder is not None else nullcontext():  # the interpreter copies its tensors
        _launch(prepared, tensors)


def _launch(prepared: Launch, tensors: Sequence[Tensor | None]) -> None:
    device = cast(Tensor, tensors[0]).get_device()
    if device < 0 or _has_launch_hooks():
        _launch_by_triton(prepared, tensors)
    elif device != torch.cuda.current_device():
        with torch.cuda.device(device):
            _launch(prepared, tensors)
    else:
        addresses = [None if each is None else each.data_ptr() for each in tensors]
        dtypes = [None if each is None else each.dtype for each in tensors]
        key = _key(device, dtypes, addresses)
        launcher = prepared.launchers.get(key)
        if launcher is None:
            _remember(key, prepared, _launch_by_triton(prepared, tensors), len(tensors))
        else:
            run, function, metadata, constants, get_current_stream, _ = launcher
            no_launch_hooks = None, None, None  # and no arguments for them
            stream = get_current_stream(device)
            arguments = *addresses, *prepared.numbers, *constants
            run(*prepared.three_axes, stream, function, metadata, *no_launch_hooks, *arguments)


class Launches(launches.Launches):
    """Launches by the launchers of compiled kernels with addresses, where there are launchers and no hooks."""

    def __init__(self, recorded: Sequence[tuple[Launch, Sequence[Any]]]) -> None:
        self._recorded = recorded
        places = (each for _, arguments in recorded for each in arguments if each is not None)
        self._places = [(each.memory, each.offset) for each in places]
        self._by_launchers: list[tuple[Any, ...]] = []

    def __call__(self, run: launches.Run) -> None:
        device = run.values[self._places[0][0]].get_device()
        if device >= 0 and not _has_launch_hooks() and device == torch.cuda.current_device():
            addresses = [run.addresses[memory] + offset for memory, offset in self._places]
            self._by_launchers = self._by_launchers or self._found_launchers(device, addresses)
            if self._by_launchers:
                self._by_addresses(addresses, self._by_launchers[0][0].get_current_stream(device))
                return
        for prepared, arguments in self._recorded:
            _launch(prepared, [None if each is None else run.tensor(each) for each in arguments])

    def _by_addresses(self, addresses: list[Any], stream: int) -> None:
        for launcher, axes, start, stop, absent, numbers in self._by_launchers:
            arguments = addresses[start:stop]
            for position in absent:
                arguments.insert(position, None)
            launcher.run(*axes, stream, launcher.function, launcher.metadata, None, None, None, *arguments, *numbers)

    def _found_launchers(self, device: int, addresses: Sequence[int]) -> list[tuple[Any, ...]]:
        """The launcher of each launch with its arguments, or nothing if one is missing. Alignments are the same in
        all runs of a program."""
        found, start = [], 0
        for prepared, arguments in self._recorded:
            absent = [position for position, each in enumerate(arguments) if each is None]
            stop = start + len(arguments) - len(absent)
            values: list[int | None] = [*addresses[start:stop]]
            for position in absent:
                values.insert(position, None)
            launcher = prepared.launchers.get(_key(device, [each and each.dtype for each in arguments], values))
            if launcher is None:
                return []
            numbers = *prepared.numbers, *launcher.constants
            found.append((launcher, prepared.three_axes, start, stop, absent, numbers))
            start = stop
        return found


def _key(device: int, dtypes: Sequence[torch.dtype | None], addresses: Sequence[int | None]) -> tuple[Any, ...]:
    """The properties of tensors for which Triton compiles a kernel of its own."""
    return device, *dtypes, *[each is None or each & 15 == 0 for each in addresses]


def _launch_by_triton(prepared: Launch, tensors: Sequence[Tensor | None]) -> Any:
    """Returns the compiled kernel, or another object where Triton interprets it or compiles it later, and nothing on
    the meta device, where there is nothing to compute."""
    if cast(Tensor, tensors[0]).is_meta:
        return None
    with torch.cuda.device_of(tensors[0]):
        return prepared.kernel[prepared.grid](*tensors, *prepared.numbers, **prepared.options)


def _remember(key: tuple[Any, ...], prepared: Launch, compiled: Any, num_tensors: int) -> None:
    """Keep the launcher of a kernel that has just been launched."""
    kernel, constants = prepared.kernel, prepared.constants
    if not _is_known() or not isinstance(compiled, _CompiledKernel) or kernel.pre_run_hooks:
        return
    # Since Triton 3.3 a launcher takes the constants too, although it does not read them.
    names = kernel.arg_names[num_tensors + len(prepared.numbers) :] if _version() >= (3, 3) else []
    loaded: Any = compiled
    active: Any = driver.active
    prepared.launchers[key] = _Launcher(
        loaded.run,
        loaded.function,
        loaded.packed_metadata,
        tuple(map(constants.get, names)),
        active.get_current_stream,
        (kernel, compiled),
    )


def _version() -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", triton.__version__)[:2]))


_CompiledKernel: Any = getattr(getattr(triton, "compiler", None), "CompiledKernel", ())


def _hook_owner() -> Any:
    """The object that has Triton's launch hooks: `knobs.runtime` since 3.4, `CompiledKernel` before."""
    owners = getattr(getattr(triton, "knobs", None), "runtime", None), _CompiledKernel
    return next((each for each in owners if hasattr(each, "launch_enter_hook")), _NO_HOOKS)


_NO_HOOKS = SimpleNamespace(launch_enter_hook=None, launch_exit_hook=None)
_HOOK_OWNER = _hook_owner()


def _is_known() -> bool:
    """Whether `_remember` was written for this version of Triton, and finds what it needs of it."""
    if (3, 2) <= _version() <= (3, 9) and _CompiledKernel and _HOOK_OWNER is not _NO_HOOKS:
        return True
    _warn_of(triton.__version__)
    return False


@functools.cache
def _warn_of(version: str) -> None:
    warnings.warn(
        f"Triton {version} is not known to this version of efficient_densenet, which leaves each launch to it: a step "
        "takes the host several times as long. The results are the same",
        stacklevel=2,
    )


def _has_launch_hooks() -> bool:
    """Whether launch hooks are registered, as by a profiler. A chain of hooks may be empty."""
    enter, leave = _HOOK_OWNER.launch_enter_hook, _HOOK_OWNER.launch_exit_hook
    return bool(getattr(enter, "calls", enter)) or bool(getattr(leave, "calls", leave))
