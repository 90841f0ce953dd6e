"""A checkpointed call has the values, gradients, RNG states and buffers of the plain call."""

import copy
import functools
import gc
import pickle
import threading
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, assert_same_buffers, assert_same_gradients
from torch import nn
from torch.nn.utils import prune

from efficient_densenet import checkpoint as cp
from efficient_densenet import convert_batchnorm
from efficient_densenet.checkpoint import (
    CheckpointFunction,
    checkpoint,
    checkpoint_sequential,
    checkpoint_wrapper,
    disable_checkpointing,
    is_checkpointing,
    is_recomputing,
    offload,
    unwrap,
)
from efficient_densenet.memory import saved_bytes


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.double)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 4)).double()


def outcome(call, inputs, seed: int = 1) -> dict[str, Any]:
    """The outputs, the gradients of the inputs, and the RNG state after the forward and after the backward."""
    torch.manual_seed(seed)
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    outputs = call(*leaves)
    after_forward = torch.get_rng_state()
    flat = [o for o in torch.utils._pytree.tree_leaves(outputs) if isinstance(o, torch.Tensor)]
    loss = sum((o * (o.detach() + 1.5)).sum() for o in flat if o.requires_grad)
    loss.backward()
    return {
        "outputs": flat,
        "requires_grad": [o.requires_grad for o in flat],
        "grads": [x.grad for x in leaves],
        "rng_states": [after_forward, torch.get_rng_state()],
    }


def assert_same_outcome(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual["requires_grad"] == expected["requires_grad"]
    for a, b in zip(actual["outputs"], expected["outputs"], strict=True):
        assert_close(a, b)
    for a, b in zip(actual["grads"], expected["grads"], strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_close(a, b)
    for a, b in zip(actual["rng_states"], expected["rng_states"], strict=True):
        assert torch.equal(a, b)


def assert_like_plain(function, *inputs) -> None:
    """Compare `checkpoint(function, *inputs)` with `function(*inputs)`, for a function without parameters."""
    assert_same_outcome(outcome(functools.partial(checkpoint, function), inputs), outcome(function, inputs))


# CheckpointFunction


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


# Parameters


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
    ],
)
@pytest.mark.parametrize("needs_grad", [True, False])
def test_modules_methods_and_closures_find_their_parameters(call, needs_grad):
    plain, ours = (network() for _ in range(2))
    ours.load_state_dict(plain.state_dict())
    x = tensor(5, 4).requires_grad_(needs_grad)
    assert_same_outcome(outcome(lambda x: call(ours, x), [x]), outcome(plain, [x]))
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)


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


def test_parameters_must_be_tensors_or_modules():
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


# Arguments and results


@dataclass
class Pair:
    left: torch.Tensor
    right: Any
    note: str = "n"


@dataclass(frozen=True)
class Frozen:
    inner: Pair
    more: list


class Named(NamedTuple):
    a: torch.Tensor
    b: int


def test_tensors_in_input_lists_and_dicts_get_gradients():
    assert_like_plain(lambda a, b, c: _nested([a, {"k": (b, 3)}], key={"z": [c, None, "s"]}), *_three_inputs())


def _nested(first, key):
    a, b, c = first[0], first[1]["k"][0], key["z"][0]
    assert first[1]["k"][1] == 3
    assert key["z"][1:] == [None, "s"]
    return {"sum": [a * b + c], "n": 7, "none": None, "t": (a.exp(), "x")}


def _three_inputs():
    return [tensor(2, 3).requires_grad_() for _ in range(3)]


def test_nested_results_keep_their_structure():
    a, b, c = _three_inputs()
    result = checkpoint(_nested, [a, {"k": (b, 3)}], key={"z": [c, None, "s"]})
    assert list(result) == ["sum", "n", "none", "t"]
    assert isinstance(result["sum"], list)
    assert (result["n"], result["none"], result["t"][1]) == (7, None, "x")


