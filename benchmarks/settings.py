"""The configurations to measure, and the architectures of their models."""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from efficient_densenet.models.zoo import VARIANTS

PRECISIONS = ("float32", "tf32", "bf16", "fp16")
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


@dataclass(frozen=True)
class Setting:
    """The configuration that all methods of one comparison share."""

    model: str
    batch_size: int
    image_size: int
    precision: str
    layout: str
    device: str
    threads: int


def expand(
    model: Any,
    batch_size: Any,
    image_size: int = 0,
    precision: Any = "float32",
    layout: Any = "contiguous",
    device: str = "cpu",
    threads: int = 0,
) -> list[Setting]:
    """Return all combinations of the given models, batch sizes, precisions and layouts."""
    for name in as_list(precision):
        _check("precision", name, PRECISIONS)
        if name == "tf32" and not device.startswith("cuda"):
            raise ValueError(f"precision 'tf32' needs a CUDA device, found {device!r}: take 'float32' or 'bf16'")
    for name in as_list(layout):
        _check("layout", name, LAYOUTS)
    sizes = {name: image_size or default_image_size(name) for name in as_list(model)}
    threads = threads or torch.get_num_threads()
    combinations = itertools.product(sizes, as_list(batch_size), as_list(precision), as_list(layout))
    return [Setting(name, int(batch), sizes[name], p, at, device, threads) for name, batch, p, at in combinations]


def as_list(value: Any) -> list[Any]:
    """Return the values of an option. fire parses `8,64` as a tuple, and `8` as a number."""
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    return list(value) if isinstance(value, tuple | list) else [value]


def architecture(model: str) -> dict[str, Any]:
    """Return the arguments of `DenseNet` for a zoo model, or for any densenet_bc_<depth>_<growth rate>."""
    if model in VARIANTS:
        return VARIANTS[model]
    match = re.fullmatch(r"densenet_bc_(\d+)_(\d+)", model)
    depth, growth_rate = (int(number) for number in match.groups()) if match else (0, 0)
    if depth < 10 or (depth - 4) % 6 or not growth_rate:
        raise ValueError(
            f"unknown model {model!r}: take one of the zoo's ({', '.join(VARIANTS)}) or "
            "densenet_bc_<depth>_<growth rate> with a depth of 6n + 4"
        )
    return VARIANTS["densenet_bc_100_12"] | {
        "growth_rate": growth_rate,
        "block_config": ((depth - 4) // 6,) * 3,
        "num_init_features": 2 * growth_rate,
    }


def default_image_size(model: str) -> int:
    """Return the height and width of the images of CIFAR or ImageNet, whichever the model is for."""
    return 32 if architecture(model)["small_inputs"] else 224


def _check(option: str, name: str, allowed: Iterable[str]) -> None:
    if name not in allowed:
        raise ValueError(f"unknown {option} {name!r}: there are {', '.join(allowed)}")
