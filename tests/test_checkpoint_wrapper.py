"""`checkpoint_wrapper` changes how a module runs, and nothing else about it."""

import copy
import functools
import pickle

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
    module.note, fired = "mine", []
    ids, names, types = [id(p) for p in module.parameters()], list(module.state_dict()), [*map(type, module.modules())]
    module.register_forward_hook(lambda *_: fired.append(1))
    wrapped = checkpoint_wrapper(module)
    assert wrapped is module
    assert isinstance(wrapped, nn.Sequential)
    assert type(wrapped).__name__ == "Sequential"
    assert list(wrapped.state_dict()) == names
    assert [id(p) for p in wrapped.parameters()] == ids
    assert wrapped.note == "mine"
    assert len(wrapped) == 5
    wrapped(tensor(5, 4)).sum().backward()
    assert fired == [1]
    assert checkpoint_wrapper(wrapped) is wrapped
    restored = unwrap(wrapped)
    assert [*map(type, restored.modules())] == types
    assert vars(restored).keys() - vars(network()).keys() == {"note"}
    assert unwrap(restored) is restored


def test_the_wrapper_saves_little_and_so_does_a_slice_until_it_is_undone():
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8)))
    x = torch.randn(512, 64, requires_grad=True)
    plain = saved_bytes(lambda: net(x))
    wrapped = checkpoint_wrapper(net)
    assert saved_bytes(lambda: wrapped(x)) < 0.3 * plain
    assert torch.equal(wrapped[:2](x), nn.Sequential(*[*wrapped][:2])(x))
    output = wrapped(x)
    assert saved_bytes(lambda: unwrap(net)(x)) == plain
    output.sum().backward()
    assert net[0][0].weight.grad is not None


class Keyworded(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x, *, offload=False, parameters=None, use_reentrant=None, scale: float = 1.0):
        """The keyword arguments have the names of those of `checkpoint`."""
        return {"y": self.linear(x) * scale, "rest": (offload, parameters, use_reentrant), "text": "t"}


def test_keyword_arguments_and_results_that_are_no_tensors():
    module = checkpoint_wrapper(Keyworded())
    result = module(tensor(2, 4), offload="o", parameters=[1], use_reentrant=3, scale=2.0)
    assert (result["rest"], result["text"]) == (("o", [1], 3), "t")
    result["y"].sum().backward()
    assert_close(module.linear.bias.grad, torch.full((4,), 4.0, dtype=torch.double))


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


def test_modules_that_cannot_be_wrapped_or_unwrapped_say_so():
    module = network()
    module.forward = lambda x: x
    with pytest.raises(ValueError, match=r"found a Sequential whose forward .* was set on the instance"):
        checkpoint_wrapper(module)
    module = checkpoint_wrapper(nn.Linear(4, 3))
    nn.utils.parametrizations.weight_norm(module)
    with pytest.raises(RuntimeError, match=r"changed again since .* undo that first"):
        unwrap(module)


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