def test_dataclasses_are_flattened():
    def function(x: Frozen, y: Pair) -> Frozen:
        return Frozen(Pair(x.inner.left * y.right[0], {"k": x.more[1].sin()}, note=y.note), [1, x.more[1] + 1])

    def call(run):
        return lambda a, b, c: _fields(run(function, Frozen(Pair(a, None), ["s", b]), y=Pair(a, [c], note="kept")))

    def _fields(frozen):
        assert type(frozen) is Frozen
        assert type(frozen.inner) is Pair
        assert frozen.inner.note == "kept"
        return frozen.inner.left, frozen.inner.right["k"], frozen.more[1]

    inputs = _three_inputs()
    plain = call(lambda function, *args, **kwargs: function(*args, **kwargs))
    assert_same_outcome(outcome(call(checkpoint), inputs), outcome(plain, inputs))


def test_named_tuples_and_positional_non_tensors():
    result = checkpoint(lambda n, k: Named(n.a * k, n.b + 1), Named(tensor(2).requires_grad_(), 4), 3)
    assert isinstance(result, Named)
    assert result.b == 5


CASES = {
    "a shared tensor": lambda a, b, c: _shared(a, a, [a, b]) + c,
    "views of one another": lambda a, b, c: (a * a[:1].expand_as(a), b.t() @ c),
    "integers and booleans": lambda a, b, c: (a.argmax(), a > 0, (a * (b > 0)).sum(), c.long()),
    "a None among the results": lambda a, b, c: (None, a * b, [None, c.sin()]),
    "an input as a result": lambda a, b, c: (a, a * b, [c, b]),
    "one result twice": lambda a, b, c: (lambda y: (y, [y], y + c))(a * b),
    "results that are views": lambda a, b, c: (a.view(-1), (b * c)[0], a.t()),
    "a result without gradient": lambda a, b, c: ((a * b).detach(), c.sin(), a.detach()),
    "no gradient anywhere in the results": lambda a, b, c: (a.sum() * b + c).detach() + a * 0,
    "an unused input": lambda a, b, c: a * c,
    "a scalar": lambda a, b, c: (a * b * c).sum(),
    "complex numbers": lambda a, b, c: torch.view_as_real(torch.complex(a, b) * c),
    "in-place operations on its own tensors": lambda a, b, c: (a * b).add_(c).relu_(),
}


def _shared(x, y, rest):
    return x * y + rest[0] * rest[1]


@pytest.mark.parametrize("case", CASES)
def test_results_behave_as_in_the_plain_call(case):
    assert_like_plain(CASES[case], *_three_inputs())


@pytest.mark.parametrize("requires_grad", [(True, False, False), (False, True, True), (False, False, True)])
@pytest.mark.parametrize("case", ["a shared tensor", "an input as a result", "a scalar"])
def test_gradients_for_a_subset_of_the_inputs(case, requires_grad):
    inputs = [tensor(2, 3).requires_grad_(needed) for needed in requires_grad]
    assert_like_plain(CASES[case], *inputs)


def test_a_returned_argument_is_the_same_object():
    x, y = tensor(3).requires_grad_(), torch.arange(3)
    first, (second, third) = checkpoint(lambda x, y: (x, (y, x * 2)), x, y)
    assert first is x
    assert second is y
    assert third is not x


def test_one_tensor_passed_twice_is_one_object():
    seen = []
    x = tensor(3).requires_grad_()
    checkpoint(lambda a, b: (seen.append(a is b), a * b)[1], x, x).sum().backward()
    assert seen == [True, True]


def test_views_of_one_tensor_as_inputs():
    def plain(base):
        return (base[:2] * base[1:] + base[0]).sum()

    def ours(base):
        return checkpoint(lambda a, b, c: (a * b + c).sum(), base[:2], base[1:], base[0])

    x = tensor(3, 2).requires_grad_()
    assert_same_outcome(outcome(ours, [x]), outcome(plain, [x]))


def test_no_input_requires_a_gradient():
    x = tensor(3)
    result = checkpoint(torch.sin, x)
    assert not result.requires_grad
    assert torch.equal(result, x.sin())


def test_changing_an_input_in_place_is_an_error():
    base = tensor(3).requires_grad_()
    for call in (checkpoint, lambda function, x: CheckpointFunction.apply(function, 1, x)):
        for x in (base * 1, tensor(3)):
            if call is not checkpoint and not x.requires_grad:
                continue
            with pytest.raises(RuntimeError, match=r"changes an input in place.*pass a clone"):
                call(lambda x: x.mul_(2) * base, x) if call is not checkpoint else checkpoint(
                    lambda x: x.mul_(2) * base, x, parameters=[base]
                )


