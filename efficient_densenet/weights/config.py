"""The model of a training run, as config.json beside its weights describes it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._checks import Rule, integer
from .transforms import ImageTransform

DEPTH = Rule("6n + 4, such as 22, 40 or 100", lambda depth: integer(10, 10_000).accepts(depth) and depth % 6 == 4)


@dataclass(frozen=True)
class ModelConfig:
    """What building a trained model again needs, and preparing images for it. config.json has these names as keys."""

    model: str | None
    depth: int | None
    growth_rate: int | None
    drop_rate: float
    channels: int
    image_size: int
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    value_range: tuple[float, float] | None = None

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> "ModelConfig":
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in entries.items()}
        return cls(**values)

    @classmethod
    def beside(cls, weights: Path) -> "ModelConfig":
        """The config of a run, in the folder of its file of weights."""
        path = weights.with_name("config.json")
        try:
            return cls.of(json.loads(path.read_bytes())["model"])
        except OSError as exc:
            raise ValueError(
                f"{path} cannot be read ({exc.strerror}), which says what the classes of {weights.name} are and how "
                "images are prepared for it: give the file in the folder of a run of the demos"
            ) from exc
        except (ValueError, KeyError, TypeError) as exc:
            raise ValueError(f"{path} is damaged ({exc!r}): restore it from a copy or from the repository") from exc

    @property
    def name(self) -> str:
        return self.model or f"DenseNet-BC-{self.depth}-{self.growth_rate}"

    def transforms(self) -> ImageTransform:
        return ImageTransform(self.image_size, self.mean, self.std, self.value_range)
