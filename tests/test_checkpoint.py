"""`CheckpointFunction`, `checkpoint_sequential`, offloading, and how `checkpoint` finds parameters."""

import copy
import functools
import weakref

import pytest
import torch
from checkpoint_outcomes import assert_network_like_plain, assert_same_outcome, network, outcome, tensor
from helpers import assert_close, assert_same_buffers
from torch import nn

from efficient_densenet import checkpoint as cp
from efficient_densenet.checkpoint import (
    CheckpointFunction,
    checkpoint,
    checkpoint_sequential,
    checkpoint_wrapper,
    offload,
)
from efficient_densenet.memory import saved_bytes


def test_checkpoint_function_as_in_the_original_repository():
    """`import checkpoint as cp` becomes `from efficient_densenet import checkpoint as cp`."""
    norm, relu, conv = nn.BatchNorm2d(5).double(), nn.ReLU(inplace=True), nn.Conv2d(5, 2, 1).double()
    plain = nn.Sequential(norm, relu, conv)
    features = [tensor(2, 3, 4, 4).requires_grad_(), tensor(2, 2, 4, 4).requires_grad_()]

    def bn_function(*inputs):
        return conv(relu(norm(torch.cat(inputs, 1))))

    def ours(*inputs):
        args = inputs + tuple(norm.parameters()) + tuple(conv.parameters())
        return cp.CheckpointFunction.apply(bn_function, len(inputs), *args)

    actual = outcome(ours, features)
    grads = [p.grad.clone() for p in plain.parameters()]
    plain.zero_grad()
    assert_same_outcome(actual, outcome(bn_function, features))
    for grad, parameter in zip(grads, plain.parameters(), strict=True):
        assert_close(grad, parameter.grad)


def test_checkpoint_function_returns_a_tensor_or_a_tuple():
    x = tensor(3).requires_grad_()
    assert isinstance(CheckpointFunction.apply(torch.sin, 1, x), torch.Tensor)
    pair = CheckpointFunction.apply(lambda x: (x.sin(), x.argmax()), 1, x)
    assert isinstance(pair, tuple)
    assert [p.requires_grad for p in pair] == [True, False]


@pytest.mark.parametrize(
    "call",
    [
        lambda net, x: checkpoint(net, x),
        lambda net, x: checkpoint(net.forward, x),
        lambda net, x: checkpoint(functools.partial(net), x),
        lambda net, x: checkpoint(lambda x: net(x), x, parameters=net.parameters()),
        lambda net, x: checkpoint(lambda x: net(x), x, parameters=net),
        lambda net, x: checkpoint(lambda x: net(x), x, parameters=[net]),
        lambda net, x: checkpoint_sequential(net, 3, x),
        lambda net, x: checkpoint_sequential(list(net), 1, x),
        lambda net, x: checkpoint_wrapper(net)(x),
        lambda net, x: checkpoint(net, x * 1, offload=True),
        lambda net, x: checkpoint_wrapper(net, offload_to_cpu=True)(x * 1),
    ],
)
@pytest.mark.parametrize("needs_grad", [True, False])
def test_modules_methods_and_closures_find_their_parameters(call, needs_grad):
    assert_network_like_plain(call, needs_grad)


@pytest.mark.parametrize("needs_grad", [True, False])
def test_an_unlisted_parameter_of_a_closure_is_an_error(needs_grad):
    net = nn.Linear(4, 3).double()
    x = tensor(2, 4).requires_grad_(needs_grad)
    with pytest.raises(RuntimeError, match=r"uses 2 tensor\(s\) that require a gradient.*parameters=\[\.\.\.\]"):
        checkpoint(lambda x: net(x), x)
    with pytest.raises(RuntimeError, match=r"1 tensor\(s\) that require a gradient.*of shape \(3,\)"):
        checkpoint(lambda x: net(x), x, parameters=[net.weight])
    hidden = (x @ net.weight.t()).detach().requires_grad_()
    computed = hidden * 2
    with pytest.raises(RuntimeError, match=r"of shape \(2, 3\)"):
        checkpoint(lambda x: x.sum() * computed, x)


