"""Which feature maps a backbone returns, and the description of each map.

Maps have timm's numbers: map 0 is the stem's output before its pooling, and map i the output of dense block i.
"""

from collections.abc import Sequence
from typing import Any

from .._checks import check, choice

MAPS = ("timm", "raw", "normalised_rectified")
"""Which map a dense block returns: `raw`, its output; `normalised_rectified`, the output of the norm and the ReLU that
follow it; `timm`, as in timm: raw maps, but the last map after norm and ReLU."""


class FeatureInfo:
    """The description of each map, as in timm's class of this name: `channels()`, `reduction()`, `module_name()`.

    Without an index, these methods describe the maps of `out_indices`.
    """

    def __init__(self, info: Sequence[dict[str, Any]], out_indices: Sequence[int]) -> None:
        self.info, self.out_indices = [dict(entry) for entry in info], tuple(out_indices)

    def channels(self, idx: int | Sequence[int] | None = None) -> Any:
        return self.get("num_chs", idx)

    def reduction(self, idx: int | Sequence[int] | None = None) -> Any:
        return self.get("reduction", idx)

    def module_name(self, idx: int | Sequence[int] | None = None) -> Any:
        return self.get("module", idx)

    def get(self, key: str, idx: int | Sequence[int] | None = None) -> Any:
        if isinstance(idx, int):
            return self.info[idx][key]
        return [self.info[i][key] for i in (self.out_indices if idx is None else idx)]

    def get_dicts(self, keys: Sequence[str] | None = None, idx: Sequence[int] | None = None) -> list[dict[str, Any]]:
        chosen = [self.info[i] for i in (self.out_indices if idx is None else idx)]
        return [{key: entry[key] for key in keys or entry} for entry in chosen]

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.info[index]

    def __len__(self) -> int:
        return len(self.info)

    def of_maps(self, out_indices: int | Sequence[int] | None, maps: str) -> "FeatureInfo":
        """The description for a backbone that returns these maps."""
        check("maps", maps, choice(*MAPS))
        blocks = range(1, len(self))
        names = {i: f"denseblock{i}" for i in blocks}
        if maps == "normalised_rectified":
            names |= {i: f"transition{i}.relu" for i in blocks}
        if maps != "raw":
            names[len(self) - 1] = "norm5"
        info = [entry | ({"module": f"features.{names[i]}"} if i in names else {}) for i, entry in enumerate(self.info)]
        return FeatureInfo(info, _indices(out_indices, len(self)))


def _indices(out_indices: int | Sequence[int] | None, count: int) -> tuple[int, ...]:
    if out_indices is None or (isinstance(out_indices, int) and 0 < out_indices <= count):
        return tuple(range(count))[-(out_indices or count) :]
    listed = [] if isinstance(out_indices, int) else list(out_indices)
    if listed and all(isinstance(i, int) and -count <= i < count for i in listed):
        resolved = tuple(i % count for i in listed)
        if len(set(resolved)) == len(resolved):
            return resolved
    raise ValueError(
        f"out_indices is {out_indices!r}, but must list some of 0 to {count - 1}, each once, or be the number of the "
        "last ones"
    )
