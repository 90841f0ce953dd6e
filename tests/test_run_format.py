"""config.json, last.pt and model.pt that hold what nobody wrote: every field of real ones, changed in turn."""

import copy
import functools
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from samples import DIGITS, IMAGE, RUN, contents, demo, demo_stopped, refused
from training import run_format
from training.loop import SGD_ARGUMENTS
from training.models import check_weights

from efficient_densenet import DenseNet

MISSING, EXTRA = "missing", "extra"

WRONG = {
    bool: ["yes", 2, None, []],
    int: ["three", -1, 2.5, True, None, math.nan, 10**30, torch.zeros(1), [1]],
    float: ["much", math.nan, math.inf, True, -1.0, None, 10**400, torch.zeros(1), {}],
    str: [3, None, [], {}, "\ud800"],
    list: [None, "several", {}, [None]],
    tuple: [None, "several", {}, ()],
    dict: [None, "several", [], {}, 3],
    type(None): [[], {}, math.nan, "\0"],
}
"""By the type of what a real file holds: values that are never right in its place."""

HARMLESS = {
    "options.save": [None],
    "options.evaluate": ["yes"],
    "options.mirror": [MISSING],
    "options.accept_changed_data": [MISSING],
    "options.cuda_graph": [MISSING],
    "options.weight_decay": [MISSING],
    "options.weights": [MISSING],
    "options.freeze": [MISSING],
    "options.keep_bottleneck": [MISSING],
    "options.memory": [MISSING],
    "options.parallel": [MISSING],
    "data.fingerprint": [MISSING],
    "data.statistics": [MISSING],
    "checksum": [MISSING],
    "versions": [MISSING],
    "versions.nobody": [EXTRA],
}


class Case(NamedTuple):
    """A field's path and its wrong value, MISSING or EXTRA."""

    path: tuple[Any, ...]
    value: Any

    @property
    def field(self) -> str:
        return ".".join(map(str, self.path))

    def __str__(self) -> str:
        return f"{self.field}={self.value if isinstance(self.value, str) else repr(self.value)[:20]}"

    def applied_to(self, content: Any) -> Any:
        changed = parent = copy.copy(content)
        for name in self.path[:-1]:
            parent[name] = copy.copy(parent[name])
            parent = parent[name]
        if self.value is MISSING:
            del parent[self.path[-1]]
        else:
            parent[self.path[-1]] = 1 if self.value is EXTRA else self.value
        return changed


def _cases(content: Any, path: tuple[Any, ...] = ()) -> Iterator[Case]:
    """Every field of `content` with each wrong value, each missing, and each dict with one too many."""
    if path:
        wrong = _wrong_tensors(content) if isinstance(content, torch.Tensor) else WRONG[_kind(content)]
        yield from (Case(path, value) for value in wrong if not (isinstance(value, dict) and content == value))
    if isinstance(content, dict):
        yield Case((*path, "nobody"), EXTRA)
        for name, value in content.items():
            yield Case((*path, name), MISSING)
            yield from _cases(value, (*path, name))
    elif isinstance(content, list):
        for number, item in enumerate(content):
            yield from _cases(item, (*path, number))


def _kind(value: Any) -> type:
    return dict if isinstance(value, dict) else type(value)


def _wrong_tensors(tensor: torch.Tensor) -> list[Any]:
    wrong = ["several", None, 1.0, torch.empty_like(tensor, device="meta"), torch.zeros(*tensor.shape, 2)]
    wrong += [tensor.to(torch.complex64), tensor.bool(), torch.zeros(3, 7).to_sparse()]
    if tensor.is_floating_point():
        wrong += [torch.full_like(tensor, math.nan), tensor.long()]
    return wrong


def _refused_cases(content: Any) -> list[Case]:
    return [case for case in _cases(content) if not any(case.value is each for each in HARMLESS.get(case.field, []))]


def _one_of_each_field(cases: list[Case]) -> list[Case]:
    """One by one another kind of change."""
    fields: dict[str, list[Case]] = {}
    for case in cases:
        fields.setdefault(case.field, []).append(case)
    return [of_field[number % len(of_field)] for number, of_field in enumerate(fields.values())]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> Path:
    """A run that was stopped after two steps of its second epoch."""
    folder = tmp_path_factory.mktemp("stopped")
    demo_stopped(2, 2, *RUN, "--n_epochs", "3", cwd=folder)
    return folder


@pytest.fixture
def changing(stopped):
    """A function that writes a file of the run; afterwards it is as before."""
    before = {path: path.read_bytes() for path in (stopped / "run").iterdir()}

    def write(name: str, content: Any) -> None:
        path = stopped / "run" / name
        path.write_text(json.dumps(content)) if path.suffix == ".json" else torch.save(content, path)

    yield write
    for path, content in before.items():
        path.write_bytes(content)


