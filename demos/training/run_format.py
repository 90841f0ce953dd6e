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
from .schema import ANY_DICT, check_fields, check_file, equal_to, list_of, tensor_like, tensors_like, text

FORMAT = "efficient_densenet run 1"

_nonnegative = number(0, float("inf"), "[)")
_positive = number(0, float("inf"), "()")
_fraction = number(0, 1, "[]")
_pixels = integer(1, 2**16)
_mean, _std = number(0, 255, "[]"), number(0, 255, "(]")


def _or_empty(rule: Rule) -> Rule:
    return Rule(f"{rule.needed}, or an empty text", lambda value: equal_to("").accepts(value) or rule.accepts(value))


_LATER_OPTIONS = {
    *("mirror", "accept_changed_data", "cuda_graph", "weight_decay", "weights", "freeze", "keep_bottleneck"),
    *("parallel", "memory"),
}
"""Options that the first version did not have."""
_RECORD: dict[str, Any] = {
    "options": {f"?{name}" if name in _LATER_OPTIONS else name: rule for name, rule in RULES.items()},
    "model": {name: RULES[name] for name in ("model", "depth", "growth_rate", "drop_rate")}
    | {"channels": choice(1, 3), "image_size": _pixels, "classes": list_of(text())}
    | {"mean": list_of(_mean), "std": list_of(_std)},
    "data": {"name": text(), "train_pictures": integer(1, 2**40), "valid_pictures": integer(0, 2**40)}
    | {"test_pictures": integer(1, 2**40), "image_size": _pixels, "classes": list_of(text())}
    | {"?note": text(empty=True), "?fingerprint": text(), "?statistics": list_of(_mean)},  # not in all versions
}
_CONFIG = _RECORD | {"?checksum": text(), "?versions": {"efficient_densenet": text(), "torch": text(), ...: ...}}
_ROW = (
    dict.fromkeys(COLUMNS, _nonnegative)
    | {"epoch": integer(1), "train_error": _fraction, "valid_error": _or_empty(_fraction)}
    | {"valid_loss": _or_empty(_nonnegative), "test_error": _or_empty(_fraction)}
)
_LAST = _RECORD | {
    "format": equal_to(FORMAT),
    "position": {"epoch": integer(1), "step": integer(0)}
    | dict.fromkeys(("loss", "wrong", "seen", "seconds"), _nonnegative),
    "rows": [_ROW],
    "state": dict.fromkeys(("model", "optimizer", "scaler"), ANY_DICT),
}
_SCALER = {
    "scale": _positive,
    "growth_factor": number(1, float("inf"), "()"),
    "backoff_factor": number(0, 1, "()"),
    "growth_interval": integer(1),
    "_growth_tracker": integer(0),
}


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
    has_momentum = has_momentum or bool(content["state"]["optimizer"].get("state"))
    buffers = {i: {"momentum_buffer": tensor_like(parameter)} for i, parameter in parameters.items()}
    arguments = SGD_ARGUMENTS | {"weight_decay": content["options"].get("weight_decay", Options.weight_decay)}
    group = {name: equal_to(value) for name, value in (arguments | {"params": list(parameters)}).items()}
    optimizer = {
        "state": buffers if has_momentum else {},
        "param_groups": [{"lr": _nonnegative, **group, ...: ...}],  # other arguments belong to the version of PyTorch
    }
    scaler = _SCALER if uses_scaler else {}
    state = {"model": tensors_like(model.state_dict()), "optimizer": optimizer, "scaler": scaler}
    groups = content["state"]["optimizer"].get("param_groups")
    one_group = Rule("a list of 1", lambda value: isinstance(value, list) and len(value) == 1)
    check_fields(path, [("state", content["state"], state), ("state.optimizer.param_groups", groups, one_group)])


def _agreements(content: Mapping[str, Any]) -> Iterator[tuple[str, Any, Rule]]:
    """What the sections of a record say twice must be the same."""
    options, model, data = content["options"], content["model"], content["data"]
    from_zoo = options["model"] is not None
    yield "options.depth", options["depth"], equal_to(None) if from_zoo else DEPTH
    yield "options.growth_rate", options["growth_rate"], equal_to(None) if from_zoo else integer(1)
    for name in ("model", "depth", "growth_rate", "drop_rate"):
        yield f"model.{name}", model[name], equal_to(options[name])
    yield "model.mean", model["mean"], list_of(_mean, model["channels"])
    yield "model.std", model["std"], list_of(_std, model["channels"])
    if "statistics" in data:
        yield "data.statistics", data["statistics"], list_of(_mean, 2 * model["channels"])
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
    epochs, needed = [row["epoch"] for row in content["rows"]], list(range(1, position["epoch"]))
    yield "rows", epochs, Rule(f"a row of each of {len(needed)} epochs, in order", lambda value: value == needed)
