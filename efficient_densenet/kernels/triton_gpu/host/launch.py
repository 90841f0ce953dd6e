"""Launching a Triton kernel at little cost to the host: all launches go through `launch`.

`kernel[grid](...)` looks up the compiled kernel at every launch, by properties of each argument. The lookup takes the
host several times as long as the launch, and a step has hundreds of launches. `kernel[grid](...)` also returns the
compiled kernel. Later launches for which Triton would choose the same compiled kernel call its launcher directly.

Only this file uses undocumented parts of Triton: `CompiledKernel.run`, the order of its arguments, and the place of
launch hooks. Versions of Triton that this file does not know, and interpreted kernels, are launched by
`kernel[grid](...)` alone.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel
from triton.runtime import driver

MAX_INT32 = 2**31 - 1
"""The largest size that Triton passes as int32. For a larger one it compiles the kernel with an int64."""

_OPTIONS = {"enable_fp_fusion": True}
"""Triton's default up to 3.9, which warns that the default will change."""


class _Launcher(NamedTuple):
    """A compiled kernel, and the arguments that all its launches have in common."""

    run: Callable[..., None]
    function: int
    metadata: Any
    constants: tuple[Any, ...]
    get_current_stream: Callable[[int], int]
    kept_alive: tuple[Any, CompiledKernel]


_launchers: dict[tuple[Any, ...], _Launcher] = {}
"""The launchers by key. A key contains the id of a kernel, which stays valid: the launcher keeps the kernel alive."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Tensor | float | None, **constants: Any) -> None:
    """Launch `kernel` on the device of the first argument, which need not be the current device.

    Args:
        kernel: a function decorated by `triton.jit`, whose `tl.constexpr` parameters come after the others.
        grid: the number of program instances on each of up to three axes.
        arguments: tensors on one device, the first of all among them; integers and floating-point numbers; None in the
            place of a tensor that the kernel does not read with these constants.
        constants: `tl.constexpr` parameters, and options such as `num_warps`.
    """
    device = cast(Tensor, arguments[0]).get_device()
    if device < 0 or _has_launch_hooks():
        _launch_by_triton(kernel, grid, arguments, constants)
    elif device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, grid, *arguments, **constants)
    else:
        key, passed = _key_and_pointers(arguments)
        key = id(kernel), device, *key, *constants.items()
        launcher = _launchers.get(key)
        if launcher is None:
            compiled = _launch_by_triton(kernel, grid, arguments, constants)
            _remember(key, kernel, compiled, len(arguments), constants)
        else:
            run, function, metadata, values, get_current_stream, _ = launcher
            x, y, z = (*grid, 1, 1)[:3]
            no_launch_hooks = None, None, None  # and no arguments for them
            run(x, y, z, get_current_stream(device), function, metadata, *no_launch_hooks, *passed, *values)


def _key_and_pointers(arguments: Sequence[Any]) -> tuple[list[Any], list[float | None]]:
    """The properties of the arguments by which Triton chooses a compiled kernel; and the arguments, tensors as
    addresses.

    A tensor's properties are its dtype, and whether its address is a multiple of 16. A number's are its type, whether
    it is 1 or a multiple of 16, for which Triton may specialize a kernel, and whether it fits in an int32.
    """
    key: list[Any] = []
    passed: list[float | None] = []
    for argument in arguments:
        if argument is None:
            key.append(None)
        elif type(argument) in (int, float, bool):
            key += type(argument), argument == 1, argument % 16 == 0, argument <= MAX_INT32
        else:
            key.append(argument.dtype)
            argument = argument.data_ptr()
            key.append(argument % 16 == 0)
        passed.append(argument)
    return key, passed


def _launch_by_triton(kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], constants: dict[str, Any]) -> Any:
    """Returns the compiled kernel, or another object where Triton interprets it or compiles it later."""
    with torch.cuda.device_of(arguments[0]):
        return kernel[grid](*arguments, **(_OPTIONS | constants))


def _remember(key: tuple[Any, ...], kernel: Any, compiled: Any, num_arguments: int, constants: dict[str, Any]) -> None:
    """Keep the launcher of a kernel that has just been launched."""
    if not _is_known_version() or not isinstance(compiled, CompiledKernel) or kernel.pre_run_hooks:
        return
    # Since Triton 3.3 a launcher takes the constants too, although it does not read them.
    values = [constants.get(name) for name in kernel.arg_names[num_arguments:]] if _version() >= (3, 3) else []
    loaded: Any = compiled
    active: Any = driver.active
    _launchers[key] = _Launcher(
        loaded.run,
        loaded.function,
        loaded.packed_metadata,
        tuple(values),
        active.get_current_stream,
        (kernel, compiled),
    )


def _version() -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", triton.__version__)[:2]))


def _is_known_version() -> bool:
    """Whether `_remember` was written for this version of Triton."""
    return (3, 2) <= _version() <= (3, 9)


def _hook_owner() -> Any:
    """The object that has Triton's launch hooks: `knobs.runtime` since 3.4, `CompiledKernel` before."""
    runtime = getattr(getattr(triton, "knobs", None), "runtime", None)
    return runtime if hasattr(runtime, "launch_enter_hook") else CompiledKernel


_HOOK_OWNER = _hook_owner()


def _has_launch_hooks() -> bool:
    """Whether launch hooks are registered, as by a profiler. A chain of hooks may be empty."""
    enter, leave = _HOOK_OWNER.launch_enter_hook, _HOOK_OWNER.launch_exit_hook
    return bool(getattr(enter, "calls", enter)) or bool(getattr(leave, "calls", leave))
