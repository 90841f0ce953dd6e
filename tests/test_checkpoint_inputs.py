"""The recomputation sees the tensor arguments as the forward did: object, class, Python attributes, hooks."""

import weakref

import pytest
import torch
from checkpoint_outcomes import tensor
from grids import grid
from helpers import assert_close
from torch import nn
from torch.masked import masked_tensor
from torch.testing._internal.two_tensor import TwoTensor

from efficient_densenet.checkpoint import CheckpointFunction, checkpoint, offload


class Scaled(torch.Tensor):
    """A subclass without storage tricks, as libraries make them to mark tensors."""


def _seen_in_both(function, *args, **options):
    """Return what `function` returned besides the result, in the forward and in the recomputation."""
    seen = []

    def record(*args):
        result, note = function(*args)
        seen.append(note)
        return result

    checkpoint(record, *args, early_stop=False, **options).sum().backward()
    assert len(seen) == 2
    return seen


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("make", [lambda x: x, nn.Parameter, lambda x: (x * 1).as_subclass(Scaled)])
def test_checkpoint_function_sees_class_and_attributes_of_its_inputs(make, create_graph):
    x = make(tensor(3).requires_grad_())
    x.scale = 0.5
    seen = []

    def function(a):
        seen.append(type(a))
        return a.sin() * a.scale

    (grad,) = torch.autograd.grad(CheckpointFunction.apply(function, 1, x).sum(), x, create_graph=create_graph)
    assert torch.equal(grad.detach().as_subclass(torch.Tensor), 0.5 * x.detach().cos().as_subclass(torch.Tensor))
    assert seen == [type(x)] * 2


def test_an_attribute_changed_before_the_backward_has_the_value_of_the_forward_in_the_recomputation():
    x = torch.ones(3, requires_grad=True)
    x.scale = 0.5
    output = checkpoint(lambda a: a * torch.tensor(a.scale), x)
    x.scale, x.later = 2.0, 1
    output.sum().backward()
    assert x.grad.tolist() == [0.5] * 3
    assert vars(x) == {"scale": 2.0, "later": 1}


def test_an_attribute_set_inside_is_unset_again_when_the_recomputation_starts():
    def function(a):
        first = not hasattr(a, "visited")
        a.visited = True
        return (a * a).sin(), first

    assert _seen_in_both(function, tensor(3).requires_grad_()) == [True, True]


def _scaled(t: torch.Tensor) -> torch.Tensor:
    return t.as_subclass(Scaled).requires_grad_()


@pytest.mark.parametrize(*grid(make=[nn.Parameter, _scaled], computed=[False, True], offloading=[False, True]))
def test_the_class_of_an_argument_stays(make, computed, offloading, monkeypatch):
    monkeypatch.setattr(offload, "is_not_on_cpu", lambda tensor: True)  # as if every tensor were on a GPU
    x = make(tensor(3))
    expected = type(x * 1) if computed else type(x)
    x = x * 1 if computed else x
    x.note = "n"
    seen = _seen_in_both(lambda a: (a.sin().exp(), (type(a), a.requires_grad, a.note)), x, offload=offloading)
    assert seen == [(expected, True, "n")] * 2


def test_the_class_and_attributes_of_an_argument_stay_in_a_nested_checkpoint():
    seen = []

    def inner(a):
        seen.append((type(a), getattr(a, "scale", None)))
        return a.sin() * a.scale

    def outer(x):
        h = x.exp().as_subclass(Scaled)
        h.scale = 0.5
        return checkpoint(inner, h).as_subclass(torch.Tensor).cos()

    x = tensor(3).requires_grad_()
    (grad,) = torch.autograd.grad(checkpoint(outer, x).sum(), x)
    (expected,) = torch.autograd.grad(outer(x).sum(), x)
    assert_close(grad, expected)
    assert set(seen) == {(Scaled, 0.5)}


