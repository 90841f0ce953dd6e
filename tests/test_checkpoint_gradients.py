"""Gradients through `checkpoint`: several backwards, second derivatives, early stops, memory, errors."""

import gc
import weakref
from functools import partial

import pytest
import torch
from checkpoint_outcomes import (
    CountingOperations,
    Fickle,
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
from torch.utils.checkpoint import create_selective_checkpoint_contexts, set_checkpoint_early_stop

from efficient_densenet.checkpoint import CheckpointFunction, checkpoint, checkpoint_wrapper, is_recomputing


def _apply_function(net, x):
    return CheckpointFunction.apply(net, 1, x, *net.parameters())


def _nested(net, x):
    return checkpoint(lambda x: net[3:](checkpoint(net[:3], x)), x)


def _selective(net, x):
    return checkpoint(net, x, context_fn=partial(create_selective_checkpoint_contexts, [torch.ops.aten.tanh.default]))


RUNS = [checkpoint, _apply_function, _nested]


@pytest.mark.parametrize("run", RUNS)
def test_autograd_grad_and_several_backwards(run):
    net, x = network(), tensor(5, 4).requires_grad_()
    net.eval()
    results = []
    for each in (plain_call, run):
        output = each(net, x)
        one = torch.autograd.grad(output.sum(), [x, net[0].weight], retain_graph=True)
        two = torch.autograd.grad(output[0].sum(), [x], retain_graph=True)
        output.square().sum().backward(retain_graph=True)
        output.square().sum().backward()
        results.append([t.clone() for t in (*one, *two, x.grad, *(p.grad for p in net.parameters()))])
        x.grad = None
        net.zero_grad()
        with pytest.raises(RuntimeError, match="second time"):
            output.square().sum().backward()
    assert_same_tensors(*results)


@pytest.mark.parametrize("run", RUNS)
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


def test_gradgradcheck():
    weight = tensor(3, 3).requires_grad_()

    def function(x, w):
        return checkpoint(lambda x: (x @ weight).tanh() * w, x)

    inputs = (tensor(2, 3).requires_grad_(), tensor(3).requires_grad_())
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_a_gradient_computed_inside():
    """As in a network that returns forces, which are the gradient of an energy that it computes."""

    def forces(net, x):
        inner = x.detach().requires_grad_()
        of_leaf = torch.autograd.grad((inner**3).sum(), inner, create_graph=True)[0]
        return torch.autograd.grad(net(x).square().sum(), x, create_graph=True)[0] + of_leaf * x

    plain, ours = networks()
    plain.eval(), ours.eval()
    x = tensor(5, 4).requires_grad_()
    actual = outcome(lambda x: checkpoint(partial(forces, ours), x), [x])
    assert_same_outcome(actual, outcome(partial(forces, plain), [x]))
    assert_same_gradients(ours, plain)


@pytest.mark.parametrize("run", RUNS)
def test_parameter_hooks_fire_once(run):
    assert_network_like_plain(run, prepare=lambda net: net[0].weight.register_hook(lambda grad: grad * 2 + 1))


def test_a_tensor_outside_the_module_gets_its_gradient():
    elsewhere, x = tensor(4, 4).requires_grad_(), tensor(2, 4)
    for product in (elsewhere, elsewhere * 1):
        checkpoint(lambda x, product=product: x @ product, x).sum().backward()
    assert_close(elsewhere.grad, 2 * x.sum(0)[:, None].expand(4, 4))


def test_a_frozen_or_unused_parameter_gets_no_gradient():
    net, unused = network(), tensor(3).requires_grad_()
    net[0].weight.requires_grad_(False)
    checkpoint(lambda x: net(x), tensor(5, 4), parameters=[net, unused]).sum().backward()
    assert net[0].weight.grad is None
    assert unused.grad is None
    assert net[0].bias.grad is not None


@pytest.mark.skipif(torch.__version__ < "2.10", reason="torch.utils.checkpoint has none before")
@pytest.mark.filterwarnings("ignore:.*torch.jit:FutureWarning", "ignore:.*torch.jit:DeprecationWarning")
def test_forward_mode_derivatives():
    x, t = tensor(3), tensor(3)
    with torch.autograd.forward_ad.dual_level():
        dual = checkpoint(torch.sin, torch.autograd.forward_ad.make_dual(x, t))
        assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, t * x.cos())


@pytest.mark.skipif(torch.__version__ < "2.7", reason="needs top_saved_tensors_hooks")
@pytest.mark.parametrize("run", [*RUNS, _selective])
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
    parameter.data.sub_(0.1 * parameter.grad)


class _Part(nn.Module):
    """Some layers of a network that has more."""

    def __init__(self, net, part):
        super().__init__()
        self.net, self.part = net, part

    def forward(self, x):
        return self.net[self.part](x)


def test_parameters_of_functional_call_are_an_error_in_a_later_backward():
    net = network()
    swapped = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters()}
    output = torch.func.functional_call(checkpoint_wrapper(net), swapped, (tensor(5, 4),))
    with pytest.raises(
        RuntimeError, match=r"Sequential\.forward is recomputed with other parameters than in the forward"
    ):
        output.sum().backward()


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize(
    ("recomputed", "message"),
    [
        (lambda x: x[:2].sin().exp(), "different metadata"),
        (lambda x: x.sin().float().exp(), "different metadata"),
        (lambda x: x.sin(), "A different number of tensors was saved"),
        (lambda x: x.to("meta").sin().exp(), "different metadata"),
    ],
)
def test_a_recomputation_that_differs_is_an_error(recomputed, message, early_stop):
    function = Fickle(lambda x: x.sin().exp(), recomputed)
    output = checkpoint(function, tensor(3).requires_grad_() * 1, early_stop=early_stop)
    with pytest.raises(RuntimeError, match=message):
        output.sum().backward()


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


@pytest.mark.parametrize("backward", [True, False])
@pytest.mark.parametrize("wrap", [lambda net: partial(checkpoint, net), checkpoint_wrapper])
def test_memory_is_freed_without_garbage_collection(wrap, backward):
    net = network()
    run, x = wrap(net), tensor(5, 4).requires_grad_()
    run(x).sum().backward()  # imports the compiler, which makes cycles
    gc.collect()
    gc.disable()
    try:
        random_state, y = torch.get_rng_state(), x * 1
        output = run(y)
        held = [weakref.ref(t) for t in (y, output)]
        if backward:
            random_state = torch.get_rng_state()
            output.sum().backward()
            assert torch.equal(torch.get_rng_state(), random_state)
        del output, y
        assert [reference() for reference in held] == [None] * 2
        assert not is_recomputing()
    finally:
        gc.enable()


def test_reading_a_saved_tensor_outside_a_backward_updates_nothing():
    net = network()
    output = checkpoint(net, tensor(5, 4).requires_grad_())
    assert output.grad_fn._saved_mat1 is not None
    assert net[1].num_batches_tracked == 1
