"""The report of a conversion."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..engine.choose import Engine
from ..engine.parts import BlockParts


@dataclass(frozen=True)
class Changed:
    """A dense block that was changed.

    Attributes:
        name: the block's name in the model.
        layers: the number of its layers.
        engine: the engine that runs the block and, if it is not the best engine, the reason.
        kept_before: the values per pixel that plain modules save for backward.
        kept: the values per pixel that the engine saves for backward.
    """

    name: str
    layers: int
    engine: str
    kept_before: int
    kept: int

    def __str__(self) -> str:
        layers = "1 layer" if self.layers == 1 else f"{self.layers} layers"
        saving = f", saves {self.kept:,} values per pixel for backward instead of {self.kept_before:,}"
        return f"{self.name or 'the model'}: {layers}, {self.engine}" + (saving if self.kept < self.kept_before else "")


@dataclass
class Report:
    """The changes of a model by `make_efficient`. The report is true if anything was changed; `print` shows all of it.

    Attributes:
        changed: the dense blocks that were changed.
        joined: the names of sequences in which a block runs together with the transition or norm after it, if the
            author's forward calls the sequence rather than the modules in it.
        transitions: the names of the transitions that were converted; each is a stage of its own where it is called.
        unchanged: the names of modules that look like a dense block but were not converted, each with the reason.
        recomputable: the names in `unchanged` of modules that `checkpoint_wrapper` can recompute as a whole.
    """

    changed: list[Changed] = field(default_factory=list)
    joined: list[str] = field(default_factory=list)
    transitions: list[str] = field(default_factory=list)
    unchanged: dict[str, str] = field(default_factory=dict)
    recomputable: list[str] = field(default_factory=list)

    def merge(self, names: Sequence[str], change: Changed) -> None:
        """Replace the entries of the blocks called `names` by `change`."""
        first = next((i for i, each in enumerate(self.changed) if each.name in names), None)
        if first is not None:
            self.changed[first] = change
            self.changed = [each for each in self.changed if each.name not in names]

    def forget(self, name: str) -> None:
        """Remove the entries of a module that was not changed."""
        self.unchanged.pop(name, None)
        self.recomputable = [each for each in self.recomputable if each != name]

    def __bool__(self) -> bool:
        return bool(self.changed)

    def __len__(self) -> int:
        return len(self.changed)

    def __str__(self) -> str:
        if not (self.changed or self.unchanged):
            return "nothing to convert: found no dense block"
        lines = [f"{_count(self.changed, 'dense block')} changed" if self.changed else "nothing was changed"]
        lines += [f"  {change}" for change in self.changed]
        lines += [
            f"  {name or 'the model'}: where it is called itself, blocks run together with the module after them"
            for name in self.joined
        ]
        if self.transitions:
            names = ", ".join(self.transitions)
            lines.append(f"  {_count(self.transitions, 'transition')}, run with a block or alone: {names}")
        if self.unchanged:
            lines.append("not changed")
            lines += [f"  {name or 'the model'}: {reason}" for name, reason in self.unchanged.items()]
        if self.recomputable:
            lines += ["to recompute such a block as a whole (efficient_densenet.checkpoint)", f"  {self._snippet()}"]
        return "\n".join(lines)

    def _snippet(self) -> str:
        name = self.recomputable[0]
        return f"checkpoint_wrapper(model.get_submodule({name!r}))" if name else "checkpoint_wrapper(model)"


def _count(items: Sequence[object], noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"


def saved_values_per_pixel(block: BlockParts, engine: Engine) -> int:
    """The values per pixel that `engine` saves for the backward of a block.

    All engines save the block's input and each layer's output. Plain also saves the inputs of both norms and both
    convolutions of a layer. Official and checkpoint save the inputs of the second norm and convolution only. The
    shared engine saves no inputs, but the bottleneck of a layer with `keep_bottleneck`.
    """
    total = block.layers[0].conv1.in_channels
    for layer in block.layers:
        width = 0 if layer.conv2 is None else layer.conv2.in_channels
        total += layer.last_conv.out_channels
        if engine is Engine.PLAIN:
            total += 2 * layer.conv1.in_channels + 2 * width
        else:
            total += width * layer.keep_bottleneck if engine is Engine.SHARED else 2 * width
    return total
