"""How much memory a step will take, told from two small ones; and what to do when it was too much."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from ..memory import tensor_peak
from ..models.densenet import DenseNet
from .options import Options
from .report import mib

_FEW, _MORE = 8, 16
_STATE_OF_A_PARAMETER = 3  # itself, its gradient and its momentum


class StepMemory:
    """The peak of a training step as a straight line in the number of pictures, on this device and by this engine."""

    def __init__(self, model: DenseNet, image_size: int, options: Options, engine: bool | str) -> None:
        self.state = _STATE_OF_A_PARAMETER * sum(p.numel() * p.element_size() for p in model.parameters())
        self.state += sum(b.numel() * b.element_size() for b in model.buffers())
        trial = copy.deepcopy(model).set_engine(True if engine == "best" else engine)
        few, more = (_peak(trial, number, image_size, options) for number in (_FEW, _MORE))
        self.each = max(more - few, 0) / (_MORE - _FEW)
        self.fixed = max(few - _FEW * self.each, 0)

    def of(self, number: int) -> int:
        return round(self.state + self.fixed + self.each * number)


def _peak(model: DenseNet, number: int, size: int, options: Options) -> int:
    parameter = next(model.parameters())
    images = torch.zeros(number, model.in_channels, size, size, dtype=parameter.dtype, device=parameter.device)
    labels = torch.zeros(number, dtype=torch.long, device=parameter.device)
    kind = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(options.amp)

    def step() -> None:
        with torch.autocast(parameter.device.type, kind, enabled=kind is not None):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()

    step()  # gradients are there from now on, and counted with the parameters
    return tensor_peak(step, parameter.device)


def advice(model: nn.Module, image_size: int, options: Options, peak: int, available: int, pictures: int) -> str:
    """What was too much, and the least change that fits: another engine first, then smaller micro-batches."""
    found = (
        f"out of memory in a step of {pictures} pictures with engine {options.engine}: tensors had reached {mib(peak)} "
        f"of {mib(available)}"
    )
    here = StepMemory(model, image_size, options, options.engine)
    choices = {options.engine: here}
    if options.engine != "best":
        choices["best"] = best = StepMemory(model, image_size, options, "best")
        if best.of(pictures) <= available:
            return f"{found}; --engine best would fit, with about {mib(best.of(pictures))}"
    for engine, memory in choices.items():
        fitting = [2**i for i in range(pictures.bit_length()) if 2**i < pictures and memory.of(2**i) <= available]
        if fitting:
            named = "" if engine == options.engine else f"--engine {engine} "
            need = mib(memory.of(fitting[-1]))
            return f"{found}; {named}--micro_batch_size {fitting[-1]} would fit, with about {need}"
    return (
        f"{found}, and even one picture at a time needs about {mib(here.of(1))}: use a smaller model or a larger device"
    )
