"""The private names of PyTorch: where one is gone, so is the feature that needs it, with a sentence; and those do what
the package expects that no other test would miss."""

import ast
import importlib
import operator
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_all_close, random_images, results_of, small_model, with_engine

import efficient_densenet
from efficient_densenet import _torch_private, doctor
from efficient_densenet._torch_private import (
    process_group_named,
)
from efficient_densenet.kernels.convolution import conv3x3
from efficient_densenet.memory import predict

PACKAGE = Path(efficient_densenet.__file__).parent
KNOWN = "torch.nn.modules.", "torch.utils._python_dispatch.TorchDispatchMode", "torch.utils._pytree"
"""Base classes of public modules and modes, and trees: every version that is claimed has them."""


def _private_names(path: Path) -> set[str]:
    """The dotted names with a private part that a file reads below `torch`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    return {name for name in names if re.match(r"torch\.([a-zA-Z]\w*\.)*_[a-z]", name)}


def test_private_names_of_torch_are_in_two_files():
    others = {path for path in PACKAGE.rglob("*.py") if path.name not in ("_torch_private.py", "_compilers.py")}
    found = {(path.name, name) for path in others for name in _private_names(path) if not name.startswith(KNOWN)}
    assert not found
    assert _private_names(PACKAGE / "_compilers.py")


@pytest.fixture
def without(monkeypatch):
    """A function that looks up all names again, as in a PyTorch that lacks one."""
    lookup = operator.attrgetter

    def attrgetter(name, missing):
        if name == missing:
            raise AttributeError(name)
        return lookup(name)

    def remove(missing):
        with monkeypatch.context() as patch:
            patch.setattr(operator, "attrgetter", lambda name: attrgetter(name, missing))
            importlib.reload(_torch_private)

    yield remove
    importlib.reload(_torch_private)


USES = {
    _torch_private.SHARED: lambda model, x: with_engine(model, "shared")(x),
    _torch_private.PREDICTION: lambda model, x: predict(model, x.shape),
    "synchronizing batch norms": lambda model, x: process_group_named("0"),
}
"""Features that raise without one of their private names."""


@pytest.mark.parametrize("name", _torch_private.NAMES)
def test_a_name_that_torch_lacks_costs_the_feature_that_needs_it_and_neither_the_import_nor_plain(name, without):
    model, x, feature = small_model("bc", block_config=(2,)), random_images("bc"), _torch_private.NAMES[name]
    expected = results_of(with_engine(model, "plain"), x)
    without(name)
    sentence = f"found PyTorch {torch.__version__} without torch.{name}, which {feature} needs"
    assert any(
        sentence in line for line, _ in zip(doctor.report(), range(1 + len(_torch_private.MISSING)), strict=False)
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for engine in ("plain", "best", "checkpoint"):
            assert_all_close(results_of(with_engine(model, engine), x), expected)
    assert all(sentence in str(warning.message) for warning in caught)
    if feature == _torch_private.SHARED:
        assert caught
    elif feature == _torch_private.IM2COL:
        images, weight = torch.randn(2, 3, 4, 5), torch.randn(6, 3, 3, 3)
        assert torch.equal(conv3x3(images, weight, 1), F.conv2d(images, weight, padding=1))
    if feature in USES:
        with pytest.raises((RuntimeError, ValueError), match=re.escape(sentence)):
            USES[feature](model, x)


def test_a_lost_name_is_warned_of_once(without):
    without("_C._current_graph_task_id")
    model = small_model("bc", efficient="plain", block_config=(1,))
    with pytest.warns(UserWarning, match=r"without torch\._C\._current_graph_task_id, which updating running stat"):
        model(random_images("bc"))
    model(random_images("bc"))