def test_an_input_changed_in_place_before_the_backward_raises_autograd_s_error():
    for options in ({}, {"offload": True}):
        x = tensor(3).requires_grad_()
        y = x * 1
        z = checkpoint(torch.sin, y, **options)
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


# Gradients


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
    for a, b in zip(actual, expected, strict=True):
        assert_close(a, b)


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
    plain, ours = network(), network()
    ours.load_state_dict(plain.state_dict())
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
    x = tensor(3).requires_grad_()
    for run in (lambda function, *args: function(*args), checkpoint):
        y = x.exp()
        (grad,) = torch.autograd.grad(run(lambda a, b: a.sin() * b, x, y).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), x)
        if run is not checkpoint:
            expected = grad, second
    assert_close(grad, expected[0])
    assert_close(second, expected[1])


def test_a_gradient_computed_inside():
    """As in a network that returns forces, which are the gradient of an energy that it computes."""
    net = network().eval()

    def function(x):
        energy = net(x).square().sum()
        return torch.autograd.grad(energy, x, create_graph=True)[0]

    plain = copy.deepcopy(net)
    x = tensor(5, 4).requires_grad_()
    expected = outcome(function, [x])
    grads = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    net.zero_grad()
    actual = outcome(lambda x: checkpoint(function, x, parameters=net), [x])
    assert_same_outcome(actual, expected)
    for grad, parameter in zip(grads, (p for p in net.parameters() if p.grad is not None), strict=True):
        assert_close(parameter.grad, grad)
    assert_same_buffers(net, plain)


def test_parameter_hooks_fire_once():
    plain, ours = network(), network()
    ours.load_state_dict(plain.state_dict())
    for net in (plain, ours):
        net[0].weight.register_hook(lambda grad: grad * 2 + 1)
    x = tensor(5, 4).requires_grad_()
    assert_same_outcome(outcome(functools.partial(checkpoint, ours), [x]), outcome(plain, [x]))
    assert_same_gradients(ours, plain)


# Random numbers, autocast, training mode


@pytest.mark.parametrize("preserve", [True, False])
def test_dropout_repeats_its_mask(preserve):
    x = torch.ones(1000, dtype=torch.double, requires_grad=True)
    output = checkpoint(lambda x: F.dropout(x, 0.5), x, preserve_rng_state=preserve)
    torch.rand(3)
    output.sum().backward()
    assert torch.equal(x.grad, output.detach()) == preserve


def test_the_rng_state_is_the_plain_call_s_after_a_recomputation():
    assert_like_plain(lambda x: F.dropout(x, 0.5) * torch.rand_like(x), tensor(50).requires_grad_())


def test_a_generator_passed_by_the_caller():
    states = []
    for run in (lambda function, x, **_: function(x), checkpoint):
        generator = torch.Generator().manual_seed(3)
        x = torch.ones(100, dtype=torch.double, requires_grad=True)
        noise = functools.partial(torch.rand, 100, generator=generator, dtype=torch.double)
        output = run(lambda x, noise=noise: x * noise(), x, generators=[generator])
        output.sum().backward()
        assert torch.equal(x.grad, output.detach())
        states.append(generator.get_state())
    assert torch.equal(*states)


def test_a_function_without_random_numbers_saves_no_rng_state():
    x = tensor(3).requires_grad_()
    sine, dropped = (CheckpointFunction.apply(function, 1, x) for function in (torch.sin, lambda x: F.dropout(x, 0.5)))
    assert sine.grad_fn.recomputation.rng_state is None
    assert dropped.grad_fn.recomputation.rng_state is not None


@pytest.mark.parametrize("inside", [True, False])
def test_autocast_is_restored(inside):
    net, seen = nn.Linear(4, 3), []

    def function(x):
        seen.append(
            (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled())
        )
        return net(x)

    x = torch.randn(2, 4, requires_grad=True)
    for run in (net, lambda x: checkpoint(function, x, parameters=net)):
        net.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = run(x).square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        grads = [p.grad.clone() for p in net.parameters()]
        if run is net:
            expected = grads
    assert seen[0] == seen[1]
    assert seen[0][:2] == (True, torch.bfloat16)
    for a, b in zip(grads, expected, strict=True):
        assert torch.equal(a, b)


