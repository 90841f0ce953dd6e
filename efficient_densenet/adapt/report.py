"""What a conversion did."""

from dataclasses import dataclass, field

from ..engines.parts import BlockParts


@dataclass(frozen=True)
class Changed:
    """A dense block that was changed: how it runs, and how many numbers of each pixel its backward needs kept."""

    name: str
    layers: int
    engine: str
    kept_before: int
    kept: int

    def __str__(self) -> str:
        layers = "1 layer" if self.layers == 1 else f"{self.layers} layers"
        saving = f", keeping {self.kept:,} numbers for a pixel instead of {self.kept_before:,}"
        return f"{self.name or 'the model'}: {layers}, {self.engine}" + (saving if self.kept < self.kept_before else "")


@dataclass
class Report:
    """What `make_efficient` changed in a model and what not: true if anything; `print` shows it all.

    Attributes:
        changed: dense blocks.
        joined: sequences whose blocks now run together with the transition or norm after them.
        unchanged: names of what looks like a dense block but is not run as one, and why.
    """

    changed: list[Changed] = field(default_factory=list)
    joined: list[str] = field(default_factory=list)
    unchanged: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.changed)

    def __len__(self) -> int:
        return len(self.changed)

    def __str__(self) -> str:
        if not (self.changed or self.unchanged):
            return "nothing to convert: found no dense block"
        number = f"{len(self.changed)} dense block{'' if len(self.changed) == 1 else 's'}"
        lines = [f"{number} changed" if self.changed else "nothing was converted"]
        lines += [f"  {change}" for change in self.changed]
        lines += [f"  {name or 'the model'}: blocks run together with what follows them" for name in self.joined]
        if self.unchanged:
            lines.append("not changed")
            lines += [f"  {name or 'the model'}: {reason}" for name, reason in self.unchanged.items()]
        return "\n".join(lines)


def kept(block: BlockParts, engine: str) -> int:
    """Numbers for each pixel that the backward of a block needs.

    Plain keeps each concatenation and what it becomes when normalised and rectified, the bottleneck likewise, and what
    is made. Recomputation keeps what is made and the second half; `shared` what is made and bottlenecks as told.
    """
    total = block.layers[0].conv1.in_channels
    for layer in block.layers:
        width = 0 if layer.conv2 is None else layer.conv2.in_channels
        total += layer.last.out_channels
        if engine == "plain":
            total += 2 * layer.conv1.in_channels + 2 * width
        else:
            total += width * layer.keep_bottleneck if engine == "shared" else 2 * width
    return total
