"""One method in a process of its own: prepares when told, then takes a training step whenever it is told to.

Started by turns.py. Commands come line by line on the standard input, each answered by a line of JSON; between them the
process waits in a read and computes nothing.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from methods import METHODS
from settings import LAYOUTS, Setting, architecture
from turns import OUT_OF_MEMORY

from efficient_densenet.memory import measure

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
SHORT = 0.3  # seconds


class Training:
    """A model, one batch, and the forward and backward of a training step."""

    def __init__(self, method: str, setting: Setting) -> None:
        self.device = torch.device(setting.device)
        self.setting = setting
        torch.manual_seed(0)
        torch.set_num_threads(setting.threads)
        torch.set_float32_matmul_precision("high" if setting.precision == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = setting.precision == "tf32"
        torch.backends.cudnn.benchmark = True  # plain is to be at its best
        self.last = 0.0
        layout = LAYOUTS[setting.layout]
        model = METHODS[method].build(architecture(setting.model))
        self.model = model.to(self.device, memory_format=layout)
        shape = (setting.batch_size, 3, setting.image_size, setting.image_size)
        self.images = torch.randn(shape, device=self.device).contiguous(memory_format=layout)
        self.labels = torch.zeros(setting.batch_size, dtype=torch.long, device=self.device)

    def step(self) -> None:
        with self._autocast():
            loss = F.cross_entropy(self.model(self.images), self.labels)
        loss.backward()

    def seconds(self) -> float:
        """The time of a step. A short one is preceded by an untimed one, as waking up would be a visible part of it."""
        if self.last < SHORT:
            self.step()
        self.last = self._seconds(self.step)
        return self.last

    def prepare(self) -> dict[str, Any]:
        """The first steps in this process: what they hold, and how long the very first takes."""
        durations: list[float] = []
        peaks = measure(lambda: durations.append(self._seconds(self.step)), self.device)
        self.last = durations[-1]
        return {
            "tensor_peak": peaks.tensor,
            "process_peak": peaks.process,
            "first_step_s": durations[0],
            "device_name": device_name(self.device),
            "allocator": allocator(),
        }

    def _seconds(self, function: Callable[[], None]) -> float:
        self._wait()
        start = time.perf_counter()
        function()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _autocast(self) -> contextlib.AbstractContextManager:
        if self.setting.precision not in AUTOCAST:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=AUTOCAST[self.setting.precision])


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return "CPU"


def allocator() -> str:
    """What serves this process's memory: named by the library that is really mapped, not by what was asked for."""
    with contextlib.suppress(OSError), open("/proc/self/maps") as file:
        mapped = file.read()
        for name in ("tcmalloc", "jemalloc", "mimalloc"):
            if f"lib{name}" in mapped:
                return name
    return "system"


def free_bytes(device: torch.device) -> int | None:
    """What is left to other processes on the device; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError), open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed does not get among the answers
    method, setting = sys.argv[1], Setting(**json.loads(sys.argv[2]))
    training = None
    print(json.dumps({}), file=answers, flush=True)  # imported and ready
    for line in sys.stdin:
        try:
            if line.strip() == "prepare":
                training = Training(method, setting)
                answer = training.prepare()
            elif line.strip() == "step":
                answer = {"seconds": training.seconds()}
            else:
                answer = {"free": free_bytes(torch.device(setting.device))}
        except Exception as exc:  # whatever a method does wrong is its own row's affair
            first = (str(exc).strip().splitlines() or [""])[0]
            answer = {"error": OUT_OF_MEMORY if is_out_of_memory(exc) else f"{type(exc).__name__}: {first}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
