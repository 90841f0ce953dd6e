"""Resources of a GPU that a Triton kernel takes, by compiling it without one: shared memory and spills.

The tests run Triton's interpreter, which changes what `triton.jit` makes. Kernels are thus compiled in a process of
their own, many at a time:

    compilation = Compilation.of(kernel, arguments, constants, arch=90)
    [found] = compile_all([compilation])
    found.shared_memory, found.spills
"""

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from efficient_densenet.kernels.triton_gpu.host.tiles import DeviceLimits

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = ("num_warps", "num_stages", "maxnreg")
POINTERS = {
    "float32": "*fp32",
    "bfloat16": "*bf16",
    "float16": "*fp16",
    "float64": "*fp64",
    "bool": "*i1",
    "int8": "*i8",
}
SCALARS = {int: "i32", float: "fp32"}
KIB = 1024
LIMITS = {
    80: DeviceLimits(108, 164 * KIB, 163 * KIB),
    86: DeviceLimits(82, 100 * KIB, 99 * KIB),
    89: DeviceLimits(128, 100 * KIB, 99 * KIB),
    90: DeviceLimits(132, 228 * KIB, 227 * KIB),
    100: DeviceLimits(148, 228 * KIB, 227 * KIB),
    120: DeviceLimits(170, 100 * KIB, 99 * KIB),
}
"""A large device of each architecture: multiprocessors, and the bytes of shared memory of each and of a block."""


class Compilation(NamedTuple):
    """A kernel for one architecture. `signature` has the type of each argument that is not a constant."""

    module: str
    kernel: str
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    num_stages: int
    arch: int
    maxnreg: int | None = None
    aligned: tuple[str, ...] = ()  # the pointers that are multiples of 16 bytes

    @classmethod
    def of(
        cls,
        kernel: Any,
        arguments: Sequence[Any],
        constants: Mapping[str, Any],
        arch: int,
        misaligned: Iterable[str] = (),
    ) -> "Compilation":
        """From the arguments of a launch: `kernel[grid](*arguments, **constants)`, tensors of any device. None, in the
        place of a tensor, is a constant.

        Pointers are taken for multiples of 16 bytes, as those of whole tensors are, but for `misaligned` ones.
        """
        function = kernel.fn
        names = list(inspect.signature(function).parameters)
        signature = {
            name: SCALARS.get(type(value)) or POINTERS[str(value.dtype).removeprefix("torch.")]
            for name, value in zip(names, arguments, strict=False)
            if value is not None
        }
        absent = {name: None for name, value in zip(names, arguments, strict=False) if value is None}
        aligned = tuple(name for name, kind in signature.items() if kind[0] == "*" and name not in set(misaligned))
        meta = absent | {name: value for name, value in constants.items() if name not in OPTIONS}
        num_warps, num_stages = constants.get("num_warps", 4), constants.get("num_stages", 3)
        kernel_name = function.__module__, function.__name__
        return cls(*kernel_name, signature, meta, num_warps, num_stages, arch, constants.get("maxnreg"), aligned)


class Resources(NamedTuple):
    """Resources that a compiled kernel takes: bytes of shared memory of a block, and of local memory that a thread's
    spills take."""

    shared_memory: int
    spills: int


def compile_all(compilations: Sequence[Compilation], timeout: float = 600) -> list[Resources]:
    """Compile in one process of its own, where Triton's interpreter is off."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    jobs = json.dumps([compilation._asdict() for compilation in compilations])
    command = [sys.executable, str(Path(__file__).resolve())]
    done = subprocess.run(command, input=jobs, env=environment, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise RuntimeError(f"the kernels do not compile:\n{done.stderr[-4000:]}")
    return [Resources(*row) for row in json.loads(done.stdout.splitlines()[-1])]


def _compile(job: Compilation) -> Resources:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as triton_compile

    source = _source(getattr(importlib.import_module(job.module), job.kernel), job)
    options = {"num_warps": job.num_warps, "num_stages": job.num_stages, "maxnreg": job.maxnreg}
    compiled = triton_compile(source, target=GPUTarget("cuda", job.arch, 32), options=options)
    return Resources(compiled.metadata.shared, _spills(compiled.asm["cubin"]))


def _source(kernel: Any, job: Compilation) -> Any:
    """The kernel with its types and constants, and the arguments that 16 divides, as this version of Triton takes
    them."""
    from triton.compiler import ASTSource

    compiler: Any = importlib.import_module("triton.backends.compiler")
    names = list(kernel.arg_names)
    aligned = [names.index(name) for name in job.aligned]
    if hasattr(compiler, "AttrsDescriptor"):  # up to Triton 3.2
        alignment = {"arg_properties": {"tt.divisibility": aligned, "tt.equal_to": []}, "cls": "AttrsDescriptor"}
        return ASTSource(kernel, job.signature, job.constants, compiler.AttrsDescriptor.from_dict(alignment))
    signature = {name: "constexpr" if name in job.constants else job.signature[name] for name in names}
    constants: Any = {(names.index(name),): value for name, value in job.constants.items()}
    return ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})


def _spills(cubin: bytes) -> int:
    """The bytes of a thread's local memory, which has nothing but spills in it."""
    import triton.backends.nvidia as nvidia

    cuobjdump = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.check_output([str(cuobjdump), "-res-usage", file.name], text=True, stderr=subprocess.STDOUT)
    found = re.search(r"STACK:(\d+) .*?LOCAL:(\d+)", report)
    if found is None:
        raise RuntimeError(f"cuobjdump does not say what the kernel takes: {report!r}")
    return sum(map(int, found.groups()))


if __name__ == "__main__":
    rows = [_compile(Compilation(**job)) for job in json.loads(sys.stdin.read())]
    print(json.dumps(rows))
