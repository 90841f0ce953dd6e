"""The report of a conversion."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch.nn.functional as F

from ..engine.choose import Engine
from ..engine.parts import BlockParts, LayerParts


@dataclass(frozen=True)
class Changed:
    """A dense block that was changed.

    Attributes:
        name: the block's name in the model.
        layers: the number of its layers.
        engine: the engine that runs the block and, if it is not the best engine, the reason.
        kept_before: the values per pixel that plain modules save for backward.
        kept: the values per pixel that the engine saves for backward.
        recomputes: what the engine recomputes of each layer, such as "each layer whole"; "" where it runs the block at
            once.
    """

    name: str
    layers: int
    engine: str
    kept_before: int
    kept: int
    recomputes: str = ""

    def __str__(self) -> str:
        layers = "1 layer" if self.layers == 1 else f"{self.layers} layers"
        text = f"{self.name or 'the model'}: {layers}, {self.engine}"
        if self.recomputes:
            text += f", recomputes {self.recomputes}"
        if self.kept < self.kept_before:
            text += f", saves {self.kept:,} values per pixel for backward instead of {self.kept_before:,}"
        return text


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
        lines: for each dense block that is lines of a network's own forward, the names of the modules that they use,
            and the network's name.
    """

    changed: list[Changed] = field(default_factory=list)
    joined: list[str] = field(default_factory=list)
    transitions: list[str] = field(default_factory=list)
    unchanged: dict[str, str] = field(default_factory=dict)
    recomputable: list[str] = field(default_factory=list)
    lines: dict[tuple[str, ...], str] = field(default_factory=dict)

    def merge(self, names: Sequence[str], change: Changed) -> None:
        """Replace the entries of the blocks called `names` by `change`."""
        first = next((i for i, each in enumerate(self.changed) if each.name in names), None)
        if first is not None:
            self.changed[first] = change
            self.changed = [each for each in self.changed if each.name not in names]

    def forget(self, *names: str) -> None:
        """Remove the entries of modules that were not changed."""
        self.unchanged = {name: reason for name, reason in self.unchanged.items() if name not in names}
        self.recomputable = [name for name in self.recomputable if name not in names]

    def __bool__(self) -> bool:
        return bool(self.changed)

    def __len__(self) -> int:
        return len(self.changed)

    def __str__(self) -> str:
        if not (self.changed or self.unchanged or self.lines):
            return "nothing to convert: found no dense block"
        lines = [f"{_count(self.changed, 'dense block')} changed" if self.changed else "nothing was changed"]
        lines += [f"  {text}" for text in self._changes()]
        lines += [
            f"  {name or 'the model'}: where it is called itself, blocks run together with the module after them"
            for name in self.joined
        ]
        if self.transitions:
            names = ", ".join(self.transitions)
            lines.append(f"  {_count(self.transitions, 'transition')}, run with a block or alone: {names}")
        if self.unchanged:
            lines.append("not changed")
            for reason in dict.fromkeys(self.unchanged.values()):
                names = [name or "the model" for name, other in self.unchanged.items() if other == reason]
                lines.append(f"  {_listed(names)}: {reason}")
        for names, network in self.lines.items():
            lines += [f"dense lines in the forward of {network or 'the model'}", f"  {_advice(names)}"]
        if self.recomputable:
            lines += ["to recompute such a block as a whole (efficient_densenet.checkpoint)", f"  {self._snippet()}"]
        return "\n".join(lines)

    def _changes(self) -> Iterator[str]:
        """The entries of `changed`, each reason once."""
        seen = set[str]()
        for change in self.changed:
            name, has_reason, _ = change.engine.partition(" (")
            again = has_reason and change.engine in seen
            yield str(replace(change, engine=f"{name} (for the same reason)") if again else change)
            seen.add(change.engine)

    def _snippet(self) -> str:
        name = self.recomputable[0]
        return f"checkpoint_wrapper(model.get_submodule({name!r}))" if name else "checkpoint_wrapper(model)"


def _listed(names: Sequence[str]) -> str:
    """Some names, such as "blocks.0.layer1, blocks.0.layer2, … and 25 more"."""
    return ", ".join(names) if len(names) <= 4 else f"{', '.join(names[:3])} and {len(names) - 3} more"


def _advice(names: Sequence[str]) -> str:
    return (
        f"{names[0]} to {names[-1]} look like the {len(names)} layers of a dense block: make them and these lines a "
        "module of their own, which make_efficient tries, or a method, which efficient_densenet.checkpoint recomputes"
    )


def _count(items: Sequence[object], noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"


def saved_values_per_pixel(block: BlockParts, engine: Engine) -> float:
    """The values per pixel that `engine` saves for the backward of a block.

    Plain saves the inputs of both norms and both convolutions of a layer. The others save the block's input and each
    layer's output; official and checkpoint also the inputs of the second norm and convolution, but not the last layer's
    output; the shared engine also the bottleneck of a layer with `keep_bottleneck`. All save the masks of dropout.
    """
    total: float = 0 if engine is Engine.PLAIN else block.layers[0].conv1.in_channels
    for layer in block.layers:
        width = 0 if layer.conv2 is None else layer.conv2.in_channels
        if engine is Engine.PLAIN:
            total += 2 * layer.conv1.in_channels + 2 * width
        elif engine is Engine.SHARED:
            total += layer.last_conv.out_channels + width * bool(layer.keep_bottleneck)
        else:
            total += layer.last_conv.out_channels * (layer is not block.layers[-1]) + 2 * width
        total += _mask_values(layer, engine) if layer.drop_rate > 0 else 0
    return total


def _mask_values(layer: LayerParts, engine: Engine) -> float:
    """The values per pixel of a dropout's mask. The shared engine and GPUs have a byte for each value. A dropout of
    whole channels has none in PyTorch."""
    growth_rate, weight = layer.last_conv.out_channels, next(layer.last_conv.parameters())
    if engine is Engine.SHARED:
        return growth_rate / weight.itemsize
    if layer.dropout is not F.dropout:
        return 0
    return growth_rate if weight.device.type == "cpu" else growth_rate / weight.itemsize
