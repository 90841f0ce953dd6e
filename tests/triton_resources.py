"""Resources of a GPU that a Triton kernel takes, by compiling it without one: shared memory and spills.

The tests run Triton's interpreter, which changes what `triton.jit` makes. Kernels are thus compiled in a process of
their own, many at a time.
"""

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from efficient_densenet.kernels.triton_gpu.host.launch import Launch
from efficient_densenet.kernels.triton_gpu.host.tiles import KIB, DeviceLimits

OPTIONS = ("num_warps", "num_stages", "maxnreg")
TYPES = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16", "int8": "*i8", "int": "i32", "float": "fp32"}
LIMITS = {
    70: DeviceLimits(80, 96 * KIB, 96 * KIB, has_tf32=False),
    75: DeviceLimits(40, 64 * KIB, 64 * KIB, has_tf32=False),
    80: DeviceLimits(108, 164 * KIB, 163 * KIB),
    86: DeviceLimits(82, 100 * KIB, 99 * KIB),
    89: DeviceLimits(128, 100 * KIB, 99 * KIB),
    90: DeviceLimits(132, 228 * KIB, 227 * KIB),
    100: DeviceLimits(148, 228 * KIB, 227 * KIB),
    120: DeviceLimits(170, 100 * KIB, 99 * KIB),
}
"""A large device of each architecture: multiprocessors, and the bytes of shared memory of each and of a block."""


class Compilation(NamedTuple):
    """A kernel for one architecture. `signature` has the type of each argument that is not a constant, `aligned` the
    pointers that are multiples of 16 bytes."""

    module: str
    kernel: str
    signature: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int]
    aligned: list[str]
    arch: int


def compilation_of(launch: Launch, tensors: Sequence[Any], arch: int, misaligned: Collection[str] = ()) -> Compilation:
    """The compilation for a launch. All pointers but the `misaligned` are aligned, as those of whole tensors are."""
    function = launch.kernel.fn
    arguments = [*tensors, *launch.numbers]
    types = [str(getattr(each, "dtype", type(each).__name__)).removeprefix("torch.") for each in arguments]
    signature = {name: TYPES[kind] for name, kind in zip(function.__code__.co_varnames, types, strict=False)}
    aligned = [name for name, kind in signature.items() if kind[0] == "*" and name not in misaligned]
    constants, options = {}, {"num_warps": 4, "num_stages": 3}
    for name, value in launch.constants.items():
        (options if name in OPTIONS else constants)[name] = value
    return Compilation(function.__module__, function.__name__, signature, constants, options, aligned, arch)


class Resources(NamedTuple):
    """Resources that a compiled kernel takes: bytes of shared memory of a block, and of local memory that a thread's
    spills take."""

    shared_memory: int
    spills: int


def compile_all(compilations: Sequence[Compilation], timeout: float = 600) -> list[Resources]:
    """Compile in one process of its own, where Triton's interpreter is off."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve())],
        input=json.dumps(compilations),
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"the kernels do not compile:\n{done.stderr[-4000:]}"
    return [Resources(*row) for row in json.loads(done.stdout.splitlines()[-1])]


def _compile(job: Compilation) -> Resources:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as triton_compile

    kernel: Any = getattr(importlib.import_module(job.module), job.kernel)
    names = list(kernel.arg_names)
    constants: Any = {(names.index(name),): value for name, value in job.constants.items()}
    signature = {name: job.signature.get(name, "constexpr") for name in names}
    aligned: Any = {(names.index(name),): [["tt.divisibility", 16]] for name in job.aligned}
    source = ASTSource(kernel, signature, constants, aligned)
    compiled = triton_compile(source, target=GPUTarget("cuda", job.arch, 32), options=job.options)
    return Resources(compiled.metadata.shared, _spills(compiled.asm["cubin"]))


def _spills(cubin: bytes) -> int:
    """The bytes of a thread's local memory, which has nothing but spills in it."""
    import triton.backends.nvidia as nvidia

    cuobjdump = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.check_output([str(cuobjdump), "-res-usage", file.name], text=True, stderr=subprocess.STDOUT)
    found = re.search(r"STACK:(\d+) .*?LOCAL:(\d+)", report)
    assert found is not None, f"cuobjdump does not say what the kernel takes: {report!r}"
    return sum(map(int, found.groups()))


if __name__ == "__main__":
    print(json.dumps([_compile(Compilation(*job)) for job in json.loads(sys.stdin.read())]))
