"""Gradients through `checkpoint`: second derivatives, early stops, selective checkpointing beside hooks."""

import functools

import pytest
import torch
from checkpoint_outcomes import (
    RUNS,
    CountingOperations,
    assert_network_like_plain,
    network,
    networks,
    plain_call,
    tensor,
)
from grids import grid
from helpers import assert_close, assert_same_buffers, assert_same_gradients
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts, set_checkpoint_early_stop

from efficient_densenet.checkpoint import checkpoint

aten = torch.ops.aten


@pytest.mark.parametrize("run", [RUNS[name] for name in ("a module", "nested", "CheckpointFunction")])
def test_gradient_penalty(run):
    """The loss contains a gradient, which needs create_graph=True."""
    plain, ours = networks()
    plain[3].p = ours[3].p = 0.0
    x = tensor(5, 4)
    grads = []
    for net, call in ((plain, plain_call), (ours, run)):
        leaf = x.clone().requires_grad_()
        output = call(net, leaf.exp())
        (grad,) = torch.autograd.grad(output.sum(), leaf, create_graph=True)
        (output.square().sum() + (grad.norm() - 1).square()).backward()
        grads.append(leaf.grad)
    assert_close(grads[1], grads[0])
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)


def _saving(*operations):
    """A context_fn that saves the results of these operations."""
    return functools.partial(create_selective_checkpoint_contexts, list(operations))


def test_what_follows_the_last_saved_tensor_is_not_recomputed_unless_torch_s_switch_says_so():
    net, products = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double(), []
    for switched_on, options in ((True, {}), (True, {"early_stop": False}), (False, {})):
        with set_checkpoint_early_stop(switched_on):
            output = checkpoint(net, tensor(2, 4), **options)
        with CountingOperations() as operations:
            output.sum().backward()
        products.append(operations.counts[aten.addmm.default])
    assert products == [1, 2, 2]


def test_reading_a_saved_tensor_outside_a_backward_updates_nothing():
    net = network()
    output = checkpoint(net, tensor(5, 4).requires_grad_())
    assert output.grad_fn._saved_mat1 is not None
    assert net[1].num_batches_tracked == 1


# Selective checkpointing


CHOICES = {"nothing": [], "several": [aten.addmm.default, aten.tanh.default]}


@pytest.mark.parametrize(*grid(choice=CHOICES, early_stop=[True, False], nested=[False, True]))
def test_selective_checkpointing_changes_no_number(choice, early_stop, nested):
    """The network has a batch norm, a dropout and hooks, which fire as they do without selection, and whose operations
    are not taken for those of the network."""
    fired = []

    def add_hooks(net):
        net[2].register_forward_hook(lambda module, args, output: fired.append(output.tanh().mean().item()))
        net[0].register_forward_hook(lambda module, args, output: output * 3 + output.tanh().mean())
        net[4].register_forward_pre_hook(lambda module, args: (args[0] + args[0].mean(),))

    options = {"context_fn": _saving(*CHOICES[choice]), "early_stop": early_stop}

    def run(net, x):
        if nested:
            return checkpoint(lambda x: net[3:](checkpoint(net[:3], x, **options)), x, **options)
        return checkpoint(net, x, **options)

    assert_network_like_plain(run, prepare=add_hooks)
    assert len(fired) == 2
