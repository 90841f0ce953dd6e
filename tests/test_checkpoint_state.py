"""RNG state, autocast, training mode, running statistics and hooks in a recomputation."""

import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from checkpoint_outcomes import (
    assert_like_plain,
    assert_network_like_plain,
    assert_same_tensors,
    network,
    networks,
    outcome,
    plain_call,
    tensor,
)
from helpers import assert_close, assert_same_buffers, assert_same_gradients
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrize, prune

from efficient_densenet.checkpoint import CheckpointFunction, checkpoint, checkpoint_sequential, checkpoint_wrapper


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
    for run in (plain_call, checkpoint):
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
    assert_same_tensors(grads, expected)


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
    plain, ours = networks()
    x = tensor(5, 4)
    for net, run in ((plain, plain), (ours, functools.partial(checkpoint, ours))):
        torch.manual_seed(0)
        loss = run(x).square().sum()
        net.eval()
        loss.backward()
        assert not any(m.training for m in net.modules())
    assert_same_gradients(ours, plain)


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
    plain, ours = networks()
    run = wrap(ours)
    for _ in range(2):
        x = tensor(5, 4).requires_grad_()
        run(x), plain(x)
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


# Each is put on the first layer.
HOOKS = {
    "returns another output": lambda m: m.register_forward_hook(lambda m, a, o: o * 3),
    "returns other arguments": lambda m: m.register_forward_pre_hook(lambda m, a: (a[0] * 3,)),
    "changes the output in place": lambda m: m.register_forward_hook(lambda m, a, o: _none(o.mul_(3))),
    "sets a weight": nn.utils.weight_norm,
    "prunes a weight": lambda m: prune.l1_unstructured(m, "weight", 0.5),
}


def _none(_: Any) -> None:
    return None


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_that_affect_the_computation_fire_again(hook):
    assert_network_like_plain(checkpoint, prepare=lambda net: HOOKS[hook](net[0]))


def test_full_backward_hooks_inside_fire_once():
    net, grads = network(), []
    net[2].register_full_backward_hook(lambda m, i, o: grads.append(o[0]))
    for run in (net, functools.partial(checkpoint, net)):
        outcome(run, [tensor(5, 4).requires_grad_()])
    assert len(grads) == 2


def test_generators_without_preserve_rng_state_are_an_error():
    with pytest.raises(ValueError, match="generators with preserve_rng_state=False"):
        checkpoint(torch.sin, tensor(3), preserve_rng_state=False, generators=[torch.Generator()])


def test_pruning_can_still_be_removed():
    module = prune.l1_unstructured(nn.Linear(4, 3), "weight", 0.5)
    checkpoint(module, torch.randn(2, 4)).sum().backward()
    assert prune.is_pruned(module)
    prune.l1_unstructured(module, "weight", 1)
    prune.remove(module, "weight")
    assert not prune.is_pruned(module)


