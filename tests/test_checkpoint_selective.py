"""`context_fn`: contexts of the caller around the forward and the recomputation, and selective checkpointing."""

import functools

import pytest
import torch
from checkpoint_outcomes import (
    CountingOperations,
    assert_network_like_plain,
    assert_same_outcome,
    networks,
    outcome,
    tensor,
)
from helpers import assert_close, assert_same_gradients
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from efficient_densenet._compilers import CHECKPOINTS_UPDATE_ONCE
from efficient_densenet.checkpoint import checkpoint

aten = torch.ops.aten


def saving(*operations, **options):
    """Return a context_fn that saves the results of these operations."""
    return functools.partial(create_selective_checkpoint_contexts, list(operations), **options)


def test_a_dispatch_mode_sees_the_operations_of_the_function_and_no_others():
    first, second = CountingOperations(), CountingOperations()
    net = nn.Sequential(nn.BatchNorm1d(4).eval(), nn.Tanh()).double()  # whose buffers the recomputation copies
    checkpoint(net, tensor(5, 4).requires_grad_() * 1, context_fn=lambda: (first, second)).sum().backward()
    assert second.counts.keys() - first.counts.keys() <= {aten.detach.default}
    assert aten.clone.default not in first.counts


CHOICES = {
    "nothing": lambda: saving(),
    "several": lambda: saving(aten.addmm.default, aten.tanh.default),
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("early_stop", [True, False])
def test_selective_checkpointing_changes_no_number(choice, early_stop):
    """The network has a batch norm, a dropout and hooks, which fire as they do without selection, and whose operations
    are not taken for those of the network."""
    fired = []

    def add_hooks(net):
        net[2].register_forward_hook(lambda module, args, output: fired.append(output.tanh().mean().item()))
        net[0].register_forward_hook(lambda module, args, output: output * 3 + output.tanh().mean())
        net[4].register_forward_pre_hook(lambda module, args: (args[0] + args[0].mean(),))

    run = functools.partial(checkpoint, context_fn=CHOICES[choice](), early_stop=early_stop)
    assert_network_like_plain(run, prepare=add_hooks)
    assert len(fired) == 2


def test_chosen_operations_are_not_recomputed():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()).double()
    products = []
    for options in ({}, {"context_fn": saving(aten.addmm.default)}):
        output = checkpoint(net, tensor(5, 4).requires_grad_(), **options)
        with CountingOperations() as operations:
            output.sum().backward()
        products.append((operations.counts[aten.addmm.default], operations.counts[aten.tanh.default]))
    assert products == [(2, 2), (0, 2)]


@pytest.mark.parametrize("chosen_by", ["inner", "outer", "both"])
def test_selective_checkpointing_inside_and_around_checkpoints(chosen_by):
    choose = {"context_fn": saving(aten.addmm.default)}
    inner, outer = (choose if chosen_by in (name, "both") else {} for name in ("inner", "outer"))
    plain, ours = networks()

    def function(x):
        return ours[2:](checkpoint(ours[:2], x, **inner).sin()).exp()

    x = tensor(5, 4).requires_grad_()
    expected = outcome(lambda x: plain[2:](plain[:2](x).sin()).exp(), [x])
    assert_same_outcome(outcome(lambda x: checkpoint(function, x, **outer), [x]), expected)
    assert_same_gradients(ours, plain)


@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.skipif(not CHECKPOINTS_UPDATE_ONCE, reason="compiled calls are not checkpointed by this compiler")
def test_selective_checkpointing_compiled():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()).double()
    x = tensor(5, 4)
    (expected,) = torch.autograd.grad(net(x).square().sum(), [net[0].weight])
    torch._dynamo.reset()
    choose = saving(aten.mm.default, aten.addmm.default)
    compiled = torch.compile(lambda x: checkpoint(net, x, context_fn=choose), backend="aot_eager")
    (actual,) = torch.autograd.grad(compiled(x).square().sum(), [net[0].weight])
    assert_close(actual, expected)
