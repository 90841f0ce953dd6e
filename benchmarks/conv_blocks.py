"""The time and the memory of training dense blocks without norms: plain, converted, and each block recomputed.

    python benchmarks/conv_blocks.py --blocks 4 --batch_size 4 --image_size 48

The network is ESRGAN's without its upsampling: groups of three residual dense blocks of five convolutions. Its steps
by all methods alternate in one process; a ratio compares two steps of the same round.
"""

import copy
import statistics
import time
from collections.abc import Iterator

import torch
from options import run_command
from torch import Tensor, nn

from efficient_densenet import make_efficient
from efficient_densenet.checkpoint import checkpoint_wrapper
from efficient_densenet.memory import tensor_peak
from efficient_densenet.memory.sizes import UNITS


class ResidualDenseBlock(nn.Module):
    """Four convolutions with activations, and a last one, on a growing concatenation."""

    def __init__(self, channels: int, growth_rate: int) -> None:
        super().__init__()
        widths = [growth_rate] * 4 + [channels]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(channels + i * growth_rate, width, 3, padding=1) for i, width in enumerate(widths)
        )
        self.activation = nn.LeakyReLU(0.2, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        *layers, last = self.convolutions
        features = x
        for layer in layers:
            features = torch.cat([features, self.activation(layer(features))], 1)
        return last(features) * 0.2 + x


class Group(nn.Sequential):
    """Three blocks, scaled and added to the input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.2 + x


def compare(
    channels: int = 64,
    growth_rate: int = 32,
    blocks: int = 4,
    batch_size: int = 4,
    image_size: int = 48,
    rounds: int = 7,
) -> None:
    """Print a table with a line for each method.

    channels, growth_rate: of a block.
    blocks: how many groups of three blocks.
    batch_size: number of images.
    image_size: height and width of the images.
    rounds: steps by each method, which alternate.
    """
    torch.manual_seed(0)
    groups = (Group(*(ResidualDenseBlock(channels, growth_rate) for _ in range(3))) for _ in range(blocks))
    plain = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), *groups, nn.Conv2d(channels, 3, 3, padding=1))
    for line in _table(_methods(plain), torch.randn(batch_size, 3, image_size, image_size), rounds):
        print(line)


def _methods(plain: nn.Module) -> dict[str, nn.Module]:
    converted, recomputed = copy.deepcopy(plain), copy.deepcopy(plain)
    make_efficient(converted)
    for group in (module for module in recomputed.modules() if isinstance(module, Group)):
        for i, block in enumerate(group):
            group[i] = checkpoint_wrapper(block)
    return {"plain": plain, "`make_efficient`": converted, "`checkpoint_wrapper` of each block": recomputed}


def _table(methods: dict[str, nn.Module], images: Tensor, rounds: int) -> Iterator[str]:
    peaks, seconds = [], {name: list[float]() for name in methods}
    for network in methods.values():
        _step(network, images)
        peaks.append(tensor_peak(lambda network=network: _step(network, images)))
    for _ in range(rounds):
        for name, network in methods.items():
            start = time.perf_counter()
            _step(network, images)
            seconds[name].append(time.perf_counter() - start)
    yield "| method | tensor peak | of plain's | time of a step | of plain's |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for (name, times), peak in zip(seconds.items(), peaks, strict=True):
        ratio = statistics.median(one / other for one, other in zip(times, seconds["plain"], strict=True))
        memory = f"{peak / UNITS['MiB']:,.1f} MiB | {peak / peaks[0]:.2f}"
        yield f"| {name} | {memory} | {1000 * statistics.median(times):,.0f} ms | {ratio:.2f} |"


def _step(network: nn.Module, images: Tensor) -> None:
    network(images).square().mean().backward()


if __name__ == "__main__":
    run_command(compare)
