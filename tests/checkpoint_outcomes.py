"""What the tests of checkpointing share: a network, and the outcome of a call to compare."""

import functools
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from helpers import assert_close, assert_same_buffers, assert_same_gradients
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from efficient_densenet.checkpoint import CheckpointFunction, checkpoint, checkpoint_sequential, checkpoint_wrapper


class CountingOperations(TorchDispatchMode):
    """Counts the calls of each operation."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.counts[operation] += 1
        return operation(*args, **(kwargs or {}))


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.double)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 4)).double()


def networks() -> tuple[nn.Module, nn.Module]:
    """Two networks with the same weights."""
    plain, ours = network(), network()
    ours.load_state_dict(plain.state_dict())
    return plain, ours


def outcome(call, inputs, seed: int = 1) -> dict[str, Any]:
    """The outputs, the gradients of the inputs, and the RNG state after the forward and after the backward."""
    torch.manual_seed(seed), random.seed(seed), np.random.seed(seed)
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
    assert_same_tensors(actual["outputs"], expected["outputs"])
    assert_same_tensors(actual["grads"], expected["grads"])
    for a, b in zip(actual["rng_states"], expected["rng_states"], strict=True):
        assert torch.equal(a, b)


def assert_network_like_plain(run, needs_grad: bool = True, prepare: Callable[[nn.Module], Any] = lambda net: None):
    """`run(net, x)` does to a network what `net(x)` does: outcome, gradients and buffers. `prepare` changes both."""
    plain, ours = networks()
    prepare(plain), prepare(ours)
    x = tensor(5, 4).requires_grad_(needs_grad)
    assert_same_outcome(outcome(functools.partial(run, ours), [x]), outcome(plain, [x]))
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)


def assert_same_tensors(actual: Iterable[torch.Tensor | None], expected: Iterable[torch.Tensor | None]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert_close(a, b)


def plain_call(function: Callable, *args: Any, **_: Any) -> Any:
    """A call without `checkpoint`, in its place."""
    return function(*args)


class Fickle:
    """Calls another function each time."""

    def __init__(self, *functions):
        self.functions = list(functions)

    def __call__(self, x):
        return self.functions.pop(0)(x)


RUNS: dict[str, Callable] = {
    "a module": checkpoint,
    "a partial": lambda net, x: checkpoint(functools.partial(net.forward), x),
    "a closure": lambda net, x: checkpoint(lambda x: net(x), x, parameters=net.parameters()),
    "a module of other options": lambda net, x: checkpoint(net, x, offload=True, early_stop=False),
    "a sequence": lambda net, x: checkpoint_sequential(net, 3, x),
    "a list": lambda net, x: checkpoint_sequential(list(net), 1, x),
    "a wrapped module": lambda net, x: checkpoint_wrapper(net)(x),
    "nested": lambda net, x: checkpoint(lambda x: net[3:](checkpoint(net[:3], x)), x),
    "CheckpointFunction": lambda net, x: CheckpointFunction.apply(net, 1, x, *net.parameters()),
    "reentrant": lambda net, x: checkpoint(net, x, use_reentrant=True),
    "torch's keywords": lambda net, x: checkpoint(
        net, x, use_reentrant=False, preserve_rng_state=True, determinism_check="none", early_stop=True, debug=False
    ),
}
"""Ways to call a network that is checkpointed."""
