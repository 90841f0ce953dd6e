"""`context_fn`: contexts of the caller around the forward and the recomputation, and selective checkpointing."""

import functools
import gc
import weakref
from contextlib import contextmanager, nullcontext

import pytest
import torch
from checkpoint_outcomes import (
    CountingOperations,
    assert_network_like_plain,
    assert_same_outcome,
    network,
    networks,
    outcome,
    tensor,
)
from helpers import assert_close, assert_same_gradients
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from efficient_densenet._compilers import CHECKPOINTS_UPDATE_ONCE
from efficient_densenet.checkpoint import checkpoint, checkpoint_sequential

aten = torch.ops.aten


def saving(*operations):
    """Return a context_fn that saves the results of these operations."""
    return functools.partial(create_selective_checkpoint_contexts, list(operations))


def test_the_two_contexts_surround_the_forward_and_the_recomputation():
    entered = []

    @contextmanager
    def context(name):
        entered.append(name)
        yield
        entered.append(f"end of {name}")

    def function(x):
        entered.append("call")
        return x.sin()

    x = tensor(3).requires_grad_()
    output = checkpoint(function, x, context_fn=lambda: (context("first"), context("second")), early_stop=False)
    assert entered == ["first", "call", "end of first"]
    output.sum().backward()
    assert entered[3:] == ["second", "call", "end of second"]


def test_context_fn_must_return_two_contexts():
    with pytest.raises(ValueError, match=r"found 1 context managers from context_fn, which must return two"):
        checkpoint(torch.sin, tensor(3).requires_grad_(), context_fn=lambda: (nullcontext(),))


def test_a_dispatch_mode_sees_the_operations_of_the_function_and_no_others():
    first, second = CountingOperations(), CountingOperations()
    x = tensor(3).requires_grad_()
    checkpoint(torch.exp, x, context_fn=lambda: (first, second)).sum().backward()
    assert first.counts == {aten.exp.default: 1}
    assert second.counts == {aten.exp.default: 1, aten.detach.default: 1}


CHOICES = {
    "a list": lambda: saving(aten.addmm.default),
    "a policy": lambda: functools.partial(
        create_selective_checkpoint_contexts,
        lambda context, operation, *args, **kwargs: (
            CheckpointPolicy.MUST_SAVE if operation is aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE
        ),
    ),
    "nothing": lambda: saving(),
    "several": lambda: saving(aten.addmm.default, aten.tanh.default),
}


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("early_stop", [True, False])
def test_selective_checkpointing_changes_no_number(choice, early_stop):
    """The network has a batch norm, a dropout and hooks, which fire as they do without selection."""
    fired = []

    def add_hooks(net):
        net[2].register_forward_hook(lambda module, args, output: fired.append(output.mean().item()))
        net[0].register_forward_hook(lambda module, args, output: output * 3 + output.mean())
        net[4].register_forward_pre_hook(lambda module, args: (args[0] + args[0].mean(),))

    run = functools.partial(checkpoint, context_fn=CHOICES[choice](), early_stop=early_stop)
    assert_network_like_plain(run, prepare=add_hooks)
    assert len(fired) == 2


def test_operations_of_a_hook_are_not_taken_for_those_of_the_function():
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    net[0].register_forward_hook(lambda module, args, output: _none(output.mean()))
    x = tensor(5, 4).requires_grad_()

    def function(x):
        y = net(x)
        return (y * y.mean()).exp()

    actual = outcome(lambda x: checkpoint(function, x, parameters=net, context_fn=saving(aten.mean.default)), [x])
    assert_same_outcome(actual, outcome(function, [x]))


def _none(_):
    return None


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
    assert_same_outcome(outcome(lambda x: checkpoint(function, x, parameters=ours, **outer), [x]), expected)
    assert_same_gradients(ours, plain)


def test_selective_checkpointing_of_a_sequence():
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))).double()
    x = tensor(5, 4).requires_grad_()
    actual = outcome(lambda x: checkpoint_sequential(net, 4, x, context_fn=saving(aten.addmm.default)), [x])
    assert_same_outcome(actual, outcome(net, [x]))


@pytest.mark.parametrize("mutation", [False, True])
@pytest.mark.parametrize(
    "operation", [aten.rand_like.default, aten.native_dropout.default, aten.bernoulli_.float, aten.mul.Tensor]
)
def test_random_operations_after_a_saved_one_draw_what_they_drew_in_the_forward(operation, mutation):
    def function(x):
        y = torch.nn.functional.dropout(x, 0.5) * torch.rand_like(x)
        mask = torch.empty_like(x).bernoulli_(0.5)
        return (torch.nn.functional.dropout(y.sin(), 0.5) * torch.rand_like(x) * mask).exp()

    x = tensor(50).requires_grad_()
    choose = functools.partial(create_selective_checkpoint_contexts, [operation], allow_cache_entry_mutation=mutation)
    actual = outcome(lambda x: checkpoint(function, x, context_fn=choose), [x])
    assert_same_outcome(actual, outcome(function, [x]))


def test_selective_checkpointing_makes_no_reference_cycle():
    gc.collect()
    gc.disable()
    try:
        saved = []

        def function(x):
            y = torch.nn.functional.dropout(x, 0.5).sin()
            saved.append(weakref.ref(y))
            return y.exp()

        for backward in (True, False):
            output = checkpoint(function, tensor(3).requires_grad_(), context_fn=saving(aten.sin.default))
            frames = [weakref.ref(o) for o in gc.get_objects() if type(o).__name__ == "UserContexts"]
            assert len(frames) == 1
            if backward:
                output.sum().backward()
            del output
            assert [reference() for reference in (*frames, *saved)] == [None] * (1 + len(saved))
    finally:
        gc.enable()


def test_a_second_backward_through_chosen_operations_raises_torch_s_error():
    output = checkpoint(lambda x: x.sin().cos().exp(), tensor(3).requires_grad_(), context_fn=saving(aten.sin.default))
    output.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="Trying to backward an extra time"):
        output.sum().backward()


def test_a_parameter_changed_before_the_backward_is_still_an_error():
    net = network()
    output = checkpoint(net, tensor(5, 4), context_fn=saving(aten.tanh.default))
    with torch.no_grad():
        net[4].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_saved_result_that_the_function_changes_is_torch_s_error_unless_it_is_allowed():
    def function(x):
        return x.sin().mul_(2).cos().exp()

    x = tensor(3).requires_grad_()
    with pytest.raises(RuntimeError, match="has been mutated"):
        checkpoint(function, x, context_fn=saving(aten.sin.default)).sum().backward()
    allowed = functools.partial(
        create_selective_checkpoint_contexts, [aten.sin.default], allow_cache_entry_mutation=True
    )
    checkpoint(function, x, context_fn=allowed).sum().backward()


def test_outer_saved_tensor_hooks_neither_warn_nor_see_what_is_chosen():
    x = tensor(3).requires_grad_()
    with torch.autograd.graph.save_on_cpu():
        output = checkpoint(lambda x: x.sin().exp(), x, context_fn=saving(aten.sin.default))
    output.sum().backward()
    assert_close(x.grad, (x.cos() * x.sin().exp()).detach())


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
