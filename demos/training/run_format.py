"""What config.json and last.pt contain: the rule of every field, and what fields must agree on.

Names such as "train_pictures" stay as they are: earlier versions wrote them, and their runs are resumed.
"""

from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn

from efficient_densenet._checks import Rule, choice, integer, number

from .freezing import trainable_parameters
from .loop import SGD_ARGUMENTS, num_steps
from .options import DEPTH, RULES, Options
from .results import COLUMNS
from .schema import Items, Record, check_fields, check_file, equal_to, tensor_like, tensors_like, text

FORMAT = "efficient_densenet run 1"

_nonnegative = number(0, float("inf"), "[)")
_positive = number(0, float("inf"), "()")
_fraction = number(0, 1, "[]")
_pixels = integer(1, 2**16)
_any_dict = Record({}, open=True)


def _or_empty(rule: Rule) -> Rule:
    return Rule(f"{rule.needed}, or an empty text", lambda value: equal_to("").accepts(value) or rule.accepts(value))


_MODEL = Record(
    {
        "model": RULES["model"],
        "depth": RULES["depth"],
        "growth_rate": RULES["growth_rate"],
        "drop_rate": RULES["drop_rate"],
        "channels": choice(1, 3),
        "image_size": _pixels,
        "classes": Items(text()),
        "mean": Items(number(0, 255, "[]")),
        "std": Items(number(0, 255, "(]")),
    }
)
_DATA = Record(
    {
        "name": text(),
        "train_pictures": integer(1, 2**40),
        "valid_pictures": integer(0, 2**40),
        "test_pictures": integer(1, 2**40),
        "image_size": _pixels,
        "classes": Items(text()),
        "note": text(empty=True),
        "fingerprint": text(),
        "statistics": Items(number(0, 255, "[]")),
    },
    may_lack=frozenset({"fingerprint", "statistics", "note"}),  # some versions recorded none
)
_LATER_OPTIONS = frozenset(
    {"mirror", "accept_changed_data", "cuda_graph", "weight_decay", "weights", "freeze", "keep_bottleneck"}
)
"""Options that the first version did not have."""

_RECORD: dict[Any, Any] = {
    "options": Record(RULES, may_lack=_LATER_OPTIONS),
    "model": _MODEL,
    "data": _DATA,
}
_CONFIG = Record(
    _RECORD | {"checksum": text(), "versions": Record({"efficient_densenet": text(), "torch": text()}, open=True)},
    may_lack=frozenset({"checksum", "versions"}),
)
_POSITION = Record(
    {"epoch": integer(1), "step": integer(0)} | dict.fromkeys(("loss", "wrong", "seen", "seconds"), _nonnegative)
)
_ROW = Record(
    dict.fromkeys(COLUMNS, _nonnegative)
    | {"epoch": integer(1), "train_error": _fraction, "valid_error": _or_empty(_fraction)}
    | {"valid_loss": _or_empty(_nonnegative), "test_error": _or_empty(_fraction)}
)
_LAST = Record(
    {
        "format": equal_to(FORMAT),
        **_RECORD,
        "position": _POSITION,
        "rows": Items(_ROW, at_least=0),
        "state": Record(dict.fromkeys(("model", "optimizer", "scaler"), _any_dict)),
    }
)


def check_config(path: Path, content: Any) -> None:
    """Raise unless `content` is what config.json contains."""
    check_file(path, content, _CONFIG)
    check_fields(path, _agreements(content))


def check_last(path: Path, content: Any) -> None:
    """Raise unless `content` is what last.pt contains, but for its tensors."""
    check_file(path, content, _LAST)
    check_fields(path, chain(_agreements(content), _progress(content)))


def check_state(path: Path, content: dict[str, Any], model: nn.Module) -> None:
    """Raise unless `content`, of last.pt, has a state of `model` and of its optimizer."""
    position, parameters = content["position"], dict(enumerate(trainable_parameters(model)))
    uses_scaler = content["options"]["amp"] == "fp16"  # which leaves out steps whose gradients overflow
    has_momentum = (position["epoch"] > 1 or position["step"] > 0) and not uses_scaler
    buffers = {i: Record({"momentum_buffer": tensor_like(parameter)}) for i, parameter in parameters.items()}
    group = {"lr": _nonnegative, "params": equal_to(list(parameters))}
    arguments = SGD_ARGUMENTS | {"weight_decay": content["options"].get("weight_decay", Options.weight_decay)}
    group |= {name: equal_to(value) for name, value in arguments.items()}
    found = content["state"]["optimizer"].get("state")
    optimizer = {
        "state": Record(buffers if found or has_momentum else {}),
        "param_groups": Items(Record(group, open=True)),  # other arguments belong to the version of PyTorch
    }
    scaler = _SCALER if uses_scaler else Record({})
    state = Record({"model": tensors_like(model.state_dict()), "optimizer": Record(optimizer), "scaler": scaler})
    check_file(path, {"state": content["state"]}, Record({"state": state}))


_SCALER = Record(
    {
        "scale": _positive,
        "growth_factor": number(1, float("inf"), "()"),
        "backoff_factor": number(0, 1, "()"),
        "growth_interval": integer(1),
        "_growth_tracker": integer(0),
    }
)


def _agreements(content: Mapping[str, Any]) -> Iterator[tuple[str, Any, Rule]]:
    """What the sections of a record say twice must be the same."""
    options, model, data = content["options"], content["model"], content["data"]
    from_zoo = options["model"] is not None
    yield "options.depth", options["depth"], equal_to(None) if from_zoo else DEPTH
    yield "options.growth_rate", options["growth_rate"], equal_to(None) if from_zoo else integer(1)
    for name in ("model", "depth", "growth_rate", "drop_rate"):
        yield f"model.{name}", model[name], equal_to(options[name])
    for name in ("mean", "std"):
        yield f"model.{name}", model[name], _of_length(model["channels"])
    if "statistics" in data:
        yield "data.statistics", data["statistics"], _of_length(2 * model["channels"])
    for name in ("image_size", "classes"):
        yield f"data.{name}", data[name], equal_to(model[name])


def _progress(content: Mapping[str, Any]) -> Iterator[tuple[str, Any, Rule]]:
    """The position and the rows must be ones that a run of these options reaches."""
    options, position = content["options"], content["position"]
    n_epochs, num_images = options["n_epochs"], content["data"]["train_pictures"]
    last_step = num_steps(num_images, options["batch_size"]) if position["epoch"] <= n_epochs else 0
    seen = position["step"] * min(options["batch_size"], num_images)
    yield "position.epoch", position["epoch"], integer(1, n_epochs + 1)
    yield "position.step", position["step"], integer(0, last_step)
    yield "position.seen", position["seen"], Rule(str(seen), lambda value: value == seen)
    yield "position.wrong", position["wrong"], number(0, seen, "[]")
    yield "position.seconds", position["seconds"], _positive if seen else _nonnegative
    yield "rows", content["rows"], _of_length(position["epoch"] - 1)
    for i, row in enumerate(content["rows"]):
        yield f"rows.{i}.epoch", row["epoch"], equal_to(i + 1)


def _of_length(length: int) -> Rule:
    return Rule(f"a list of {length}", lambda value: len(value) == length)
