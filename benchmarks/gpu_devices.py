"""GPUs by their published figures, and the time that a traced step would take on one. Every time here is an estimate.

- A computation takes as long as its bytes or its products, whichever is slower, at a fraction of the device's peak that
  such kernels reach, and no less than a kernel costs at all.
- A step takes as long as the device's computations or the host's calls, whichever is slower, since the host runs ahead.
  A captured graph needs no host but for its launch, and less between two kernels.
- `torch.compile` of plain modules is computed from plain's own step: its pointwise operations cost no launch, and what
  they move is fused into the batch norm beside them. Of a ReLU and its backward nothing is left; of a gradient added to
  another, one read. Batch norms are two launches, one for the sums; concatenations are still copied.
"""

import dataclasses
from typing import NamedTuple

import torch
from gpu_trace import Computation, StepTrace, triton_modules


class Device(NamedTuple):
    """A GPU's published figures.

    Attributes:
        bandwidth: bytes a second.
        flops: operations a second by precision, without sparsity; bf16 and fp16 are summed in float32.
        num_sms: its multiprocessors.
        shared_memory: KiB a multiprocessor has, and KiB a block may have of it.
        l2_bytes: the L2 cache.
        has_triton: whether the engine's Triton kernels run on it; the portable ones do otherwise.
    """

    name: str
    bandwidth: float
    flops: dict[str, float]
    num_sms: int
    shared_memory: tuple[int, int]
    l2_bytes: int
    has_triton: bool = True


DEVICES = {
    # NVIDIA H200 Tensor Core GPU datasheet (SXM; its tensor figures are with sparsity, halved here); the
    # multiprocessors and the cache: NVIDIA H100 Tensor Core GPU Architecture whitepaper.
    "H200": Device(
        name="H200",
        bandwidth=4.8e12,
        flops={"float32": 67e12, "tf32": 494e12, "bf16": 989e12, "fp16": 989e12},
        num_sms=132,
        shared_memory=(228, 227),
        l2_bytes=50 << 20,
    ),
    # NVIDIA A100 Tensor Core GPU datasheet (80GB SXM); NVIDIA A100 Tensor Core GPU Architecture whitepaper.
    "A100": Device(
        name="A100 SXM 80GB",
        bandwidth=2.039e12,
        flops={"float32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "fp16": 312e12},
        num_sms=108,
        shared_memory=(164, 163),
        l2_bytes=40 << 20,
    ),
    # NVIDIA Ada GPU Architecture whitepaper, appendix on the GeForce RTX 4090.
    "RTX 4090": Device(
        name="RTX 4090",
        bandwidth=1.008e12,
        flops={"float32": 82.6e12, "tf32": 82.6e12, "bf16": 165.2e12, "fp16": 165.2e12},
        num_sms=128,
        shared_memory=(100, 99),
        l2_bytes=72 << 20,
    ),
    # NVIDIA T4 datasheet; NVIDIA Turing GPU Architecture whitepaper. It has neither TF32, so that float32 is exact, nor
    # bfloat16; the Triton kernels need compute capability 8.0.
    "T4": Device(
        name="T4",
        bandwidth=320e9,
        flops={"float32": 8.1e12, "tf32": 8.1e12, "fp16": 65e12},
        num_sms=40,
        shared_memory=(64, 64),
        l2_bytes=4 << 20,
        has_triton=False,
    ),
}
"""By a part of the name that PyTorch gives them. Shared memory: CUDA C++ Programming Guide, technical specifications
per compute capability."""

BANDWIDTH_FRACTION = 0.8
"""What streaming kernels reach of the published bandwidth; STREAM-like copies reach 0.85 to 0.93."""

FLOPS_FRACTION = {"float32": 0.6, "tf32": 0.35, "bf16": 0.35, "fp16": 0.35}
"""What products with few channels reach of the peak: tiles are narrow, and tensor cores wait for operands."""

KERNEL_SECONDS = {"stream": 2.5e-6, "graph": 1.5e-6}
"""From the start of an empty kernel to the start of the next, launched one by one or by a graph: round figures of the
order that NVIDIA's "Getting Started with CUDA Graphs" (technical blog) reports."""

GRAPH_LAUNCH_SECONDS = 20e-6

HOST_SECONDS = {"aten": 7e-6, "host_only": 2e-6, "triton": 3.5e-6, "triton_uncached": 23e-6, "compiled": 8e-6}
"""A call of the host: an operation of ATen with its node in autograd's graph, a view or an allocation, a Triton launch
by the compiled kernel object or by `JITFunction.run`, a launch in the code that torch.compile writes. The Triton
launches were timed on a CPU with a driver that does nothing; the others are round figures of eager PyTorch."""


class Estimate(NamedTuple):
    """Seconds of a step: of the device, and of the host (0 where it has nothing to do)."""

    device: float
    host: float

    @property
    def seconds(self) -> float:
        return max(self.device, self.host)


def estimate(trace: StepTrace, device: Device, precision: str) -> Estimate:
    """Of a step in eager mode."""
    launch = HOST_SECONDS["triton" if launches_are_cached() else "triton_uncached"]
    host = trace.host_only_calls * HOST_SECONDS["host_only"]
    host += sum(launch if each.is_triton else HOST_SECONDS["aten"] for each in trace.computations)
    return Estimate(_device_seconds(trace, device, precision, "stream"), host)


def launches_are_cached() -> bool:
    """Whether the Triton kernels are launched by their compiled kernel objects: `triton_gpu.launch` does that."""
    return any(module.__name__.endswith(".launch") for module in triton_modules())


def estimate_graph(trace: StepTrace, device: Device, precision: str) -> Estimate:
    """Of the same step, captured in a CUDA graph."""
    return Estimate(_device_seconds(trace, device, precision, "graph"), GRAPH_LAUNCH_SECONDS)


def estimate_compiled(trace: StepTrace, device: Device, precision: str) -> Estimate:
    """Of the step that `fused` makes of plain's."""
    compiled = fused(trace)
    return Estimate(
        _device_seconds(compiled, device, precision, "stream"), compiled.launches() * HOST_SECONDS["compiled"]
    )


def fused(trace: StepTrace) -> StepTrace:
    """Plain's step with its pointwise operations fused as this module's docstring says."""
    computations = [each for each in map(_fused, trace.computations) if each is not None]
    return dataclasses.replace(trace, computations=computations)


def _fused(computation: Computation) -> Computation | None:
    name = computation.name
    if name in ("relu", "relu_", "threshold_backward", "_to_copy"):
        return None
    if name in ("add", "add_") and computation.phase == "backward":
        return dataclasses.replace(computation, launches=0, traffic=computation.traffic[:1])
    if "batch_norm" in name:
        return dataclasses.replace(computation, launches=2)
    return computation


def _device_seconds(trace: StepTrace, device: Device, precision: str, launched_by: str) -> float:
    """The times of all computations, one after another; `launched_by` is a key of `KERNEL_SECONDS`."""
    return sum(_seconds(each, device, precision, launched_by) for each in trace.computations)


def _seconds(computation: Computation, device: Device, precision: str, launched_by: str) -> float:
    moving = computation.bytes(device.l2_bytes) / (device.bandwidth * BANDWIDTH_FRACTION)
    shortest = computation.launches * KERNEL_SECONDS[launched_by]
    if computation.product_dtype is None:
        return max(moving, shortest)
    by = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(computation.product_dtype, "float32")
    by = "tf32" if (by, precision) == ("float32", "tf32") else by
    reached = max(device.flops[each] * FLOPS_FRACTION[each] for each in (by, "float32"))  # tensor cores or others
    return max(moving, shortest, computation.flops / reached)
