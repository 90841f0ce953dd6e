"""What a Triton kernel needs of a GPU, by compiling it without one: registers, shared memory, spills, occupancy.

The tests run Triton's interpreter, which changes what `triton.jit` makes. Kernels are thus compiled in a process of
their own, many at a time:

    compilation = Compilation.of(kernel, arguments, constants, arch=90)
    [found] = compile_all([compilation])
    found.registers, found.shared_memory, found.spills, found.blocks, found.occupancy
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
ARCHITECTURES = (80, 86, 89, 90, 100, 120)


class Architecture(NamedTuple):
    """Limits of a multiprocessor, from NVIDIA's "CUDA C++ Programming Guide", section "Compute Capabilities", tables
    "Technical Specifications per Compute Capability" and "Shared Memory Capacity per Compute Capability"."""

    threads: int
    blocks: int
    shared_memory: int
    shared_memory_of_a_block: int
    registers: int = 65536


LIMITS = {
    75: Architecture(1024, 16, 64 * KIB, 64 * KIB),
    80: Architecture(2048, 32, 164 * KIB, 163 * KIB),
    86: Architecture(1536, 16, 100 * KIB, 99 * KIB),
    89: Architecture(1536, 24, 100 * KIB, 99 * KIB),
    90: Architecture(2048, 32, 228 * KIB, 227 * KIB),
    100: Architecture(2048, 32, 228 * KIB, 227 * KIB),
    120: Architecture(1536, 24, 100 * KIB, 99 * KIB),
}
RESERVED_SHARED_MEMORY = KIB
"""What the system takes of each block's shared memory since compute capability 8.0 (the same section of the guide)."""

REGISTER_ALLOCATION, WARP_ALLOCATION = 256, 4
"""Registers are given to a warp in units of 256, and to warps in fours ("CUDA Occupancy Calculator")."""


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
    """What a compiled kernel takes: registers of a thread, bytes of shared memory of a block, bytes of local memory
    that a thread's spills take."""

    registers: int
    shared_memory: int
    spills: int
    num_warps: int
    arch: int

    @property
    def fits(self) -> bool:
        """Whether a device of this architecture can launch it."""
        return self.shared_memory <= LIMITS[self.arch].shared_memory_of_a_block and self.blocks > 0

    @property
    def blocks(self) -> int:
        """How many blocks a multiprocessor holds at a time, without regard to the tensor memory of 10.0."""
        limits = LIMITS[self.arch]
        of_a_warp = -(-self.registers * 32 // REGISTER_ALLOCATION) * REGISTER_ALLOCATION
        warps = limits.registers // of_a_warp // WARP_ALLOCATION * WARP_ALLOCATION
        reserved = RESERVED_SHARED_MEMORY if self.arch >= 80 else 0
        by_shared_memory = limits.shared_memory // max(1, self.shared_memory + reserved)
        by_threads = limits.threads // (32 * self.num_warps)
        return min(limits.blocks, by_threads, warps // self.num_warps, by_shared_memory)

    @property
    def occupancy(self) -> float:
        """The part of a multiprocessor's warps that is resident."""
        return self.blocks * self.num_warps * 32 / LIMITS[self.arch].threads


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
    registers, spills = _usage(compiled.asm["cubin"])
    return Resources(registers, compiled.metadata.shared, spills, job.num_warps, job.arch)


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


def _usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread and bytes of its local memory, which has nothing but spills in it."""
    import triton.backends.nvidia as nvidia

    cuobjdump = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        report = subprocess.check_output([str(cuobjdump), "-res-usage", file.name], text=True, stderr=subprocess.STDOUT)
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", report)
    if found is None:
        raise RuntimeError(f"cuobjdump does not say what the kernel takes: {report!r}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


if __name__ == "__main__":
    rows = [_compile(Compilation(**job)) for job in json.loads(sys.stdin.read())]
    print(json.dumps(rows))
