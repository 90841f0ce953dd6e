"""Hooks on a model and its modules fire once, with the values of plain."""

from collections.abc import Iterator

import pytest
import torch
from helpers import (
    MEMORY_EFFICIENT,
    assert_close,
    assert_same_buffers,
    assert_same_gradients,
    assert_same_step,
    random_images,
    small_model,
    with_engine,
)
from torch import Tensor, nn

from efficient_densenet.engine import choose

NAMES = ["", "features", "features.denseblock1", "features.denseblock3", "features.transition1", "features.norm5"]
HOOK_TYPES = ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"]


def _tensors(*values) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value.detach().clone()
        elif isinstance(value, tuple):
            yield from _tensors(*value)


def test_all_hooks_at_once_and_after_their_removal():
    """Each fires once with plain's values."""
    plain = small_model("bc", efficient=False, drop_rate=0.1)
    efficient = with_engine(plain, "shared")
    seen, handles = [[], []], []
    for model, calls in zip((efficient, plain), seen, strict=True):
        for module_name in NAMES:
            for hook_type in HOOK_TYPES:

                def record(module, *values, calls=calls, name=f"{hook_type} of {module_name}"):
                    calls.append((name, list(_tensors(*values))))

                handles.append(getattr(model.get_submodule(module_name), f"register_{hook_type}")(record))
    assert_same_step(efficient, plain, random_images("bc"))
    assert sorted(name for name, _ in seen[0]) == sorted(name for name, _ in seen[1])
    assert len(seen[0]) == len(NAMES) * len(HOOK_TYPES)
    expected = dict(seen[1])
    for name, values in seen[0]:
        for actual, value in zip(values, expected[name], strict=True):
            assert_close(actual, value)
    for handle in handles:
        handle.remove()
    assert_same_step(efficient, plain, random_images("bc"))
    assert len(seen[0]) == len(NAMES) * len(HOOK_TYPES)


@pytest.mark.parametrize("module_name", NAMES)
def test_hooks_may_replace_values(module_name):
    plain = small_model("bc", efficient=False)
    efficient = with_engine(plain, "shared")
    for model in (efficient, plain):
        module = model.get_submodule(module_name)
        module.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        module.register_forward_hook(lambda module, args, output: output + 0.25)
        module.register_full_backward_hook(lambda module, grads, _: (grads[0] * 3,))
    assert_same_step(efficient, plain, random_images("bc"))
    assert_same_buffers(efficient, plain)


def _sgd_step(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=1e-3)


@pytest.mark.parametrize("engine", MEMORY_EFFICIENT)
def test_hooks_of_parameters_and_of_features(engine):
    """They change gradients; and steps of an optimizer within the backward update each parameter once."""
    plain = small_model("bc", efficient=False)
    efficient, grads = with_engine(plain, engine), []
    before = [parameter.detach().clone() for parameter in plain.parameters()]
    for model in (efficient, plain):
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: grad * 3 + 1)
            parameter.register_post_accumulate_grad_hook(_sgd_step)
        features = model.features(random_images("bc") * 0 + torch.linspace(0, 1, 63).view(9, 7))
        features.register_hook(lambda grad: grad * 2)
        features.retain_grad()
        features.square().sum().backward()
        grads.append(features.grad)
    assert_close(*grads)
    assert_same_gradients(efficient, plain)
    for actual, expected, old in zip(efficient.parameters(), plain.parameters(), before, strict=True):
        assert_close(actual.detach(), expected.detach())
        assert expected.grad is None or not torch.equal(actual, old)


class NestedStep(nn.Module):
    """Runs a forward and backward of a model inside a hook of another one."""

    def __init__(self, inner: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.inner, self.x = inner, x

    def forward(self, *_) -> None:
        self.inner(self.x).square().sum().backward()


def test_training_step_within_forward_and_backward_hooks():
    plain, other = small_model("bc", efficient=False), small_model("bc", efficient=False)
    x = random_images("bc", 2)
    steps = []
    for engine in ("shared", "plain"):
        model, inner = with_engine(plain, engine), with_engine(other, engine)
        nested = NestedStep(inner, x)
        model.features.denseblock2.register_forward_hook(lambda *_, nested=nested: nested())
        torch.manual_seed(2)
        loss = model(random_images("bc")).square().sum()
        handle = model.features.transition2.register_full_backward_hook(lambda *_, nested=nested: nested())
        loss.backward()
        handle.remove()
        steps.append((model, inner))
    assert_same_gradients(steps[0][0], steps[1][0])
    assert_same_gradients(steps[0][1], steps[1][1])
    assert_same_buffers(steps[0][0], steps[1][0])


def test_global_module_hook_falls_back_with_a_warning_or_raises(monkeypatch):
    monkeypatch.setattr(choose, "_warned", set())
    model = small_model("bc", efficient=True)
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        with pytest.warns(UserWarning, match="found a hook on all modules"):
            model(random_images("bc"))
        with pytest.raises(RuntimeError, match="engine 'shared' cannot run here: found a hook on all modules"):
            model.set_engine("shared")(random_images("bc"))
    finally:
        handle.remove()
    assert {module for module in model.modules() if isinstance(module, nn.Conv2d)} <= set(seen)
