"""Compare dense blocks without norms, converted by `make_efficient`, with plain ones and with `checkpoint_wrapper`.

    python benchmarks/conv_blocks.py --batch-size 4 --image-size 64 --rounds 10

The models are trunks of residual dense blocks as in ESRGAN and in RDN, and a flow estimator as in PWC-Net. The methods
take one step each in turn, so that a ratio compares two steps of the same round. A step is forward and backward, and
the memory is its tensor peak. The results are a CSV file in benchmarks/results.
"""

import copy
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rows as results
import torch
from options import run_command
from torch import Tensor, nn

from efficient_densenet import make_efficient
from efficient_densenet.checkpoint import checkpoint_wrapper
from efficient_densenet.memory import tensor_peak

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from conv_families import FlowEstimator, LocalFusion, ResidualInResidual

WARM_UP_ROUNDS = 2
METHODS = ("plain", "converted", "checkpoint_wrapper")


class Estimator(nn.Module):
    """A flow estimator that returns one tensor, as a network's other modules read it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.estimator = FlowEstimator(channels, (128, 128, 96, 64, 32))

    def forward(self, x: Tensor) -> Tensor:
        features, flow = self.estimator(x)
        return features.mean(1, keepdim=True) + flow


MODELS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "rrdb": (lambda: nn.Sequential(ResidualInResidual(64, 32), ResidualInResidual(64, 32)), 64),
    "rdn": (lambda: nn.Sequential(*(LocalFusion(False, 64, 64, 8) for _ in range(3))), 64),
    "flow": (lambda: Estimator(115), 115),
}
"""Each model, with as many channels as its input has."""
BLOCKS = ("ResidualDense", "LocalFusion", "FlowEstimator")


def measure(
    *models: str,
    batch_size: int = 4,
    image_size: int = 64,
    rounds: int = 10,
    precision: str = "float32",
    layout: str = "",
) -> None:
    """Run the benchmark and write its CSV file.

    Args:
        models: rrdb, rdn or flow; all of them by default.
        batch_size: number of images.
        image_size: pixels a side.
        rounds: number of timed steps.
        precision: float32, or bfloat16 for autocast.
        layout: channels_last for models and images in that memory format.
    """
    measured = []
    for name in models or MODELS:
        build, channels = MODELS[name]
        x = torch.randn(batch_size, channels, image_size, image_size)
        setting = {"model": name, "batch_size": batch_size, "image_size": image_size}
        setting |= {"precision": precision, "layout": layout or "contiguous"}
        measured += _measure_model(setting, build(), x, rounds)
    version = torch.__version__.split("+")[0]
    results.write(results.RESULTS / f"conv_blocks_torch{version}_{batch_size}x{image_size}_{precision}.csv", measured)


def _measure_model(setting: dict[str, Any], plain: nn.Module, x: Tensor, rounds: int) -> list[dict[str, Any]]:
    if setting["layout"] == "channels_last":
        plain, x = plain.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    steps = {method: _step(_by(method, plain), x, setting["precision"]) for method in METHODS}
    times: dict[str, list[float]] = {method: [] for method in METHODS}
    for _ in range(WARM_UP_ROUNDS + rounds):
        for method, step in steps.items():
            start = time.perf_counter()
            step()
            times[method].append(time.perf_counter() - start)
    peaks = {method: tensor_peak(step) for method, step in steps.items()}
    measured = []
    for method in METHODS:
        timed, of_plain = times[method][WARM_UP_ROUNDS:], times["plain"][WARM_UP_ROUNDS:]
        ratios = [seconds / plain_seconds for seconds, plain_seconds in zip(timed, of_plain, strict=True)]
        row = setting | {
            "method": method,
            "tensor_peak_mib": round(peaks[method] / 2**20, 1),
            "tensor_peak_over_plain": round(peaks[method] / peaks["plain"], 3),
            "step_s_median": round(statistics.median(timed), 4),
            "time_over_plain_median": round(statistics.median(ratios), 3),
            "rounds": rounds,
            "threads": torch.get_num_threads(),
            **results.provenance(),
        }
        print(
            *(row[key] for key in ("model", "method", "tensor_peak_over_plain", "time_over_plain_median")), flush=True
        )
        measured.append(row)
    return measured


def _by(method: str, plain: nn.Module) -> nn.Module:
    """A copy of the model that runs by this method."""
    model = copy.deepcopy(plain)
    if method == "converted":
        make_efficient(model)
    elif method == "checkpoint_wrapper":
        for module in list(model.modules()):
            if type(module).__name__ in BLOCKS:
                checkpoint_wrapper(module)
    return model


def _step(model: nn.Module, x: Tensor, precision: str) -> Callable[[], None]:
    x = x.detach().requires_grad_()  # as within a network

    def step() -> None:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
            output = model(x)
        output.sum().backward()

    return step


if __name__ == "__main__":
    run_command(measure)
