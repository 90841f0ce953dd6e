"""The private PyTorch calls the package needs, each behind a name of its own.

A test per function (`tests/test_torch_private.py`) notices when a torch release changes one of them.
"""

from collections.abc import Callable

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


def hooks_watch_all_modules() -> bool:
    """True while a hook is registered for every module at once, as `register_module_forward_hook` does."""
    kinds = "forward_pre", "forward", "backward_pre", "backward"
    return any(getattr(torch.nn.modules.module, f"_global_{kind}_hooks") for kind in kinds)


def caches_parametrizations() -> bool:
    """True inside `torch.nn.utils.parametrize.cached()`."""
    return bool(torch.nn.utils.parametrize._cache_enabled)


def at_the_end_of_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the backward that the calling thread is executing is done."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def is_exporting(training: bool) -> bool:
    """True in tracing and export, of a model that is in training mode or not."""
    if torch.jit.is_tracing() or torch.onnx.is_in_onnx_export():
        return True
    if hasattr(torch.compiler, "is_exporting"):
        return torch.compiler.is_exporting()
    # torch 2.6 does not tell export from compilation: what it exports is untraced by dynamo, or in eval mode.
    return torch.compiler.is_compiling() and not (torch.compiler.is_dynamo_compiling() and training)


def compilers_recompute_exactly() -> bool:
    """Whether a compiled torch.utils.checkpoint leaves running statistics alone in its second run."""
    return torch.__version__ >= "2.11"
