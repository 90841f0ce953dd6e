"""The methods that `gpu_model` estimates, measured on the GPU of this machine."""

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
from settings import Setting
from worker import Training

from efficient_densenet.memory import tensor_peak

WARM_UP_STEPS, TIMED_STEPS = 5, 20


class Measured(NamedTuple):
    """The median seconds of a step, and its tensor peak; None for a captured step, whose memory is the graph's own."""

    seconds: float
    tensor_peak: int | None


def measure_method(method: str, setting: Setting) -> Measured:
    """A step as `gpu_step` traces it, with its gradients None before; graph_… is the step captured in a CUDA graph."""
    captured = method.startswith("graph_")
    training = Training(method.removeprefix("graph_"), setting)

    def step() -> None:
        for parameter in training.model.parameters():
            parameter.grad = None
        training.step()

    for _ in range(WARM_UP_STEPS):
        step()
    if captured:
        return Measured(_median_seconds(_captured(step)), None)
    seconds = _median_seconds(step)
    for parameter in training.model.parameters():
        parameter.grad = None  # a step's gradients are part of its peak
    return Measured(seconds, tensor_peak(training.step, setting.device))


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def _median_seconds(step: Callable[[], None]) -> float:
    times = []
    for _ in range(TIMED_STEPS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        step()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return statistics.median(times)
