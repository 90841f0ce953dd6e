"""Random numbers, running statistics, training mode, hooks, attributes and buffers in a recomputation."""

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checkpoint_outcomes import (
    RUNS,
    assert_network_like_plain,
    assert_same_outcome,
    assert_same_tensors,
    network,
    networks,
    outcome,
    plain_call,
    tensor,
)
from grids import grid
from helpers import assert_same_buffers
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from efficient_densenet.checkpoint import checkpoint

CHOSEN = {name: RUNS[name] for name in ("a module", "a closure", "CheckpointFunction")}


@pytest.mark.parametrize("preserve", [True, False])
def test_dropout_repeats_its_mask(preserve):
    x = torch.ones(1000, dtype=torch.double, requires_grad=True)
    output = checkpoint(lambda x: F.dropout(x, 0.5), x, preserve_rng_state=preserve)
    torch.rand(3)
    state = torch.get_rng_state()
    output.sum().backward()
    assert torch.equal(x.grad, output.detach()) == preserve
    assert torch.equal(torch.get_rng_state(), state) == preserve


@pytest.mark.parametrize("operation", [torch.ops.aten.rand_like.default, torch.ops.aten.native_dropout.default])
def test_random_operations_after_a_saved_one_draw_what_they_drew_in_the_forward(operation):
    generator = torch.Generator()

    def function(x: Tensor) -> Tensor:
        y = F.dropout(x, 0.5) * torch.rand_like(x)
        mask = torch.empty_like(x).bernoulli_(0.5) + torch.rand(50, generator=generator, dtype=x.dtype)
        return (F.dropout(y.sin(), 0.5) * torch.rand_like(x) * mask).exp()

    def seeded(call: Callable, x: Tensor) -> Tensor:
        generator.manual_seed(3)
        return call(function, x)

    def saves(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op is operation else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, saves)
    run, x = functools.partial(checkpoint, context_fn=contexts, generators=[generator]), tensor(50).requires_grad_()
    actual, expected = (outcome(functools.partial(seeded, call), [x]) for call in (run, lambda f, x: f(x)))
    assert_same_outcome(actual, expected)


