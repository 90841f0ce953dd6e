"""`checkpoint` accepts and returns what the plain call does, in any structure."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from checkpoint_outcomes import assert_like_plain, assert_same_outcome, outcome, plain_call, tensor
from helpers import assert_close
from torch import nn

from efficient_densenet.checkpoint import CheckpointFunction, checkpoint


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


def _nested(first, key):
    a, b, c = first[0], first[1]["k"][0], key["z"][0]
    assert first[1]["k"][1] == 3
    assert key["z"][1:] == [None, "s"]
    return {"sum": [a * b + c], "n": 7, "none": None, "t": (a.exp(), "x")}


def _three_inputs():
    return [tensor(2, 3).requires_grad_() for _ in range(3)]


def test_tensors_in_lists_and_dicts_get_gradients_and_results_keep_their_structure():
    a, b, c = _three_inputs()
    assert_like_plain(lambda a, b, c: _nested([a, {"k": (b, 3)}], key={"z": [c, None, "s"]}), a, b, c)
    result = checkpoint(_nested, [a, {"k": (b, 3)}], key={"z": [c, None, "s"]})
    assert list(result) == ["sum", "n", "none", "t"]
    assert isinstance(result["sum"], list)
    assert (result["n"], result["none"], result["t"][1]) == (7, None, "x")


def test_dataclasses_and_named_tuples_are_flattened():
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


def test_a_result_requires_no_gradient_where_no_input_does():
    x = tensor(3)
    result = checkpoint(torch.sin, x)
    assert torch.equal(result, x.sin())
    assert not result.requires_grad


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
    def call(run):
        return lambda base: run(lambda a, b, c: (a * b + c).sum(), base[:2], base[1:], base[0])

    x = tensor(3, 2).requires_grad_()
    assert_same_outcome(outcome(call(checkpoint), [x]), outcome(call(plain_call), [x]))


@pytest.mark.parametrize(
    "call",
    [
        lambda function, base: checkpoint(function, base * 1, parameters=[base]),
        lambda function, base: checkpoint(function, tensor(3), parameters=[base]),
        lambda function, base: CheckpointFunction.apply(function, 1, base * 1),
    ],
)
def test_changing_an_input_in_place_is_an_error(call):
    base = tensor(3).requires_grad_()
    with pytest.raises(RuntimeError, match=r"changes an input in place.*pass a clone"):
        call(lambda x: x.mul_(2) * base, base)


def test_an_input_changed_in_place_before_the_backward_raises_autograd_s_error():
    for options in ({}, {"offload": True}):
        x = tensor(3).requires_grad_()
        y = x * 1
        z = checkpoint(torch.sin, y, **options)
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


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


@pytest.mark.parametrize("name", ["use_reentrant", "determinism_check"])
def test_arguments_of_torch_s_checkpoint_are_refused_unless_the_function_takes_them(name):
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(TypeError, match=f"found {name}, an argument of torch.utils.checkpoint.checkpoint"):
        checkpoint(nn.Linear(2, 2), x, **{name: False})
    assert checkpoint(lambda x, **settings: x * settings[name], x, **{name: 3}).sum().item() == 6
