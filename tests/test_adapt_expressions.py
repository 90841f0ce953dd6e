"""Expressions: equal numbers for every way to write the same function, and other numbers for every other function."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from efficient_densenet.adapt.expressions import Expressions, Table


def numbers(table: Table, function: Callable[[Tensor, Tensor], Tensor]) -> tuple:
    """The expressions of the output and of the gradients of both inputs."""
    a, b = (torch.zeros(2, 4, 3, 3, requires_grad=True) for _ in "ab")
    expressions = Expressions(table)
    for each, name in ((a, "a"), (b, "b")):
        expressions.leaf(each, name)
    with torch.random.fork_rng([]), expressions:
        torch.manual_seed(0)
        output = function(a, b)
        grad = torch.empty_like(output)
        expressions.leaf(grad, "gradient")
        output.backward(grad)
    return expressions.of(output), *(None if each.grad is None else expressions.of(each.grad) for each in (a, b))


def _read_by_a_view(a: Tensor, b: Tensor, double: Callable[[Tensor, float], Tensor]) -> Tensor:
    x = a.detach() * 1
    view = x.view(2, 36)
    double(x, 2)
    return view.sin().view(2, 4, 3, 3) + b


EQUAL = {
    "concatenations": [
        lambda a, b: torch.cat([a, b], 1).relu_() + 1.0,
        lambda a, b: torch.cat([torch.cat([a, b], 1)[:, :4], torch.cat([b, a], 1)[:, :4]], 1).relu() + 1.0,
    ],
    "sums": [lambda a, b: a + b + a.sin(), lambda a, b: a.sin() + (b + a)],
    "a slice of a sum": [lambda a, b: (a + b)[:, 1:3], lambda a, b: b[:, 1:3] + a[:, 1:3]],
    "a half and its whole": [
        lambda a, b: torch.cat(a.split(2, 1), 1) + b,
        lambda a, b: torch.cat(a.chunk(2, 1), 1) + b,
    ],
    "poolings": [lambda a, b: F.avg_pool2d(a + b, 2), lambda a, b: F.avg_pool2d(a + b, 2, 2)],
    "activations": [lambda a, b: F.hardtanh(a + b, 0.0, 6.0), lambda a, b: F.relu6(a + b)],
    "checkpoints": [
        lambda a, b: F.dropout(a.sin() * b, 0.5),
        lambda a, b: checkpoint(lambda a, b: F.dropout(a.sin() * b, 0.5), a, b, use_reentrant=False),
    ],
    "a part that is sliced off": [lambda a, b: a.sin() + b, lambda a, b: torch.cat([b, a.sin()], 1)[:, -4:] + b],
}
OTHER = {
    "constants of one shape": [lambda a, b: a + b * torch.ones(()), lambda a, b: a + b * torch.zeros(())],
    "constants from Python": [lambda a, b: a * torch.tensor(2.0) + b, lambda a, b: a * torch.tensor(3.0) + b],
    "casts": [lambda a, b: a + b, lambda a, b: a.half().float() + b],
    "a view of what was written to": [
        lambda a, b: _read_by_a_view(a, b, Tensor.mul_),
        lambda a, b: _read_by_a_view(a, b, Tensor.mul),
    ],
    "random numbers that are drawn again": [
        lambda a, b: F.dropout(a.detach(), 0.5) + F.dropout(a.detach(), 0.5) + b,
        lambda a, b: (lambda x: x + x)(F.dropout(a.detach(), 0.5)) + b,
    ],
    "a detached part": [lambda a, b: a * b, lambda a, b: a * b.detach()],
    "an order": [lambda a, b: torch.cat([a, b], 1), lambda a, b: torch.cat([b, a], 1)],
    "a term twice": [lambda a, b: a.detach() + a.detach() + b, lambda a, b: a.detach() + b],
    "a clamp": [lambda a, b: a + b, lambda a, b: (a + b).clamp(-1e9, 1e9)],
}


@pytest.mark.parametrize("kind", [*EQUAL, *OTHER])
def test_numbers_are_equal_where_two_ways_to_write_a_function_are(kind):
    table = Table()
    first, second = (numbers(table, function) for function in (EQUAL | OTHER)[kind])
    assert (first == second) == (kind in EQUAL)


NORMS = [
    nn.BatchNorm2d,
    lambda c: nn.BatchNorm2d(c, momentum=None),
    lambda c: nn.InstanceNorm2d(c, track_running_stats=True),
]


@pytest.mark.parametrize("norm", NORMS)
def test_every_update_of_running_statistics_is_seen(norm):
    table, found = Table(), []
    for updates in (0, 1, 2):
        module, expressions = norm(4), Expressions(table)
        before = {name: value.clone() for name, value in module.named_buffers()}
        for name, value in module.named_buffers():
            expressions.leaf(value, name)
        x = torch.randn(2, 4, 3, 3)
        expressions.leaf(x, "x")
        with expressions:
            for _ in range(updates):
                module(x)
        found.append([expressions.of(value) for value in module.buffers()])
        changed = [not torch.equal(value, before[name]) for name, value in module.named_buffers()]
        assert changed == [now != then for now, then in zip(found[-1], found[0], strict=True)]
    assert found[1] != found[2]


def test_a_tensor_from_outside_is_equal_to_itself_alone():
    table, tensors = Table(), [torch.ones(2, 4, 3, 3) for _ in "ab"]
    first, again, second = (
        numbers(table, lambda a, b, each=each: a * each + b) for each in (*tensors[:1] * 2, tensors[1])
    )
    assert first == again != second
