"""Hooks on a model and its parts fire once, with what they get in plain."""

from collections.abc import Iterator

import pytest
import torch
from helpers import (
    assert_close,
    assert_same_buffers,
    assert_same_gradients,
    assert_same_step,
    random_images,
    small_model,
    with_engine,
)
from torch import Tensor, nn

from efficient_densenet.engines import dispatch as engines

PLACES = ["", "features", "features.denseblock1", "features.denseblock3", "features.transition1", "features.norm5"]
KINDS = ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"]


def _tensors(*values) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value.detach().clone()
        elif isinstance(value, tuple):
            yield from _tensors(*value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_a_hook_fires_once_with_plain_s_values(place, kind):
    plain = small_model("bc", efficient=False, drop_rate=0.1)
    ours = with_engine(plain, "shared")
    seen = []
    for model in (ours, plain):
        calls = []
        seen.append(calls)
        register = getattr(model.get_submodule(place), f"register_{kind}")
        register(lambda module, *values, calls=calls: calls.append(list(_tensors(*values))))
    assert_same_step(ours, plain, random_images("bc"))
    assert_same_buffers(ours, plain)
    assert [len(calls) for calls in seen] == [1, 1]
    assert len(seen[0][0]) == len(seen[1][0]) > 0
    for found, expected in zip(seen[0][0], seen[1][0], strict=True):
        assert_close(found, expected)


def test_hooks_everywhere_at_once_and_the_stages_whole_again_without_them():
    plain = small_model("bc", efficient=False)
    ours = with_engine(plain, "shared")
    seen, handles = [[], []], []
    for model, calls in zip((ours, plain), seen, strict=True):
        for place in PLACES:
            for kind in KINDS:

                def note(module, *values, calls=calls, name=f"{kind} of {place}"):
                    calls.append((name, list(_tensors(*values))))

                handles.append(getattr(model.get_submodule(place), f"register_{kind}")(note))
    assert_same_step(ours, plain, random_images("bc"))
    assert sorted(name for name, _ in seen[0]) == sorted(name for name, _ in seen[1])
    assert len(seen[0]) == len(PLACES) * len(KINDS)
    expected = dict(seen[1])
    for name, values in seen[0]:
        for found, value in zip(values, expected[name], strict=True):
            assert_close(found, value)
    for handle in handles:
        handle.remove()
    assert_same_step(ours, plain, random_images("bc"))
    assert len(seen[0]) == len(PLACES) * len(KINDS)


@pytest.mark.parametrize("place", PLACES)
def test_a_hook_may_change_what_it_gets(place):
    plain = small_model("bc", efficient=False)
    ours = with_engine(plain, "shared")
    for model in (ours, plain):
        module = model.get_submodule(place)
        module.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        module.register_forward_hook(lambda module, args, output: output + 0.25)
        module.register_full_backward_hook(lambda module, grads, _: (grads[0] * 3,))
    assert_same_step(ours, plain, random_images("bc"))
    assert_same_buffers(ours, plain)


def _descend(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=1e-3)


def test_an_optimizer_that_steps_within_the_backward():
    """Each parameter changes as soon as its gradient is there, when other stages' are still to come."""
    plain = small_model("bc", efficient=False)
    ours = with_engine(plain, "shared")
    before = [parameter.detach().clone() for parameter in plain.parameters()]
    for model in (ours, plain):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(_descend)
    assert_same_step(ours, plain, random_images("bc"))
    for found, expected, old in zip(ours.parameters(), plain.parameters(), before, strict=True):
        assert_close(found.detach(), expected.detach())
        assert not torch.equal(found, old)


def test_a_hook_on_the_intermediate_tensors():
    """Retained gradients and tensor hooks of a stage's output."""
    plain = small_model("bc", efficient=False)
    grads = []
    for model in (with_engine(plain, "shared"), plain):
        features = model.features(random_images("bc") * 0 + torch.linspace(0, 1, 63).view(9, 7))
        features.register_hook(lambda grad: grad * 2)
        features.retain_grad()
        features.square().sum().backward()
        grads += [features.grad, model.features.conv0.weight.grad]
    assert_close(grads[0], grads[2])
    assert_close(grads[1], grads[3])


class Restless(nn.Module):
    """Trains inside a forward hook: another forward and backward of the model it is in."""

    def __init__(self, inner: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.inner, self.x = inner, x

    def forward(self, *_) -> None:
        self.inner(self.x).square().sum().backward()


def test_a_backward_within_a_forward_hook_and_within_a_backward_hook():
    plain, other = small_model("bc", efficient=False), small_model("bc", efficient=False)
    x = random_images("bc", 2)
    steps = []
    for engine in ("shared", "plain"):
        model, inner = with_engine(plain, engine), with_engine(other, engine)
        inside = Restless(inner, x)
        model.features.denseblock2.register_forward_hook(lambda *_, inside=inside: inside())
        torch.manual_seed(2)
        loss = model(random_images("bc")).square().sum()
        handle = model.features.transition2.register_full_backward_hook(lambda *_, inside=inside: inside())
        loss.backward()
        handle.remove()
        steps.append((model, inner))
    assert_same_gradients(steps[0][0], steps[1][0])
    assert_same_gradients(steps[0][1], steps[1][1])
    assert_same_buffers(steps[0][0], steps[1][0])


def test_a_hook_on_all_modules_falls_back_or_raises_by_name(monkeypatch):
    monkeypatch.setattr(engines, "_warned", set())
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