def _refuses(case: Case, folder: Path, name: str, number: int) -> None:
    """Evaluating and predicting by turns, or resuming, refuses the file by that field and alters none."""
    words = ["cp_demo.py", "--evaluate", "run"] if number % 2 else ["predict.py", IMAGE, "--model", "run"]
    words = ["cp_demo.py", "--save", "run", "--resume"] if name == "last.pt" else words
    before = contents(folder / "run")
    done = demo(*words, cwd=folder)
    refused(done, f"error: run/{name}: ")
    assert _names(case, done.stderr.strip().replace(f"error: run/{name}:", "name:")), (str(case), done.stderr)
    assert contents(folder / "run") == before


def _config(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run" / "config.json").read_text())


def _last(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "run" / "last.pt", weights_only=True)


def test_real_files_pass(stopped):
    run_format.check_config(Path("config.json"), _config(stopped))
    run_format.check_last(Path("last.pt"), _last(stopped))
    run_format.check_config(DIGITS, json.loads((DIGITS / "config.json").read_text()))


def _not_refused(check: Callable[[Path, Any], None], content: Any, cases: list[Case]) -> list[str]:
    """The cases that `check` does not refuse by the name of the field."""
    wrong = []
    for case in cases:
        try:
            check(Path("name"), case.applied_to(content))
            wrong.append(f"{case} is accepted")
        except ValueError as exc:
            if not _names(case, str(exc)):
                wrong.append(f"{case}: {exc}")
    return wrong


def _names(case: Case, message: str) -> bool:
    """Whether a message is one sentence that names the file, and the field or one that holds it."""
    match = re.fullmatch(r"\S*name: (\S+) is .*, but .*; the file was left unchanged: .*, or give another run", message)
    return bool(match) and (match[1].startswith(case.field) or case.field.startswith(match[1])) and len(message) < 400


def test_every_changed_field_of_a_config_is_refused_by_name(stopped):
    content = _config(stopped)
    cases = _refused_cases(content)
    assert len(cases) > 300
    assert _not_refused(run_format.check_config, content, cases) == []


def test_every_changed_field_of_a_state_is_refused_by_name(stopped):
    content = _last(stopped)
    cases = _refused_cases({name: part for name, part in content.items() if name != "state"})
    cases += [Case(("state",), value) for value in (*WRONG[dict], MISSING)]
    cases += [Case(("state", part), value) for part in content["state"] for value in (None, "several", [], MISSING)]
    cases.append(Case(("state", "nobody"), EXTRA))
    assert len(cases) > 500
    assert _not_refused(run_format.check_last, content, cases) == []


def _state_cases(content: Any) -> list[Case]:
    """Those inside the parts of the state."""
    cases = _refused_cases({"state": content["state"]})
    return [case for case in cases if len(case.path) > 2 and not _is_of_torch(case)]


def _is_of_torch(case: Case) -> bool:
    """Arguments of the optimizer that belong to the version of PyTorch are not loaded."""
    inside = case.path[1:4] == ("optimizer", "param_groups", 0)
    return inside and case.path[4:] not in [(), *((name,) for name in (*SGD_ARGUMENTS, "lr", "weight_decay", "params"))]


def test_every_changed_tensor_and_number_of_a_state_is_refused_by_name(stopped):
    content = _last(stopped)
    model = DenseNet(4, (1, 1, 1), num_init_features=8, in_channels=1)
    check = functools.partial(run_format.check_state, model=model)
    check(Path("name"), content)
    cases = _state_cases(content)
    assert len(cases) > 500
    assert _not_refused(check, content, cases) == []


def test_every_changed_tensor_of_the_weights_is_refused_by_name(stopped):
    content = torch.load(stopped / "run" / "model.pt", weights_only=True)
    model = DenseNet(4, (1, 1, 1), num_init_features=8, in_channels=1)
    cases = _refused_cases(content)
    assert len(cases) > 300
    assert _not_refused(lambda path, changed: check_weights(model, changed, path), content, cases) == []


def _cases_of_commands(name: str, folder: Path, every: bool) -> tuple[Any, list[Case]]:
    """What the file of that name has, and the changes of it that the commands are tried on."""
    if name == "config.json":
        content = _config(folder)
        cases = [case for case in _refused_cases(content) if not isinstance(case.value, torch.Tensor)]
        return content, cases if every else _one_of_each_field(cases)
    if name == "model.pt":
        content = torch.load(folder / "run" / "model.pt", weights_only=True)
        cases = _refused_cases(content)
        return content, cases[:: 1 if every else len(cases) // 12]
    content = _last(folder)
    cases = _refused_cases({name: part for name, part in content.items() if name != "state"})
    cases = [case for case in cases if case.field != "format" or case.value is not MISSING]  # else it is no state
    in_state = _state_cases(content)
    return content, [*cases, *in_state[::4]] if every else [
        *_one_of_each_field(cases),
        *in_state[:: len(in_state) // 8],
    ]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", ["config.json", "last.pt", "model.pt"])
def test_a_changed_file_is_refused_by_the_commands_that_read_it(name, every, stopped, changing):
    content, cases = _cases_of_commands(name, stopped, every)
    for number, case in enumerate(cases):
        changing(name, case.applied_to(content))
        _refuses(case, stopped, name, number)


@pytest.mark.parametrize("name", ["last.pt", "model.pt"])
@pytest.mark.parametrize("content", [None, 3, [], "several", torch.zeros(2)])
def test_a_file_of_something_else_is_refused(name, content, stopped, changing):
    changing(name, content)
    words = ["--save", "run", "--resume"] if name == "last.pt" else ["--evaluate", "run"]
    refused(demo("cp_demo.py", *words, cwd=stopped), f"run/{name}")


@pytest.mark.parametrize("content", ["", "{", "[" * 100_000, "\udcff", "null", "[]", "3"])
def test_a_config_that_is_no_record_is_refused(content, stopped, changing):
    changing("config.json", None)
    (stopped / "run" / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    refused(demo("cp_demo.py", "--evaluate", "run", cwd=stopped), "run/config.json")


@pytest.mark.parametrize(
    ("make", "remove", "message"),
    [
        (os.mkdir, os.rmdir, "cannot be read (Is a directory): make it readable"),
        (os.mkfifo, os.unlink, "is no regular file, but a pipe or a device"),
    ],
)
@pytest.mark.parametrize("name", ["last.pt", "model.pt", "config.json"])
def test_a_directory_or_a_pipe_in_the_place_of_a_file_is_refused(name, make, remove, message, stopped):
    path = stopped / "run" / name
    path.rename(stopped / "aside")
    make(path)
    words = ["--save", "run", "--resume"] if name == "last.pt" else ["--evaluate", "run"]
    done = demo("cp_demo.py", *words, cwd=stopped)
    remove(path)
    (stopped / "aside").rename(path)
    refused(done, f"run/{name} {message}")


def test_weights_that_overflow_are_an_error_when_evaluating_and_predicting(stopped, changing):
    content = torch.load(stopped / "run" / "model.pt", weights_only=True)
    content["classifier.weight"].fill_(3e38)
    changing("model.pt", content)
    refused(demo("cp_demo.py", "--evaluate", "run", cwd=stopped), "run: the test loss is nan, but must be finite")
    done = demo("predict.py", IMAGE, "--model", "run", cwd=stopped)
    refused(done, f"{IMAGE}: the model's outputs are not finite")
    assert done.stdout == ""


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("model.mean", [], "model.mean is [], but must be a list of at least 1"),
        ("model.std", [0.0], "model.std is [0.0], but must be a list of at least 1, each a number in (0, 255]"),
        ("model.std", [80.0, 80.0], "model.std is [80.0, 80.0], but must be a list of 1"),
        ("model.depth", 16, "model.depth is 16, but must be 10"),
        ("model.depth", 11, "model.depth is 11, but must be 6n + 4"),
        ("model.channels", 2, "model.channels is 2, but must be one of 1, 3"),
        ("model.model", "densenet121", "model.model is 'densenet121', but must be None"),
        ("options.model", "densenet121", "options.depth is 10, but must be None"),
        ("options.growth_rate", None, "options.growth_rate is None, but must be a whole number of at least 1"),
        ("data.classes", ["a", "b"], "data.classes is ['a', 'b'], but must be"),
        ("data.statistics", [80.0], "data.statistics is [80.0], but must be a list of 2"),
        ("data.image_size", 33, "data.image_size is 33, but must be 32"),
        ("position.epoch", 5, "position.epoch is 5, but must be a whole number of at least 1 and at most 4"),
        ("position.epoch", 3, "rows is [1], but must be a row of each of 2 epochs, in order"),
        ("position.step", 11, "position.step is 11, but must be a whole number of at least 0 and at most 10"),
        ("position.seen", 7.0, "position.seen is 7.0, but must be 256"),
        ("position.wrong", 257.0, "position.wrong is 257.0, but must be a number in [0, 256]"),
        ("position.seconds", 0.0, "position.seconds is 0.0, but must be a number in (0, inf)"),
    ],
)
def test_a_value_that_other_fields_exclude_is_refused(field, value, message, stopped):
    changed = Case(tuple(field.split(".")), value).applied_to(_last(stopped))
    with pytest.raises(ValueError, match=re.escape(f"last.pt: {message}")):
        run_format.check_last(Path("last.pt"), changed)