def test_a_generator_passed_by_the_caller():
    states = []
    for run in (plain_call, checkpoint):
        generator = torch.Generator().manual_seed(3)
        x = torch.ones(100, dtype=torch.double, requires_grad=True)
        noise = functools.partial(torch.rand, 100, generator=generator, dtype=torch.double)
        output = run(lambda x, noise=noise: x * noise(), x, generators=[generator])
        output.sum().backward()
        assert torch.equal(x.grad, output.detach())
        states.append(generator.get_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("run", CHOSEN)
def test_running_statistics_are_updated_once_with_or_without_a_backward(run):
    plain, ours = networks()
    call = functools.partial(RUNS[run], ours)
    for _ in range(2):
        x = tensor(5, 4).requires_grad_()
        call(x), plain(x)
        outcome(call, [x]), outcome(plain, [x])
    with torch.no_grad():
        call(x), plain(x)
    assert ours[1].num_batches_tracked == 5
    assert_same_buffers(ours, plain)


def test_forward_hooks_fire_once_and_what_they_compute_for_a_loss_is_saved():
    results, fired = [], []
    for run in (plain_call, *CHOSEN.values()):
        torch.manual_seed(0)
        net, x, penalties = network(), tensor(5, 4).requires_grad_(), []
        for i, module in enumerate(net.modules()):
            module.register_forward_pre_hook(lambda m, a, i=i: fired.append(f"before {i}"))
            module.register_forward_hook(lambda m, a, kw, o, i=i: fired.append(f"after {i}"), with_kwargs=True)
        net[2].register_forward_hook(lambda m, a, o, seen=penalties: seen.append(o.square().exp().mean()))
        (run(net, x).square().sum() + penalties[0]).backward()
        assert len(penalties) == 1
        assert len(fired) == len(set(fired)) == 12
        fired.clear()
        results.append([x.grad, *(p.grad for p in net.parameters())])
    for each in results[1:]:
        assert_same_tensors(each, results[0])


def _none(_: Any) -> None:
    return None


# Each is put on the first layer.
HOOKS = {
    "returns another output that saves": lambda m: m.register_forward_hook(lambda m, a, o: o * o.exp()),
    "returns other arguments": lambda m: m.register_forward_pre_hook(lambda m, a: (a[0] * 3,)),
    "changes the output in place": lambda m: m.register_forward_hook(lambda m, a, o: _none(o.mul_(3))),
    "sets a weight": nn.utils.weight_norm,
    "prunes a weight": lambda m: prune.l1_unstructured(m, "weight", 0.5),
    "draws and does nothing": lambda m: m.register_forward_pre_hook(lambda m, a: _none(random.random())),
    "draws from Python": lambda m: m.register_forward_hook(lambda m, a, o: o * random.random()),
    "draws from PyTorch": lambda m: m.register_forward_hook(lambda m, a, o: o * torch.rand(())),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_that_affect_the_computation_fire_again(hook):
    assert_network_like_plain(checkpoint, prepare=lambda net: HOOKS[hook](net[0]))


class _Scaled(nn.Module):
    """Counts its calls, multiplies by a number, applies a function, and scales by a moving average of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.scale, self.function, self.calls, self.is_initialized = 0.5, torch.sin, 0, False
        self.register_buffer("mean", torch.ones(4))
        for module in (self.linear, self.norm):
            module.register_buffer("calls", torch.zeros(()))
            module.register_forward_hook(lambda module, args, output: module.calls.add_(1) and None)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if not self.is_initialized:
            self.is_initialized = True
            with torch.no_grad():
                self.linear.weight.mul_(0.5)
        self.mean.lerp_(x.detach().mean(0), 0.1)
        x = self.norm(self.linear(x * x * self.mean.clone()))
        return self.function(self.dropout(x) * self.scale * self.calls)


def _add_hooks(net: _Scaled) -> None:
    net.linear.register_forward_hook(lambda module, args, output: output * 0.5)
    net.norm.register_forward_pre_hook(lambda module, args: args[0] * args[0])


def _remove_hooks(net: _Scaled) -> None:
    net.linear._forward_hooks.clear()
    net.norm._forward_pre_hooks.clear()


def _change_attributes(net: _Scaled) -> None:
    net.scale, net.function, net.dropout.p = 3.0, torch.cos, 0.1


CHANGES: dict[str, tuple[Callable, Callable]] = {
    "nothing": (lambda net: None, lambda net: None),
    "evaluation mode": (lambda net: net.eval(), lambda net: None),
    "attributes": (_change_attributes, lambda net: None),
    "a buffer": (lambda net: setattr(net, "mean", net.mean * 2), lambda net: None),
    "a buffer, in place": (lambda net: net.mean.mul_(2), lambda net: None),
    "a frozen norm": (lambda net: setattr(net.norm, "running_mean", net.mean + 1), lambda net: net.norm.eval()),
    "parameters are frozen": (lambda net: net.requires_grad_(False), lambda net: None),
    "parameters are unfrozen": (lambda net: net.requires_grad_(), lambda net: net.linear.requires_grad_(False)),
    "hooks are added": (_add_hooks, lambda net: None),
    "hooks are removed": (_remove_hooks, _add_hooks),
}


@pytest.mark.parametrize(*grid(change=CHANGES, run=CHOSEN, strength=1))
def test_what_is_changed_between_forward_and_backward_is_restored_for_the_recomputation(change, run):
    """Two calls before the backward, and a second step: gradients, weights, buffers, attributes."""
    between, before = CHANGES[change]
    results = []
    for each in (plain_call, RUNS[run]):
        torch.manual_seed(0)
        net = _Scaled().double()
        before(net)
        x, y = tensor(5, 4).requires_grad_(), tensor(5, 4).requires_grad_()
        for after in (lambda net: None, between):
            loss = each(net, x).sum() + 2 * each(net, y).sum()
            after(net)
            loss.backward()
        results.append([x.grad, y.grad, net.linear.weight.grad, net.linear.weight.detach(), *net.buffers()])
        results[-1] += [tensor(1) * 0 + value for value in (net.calls, net.scale, net.dropout.p, net.training)]
    assert_same_tensors(*results)


def test_a_large_buffer_that_is_changed_in_place_after_the_forward_raises():
    net = nn.Identity()
    net.register_buffer("table", torch.ones(1 << 17, 1))
    loss = checkpoint(lambda x: net(x * net.table).sin(), torch.ones(1, requires_grad=True)).sum()
    net.table.mul_(2)
    with pytest.raises(RuntimeError, match=r"buffer table of a Identity, of shape \(131072, 1\), has been changed"):
        loss.backward()