def test_no_autocast_in_the_forward_means_none_in_the_recomputation():
    x = torch.randn(2, 4, requires_grad=True)
    seen = []
    output = checkpoint(lambda x: (seen.append(torch.is_autocast_enabled("cpu")), x.sin())[1], x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output.sum().backward()
    assert seen == [False, False]


@pytest.mark.parametrize(
    "run",
    [
        lambda net, x: checkpoint(net, x),
        lambda net, x: CheckpointFunction.apply(net, 1, x, *net.parameters()),
    ],
)
def test_autocast_s_weight_cache_is_not_shared(run):
    """A weight cast in the forward has no grad_fn. Code that uses the weight afterwards must cast it again."""
    net, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    grads = []
    for call in (lambda net, x: net(x), run):
        net.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(call(net, x)).square().sum()
        loss.backward()
        grads.append(net.weight.grad.clone())
    # Plain accumulates the gradients of the two uses in bfloat16, since they share one cast; ours in float32.
    torch.testing.assert_close(grads[1], grads[0], rtol=2e-2, atol=2e-2)


def test_eval_mode_set_before_the_backward_changes_nothing():
    plain, ours = network(), network()
    ours.load_state_dict(plain.state_dict())
    x = tensor(5, 4)
    for net, run in ((plain, plain), (ours, functools.partial(checkpoint, ours))):
        torch.manual_seed(0)
        loss = run(x).square().sum()
        net.eval()
        loss.backward()
        assert not any(m.training for m in net.modules())
    assert_same_gradients(ours, plain)


# A recomputation that differs


class Fickle:
    """Calls another function each time."""

    def __init__(self, *functions):
        self.functions = list(functions)

    def __call__(self, x):
        return self.functions.pop(0)(x)


@pytest.mark.parametrize(
    ("recomputed", "message"),
    [
        (lambda x: x[:2].sin(), r"Fickle returned 1 tensor \(\(2,\) float64\) in .* but 1 tensor \(\(3,\) float64\)"),
        (lambda x: x.sin().float(), r"Fickle returned 1 tensor \(\(3,\) float32\)"),
        (lambda x: (x.sin(), x.cos()), r"Fickle returned 2 tensors \(\(3,\) float64, \(3,\) float64\)"),
        (lambda x: (), r"Fickle returned 0 tensors"),
    ],
)
@pytest.mark.parametrize("call", [checkpoint, lambda function, x: CheckpointFunction.apply(function, 1, x)])
def test_a_recomputation_that_differs_is_an_error_that_names_the_difference(call, recomputed, message):
    output = call(Fickle(torch.sin, recomputed), tensor(3).requires_grad_())
    with pytest.raises(RuntimeError, match=message):
        output.sum().backward()


# Nesting, threads, queries


def test_nested_checkpoints():
    nets = [network() for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    runs = []

    def inner(x):
        runs.append((is_checkpointing(), is_recomputing()))
        return nets[1][:3](x)

    def outer(x):
        return nets[1][3:](checkpoint(inner, x, parameters=nets[1][:3]).sin())

    x = tensor(5, 4).requires_grad_()
    actual = outcome(lambda x: checkpoint(outer, x, parameters=nets[1]), [x])
    expected = outcome(lambda x: nets[0][3:](nets[0][:3](x).sin()), [x])
    assert_same_outcome(actual, expected)
    assert_same_gradients(nets[1], nets[0])
    assert_same_buffers(nets[1], nets[0])
    assert runs == [(True, False), (False, True), (False, True)]


def test_is_checkpointing_and_is_recomputing_in_a_module_that_counts_its_calls():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls, self.seen = 0, []

        def forward(self, x):
            self.calls += not is_recomputing()
            self.seen.append((is_checkpointing(), is_recomputing()))
            return x.sin()

    module = Counting()
    x = tensor(3).requires_grad_()
    module(x).sum().backward()
    checkpoint(module, x).sum().backward()
    with disable_checkpointing():
        checkpoint(module, x).sum().backward()
        checkpoint_wrapper(module)(x).sum().backward()
    assert module.calls == 4
    nothing = (False, False)
    assert module.seen == [nothing, (True, False), (False, True), nothing, nothing]
    assert (is_checkpointing(), is_recomputing()) == nothing


def test_is_checkpointing_and_is_recomputing_after_an_error():
    with pytest.raises(ZeroDivisionError):
        checkpoint(lambda x: x / (1 // 0), tensor(2).requires_grad_())
    output = checkpoint(Fickle(torch.sin, lambda x: x / (1 // 0)), tensor(2).requires_grad_())
    with pytest.raises(ZeroDivisionError):
        output.sum().backward()
    assert (is_checkpointing(), is_recomputing()) == (False, False)


def test_disable_checkpointing_concerns_one_thread():
    seen = []
    with disable_checkpointing():
        thread = threading.Thread(
            target=lambda: checkpoint(
                lambda x: (seen.append(is_checkpointing()), x.sin())[1], tensor(2).requires_grad_()
            )
        )
        thread.start()
        thread.join()
    assert seen == [True]


def test_two_threads_compute_what_one_thread_computes():
    """200 rounds of forward and backward of two networks and of a shared one in two threads, as in nn.DataParallel."""
    nets = [nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).double() for _ in range(3)]
    for net in nets[:2]:
        checkpoint_wrapper(net)
    nets[2].eval()
    inputs = [tensor(6, 4), tensor(6, 4)]
    queries = [[], []]

    def work(i: int, results: list) -> None:
        x = inputs[i].clone().requires_grad_()
        y = nets[i](x)
        z = checkpoint(lambda y: (queries[i].append(is_recomputing()), nets[2](y))[1], y, parameters=nets[2])
        results[i] = torch.autograd.grad(z.square().sum(), [x, *nets[i].parameters(), *nets[2].parameters()])

    expected = [None, None]
    for i in range(2):
        work(i, expected)
    for _ in range(200):
        results = [None, None]
        threads = [threading.Thread(target=work, args=(i, results)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for actual, right in zip(results, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(actual, right, strict=True))
    assert queries == [[False, True] * 201] * 2
    assert nets[0][1].num_batches_tracked == nets[1][1].num_batches_tracked == 201


def test_inside_data_parallel_replicas():
    plain, ours = network().eval(), network().eval()
    ours.load_state_dict(plain.state_dict())
    checkpoint_wrapper(ours)
    replica = _replica(ours)
    assert list(replica.parameters()) == []
    x = tensor(5, 4)
    for net in (replica, plain):
        results = []
        thread = threading.Thread(target=lambda net=net, results=results: results.append(net(x)))
        thread.start()
        thread.join()
        results[0].square().sum().backward()
    assert_same_gradients(ours, plain)


def _replica(module: nn.Module) -> nn.Module:
    replica = module._replicate_for_data_parallel()
    replica._modules = {name: _replica(child) for name, child in module._modules.items()}
    replica._former_parameters = {name: p.view_as(p) for name, p in module._parameters.items()}
    for name, parameter in replica._former_parameters.items():
        object.__setattr__(replica, name, parameter)
    return replica


@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("run", [checkpoint, lambda net, x: checkpoint_wrapper(net)(x)])
def test_under_torch_compile(run):
    plain, ours = network(), network()
    ours.load_state_dict(plain.state_dict())
    plain[3].p = ours[3].p = 0.0
    x = tensor(5, 4)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: run(ours, x), backend="aot_eager")
    for _ in range(2):
        compiled(x).square().sum().backward()
        plain(x).square().sum().backward()
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)


# Batch norms, hooks


@pytest.mark.parametrize(
    "wrap",
    [
        lambda net: functools.partial(checkpoint, net),
        lambda net: lambda x: checkpoint(lambda x: net(x), x, parameters=list(net.parameters())),
        lambda net: lambda x: checkpoint_sequential(net, 2, x),
        checkpoint_wrapper,
    ],
)
def test_running_statistics_are_updated_once_with_or_without_a_backward(wrap):
    plain, ours = network(), network()
    ours.load_state_dict(plain.state_dict())
    run = wrap(ours)
    for _ in range(2):
        run(tensor(5, 4) * 0 + torch.arange(20.0).view(5, 4))
        plain(tensor(5, 4) * 0 + torch.arange(20.0).view(5, 4))
    for _ in range(2):
        x = tensor(5, 4).requires_grad_()
        outcome(run, [x]), outcome(plain, [x])
    with torch.no_grad():
        run(x), plain(x)
    assert ours[1].num_batches_tracked == 5
    assert_same_buffers(ours, plain)


def test_forward_hooks_fire_once():
    net, fired = network(), []
    for i, module in enumerate(net.modules()):
        module.register_forward_hook(lambda m, a, o, i=i: fired.append(f"after {i}"))
        module.register_forward_pre_hook(lambda m, a, i=i: fired.append(f"before {i}"))
        module.register_forward_hook(lambda m, a, kw, o, i=i: fired.append(f"kw {i}"), with_kwargs=True)
    for run in (lambda x: checkpoint(net, x), lambda x: checkpoint(lambda x: net(x), x, parameters=net)):
        fired.clear()
        run(tensor(5, 4)).sum().backward()
        assert len(fired) == len(set(fired)) == 18
    handle = net[0].register_forward_hook(lambda m, a, o: fired.append("removed"))
    checkpoint(net, tensor(5, 4)).sum().backward()
    assert fired.count("removed") == 1
    handle.remove()
    checkpoint(net, tensor(5, 4)).sum().backward()
    assert fired.count("removed") == 1


HOOKS = {
    "returns another output": lambda m: m.register_forward_hook(lambda m, a, o: o * 3),
    "returns other arguments": lambda m: m.register_forward_pre_hook(lambda m, a: (a[0] * 3,)),
    "changes the output in place": lambda m: m.register_forward_hook(lambda m, a, o: _none(o.mul_(3))),
}


def _none(_: Any) -> None:
    return None


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_that_affect_the_computation_fire_again(hook):
    plain, ours = network(), network()
    ours.load_state_dict(plain.state_dict())
    HOOKS[hook](plain[0]), HOOKS[hook](ours[0])
    x = tensor(5, 4).requires_grad_()
    assert_same_outcome(outcome(functools.partial(checkpoint, ours), [x]), outcome(plain, [x]))
    assert_same_gradients(ours, plain)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
def test_hooks_that_set_a_weight_fire_again():
    """Weight norm by hooks, and pruning."""
    for prepare in (nn.utils.weight_norm, lambda m: prune.l1_unstructured(m, "weight", 0.5)):
        plain, ours = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()
        ours.load_state_dict(plain.state_dict())
        prepare(plain), prepare(ours)
        x = tensor(5, 4).requires_grad_()
        assert_same_outcome(outcome(functools.partial(checkpoint, ours), [x]), outcome(plain, [x]))
        assert_same_gradients(ours, plain)


def test_full_backward_hooks_inside_fire_once():
    net, grads = network(), []
    net[2].register_full_backward_hook(lambda m, i, o: grads.append(o[0]))
    for run in (net, functools.partial(checkpoint, net)):
        outcome(run, [tensor(5, 4).requires_grad_()])
    assert len(grads) == 2


# The wrapper


def test_the_wrapper_changes_nothing_visible():
    module = network()
    module.note = "mine"
    names = list(module.state_dict())
    ids = [id(p) for p in module.parameters()]
    fired = []
    module.register_forward_hook(lambda *_: fired.append(1))
    wrapped = checkpoint_wrapper(module)
    assert wrapped is module
    assert isinstance(wrapped, nn.Sequential)
    assert type(wrapped).__name__ == "Sequential"
    assert list(wrapped.state_dict()) == names
    assert [name for name, _ in wrapped.named_parameters()] == [name for name, _ in network().named_parameters()]
    assert [id(p) for p in wrapped.parameters()] == ids
    assert wrapped.note == "mine"
    assert len(wrapped) == 5
    wrapped(tensor(5, 4)).sum().backward()
    assert fired == [1]
    assert checkpoint_wrapper(wrapped) is wrapped
    types = [type(m) for m in network().modules()]
    restored = unwrap(wrapped)
    assert [type(m) for m in restored.modules()] == types
    assert vars(restored).keys() - vars(network()).keys() == {"note"}
    assert unwrap(restored) is restored


def test_the_wrapper_saves_little():
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
    x = torch.randn(512, 64, requires_grad=True)
    plain = saved_bytes(lambda: net(x))
    wrapped = checkpoint_wrapper(net)
    assert saved_bytes(lambda: wrapped(x)) < 0.3 * plain
    assert saved_bytes(lambda: unwrap(net)(x)) == plain


class Keyworded(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x, *, offload=False, parameters=None, scale: float = 1.0):
        """The keyword arguments have the names of those of `checkpoint`."""
        return {"y": self.linear(x) * scale, "offload": offload, "parameters": parameters, "text": "t"}


def test_keyword_arguments_and_results_that_are_no_tensors():
    module = checkpoint_wrapper(Keyworded())
    result = module(tensor(2, 4), offload="o", parameters=[1], scale=2.0)
    assert (result["offload"], result["parameters"], result["text"]) == ("o", [1], "t")
    result["y"].sum().backward()
    assert_close(module.linear.bias.grad, torch.full((4,), 4.0, dtype=torch.double))


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_a_wrapped_module_uses_its_own_weights(copier):
    module = checkpoint_wrapper(network().eval())
    copied = copier(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    x = tensor(5, 4)
    copied(x).square().sum().backward()
    assert all(p.grad is None for p in module.parameters())
    assert all(p.grad.abs().sum() > 0 for p in copied.parameters())
    assert saved_bytes(lambda: copied(x.requires_grad_())) < saved_bytes(lambda: unwrap(copied)(x))


def test_no_reference_cycle_in_wrapped_modules():
    gc.collect()
    gc.disable()
    try:
        module = checkpoint_wrapper(network())
        x = tensor(5, 4).requires_grad_()
        output = module(x)
        output.sum().backward()
        pending = module(x)
        watched = [weakref.ref(t) for t in (module, module[0].weight, x, output, pending)]
        del module, x, output, pending
        assert [ref() for ref in watched] == [None] * 5
    finally:
        gc.enable()


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


def test_a_norm_can_be_wrapped_and_converted_in_any_order():
    for prepare in (
        lambda norm: convert_batchnorm(checkpoint_wrapper(norm)),
        lambda norm: checkpoint_wrapper(convert_batchnorm(norm)),
        checkpoint_wrapper,
    ):
        norm = prepare(nn.BatchNorm1d(4).double())
        copy.deepcopy(norm)(tensor(3, 4)).sum().backward()
        norm(tensor(3, 4)).sum().backward()
        assert norm.num_batches_tracked == 1


def test_a_forward_set_on_the_instance_is_an_error():
    module = network()
    module.forward = lambda x: x
    with pytest.raises(ValueError, match=r"found a Sequential whose forward .* was set on the instance"):
        checkpoint_wrapper(module)


class Holder:
    """An object that is no module, with methods that call a module."""

    def __init__(self, net):
        self.inner = [{"net": net}]

    def method(self, x):
        return self.inner[0]["net"](x)

    __call__ = method


def _reached(net, x, how):
    holder = Holder(net)

    def helper(x):
        return holder.method(x)

    parameters = list(net.parameters())
    return {
        "an attribute": lambda: checkpoint(lambda x: holder.inner[0]["net"](x), x, parameters=parameters),
        "another function": lambda: checkpoint(lambda x: helper(x), x, parameters=parameters),
        "an argument": lambda: checkpoint(lambda n, x: n(x), net, x, parameters=parameters),
        "a method": lambda: checkpoint(holder.method, x, parameters=parameters),
        "a callable object": lambda: checkpoint(holder, x, parameters=parameters),
        "a sequence": lambda: checkpoint_sequential([lambda x: net(x), torch.tanh], 2, x, parameters=iter(parameters)),
    }[how]()


@pytest.mark.parametrize(
    "how", ["an attribute", "another function", "an argument", "a method", "a callable object", "a sequence"]
)
def test_indirectly_referenced_norms_update_once(how):
    net = network()
    _reached(net, tensor(5, 4).requires_grad_(), how).sum().backward()
    assert net[1].num_batches_tracked == 1


def test_reading_a_saved_tensor_outside_a_backward_updates_nothing():
    net = network()
    output = checkpoint(net, tensor(5, 4).requires_grad_())
    assert output.grad_fn._saved_mat1 is not None
    assert net[1].num_batches_tracked == 1


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


def test_a_backward_inside_disable_checkpointing_recomputes_as_usual():
    net = network()

    def outer(x):
        return checkpoint(net[:3], x).sin()

    output = checkpoint(outer, tensor(5, 4).requires_grad_(), parameters=net)
    with disable_checkpointing():
        output.sum().backward()
    assert net[0].weight.grad is not None


@dataclass
class Derived:
    x: torch.Tensor
    later: Any = None

    def __post_init__(self):
        self.cached = "kept"


def test_a_dataclass_keeps_attributes_that_are_not_fields():
    x = tensor(3).requires_grad_()
    result = checkpoint(lambda d: Derived(d.x.sin(), d.cached), Derived(x))
    assert (result.later, result.cached) == ("kept", "kept")
    result.x.sum().backward()
    assert_close(x.grad, x.detach().cos())


def test_generators_without_preserve_rng_state_are_an_error():
    with pytest.raises(ValueError, match="generators with preserve_rng_state=False"):
        checkpoint(torch.sin, tensor(3), preserve_rng_state=False, generators=[torch.Generator()])


def test_checkpoint_function_takes_only_tensors():
    with pytest.raises(TypeError, match="found a NoneType among the inputs and parameters of"):
        CheckpointFunction.apply(torch.add, 2, tensor(3).requires_grad_(), None)


def test_a_slice_of_a_wrapped_sequential_and_unwrapping_before_the_backward():
    net = checkpoint_wrapper(network().eval())
    x = tensor(5, 4).requires_grad_()
    expected = unwrap(copy.deepcopy(net))[:2](x)
    assert torch.equal(net[:2](x), expected)
    output = net(x)
    unwrap(net)
    output.sum().backward()
    assert net[0].weight.grad is not None


def test_weight_norm_and_pruning_can_still_be_removed():
    module = prune.l1_unstructured(nn.Linear(4, 3), "weight", 0.5)
    checkpoint(module, torch.randn(2, 4)).sum().backward()
    assert prune.is_pruned(module)
    prune.l1_unstructured(module, "weight", 1)
    prune.remove(module, "weight")
    assert not prune.is_pruned(module)


def test_unwrapping_a_class_changed_after_wrapping_is_an_error():
    module = checkpoint_wrapper(nn.Linear(4, 3))
    nn.utils.parametrizations.weight_norm(module)
    with pytest.raises(RuntimeError, match=r"changed again since .* undo that first"):
        unwrap(module)


def test_lazy_modules_can_be_wrapped():
    module = checkpoint_wrapper(nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()))
    for _ in range(2):
        module(torch.randn(4, 5)).sum().backward()
    assert module[0].weight.grad is not None
    assert module[1].num_batches_tracked == 2


@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_forward_mode_derivatives():
    x, t = tensor(3), tensor(3)
    with torch.autograd.forward_ad.dual_level():
        dual = checkpoint(torch.sin, torch.autograd.forward_ad.make_dual(x, t))
        assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, t * x.cos())


@pytest.mark.filterwarnings("ignore")
def test_a_wrapped_module_compiles_as_one_graph_and_exports():
    net = checkpoint_wrapper(network().eval())
    x = tensor(5, 4)
    with torch.no_grad():
        expected = net(x)
    assert_close(torch.export.export(net, (x,)).module()(x), expected)
    assert_close(torch.jit.trace(net, x)(x), expected)
    if torch.__version__ >= "2.11":
        torch._dynamo.reset()
        assert_close(torch.compile(net, backend="aot_eager", fullgraph=True)(x), expected)


# Sequences, offloading


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


@pytest.mark.parametrize(
    "run",
    [lambda net, x: checkpoint(net, x, offload=True), lambda net, x: checkpoint_wrapper(net, offload_to_cpu=True)(x)],
)
def test_offloading_changes_no_number(run):
    plain, ours = network(), network()
    ours.load_state_dict(plain.state_dict())
    x = tensor(5, 4).requires_grad_()
    assert_same_outcome(outcome(lambda x: run(ours, x * 1), [x]), outcome(lambda x: plain(x * 1), [x]))
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)


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
