"""Random numbers, running statistics, training mode, hooks, attributes and buffers in a recomputation."""

import functools
from typing import Any

import pytest
import torch
from checkpoint_outcomes import (
    RUNS,
    assert_network_like_plain,
    assert_same_tensors,
    network,
    networks,
    outcome,
    plain_call,
    tensor,
)
from grids import grid
from helpers import assert_same_buffers
from torch import nn
from torch.nn.utils import prune

from efficient_densenet.checkpoint import checkpoint

CHOSEN = {name: RUNS[name] for name in ("a module", "a closure", "CheckpointFunction")}


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
    "draws and does nothing": lambda m: m.register_forward_pre_hook(lambda m, a: _none(torch.rand(()))),
    "draws from PyTorch": lambda m: m.register_forward_hook(lambda m, a, o: o * torch.rand(())),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_that_affect_the_computation_fire_again(hook):
    assert_network_like_plain(checkpoint, prepare=lambda net: HOOKS[hook](net[0]))


MODES = {"evaluation mode": (True, False), "training mode": (False, True), "a frozen norm": (False, False)}


@pytest.mark.parametrize(*grid(modes=MODES, run=CHOSEN, strength=1))
def test_modules_are_recomputed_in_the_modes_of_the_forward(modes, run):
    """Two calls before the backward, after which each module has the mode that it had before it."""
    before, after = MODES[modes]
    results = []
    for each in (plain_call, RUNS[run]):
        torch.manual_seed(0)
        net = network().train(before)
        net[3].train()
        x, y = tensor(5, 4).requires_grad_(), tensor(5, 4).requires_grad_()
        loss = each(net, x).square().sum() + 2 * each(net, y).square().sum()
        net.train(after)
        loss.backward()
        assert {module.training for module in net.modules()} == {after}
        results.append([x.grad, y.grad, *(parameter.grad for parameter in net.parameters()), *net.buffers()])
    assert_same_tensors(*results)