def _train_with(between: Callable[[nn.Module], Any], before: Callable[[nn.Module], Any], run: Callable) -> list[Any]:
    """Input and parameters' gradients of a second step, in which `between` is called between forward and backward."""
    torch.manual_seed(0)
    net = network()
    before(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    for change in (lambda net: None, between):
        optimizer.zero_grad()
        x = tensor(5, 4).requires_grad_()
        loss = run(net, x).square().sum()
        change(net)
        loss.backward()
        optimizer.step()
    return [x.grad, *(parameter.grad for parameter in net.parameters())]


def _add_hooks(net: nn.Module) -> None:
    net[1].register_forward_hook(lambda module, args, output: output * 0.5)
    net[2].register_forward_pre_hook(lambda module, args: args[0] * args[0])


def _remove_hooks(net: nn.Module) -> None:
    net[1]._forward_hooks.clear()
    net[2]._forward_pre_hooks.clear()


CHANGES_BETWEEN = {
    "parameters are frozen": (lambda net: net.requires_grad_(False), lambda net: None),
    "parameters are unfrozen": (lambda net: net.requires_grad_(), lambda net: net[0].requires_grad_(False)),
    "hooks are added": (_add_hooks, lambda net: None),
    "hooks are removed": (_remove_hooks, _add_hooks),
}
RUNS = {
    "checkpoint": checkpoint,
    "CheckpointFunction": lambda net, x: CheckpointFunction.apply(net, 1, x, *net.parameters()),
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("change", CHANGES_BETWEEN)
def test_what_is_changed_between_forward_and_backward_is_restored_for_the_recomputation(change, run):
    expected = _train_with(*CHANGES_BETWEEN[change], plain_call)
    assert_same_tensors(_train_with(*CHANGES_BETWEEN[change], RUNS[run]), expected)


def test_without_saved_tensor_hooks_nothing_is_checkpointed():
    net, x = nn.Linear(4, 3).double(), tensor(5, 4).requires_grad_()
    expected = torch.autograd.grad(net(x).square().sum(), x)
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("not here"),
        pytest.warns(UserWarning, match="Linear is not checkpointed, for lack of saved-tensor hooks"),
    ):
        assert_close(torch.autograd.grad(checkpoint(net, x).square().sum(), x)[0], expected[0])


def test_a_backward_that_ends_in_an_exception_leaves_no_recomputed_tensors():
    net, storages = nn.Linear(4, 4).double(), []

    def function(x):
        hidden = x.exp()  # saves its result, which its backward would unpack after the exception
        storages.append(StorageWeakRef(hidden.untyped_storage()))
        return net(hidden).sin()

    def fail(grad):
        raise ValueError("in the backward")

    loss = checkpoint(function, tensor(5, 4).requires_grad_(), parameters=net).sum()
    handle = net.bias.register_hook(fail)
    with pytest.raises(ValueError, match="in the backward"):
        loss.backward(retain_graph=True)
    handle.remove()
    assert len(storages) == 2
    assert storages[1].expired()
    loss.backward()


class _Scaled(nn.Module):
    """A linear layer that counts its calls, and multiplies by a number and applies a function that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 4).double(), nn.Dropout(0.5)
        self.scale, self.function, self.calls, self.is_initialized = 0.5, torch.sin, 0, False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if not self.is_initialized:
            self.is_initialized = True
            with torch.no_grad():
                self.linear.weight.mul_(0.5)
        return self.function(self.dropout(self.linear(x * x)) * self.scale * self.calls)


def _change_attributes(net: _Scaled) -> None:
    net.scale, net.function, net.dropout.p = 3.0, torch.cos, 0.1


@pytest.mark.parametrize("between", [lambda net: None, _change_attributes])
def test_attributes_are_those_of_the_forward_in_the_recomputation_and_what_it_counts_is_counted_once(between):
    results = []
    for run in (plain_call, checkpoint):
        torch.manual_seed(0)
        net = _Scaled()
        x, y = tensor(5, 4).requires_grad_(), tensor(5, 4).requires_grad_()
        net.linear.register_forward_hook(lambda module, args, output: setattr(module, "seen", args[0].shape[0]))
        loss = run(net, x).sum() + 2 * run(net, y).sum()
        between(net)
        loss.backward()
        results.append([x.grad, y.grad, net.linear.weight.grad, net.linear.weight.detach()])
        assert net.calls == 2
        assert net.linear.seen == 5
        assert (net.scale, net.dropout.p) == ((0.5, 0.5) if net.function is torch.sin else (3.0, 0.1))
    assert_same_tensors(*results)


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.calls += 1
        return weight * self.calls


def test_a_parametrization_that_counts_its_calls_is_repeated_with_the_count_of_the_forward():
    grads = []
    for run in (plain_call, checkpoint):
        torch.manual_seed(0)
        net, x = nn.Linear(4, 3).double(), tensor(5, 4).requires_grad_()
        parametrize.register_parametrization(net, "weight", _Counting())
        run(net, x).square().sum().backward()
        run(net, x).square().sum().backward()
        grads.append([x.grad, net.parametrizations.weight.original.grad])
    assert_same_tensors(*grads)


class _Averaging(nn.Module):
    """Scales by a moving average of its inputs, and counts in a buffer of a part."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(4, dtype=torch.double))
        self.linear, self.norm = nn.Linear(4, 4).double(), nn.BatchNorm1d(4).double()
        for module in (self.linear, self.norm):
            module.register_buffer("calls", torch.zeros((), dtype=torch.double))
            module.register_forward_hook(lambda module, args, output: module.calls.add_(1) and None)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.norm(self.linear(x * self.mean.clone())).sin()


def _replace_mean(net: _Averaging) -> None:
    net.mean = net.mean * 2


@pytest.mark.parametrize("between", [lambda net: None, _replace_mean])
def test_buffers_have_the_values_of_the_forward_in_the_recomputation_and_change_once(between):
    results = []
    for run in (plain_call, checkpoint):
        torch.manual_seed(0)
        net = _Averaging()
        x, y = tensor(5, 4).requires_grad_(), tensor(5, 4).requires_grad_()
        loss = run(net, x).sum() + 2 * run(net, y).sum()
        between(net)
        loss.backward()
        results.append([x.grad, y.grad, net.linear.weight.grad, *net.buffers()])
    assert_same_tensors(*results)


def test_a_frozen_norm_is_recomputed_with_the_statistics_of_its_forward():
    net, x = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)).double(), tensor(5, 4).requires_grad_()
    expected = torch.autograd.grad(net.eval()(x).sin().sum(), net.parameters())
    loss = checkpoint(net, x).sin().sum()
    checkpoint(net.train(), x * 3 + 1)
    buffers = list(net.buffers())
    for actual, grad in zip(torch.autograd.grad(loss, net.parameters()), expected, strict=True):
        assert torch.equal(actual, grad)
    assert all(now is buffer for now, buffer in zip(net.buffers(), buffers, strict=True))


def test_a_large_buffer_that_is_changed_in_place_after_the_forward_raises():
    net = nn.Identity()
    net.register_buffer("table", torch.ones(1 << 17, 1))
    loss = checkpoint(lambda x: net(x * net.table).sin(), torch.ones(1, requires_grad=True)).sum()
    net.table.mul_(2)
    with pytest.raises(
        RuntimeError, match=r"buffer table of a Identity, of shape \(131072, 1\), has been changed in place"
    ):
        loss.backward()


DRAWS = {
    "Python": random.random,
    "NumPy": lambda: float(np.random.rand()),
    "PyTorch": lambda: float(torch.rand(())),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_hooks_that_draw_random_numbers_draw_the_same_again(draw):
    results = []
    for run in (plain_call, checkpoint):
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        net, x = network(), tensor(5, 4).requires_grad_()
        net[0].register_forward_pre_hook(lambda module, args: _none(DRAWS[draw]()))
        net[1].register_forward_hook(lambda module, args, output: output * DRAWS[draw]())
        run(net, x).square().sum().backward()
        results.append([x.grad, *(parameter.grad for parameter in net.parameters()), tensor(1) * 0 + DRAWS[draw]()])
    assert_same_tensors(*results)
