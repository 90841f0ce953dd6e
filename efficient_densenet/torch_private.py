"""The private PyTorch calls the package needs, each behind a name of its own.

A test per function (`tests/test_torch_private.py`) notices when a torch release changes one of them.
"""

import torch
import torch.nn.utils.parametrize


def in_backward() -> bool:
    """True while autograd executes a backward graph in the calling thread, whatever started it."""
    return graph_task() != -1


def graph_task() -> int:
    """A number for the backward that the calling thread is executing, -1 outside of one."""
    return torch._C._current_graph_task_id()


def functorch_is_active() -> bool:
    """True under `torch.func` transforms (vmap, grad, jvp and their compositions)."""
    return torch._C._are_functorch_transforms_active()


def tensor_hooks(tensor: torch.Tensor) -> dict | None:
    """The live dict of a tensor's `register_hook` callables; emptying it silences them."""
    return tensor._backward_hooks


def is_leaf_node(node: torch.autograd.graph.Node) -> bool:
    """True for the node that accumulates a leaf's gradient; the leaf is its `variable`."""
    return node.name() == "torch::autograd::AccumulateGrad"


def caches_parametrizations() -> bool:
    """True inside `torch.nn.utils.parametrize.cached()`."""
    return bool(torch.nn.utils.parametrize._cache_enabled)
