"""Does a call checkpointed by this package or by torch.utils.checkpoint behave as the plain call? Yes or no.

    python benchmarks/checkpointing_probes.py

Writes a CSV file to benchmarks/results. The names of the probes are its first column.
"""

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import rows as results
import torch
from options import run_command
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from efficient_densenet.checkpoint import checkpoint_wrapper

Wrap = Callable[[nn.Module], nn.Module]


class _TorchCheckpoint(nn.Module):
    """Calls a module through `torch.utils.checkpoint`, which has no wrapper for modules."""

    def __init__(self, module: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.module, self.use_reentrant = module, use_reentrant

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return torch_checkpoint(self.module, *args, use_reentrant=self.use_reentrant, **kwargs)


WRAPPERS: dict[str, Wrap] = {
    "ours": checkpoint_wrapper,
    "torch": lambda module: _TorchCheckpoint(module, use_reentrant=False),
    "torch, reentrant": lambda module: _TorchCheckpoint(module, use_reentrant=True),
}


class Function(nn.Module):
    """A function as a module, which all wrappers accept."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@dataclass
class Pair:
    """An argument with two tensors."""

    left: Tensor
    right: Tensor


def _x(*shape: int, requires_grad: bool = True) -> Tensor:
    return torch.randn(*(shape or (4, 3)), dtype=torch.double, requires_grad=requires_grad)


def _net(*layers: nn.Module) -> Any:  # an nn.Sequential, whose items' attributes type checkers do not know
    return nn.Sequential(nn.Linear(3, 3), *layers, nn.Linear(3, 3)).double()


def _grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


def gradient_of_an_input_in_a_list_or_dataclass(wrap: Wrap) -> bool:
    x, y, z = _x(), _x(), _x()
    module = wrap(Function(lambda tensors, pair: tensors[0].sin() + pair.left * pair.right))
    module([x], Pair(y, z)).sum().backward()
    return torch.equal(_grad(x), x.detach().cos()) and torch.equal(_grad(y), z) and torch.equal(_grad(z), y)


def parameters_get_gradients_when_the_input_requires_none(wrap: Wrap) -> bool:
    net = _net()
    wrap(net)(_x(requires_grad=False)).sum().backward()
    return all(p.grad is not None for p in net.parameters())


def batch_norm_updates_once_a_step(wrap: Wrap) -> bool:
    net = _net(nn.BatchNorm1d(3))
    wrap(net)(_x()).sum().backward()
    return net[1].num_batches_tracked.item() == 1


def batch_norm_updates_without_a_backward(wrap: Wrap) -> bool:
    net = _net(nn.BatchNorm1d(3))
    wrapped = wrap(net)
    wrapped(_x())
    with torch.no_grad():
        wrapped(_x())
    return net[1].num_batches_tracked.item() == 2


def forward_hooks_inside_fire_once(wrap: Wrap) -> bool:
    net, fired = _net(), []
    net[0].register_forward_hook(lambda *_: fired.append(1))
    wrap(net)(_x()).sum().backward()
    return len(fired) == 1


def a_deep_copy_uses_its_own_weights(wrap: Wrap) -> bool:
    wrapped = wrap(_net())
    copied = copy.deepcopy(wrapped)
    x = _x()
    expected = copied(x).detach()
    with torch.no_grad():
        for parameter in wrapped.parameters():
            parameter.zero_()
    output = copied(x)
    output.sum().backward()
    return torch.equal(output, expected) and all(p.grad is not None for p in copied.parameters())


def pickling_works(wrap: Wrap) -> bool:
    wrapped, x = wrap(_net()), _x()
    return torch.equal(pickle.loads(pickle.dumps(wrapped))(x), wrapped(x))


def state_dict_keys_stay_and_isinstance_holds(wrap: Wrap) -> bool:
    net = _net()
    keys = list(net.state_dict())
    wrapped = wrap(net)
    return list(wrapped.state_dict()) == keys and isinstance(wrapped, nn.Sequential)


def memory_is_freed_without_garbage_collection(wrap: Wrap) -> bool:
    gc.collect()
    gc.disable()
    try:
        wrapped = wrap(_net())
        output = wrapped(_x())
        output.sum().backward()
        references = [weakref.ref(next(iter(wrapped.parameters()))), weakref.ref(output)]
        del wrapped, output
        return all(ref() is None for ref in references)
    finally:
        gc.enable()


def second_derivatives(wrap: Wrap) -> bool:
    x = _x()
    (grad,) = torch.autograd.grad(wrap(Function(torch.sin))(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    return torch.allclose(second, -x.detach().sin())


def autocast_is_restored(wrap: Wrap) -> bool:
    net, grads = nn.Linear(3, 3), []
    for module in (copy.deepcopy(net), net):
        run = wrap(module) if module is net else module
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = run(torch.ones(2, 3, requires_grad=True)).sum()
        loss.backward()
        grads.append(module.weight.grad)
    return torch.equal(*grads)


def eval_mode_set_before_the_backward_changes_nothing(wrap: Wrap) -> bool:
    net = _net(nn.BatchNorm1d(3))
    plain, x = copy.deepcopy(net), _x()
    for module, run in ((plain, plain), (net, wrap(net))):
        loss = run(x).square().sum()
        module.eval()
        loss.backward()
    return torch.allclose(_grad(net[0].weight), _grad(plain[0].weight))


def what_follows_the_last_saved_tensor_is_not_recomputed(wrap: Wrap) -> bool:
    clones: list[int] = []
    wrap(Function(lambda x: (x.sin(), clones.append(1))[0].clone()))(_x()).sum().backward()
    return len(clones) == 1


PROBES = (
    gradient_of_an_input_in_a_list_or_dataclass,
    parameters_get_gradients_when_the_input_requires_none,
    batch_norm_updates_once_a_step,
    batch_norm_updates_without_a_backward,
    forward_hooks_inside_fire_once,
    a_deep_copy_uses_its_own_weights,
    pickling_works,
    state_dict_keys_stay_and_isinstance_holds,
    memory_is_freed_without_garbage_collection,
    second_derivatives,
    autocast_is_restored,
    eval_mode_set_before_the_backward_changes_nothing,
    what_follows_the_last_saved_tensor_is_not_recomputed,
)


NOT_APPLICABLE = {(state_dict_keys_stay_and_isinstance_holds, name) for name in ("torch", "torch, reentrant")}
"""Pairs of a probe and an implementation without a module wrapper, which `_TorchCheckpoint` only stands in for."""


def answer(probe: Callable[[Wrap], bool], name: str) -> str:
    """Return yes, no or – (not applicable) for a probe of the implementation `name`."""
    if (probe, name) in NOT_APPLICABLE:
        return "–"
    return "yes" if behaves(probe, WRAPPERS[name]) else "no"


def behaves(probe: Callable[[Wrap], bool], wrap: Wrap) -> bool:
    """Return True if a wrapped module behaves as the plain one. An unexpected error counts as False."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return probe(wrap)
        except Exception:
            return False


def probe_behaviours() -> None:
    """Run all probes on all implementations, and write the file, with one row for each probe."""
    rows = []
    for probe in PROBES:
        answers = {name: answer(probe, name) for name in WRAPPERS}
        rows.append({"behaviour": probe.__name__.replace("_", " "), **answers})
    results.write(results.RESULTS / f"checkpointing_behaviours_torch{torch.__version__.split('+')[0]}.csv", rows)


if __name__ == "__main__":
    run_command(probe_behaviours)