def test_a_tensor_outside_the_module_gets_its_gradient():
    class Tied(nn.Module):
        def forward(self, x):
            return x @ elsewhere

    elsewhere = tensor(4, 4).requires_grad_()
    x = tensor(2, 4)
    checkpoint(Tied(), x).sum().backward()
    assert_close(elsewhere.grad, x.sum(0)[:, None].expand(4, 4))


def test_arguments_of_other_types_are_named():
    with pytest.raises(TypeError, match="found a NoneType among the inputs and parameters of"):
        CheckpointFunction.apply(torch.add, 2, tensor(3).requires_grad_(), None)
    with pytest.raises(TypeError, match="found a str in parameters"):
        checkpoint(torch.sin, tensor(2).requires_grad_(), parameters=["weight"])


def test_a_parameter_that_is_frozen_or_unused_gets_no_gradient():
    net = network()
    net[0].weight.requires_grad_(False)
    unused = tensor(3).requires_grad_()
    checkpoint(lambda x: net(x), tensor(5, 4), parameters=[net, unused]).sum().backward()
    assert net[0].weight.grad is None
    assert unused.grad is None
    assert net[0].bias.grad is not None


class Holder:
    """An object that is no module, with methods that call a module."""

    def __init__(self, net):
        self.inner = [{"net": net}]

    def method(self, x):
        return self.inner[0]["net"](x)

    __call__ = method


REACHED = {
    "an attribute": lambda holder, x, **options: checkpoint(lambda x: holder.inner[0]["net"](x), x, **options),
    "another function": lambda holder, x, **options: checkpoint(lambda x: _called(holder, x), x, **options),
    "an argument": lambda holder, x, **options: checkpoint(lambda n, x: n(x), holder.inner[0]["net"], x, **options),
    "a method": lambda holder, x, **options: checkpoint(holder.method, x, **options),
    "a callable object": lambda holder, x, **options: checkpoint(holder, x, **options),
    "a sequence": lambda holder, x, **options: checkpoint_sequential([holder, torch.tanh], 2, x, **options),
}


def _called(holder, x):
    return holder.method(x)


@pytest.mark.parametrize("how", REACHED)
def test_indirectly_referenced_norms_update_once(how):
    net = network()
    REACHED[how](Holder(net), tensor(5, 4).requires_grad_(), parameters=iter(net.parameters())).sum().backward()
    assert net[1].num_batches_tracked == 1


@pytest.mark.parametrize("segments", [0, 6, -1])
def test_segments_out_of_range(segments):
    with pytest.raises(ValueError, match=f"segments is {segments}, but must be from 1 to the number of modules, 5"):
        checkpoint_sequential(network(), segments, tensor(5, 4))


def test_more_segments_save_less_up_to_a_point():
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(9)))
    x = torch.randn(512, 64, requires_grad=True)
    saved = [saved_bytes(lambda s=s: checkpoint_sequential(net, s, x)) for s in (1, 2, 3)]
    assert saved[0] > saved[1] > saved[2]
    assert saved[0] == saved_bytes(lambda: net(x))


@pytest.mark.parametrize("offloading", [True, False])
def test_offloaded_inputs_are_copies_and_the_originals_are_freed(offloading, monkeypatch):
    """All tensors are treated as tensors of a GPU: their memory is freed, and the gradients are right."""
    monkeypatch.setattr(offload, "is_not_on_cpu", lambda tensor: True)
    net = network()
    plain = copy.deepcopy(net)
    x = tensor(5, 4).requires_grad_()
    y = x * 2
    held = weakref.ref(y.untyped_storage())
    loss = checkpoint(net, y, offload=offloading).square().sum()
    del y
    assert (held() is None) == offloading
    torch.manual_seed(1)
    actual = outcome(lambda x: checkpoint(net, x * 2, offload=offloading), [x])
    net.zero_grad()
    plain(x * 2)
    assert_same_outcome(actual, outcome(lambda x: plain(x * 2), [x]))
    assert_same_buffers(net, plain)
    loss.backward()
    assert x.grad is not None
