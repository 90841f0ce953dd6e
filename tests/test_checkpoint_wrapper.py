"""`checkpoint_wrapper` changes how a module runs, and nothing else about it."""

import copy
import functools
import gc
import pickle
import weakref

import pytest
import torch
from checkpoint_outcomes import network, tensor
from helpers import assert_close, assert_same_gradients
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from efficient_densenet import convert_batchnorm
from efficient_densenet.checkpoint import checkpoint_wrapper, unwrap
from efficient_densenet.memory import saved_bytes


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


def test_a_slice_of_a_wrapped_sequential_and_unwrapping_before_the_backward():
    net = checkpoint_wrapper(network().eval())
    x = tensor(5, 4).requires_grad_()
    expected = unwrap(copy.deepcopy(net))[:2](x)
    assert torch.equal(net[:2](x), expected)
    output = net(x)
    unwrap(net)
    output.sum().backward()
    assert net[0].weight.grad is not None


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


def _save_products(context, operation, *args, **kwargs):
    return operation is torch.ops.aten.addmm.default


def test_a_wrapped_module_saves_what_its_context_fn_chooses():
    choose = functools.partial(create_selective_checkpoint_contexts, _save_products)
    net = checkpoint_wrapper(network().eval(), context_fn=choose)
    plain = unwrap(copy.deepcopy(net))
    x = tensor(5, 4)
    for module in (net, pickle.loads(pickle.dumps(net))):
        for each in (module, plain):
            each.zero_grad()
            each(x).square().sum().backward()
        assert_same_gradients(module, plain)
    output = net(x)
    output.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="Trying to backward an extra time"):
        output.sum().backward()
