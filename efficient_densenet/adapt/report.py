"""The report of a conversion."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Changed:
    """A dense block that was changed.

    Attributes:
        name: the block's name in the model.
        layers: the number of its layers.
        engine: the engine that runs the block and, if it is not the best engine, the reason.
        recomputes: what the engine recomputes of each layer, such as "each layer whole"; "" where it runs the block at
            once.
    """

    name: str
    layers: int
    engine: str
    recomputes: str = ""

    def __str__(self) -> str:
        layers = "1 layer" if self.layers == 1 else f"{self.layers} layers"
        text = f"{self.name or 'the model'}: {layers}, {self.engine}"
        return f"{text}, recomputes {self.recomputes}" if self.recomputes else text


@dataclass
class Report:
    """The changes of a model by `make_efficient`, from `conversion_report`.

    The report is true if anything was changed; `print` shows all of it.

    Attributes:
        changed: the dense blocks that were changed.
        transitions: the names of the transitions that were converted; each is a stage of its own where it is called.
        unchanged: the names of modules that look like a dense block but were not converted, each with the reason.
    """

    changed: list[Changed] = field(default_factory=list)
    transitions: list[str] = field(default_factory=list)
    unchanged: dict[str, str] = field(default_factory=dict)

    def merge(self, names: Sequence[str], change: Changed) -> None:
        """Replace the entries of the blocks called `names` by `change`."""
        first = next((i for i, each in enumerate(self.changed) if each.name in names), None)
        if first is not None:
            self.changed[first] = change
            self.changed = [each for each in self.changed if each.name not in names]

    def __bool__(self) -> bool:
        return bool(self.changed)

    def __len__(self) -> int:
        return len(self.changed)

    def summary(self) -> str:
        """The report in a line, such as "3 of 4 dense blocks run by shared, 1 is left as it is: …"."""
        if not (self.changed or self.unchanged):
            return "found no dense block"
        total, parts = len(self.changed) + len(self.unchanged), list[str]()
        for engine in dict.fromkeys(change.engine.partition(" ")[0].rstrip(",") for change in self.changed):
            count = sum(change.engine.startswith(engine) for change in self.changed)
            parts.append(f"{count} of {_count(range(total), 'dense block')} run by {engine}")
        if self.unchanged:
            as_it_is = (
                "1 is left as it is" if len(self.unchanged) == 1 else f"{len(self.unchanged)} are left as they are"
            )
            parts.append(f"{as_it_is}: {'; '.join(dict.fromkeys(self.unchanged.values()))}")
        return ", ".join(parts)

    def __str__(self) -> str:
        if not (self.changed or self.unchanged):
            return "nothing to convert: found no dense block"
        lines = [f"{_count(self.changed, 'dense block')} changed" if self.changed else "nothing was changed"]
        seen = set[str]()
        for change in self.changed:  # each reason once
            name, has_reason, _ = change.engine.partition(" (")
            again = has_reason and change.engine in seen
            lines.append(f"  {replace(change, engine=f'{name} (for the same reason)') if again else change}")
            seen.add(change.engine)
        if self.transitions:
            names = ", ".join(self.transitions)
            lines.append(f"  {_count(self.transitions, 'transition')}, run with a block or alone: {names}")
        if self.unchanged:
            lines.append("not changed")
            for reason in dict.fromkeys(self.unchanged.values()):
                names = [name or "the model" for name, other in self.unchanged.items() if other == reason]
                others = [f"{len(names) - 3} more"] if len(names) > 4 else []
                listed = ", ".join(names[:3] if others else names)
                lines.append(f"  {' and '.join([listed, *others])}: {reason}")
        return "\n".join(lines)


def _count(items: Sequence[object], noun: str) -> str:
    return f"{len(items)} {noun}{'' if len(items) == 1 else 's'}"