def test_an_argument_that_is_also_in_a_closure_or_module_is_the_same_object():
    x = tensor(3).requires_grad_()
    y = x * 2
    net = nn.Linear(3, 3).double()
    for value in (x, y, tensor(3), net.weight):
        assert _seen_in_both(lambda a, value=value: ((x * a).sin(), a is value), value, parameters=[x, y, net]) == [
            True,
            True,
        ]
    layer = _Tied(net.weight)
    checkpoint(layer, x, net.weight).sum().backward()
    checkpoint(lambda x, w: checkpoint(layer, x, w), x, net.weight, parameters=layer).sum().backward()
    assert layer.seen == [True] * 4


class _Tied(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight, self.seen = weight, []

    def forward(self, x, weight):
        self.seen.append(weight is self.weight)
        return (x @ weight).sin()


def test_a_view_and_its_base_as_arguments_share_memory_in_the_recomputation():
    x = tensor(4).requires_grad_() * 1
    seen = _seen_in_both(lambda a, b: ((a[:2] * b).sin(), a.data_ptr() == b.data_ptr()), x, x[:2])
    assert seen == [True, True]


def test_a_hook_that_the_function_registers_on_its_argument_fires_once():
    for make in (lambda x: x, lambda x: x * 1):
        fired = []

        def function(a, fired=fired):
            a.register_hook(lambda grad: fired.append(1))
            return a.sin().exp()

        checkpoint(function, make(tensor(3).requires_grad_())).sum().backward()
        assert fired == [1]


def test_an_argument_frozen_before_the_backward_still_gets_no_other_recomputation():
    x, w = tensor(3).requires_grad_(), tensor(3).requires_grad_()
    output = checkpoint(lambda x, w: (x * w).sin(), x, w)
    w.requires_grad_(False)
    output.sum().backward()
    assert_close(x.grad, (x * w).cos().detach() * w)


def test_an_unused_argument_is_freed_with_the_result():
    x = tensor(3).requires_grad_() * 1
    output, reference = checkpoint(lambda x: x.sin(), x), weakref.ref(x)
    del x
    assert reference() is not None
    del output
    assert reference() is None


def _wrapper_tensors():
    values, mask = torch.randn(3, 3), torch.tensor([True, False, True]).expand(3, 3)
    return {
        "TwoTensor": lambda: TwoTensor(values, values + 1),
        "MaskedTensor": lambda: masked_tensor(values, mask),
        "nested, jagged": lambda: torch.nested.nested_tensor([values, values[:2]], layout=torch.jagged),
        "nested, strided": lambda: torch.nested.nested_tensor([values, values[:2]]),
        "csr": lambda: values.to_sparse_csr(),
    }


@pytest.mark.filterwarnings("ignore:.*is in prototype stage:UserWarning")
@pytest.mark.filterwarnings("ignore:.*PyTorch API of MaskedTensors is in prototype stage.*:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state.*:UserWarning")
@pytest.mark.parametrize("kind", list(_wrapper_tensors()))
@pytest.mark.parametrize("nested", [False, True])
def test_tensors_without_a_storage_of_their_own(kind, nested):
    make = _wrapper_tensors()[kind]
    double = (lambda x: x * x) if kind == "csr" else (lambda x: (x * 2).sin().cos())
    call = (lambda x: checkpoint(lambda x: checkpoint(double, x), x)) if nested else (lambda x: checkpoint(double, x))
    grads = []
    for run in (double, call):
        x = make().requires_grad_()
        y = run(x)
        y.backward(torch.ones_like(y))
        grads.append(x.grad)
    assert type(grads[0]) is type(grads[1])
    for a, b in zip(*map(_parts, grads), strict=True):
        assert torch.equal(a, b)


def _parts(t):
    if isinstance(t, TwoTensor):
        return [t.a, t.b]
    if t.is_nested:
        return list(t.unbind())
    return [t.get_data() if hasattr(t, "get_data") else t.to_dense()]
