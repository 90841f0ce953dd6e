"""Gradients through `checkpoint`: several backwards, second derivatives, gradients computed inside, errors."""

import functools
import gc
import weakref

import pytest
import torch
from checkpoint_outcomes import (
    Fickle,
    assert_like_plain,
    assert_network_like_plain,
    assert_same_outcome,
    assert_same_tensors,
    network,
    networks,
    outcome,
    plain_call,
    tensor,
)
from helpers import assert_close, assert_same_buffers, assert_same_gradients
from torch import nn

from efficient_densenet import convert_batchnorm
from efficient_densenet.checkpoint import CheckpointFunction, checkpoint, checkpoint_wrapper


def test_autograd_grad_and_several_backwards():
    net, x = network(), tensor(5, 4).requires_grad_()
    net.eval()
    for run in (net, functools.partial(checkpoint, net)):
        output = run(x)
        one = torch.autograd.grad(output.sum(), [x, net[0].weight], retain_graph=True)
        two = torch.autograd.grad(output[0].sum(), [x], retain_graph=True)
        output.square().sum().backward(retain_graph=True)
        output.square().sum().backward()
        actual = [*one, *two, x.grad, *(p.grad for p in net.parameters())]
        if run is net:
            expected = [t.clone() for t in actual]
        x.grad = None
        net.zero_grad()
    assert_same_tensors(actual, expected)


def test_backward_from_one_of_several_outputs():
    x, y = tensor(3).requires_grad_(), tensor(3).requires_grad_()
    first, second = checkpoint(lambda x, y: (x.sin(), y.cos()), x, y)
    first.sum().backward(retain_graph=True)
    assert y.grad is None
    assert_close(x.grad, x.detach().cos())
    second.sum().backward()
    assert_close(y.grad, -y.detach().sin())


def test_a_second_backward_without_retaining_raises_as_plain_does():
    output = checkpoint(torch.sin, tensor(3).requires_grad_())
    output.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        output.sum().backward()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda net: functools.partial(checkpoint, net),
        lambda net: functools.partial(checkpoint, net, offload=True),
        lambda net: lambda x: CheckpointFunction.apply(convert_batchnorm(net), 1, x, *net.parameters()),
        checkpoint_wrapper,
    ],
)
def test_gradient_penalty(wrap):
    """The loss contains a gradient, which needs create_graph=True."""
    plain, ours = networks()
    plain[3].p = ours[3].p = 0.0
    run = wrap(ours)
    x = tensor(5, 4)
    for net, call in ((plain, plain), (ours, run)):
        leaf = x.clone().requires_grad_()
        output = call(leaf)
        (grad,) = torch.autograd.grad(output.sum(), leaf, create_graph=True)
        (output.square().sum() + (grad.norm() - 1).square()).backward()
        if net is plain:
            expected = leaf.grad
    assert_close(leaf.grad, expected)
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)


def test_gradgradcheck():
    weight = tensor(3, 3).requires_grad_()

    def function(x, w):
        return checkpoint(lambda x: (x @ weight).tanh() * w, x, parameters=[weight, w])

    inputs = (tensor(2, 3).requires_grad_(), tensor(3).requires_grad_())
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_inputs_computed_from_one_another_under_create_graph():
    x, results = tensor(3).requires_grad_(), []
    for run in (plain_call, checkpoint):
        y = x.exp()
        (grad,) = torch.autograd.grad(run(lambda a, b: a.sin() * b, x, y).sum(), x, create_graph=True)
        results.append([grad, *torch.autograd.grad(grad.square().sum(), x)])
    assert_same_tensors(*results)


def test_a_gradient_computed_inside():
    """As in a network that returns forces, which are the gradient of an energy that it computes."""

    def forces(net, x):
        return torch.autograd.grad(net(x).square().sum(), x, create_graph=True)[0]

    plain, ours = networks()
    plain.eval(), ours.eval()
    x = tensor(5, 4).requires_grad_()
    actual = outcome(lambda x: checkpoint(functools.partial(forces, ours), x, parameters=ours), [x])
    assert_same_outcome(actual, outcome(functools.partial(forces, plain), [x]))
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)


