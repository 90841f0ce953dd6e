"""The process that runs one method. On command, it prepares a model, takes a step or checks it.

comparison.py starts it with a method and a setting. Commands are lines on the standard input, each answered by a line
of JSON on the standard output. Between commands, the process blocks in a read and uses no CPU.
"""

import contextlib
import copy
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from comparison import OUT_OF_MEMORY
from methods import LAYOUTS, METHODS, Setting, architecture
from torch import Tensor, nn

from efficient_densenet._tensors import compute_dtype
from efficient_densenet.engine.choose import Engine
from efficient_densenet.kernels import kernel_set_name
from efficient_densenet.memory import Peaks, high_water_mark, measure, tensor_peak

sys.path.append(str(Path(__file__).resolve().parents[1] / "demos"))
from training.cuda_graph import WARM_UP_STEPS, CudaGraphBackward

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
SHORT_STEP, LONG_STEP = 0.3, 5.0
"""Seconds: a short step comes after an untimed one, and a long one is not repeated for `step_peak`."""
STEPS_ON_GPU = 5
"""Number of steps that are timed together on a GPU."""
ALGORITHMS_TRIED = 4
"""Number of convolution algorithms that cuDNN tries for each shape: all would take longer than the measurement."""


class Task:
    """A model, one batch, and a step: forward and backward of training, or in inference a forward in eval mode."""

    def __init__(self, method: str, setting: Setting, dtype: torch.dtype = torch.float32) -> None:
        self.device, self.setting = torch.device(setting.device), setting
        torch.set_num_threads(max(1, setting.threads // setting.devices))
        torch.set_float32_matmul_precision("high" if setting.precision == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = setting.precision == "tf32"
        torch.backends.cudnn.benchmark = True  # plain's best configuration
        torch.backends.cudnn.benchmark_limit = ALGORITHMS_TRIED
        memory_format: Any = LAYOUTS[METHODS[method].layout or setting.layout]
        torch.manual_seed(0)
        channels, *sizes = setting.image_shape
        shape = (setting.batch_size, channels, *sizes)
        self.images = torch.randn(shape).to(self.device, dtype).contiguous(memory_format=memory_format)
        self.labels = torch.arange(setting.batch_size, device=self.device) % 10
        if setting.model.startswith("fc_"):  # a label for every pixel
            self.labels = self.labels.view(-1, *[1] * len(sizes)).expand(-1, *sizes).contiguous()
        inputs = {"in_channels": channels, "dims": len(sizes)}
        self.model: Any = METHODS[method].build(architecture(setting.model) | inputs)
        self.model.to(self.device, dtype, memory_format=memory_format).train(not setting.inference)
        self.last_seconds, self.output = 0.0, self.images
        self.as_cuda_graph = METHODS[method].as_cuda_graph
        self.backward: Callable[[Tensor, Tensor, float], Tensor] = self._backward
        if self.as_cuda_graph:
            self.backward = CudaGraphBackward(self._backward, self.model.parameters())
        self.replicas = [self.model]
        if setting.devices > 1 and self.device.type == "cuda":
            self.model = nn.DataParallel(self.model, list(range(setting.devices)))
        elif setting.devices > 1:
            self.replicas += [copy.deepcopy(self.model) for _ in range(1, setting.devices)]
            self.threads, self.backward = ThreadPoolExecutor(setting.devices - 1), self._backward_of_replicas

    def step(self) -> None:
        """Run one batch. Gradients are made anew, as trainers do that set them to None before."""
        if self.setting.inference:
            with torch.no_grad(), self._autocast():
                self.output = self.model(self.images)
        else:
            self._forget_gradients()
            self.backward(self.images, self.labels, 1.0)

    def _forget_gradients(self) -> None:
        for parameter in (parameter for replica in self.replicas for parameter in replica.parameters()):
            parameter.grad = None

    def _backward(self, images: Tensor, labels: Tensor, _loss_scale: float) -> Tensor:
        return self._backward_of(self.model, images, labels)

    def _backward_of(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        with self._autocast():
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        return loss.detach()

    def _backward_of_replicas(self, images: Tensor, labels: Tensor, _loss_scale: float) -> Tensor:
        """A step of each replica on its share of the batch, in a thread of its own. The first one's is this thread, the
        only one that the profiler sees: so the tensor peak is that of one replica."""
        count = len(self.replicas)
        shares = list(zip(self.replicas, images.chunk(count), labels.chunk(count), strict=True))
        others = [self.threads.submit(self._backward_of, *share) for share in shares[1:]]
        loss = self._backward_of(*shares[0])
        for other in others:
            other.result()
        return loss

    def time_step(self) -> dict[str, float]:
        """Return the seconds of a step, and the host's until it has launched everything. A short step comes after an
        untimed one, so that the threads are awake. On a GPU several are timed, as the host runs ahead in a training."""
        if self.last_seconds < SHORT_STEP:
            self.step()
        count = STEPS_ON_GPU if self.device.type == "cuda" else 1
        self._synchronize()
        start = time.perf_counter()
        for _ in range(count):
            self.step()
        host = (time.perf_counter() - start) / count
        self._synchronize()
        self.last_seconds = (time.perf_counter() - start) / count
        return {"seconds": self.last_seconds, "host_seconds": host}

    def prepare(self) -> dict[str, Any]:
        """Run the first steps, and return their memory peaks, the time of the first, and what ran.

        The second step adds to the gradients of the first, which do not count as memory of that step. In the third,
        whose peak is `step_peak`, gradients are made anew, as in training, and count. The gradients of a CUDA graph
        always count, since it owns them; its first step is all until it is captured.
        """
        durations: list[float] = []
        if self.as_cuda_graph:
            peaks = self._capture(durations)
            step_peak = peaks.tensor
        else:
            peaks = measure(lambda: durations.append(self._time(self._accumulate)), self.device)
            self._forget_gradients()
            step_peak = tensor_peak(self.step, self.device) if durations[-1] < LONG_STEP else None
        self.last_seconds = durations[-1]
        return {
            "tensor_peak": peaks.tensor,
            "process_peak": peaks.process,
            "step_peak": step_peak,
            "first_step_s": durations[0],
            "device_name": device_name(self.device),
            "allocator": allocator(),
            "kernels": self._kernels(),
        }

    def _accumulate(self) -> None:
        if self.setting.inference:
            self.step()
        else:
            self.backward(self.images, self.labels, 1.0)

    def _capture(self, durations: list[float]) -> Peaks:
        """Run the steps before the capture, the one that captures, and one more."""
        before = high_water_mark(self.device)
        warm_up = [self._time(self.step) for _ in range(WARM_UP_STEPS)]
        self._forget_gradients()
        tensor = tensor_peak(lambda: warm_up.append(self._time(self.step)), self.device)
        after = high_water_mark(self.device)
        durations += [sum(warm_up), self._time(self.step)]
        return Peaks(tensor, None if before is None or after is None else after - before)

    def _kernels(self) -> str:
        """The set of kernels that the shared engine runs on this device in this precision; "" for other engines.

        An engine that a method names never falls back to another.
        """
        engines = {getattr(module, "engine", None) for module in self.model.modules()}
        if Engine.SHARED not in engines:
            return ""
        with self._autocast():
            return kernel_set_name(self.images.new_empty(0, dtype=compute_dtype(self.images)))

    def results(self, state: list[Tensor]) -> list[Tensor]:
        """A step's gradients, or in inference its output, with these parameters and buffers, in float64."""
        for tensor, value in zip(self.model.state_dict().values(), state, strict=True):
            tensor.copy_(value)
        self.step()
        gradients = [parameter.grad for parameter in self.model.parameters()]
        return [each.double().cpu() for each in ([self.output] if self.setting.inference else gradients)]

    def _time(self, function: Callable[[], object]) -> float:
        self._synchronize()
        start = time.perf_counter()
        function()
        self._synchronize()
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _autocast(self) -> contextlib.AbstractContextManager:
        if self.setting.precision not in AUTOCAST or self.images.dtype == torch.double:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=AUTOCAST[self.setting.precision])


def check(method: str, setting: Setting) -> dict[str, Any]:
    """The error of the method's results and of plain's beside plain's in float64, each of the length of the truth.

    Where plain in float64 does not fit in memory, the truth is plain in the setting's own precision.
    """
    plain = Task("plain", setting)
    state = [value.clone() for value in plain.model.state_dict().values()]
    expected = plain.results(state)
    del plain
    try:
        truth, name = Task("plain", setting, torch.double).results(state), "float64"
    except Exception as exc:
        if not is_out_of_memory(exc):
            raise
        truth, name = expected, setting.precision
    error, error_of_plain = (_distance(found, truth) for found in (Task(method, setting).results(state), expected))
    return {"error": error, "error_of_plain": error_of_plain, "truth": name}


def _distance(found: list[Tensor], truth: list[Tensor]) -> float:
    difference = sum(float((ours - theirs).square().sum()) for ours, theirs in zip(found, truth, strict=True))
    return (difference / sum(float(theirs.square().sum()) for theirs in truth)) ** 0.5


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or of the CPU where the system has it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return "CPU"


def allocator() -> str:
    """Return the name of the memory allocator whose library is mapped into this process."""
    with contextlib.suppress(OSError), open("/proc/self/maps") as file:
        mapped = file.read()
        for name in ("tcmalloc", "jemalloc", "mimalloc"):
            if f"lib{name}" in mapped:
                return name
    return "system"


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of the device, or None if the system does not report it."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for the errors that PyTorch and Python raise if an allocation fails."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def main() -> None:
    """Answer commands until the standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output goes to stderr, not among the answers
    method, setting = sys.argv[1], Setting(**json.loads(sys.argv[2]))
    task: Any = None
    print(json.dumps({}), file=answers, flush=True)  # imports are done
    for line in sys.stdin:
        try:
            command = line.strip()
            if command == "prepare":
                task = Task(method, setting)
                answer = task.prepare()
            elif command == "step":
                answer = task.time_step()
            elif command == "check":
                answer = check(method, setting)
            else:
                answer = {"free": free_bytes(torch.device(setting.device))}
        except Exception as exc:  # any error of a method is reported in its row
            first = (str(exc).strip().splitlines() or [""])[0]
            answer = {"failure": OUT_OF_MEMORY if is_out_of_memory(exc) else f"{type(exc).__name__}: {first}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
