"""What is measured: the setting that all methods share in one comparison, and the lists of options that make many."""

import itertools
import re
from dataclasses import dataclass
from typing import Any

import torch

from efficient_densenet.models.zoo import VARIANTS

PRECISIONS = ("float32", "tf32", "bf16", "fp16")
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


@dataclass(frozen=True)
class Setting:
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
    """Every combination of what `model`, `batch_size`, `precision` and `layout` list."""
    for name in many(precision):
        _check("precision", name, PRECISIONS)
        if name == "tf32" and not device.startswith("cuda"):
            raise ValueError(f"precision 'tf32' needs a CUDA device, found {device!r}: take 'float32' or 'bf16'")
    for name in many(layout):
        _check("layout", name, LAYOUTS)
    sizes = {name: image_size or usual_image_size(name) for name in many(model)}
    threads = threads or torch.get_num_threads()
    combinations = itertools.product(sizes, many(batch_size), many(precision), many(layout))
    return [Setting(name, int(batch), sizes[name], p, at, device, threads) for name, batch, p, at in combinations]


def many(value: Any) -> list[Any]:
    """The values of an option: fire makes a tuple of `8,64` and leaves `8` a number."""
    if isinstance(value, str):
        return [word.strip() for word in value.split(",") if word.strip()]
    return list(value) if isinstance(value, tuple | list) else [value]


def architecture(model: str) -> dict[str, Any]:
    """The arguments of `DenseNet` for a zoo model, or for any densenet_bc_<depth>_<growth rate>."""
    if model in VARIANTS:
        return VARIANTS[model]
    found = re.fullmatch(r"densenet_bc_(\d+)_(\d+)", model)
    depth, growth = (int(number) for number in found.groups()) if found else (0, 0)
    if depth < 10 or (depth - 4) % 6 or not growth:
        raise ValueError(
            f"unknown model {model!r}: take one of the zoo's ({', '.join(VARIANTS)}) or "
            "densenet_bc_<depth>_<growth rate> with a depth of 6n + 4"
        )
    blocks = ((depth - 4) // 6,) * 3
    return VARIANTS["densenet_bc_100_12"] | {
        "growth_rate": growth,
        "block_config": blocks,
        "num_init_features": 2 * growth,
    }


def usual_image_size(model: str) -> int:
    return 32 if architecture(model)["small_inputs"] else 224


def _check(what: str, name: str, known: Any) -> None:
    if name not in known:
        raise ValueError(f"unknown {what} {name!r}: there are {', '.join(known)}")