def _apply_function(net, x):
    return CheckpointFunction.apply(convert_batchnorm(net), 1, x, *net.parameters())


@pytest.mark.parametrize("run", [checkpoint, _apply_function])
def test_parameter_hooks_fire_once(run):
    assert_network_like_plain(run, prepare=lambda net: net[0].weight.register_hook(lambda grad: grad * 2 + 1))


@pytest.mark.parametrize(
    ("recomputed", "message"),
    [
        (lambda x: x[:2].sin(), r"Fickle returned 1 tensor \(\(2,\) float64\) in .* but 1 tensor \(\(3,\) float64\)"),
        (lambda x: x.sin().float(), r"Fickle returned 1 tensor \(\(3,\) float32\)"),
        (lambda x: (x.sin(), x.cos()), r"Fickle returned 2 tensors \(\(3,\) float64, \(3,\) float64\)"),
        (lambda x: (), r"Fickle returned 0 tensors"),
    ],
)
@pytest.mark.parametrize(
    "call",
    [functools.partial(checkpoint, early_stop=False), lambda function, x: CheckpointFunction.apply(function, 1, x)],
)
def test_a_recomputation_that_differs_is_an_error_that_names_the_difference(call, recomputed, message):
    output = call(Fickle(torch.sin, recomputed), tensor(3).requires_grad_())
    with pytest.raises(RuntimeError, match=message):
        output.sum().backward()


def test_no_reference_cycle_in_checkpoint():
    gc.collect()
    gc.disable()
    try:
        x = tensor(5).requires_grad_() * 1
        output = checkpoint(lambda x: {"a": [x.sin()], "b": x}, x)
        watched = [weakref.ref(t) for t in (x, output["a"][0])]
        del x, output
        assert [ref() for ref in watched] == [None] * 2
    finally:
        gc.enable()


def test_reading_a_saved_tensor_outside_a_backward_updates_nothing():
    net = network()
    output = checkpoint(net, tensor(5, 4).requires_grad_())
    before = _live_tensors()
    assert output.grad_fn._saved_mat1 is not None
    assert net[1].num_batches_tracked == 1
    assert _live_tensors() == before


def _live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def test_a_parameter_changed_before_the_backward_raises_autograd_s_error():
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    output = checkpoint(net, tensor(5, 4))
    checkpoint(net, tensor(5, 4)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_parameters_replaced_before_the_backward_are_an_error():
    net = network()
    swapped = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
    output = torch.func.functional_call(checkpoint_wrapper(net), swapped, (tensor(5, 4),))
    with pytest.raises(RuntimeError, match="recomputed with other parameters than in the forward"):
        output.sum().backward()


def test_an_inner_gradient_leaves_no_recomputed_tensors():
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(6))).double()

    def forces(x):
        return torch.autograd.grad(layers(x).sum(), x, create_graph=True)[0]

    x = tensor(256, 32).requires_grad_()
    output = checkpoint(forces, x, parameters=layers)
    frames = {id(f): f for f in gc.get_objects() if type(f).__name__ == "CheckpointFrame" and f.function is forces}
    assert [frame.recomputed_tensors for frame in frames.values()] == [{}]
    output.sum().backward()


def test_a_leaf_created_inside_is_not_an_unlisted_parameter():
    def function(x):
        z = x.detach().requires_grad_()
        return torch.autograd.grad((z**3).sum(), z, create_graph=True)[0] * x

    assert_like_plain(function, tensor(3).requires_grad_())


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_forward_mode_derivatives():
    x, t = tensor(3), tensor(3)
    with torch.autograd.forward_ad.dual_level():
        dual = checkpoint(torch.sin, torch.autograd.forward_ad.make_dual(x, t))
        assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, t * x.cos())
