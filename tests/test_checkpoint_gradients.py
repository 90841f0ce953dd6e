"""Gradients through `checkpoint`: second derivatives, parameters that change, early stops, selective checkpointing."""

import functools

import pytest
import torch
from checkpoint_outcomes import (
    RUNS,
    CountingOperations,
    assert_network_like_plain,
    assert_same_tensors,
    network,
    networks,
    plain_call,
    tensor,
)
from grids import grid
from helpers import assert_close, assert_same_buffers, assert_same_gradients
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts, set_checkpoint_early_stop

from efficient_densenet._compilers import CHECKPOINTS_UPDATE_ONCE
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


@pytest.mark.parametrize("view", [lambda x: x[0], lambda x: x.view(2, 8), lambda x: x.expand(2, 4, 4)])
@pytest.mark.parametrize("where", ["outside", "inside"])
def test_arguments_that_are_views_of_leaves_in_nested_checkpoints(where, view):
    def grow(x):
        return (x.sin() * x.cos()).exp()

    leaf, grads = tensor(4, 4).requires_grad_(), []
    for call in (plain_call, checkpoint):
        if where == "outside":
            output = call(lambda a, call=call: call(grow, a) * a, view(leaf))
        else:
            output = call(lambda a, call=call: call(grow, view(a)).sin() * a.sum(), leaf)
        grads.append(torch.autograd.grad(output.square().sum(), leaf)[0])
    assert_close(*grads)


def _saving(*operations):
    """A context_fn that saves the results of these operations."""
    return functools.partial(create_selective_checkpoint_contexts, list(operations))


def _step(parameter):
    with torch.no_grad():
        parameter.sub_(0.1 * parameter.grad)


def test_parameters_may_be_stepped_during_the_backward():
    """Fused optimizers do that: the second layer has its step before the first is recomputed."""
    results = []
    for run in (plain_call, checkpoint):
        torch.manual_seed(0)
        net, x = network(), tensor(5, 4).requires_grad_()
        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(_step)
        run(net[3:], run(net[:3], x)).square().sum().backward()
        results.append([x.grad, *net.parameters()])
    assert_same_tensors(*results)


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


def test_a_dispatch_mode_sees_the_operations_of_the_function_and_no_others():
    first, second = CountingOperations(), CountingOperations()
    net = nn.Sequential(nn.BatchNorm1d(4).eval(), nn.Tanh()).double()  # whose buffers the recomputation copies
    checkpoint(net, tensor(5, 4).requires_grad_() * 1, context_fn=lambda: (first, second)).sum().backward()
    assert second.counts.keys() - first.counts.keys() <= {aten.detach.default}
    assert aten.clone.default not in first.counts


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


def test_chosen_operations_are_not_recomputed():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()).double()
    products = []
    for options in ({}, {"context_fn": _saving(aten.addmm.default)}):
        output = checkpoint(net, tensor(5, 4).requires_grad_(), **options)
        with CountingOperations() as operations:
            output.sum().backward()
        products.append((operations.counts[aten.addmm.default], operations.counts[aten.tanh.default]))
    assert products == [(2, 2), (0, 2)]


@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.skipif(not CHECKPOINTS_UPDATE_ONCE, reason="compiled calls are not checkpointed by this compiler")
def test_selective_checkpointing_compiled():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()).double()
    x = tensor(5, 4)
    (expected,) = torch.autograd.grad(net(x).square().sum(), [net[0].weight])
    torch._dynamo.reset()
    choose = _saving(aten.mm.default, aten.addmm.default)
    compiled = torch.compile(lambda x: checkpoint(net, x, context_fn=choose), backend="aot_eager")
    (actual,) = torch.autograd.grad(compiled(x).square().sum(), [net[0].weight])
    assert_close(actual, expected)
