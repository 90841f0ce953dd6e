"""The recomputation ends when it has saved the last tensor that the backward needs."""

import functools
import gc
import weakref

import pytest
import torch
from checkpoint_outcomes import CountingOperations, Fickle, assert_same_outcome, networks, outcome, tensor
from helpers import assert_same_buffers, assert_same_gradients
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

from efficient_densenet.checkpoint import checkpoint, checkpoint_sequential, is_recomputing


class Counting(nn.Module):
    """Counts its calls that return."""

    def __init__(self, *layers):
        super().__init__()
        self.layers, self.finished = nn.Sequential(*layers), []

    def forward(self, x):
        result = self.layers(x)
        self.finished.append(None)
        return result


def test_what_follows_the_last_saved_tensor_is_not_recomputed_unless_torch_s_switch_says_so():
    module, finished = Counting(nn.Linear(4, 3), nn.Linear(3, 3)).double(), []
    for switched_on, options in ((True, {}), (True, {"early_stop": False}), (False, {})):
        with set_checkpoint_early_stop(switched_on):
            output = checkpoint(module, tensor(2, 4), **options)
        output.sum().backward()
        finished.append(len(module.finished))
    assert finished == [1, 3, 5]


def test_a_last_linear_layer_costs_no_product_in_the_recomputation():
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    products = []
    for run in (net, functools.partial(checkpoint, net), functools.partial(checkpoint, net, early_stop=False)):
        output = run(tensor(5, 4))
        with CountingOperations() as operations:
            output.sum().backward()
        products.append(operations.counts[torch.ops.aten.addmm.default])
    assert products == [0, 1, 2]


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize(
    "run",
    [
        lambda net, x, **options: checkpoint(net, x, **options),
        lambda net, x, **options: checkpoint_sequential(net, 3, x, **options),
        lambda net, x, **options: checkpoint(lambda x: checkpoint(net, x, **options), x, parameters=net, **options),
        lambda net, x, **options: checkpoint(
            lambda x: net[3:](checkpoint(net[1:3], net[0](x), **options).sin()) + x.exp(),
            x,
            parameters=net,
            **options,
        ),
    ],
)
def test_nothing_changes_but_the_work(run, early_stop):
    plain, ours = networks()
    x = tensor(5, 4).requires_grad_()
    with set_checkpoint_early_stop(False):
        expected = outcome(lambda x: run(plain, x), [x])
    plain_buffers = {name: buffer.clone() for name, buffer in plain.named_buffers()}
    assert_same_outcome(outcome(lambda x: run(ours, x, early_stop=early_stop), [x]), expected)
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)
    assert all(torch.equal(buffer, plain_buffers[name]) for name, buffer in ours.named_buffers())
    assert not is_recomputing()


def test_an_inner_checkpoint_at_the_end_is_not_run_by_the_outer_recomputation():
    module = Counting(nn.Linear(4, 4), nn.Tanh()).double()
    outer = nn.Linear(4, 4).double()
    calls = []

    def inner(x):
        calls.append(is_recomputing())
        return module(x)

    x = tensor(2, 4)
    checkpoint(lambda x: checkpoint(inner, outer(x), parameters=module), x, parameters=[outer, module]).sum().backward()
    assert calls == [False, True]


def test_a_function_that_catches_exceptions_is_still_ended():
    calls = []

    def function(x):
        y = None
        for _ in range(2):
            try:
                y = x.sin() if y is None else y.exp()
            except Exception:
                calls.append("caught")
        calls.append("finished")
        return y

    checkpoint(function, tensor(3).requires_grad_()).sum().backward()
    assert calls == ["finished"]


def test_a_function_that_catches_everything_is_recomputed_to_its_end():
    def function(x):
        try:
            return x.sin()
        except BaseException:
            return x.cos()

    x = tensor(3).requires_grad_()
    checkpoint(function, x).sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


def test_a_recomputation_that_saves_fewer_tensors_is_an_error():
    output = checkpoint(Fickle(lambda x: x.sin().exp(), torch.sin), tensor(3).requires_grad_())
    with pytest.raises(RuntimeError, match=r"Fickle saved 1 tensor .* but 2 tensors"):
        output.sum().backward()


def test_a_stopped_recomputation_leaves_no_cycle_and_no_state():
    gc.collect()
    gc.disable()
    try:
        references = []

        def function(x):
            y = x.sin()
            references.append(weakref.ref(y))
            return torch.nn.functional.dropout(y.exp(), 0.5)

        x = tensor(3).requires_grad_()
        output = checkpoint(function, x)
        torch.manual_seed(0)
        state = torch.get_rng_state()
        output.sum().backward()
        del output
        assert [reference() for reference in references] == [None, None]
        assert torch.equal(torch.get_rng_state(), state)
        assert not is_recomputing()
    finally:
        gc.enable()


def test_early_stopping_in_the_middle_of_a_scripted_function():
    with pytest.warns(Warning, match="torch.jit.script"):
        scripted = torch.jit.script(_sine)
    x = tensor(3).requires_grad_()
    checkpoint(scripted, x).sum().backward()
    expected = x.grad.clone()
    x.grad = None
    _sine(x).sum().backward()
    assert torch.equal(x.grad, expected)


def _sine(x):
    y = x.sin().cos()
    return y + y.sum()
