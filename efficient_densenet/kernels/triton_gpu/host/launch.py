"""Launching a Triton kernel: all launches go through `launch`.

`kernel[grid](...)` looks up the compiled kernel by properties of each argument, which takes the host several times as
long as the launch. In a recorded run these are always the same: a replay calls the launchers of the compiled kernels.

Only this file uses undocumented parts of Triton: `CompiledKernel.run`, the order of its arguments, and the place of
launch hooks. With versions of Triton that this file does not know, replays are launched by `kernel[grid](...)` too.
"""

import functools
import itertools
import re
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime import driver

from ...._torch_private import without_dispatch_modes
from ... import launches

_OPTIONS = {"enable_fp_fusion": True}
"""Triton's default up to 3.9, which warns that the default will change."""


class Launch(NamedTuple):
    """All of a launch but its tensors.

    Attributes:
        kernel: a function decorated by `triton.jit`. Its parameters are tensors, then numbers, then `tl.constexpr`.
        grid: the number of program instances on each of up to three axes.
        numbers: integers and floating-point numbers.
        constants: `tl.constexpr` parameters, and options such as `num_warps`.
    """

    kernel: Any
    grid: tuple[int, ...]
    numbers: tuple[float, ...]
    constants: dict[str, Any]


def launch(prepared: Launch, *tensors: Tensor) -> None:
    """Launch on the device of the first tensor, which need not be the current device."""
    if (recorder := launches.recorder()) is None:
        _launch_by_triton(prepared, tensors)
        return
    with without_dispatch_modes():  # the interpreter copies its tensors
        compiled = _launch_by_triton(prepared, tensors)
    recorder.launched(Launches, (prepared, compiled), [recorder.argument(each) for each in tensors])


class Launches(launches.Launches):
    """Launches by the launchers of compiled kernels, or by Triton where one has none, or hooks observe launches."""

    def __init__(self, recorded: Sequence[tuple[tuple[Launch, Any], Sequence[Any]]]) -> None:
        self._recorded = recorded  # keeps compiled kernels alive, which unload their code
        self._launchers = [_launcher(*launch, len(arguments)) for launch, arguments in recorded]
        tensors = [each for _, arguments in recorded for each in arguments]
        places = torch.tensor([[each.memory, each.offset] for each in tensors], dtype=torch.int64, device="cpu")
        self._memories, self._offsets = places.t().contiguous()
        self._first_memory = tensors[0].memory
        ends = itertools.accumulate((len(arguments) for _, arguments in recorded), initial=0)
        self._slices = list(itertools.starmap(slice, itertools.pairwise(ends)))

    def __call__(self, run: launches.Run) -> None:
        device = run.values[self._first_memory].get_device()
        if None in self._launchers or _has_launch_hooks() or device != torch.cuda.current_device():
            for (prepared, _), arguments in self._recorded:
                _launch_by_triton(prepared, [run.tensor(each) for each in arguments])
            return
        active: Any = driver.active
        stream = active.get_current_stream(device)
        starts = torch.frombuffer(run.addresses, dtype=torch.int64).index_select(0, self._memories)
        addresses = starts.add_(self._offsets).tolist()
        for launcher, tensors in zip(self._launchers, self._slices, strict=True):
            assert launcher is not None
            function, grid, handle, metadata, constants = launcher
            no_launch_hooks = None, None, None  # and no arguments for them
            function(*grid, stream, handle, metadata, *no_launch_hooks, *addresses[tensors], *constants)


def _launch_by_triton(prepared: Launch, tensors: Sequence[Tensor]) -> Any:
    """Returns the compiled kernel, or another object where Triton interprets it or compiles it later, and nothing on
    the meta device, where there is nothing to compute."""
    if tensors[0].is_meta:
        return None
    kernel, grid, numbers, constants = prepared
    with torch.cuda.device_of(tensors[0]):
        return kernel[grid](*tensors, *numbers, **_OPTIONS | constants)


def _launcher(prepared: Launch, compiled: Any, num_tensors: int) -> tuple[Any, ...] | None:
    """The launcher of a kernel that has just been launched, and its arguments but the stream and the tensors; None
    where only Triton itself can launch it."""
    kernel, grid, numbers, constants = prepared
    if compiled is None or not _is_known() or not hasattr(compiled, "packed_metadata") or kernel.pre_run_hooks:
        return None
    # Since Triton 3.3 a launcher takes the constants too, although it does not read them.
    names = kernel.arg_names[num_tensors + len(numbers) :] if _version() >= (3, 3) else []
    axes, passed = (*grid, 1, 1)[:3], (*numbers, *map(constants.get, names))
    return compiled.run, axes, compiled.function, compiled.packed_metadata, passed


def _version() -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", triton.__version__)[:2]))


def _is_known() -> bool:
    """Whether this file was written for this version of Triton."""
    if (3, 2) <= _version() <= (3, 9):
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
    enter, leave = (getattr(_hook_owner(), f"launch_{each}_hook") for each in ("enter", "exit"))
    return bool(getattr(enter, "calls", enter)) or bool(getattr(leave, "calls", leave))


def _hook_owner() -> Any:
    """The object that has Triton's launch hooks: `knobs.runtime` since 3.4, `CompiledKernel` before."""
    known: Any = triton
    return known.knobs.runtime if hasattr(known, "knobs") else known.compiler.CompiledKernel
