"""Gradients through `checkpoint`: second derivatives, parameters that change, early stops."""

from functools import partial

import pytest
import torch
from checkpoint_outcomes import (
    RUNS,
    CountingOperations,
    assert_same_tensors,
    network,
    networks,
    plain_call,
    tensor,
)
from helpers import assert_close, assert_same_buffers, assert_same_gradients
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts, set_checkpoint_early_stop

from efficient_densenet.checkpoint import checkpoint


def _selective(net, x):
    return checkpoint(net, x, context_fn=partial(create_selective_checkpoint_contexts, [torch.ops.aten.tanh.default]))


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


@pytest.mark.skipif(torch.__version__ < "2.7", reason="needs top_saved_tensors_hooks")
@pytest.mark.parametrize("run", [RUNS["a module"], RUNS["nested"], _selective])
@pytest.mark.parametrize("change", ["a step", "a step of a part", "other parameters"])
def test_parameters_changed_before_the_backward_are_an_error(change, run):
    """A step after the backward of another loss, as in adversarial training: plain raises too."""
    net, x = network(), tensor(5, 4).requires_grad_()
    output = run(net, x)
    if change == "other parameters":
        for name in ("weight", "bias"):
            setattr(net[4], name, nn.Parameter(getattr(net[4], name).detach() * 2))
    else:
        optimizer = torch.optim.SGD(net[4].parameters() if change == "a step of a part" else net.parameters(), lr=0.1)
        run(net, x).sum().backward()
        optimizer.step()
    with pytest.raises(
        RuntimeError, match=r"modified by an inplace operation|with other parameters than in the forward"
    ):
        output.sum().backward()


def test_parameters_may_be_stepped_during_the_backward():
    """As fused optimizers do: the second layer has its step before the first is recomputed."""
    results = []
    for run in (plain_call, checkpoint):
        torch.manual_seed(0)
        net, x = network(), tensor(5, 4).requires_grad_()
        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(_step)
        first, second = _Part(net, slice(0, 3)), _Part(net, slice(3, 5))
        run(second, run(first, x)).square().sum().backward()
        results.append([x.grad, *net.parameters()])
    assert_same_tensors(*results)


def _step(parameter):
    with torch.no_grad():
        parameter.sub_(0.1 * parameter.grad)


class _Part(nn.Module):
    """Some layers of a network that has more."""

    def __init__(self, net, part):
        super().__init__()
        self.net, self.part = net, part

    def forward(self, x):
        return self.net[self.part](x)


class Counting(nn.Module):
    """Counts its calls that return."""

    def __init__(self, *layers):
        super().__init__()
        self.layers, self.finished = nn.Sequential(*layers).double(), []

    def forward(self, x):
        result = self.layers(x)
        self.finished.append(None)
        return result


def test_what_follows_the_last_saved_tensor_is_not_recomputed_unless_torch_s_switch_says_so():
    module, finished, products = Counting(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)), [], []
    for switched_on, options in ((True, {}), (True, {"early_stop": False}), (False, {})):
        with set_checkpoint_early_stop(switched_on):
            output = checkpoint(module, tensor(2, 4), **options)
        with CountingOperations() as operations:
            output.sum().backward()
        finished.append(len(module.finished))
        products.append(operations.counts[torch.ops.aten.addmm.default])
    assert finished == [1, 3, 5]
    assert products == [1, 2, 2]


def test_reading_a_saved_tensor_outside_a_backward_updates_nothing():
    net = network()
    output = checkpoint(net, tensor(5, 4).requires_grad_())
    assert output.grad_fn._saved_mat1 is not None
    assert net[1].num_batches_tracked == 1
