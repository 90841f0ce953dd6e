"""The private PyTorch APIs that the package uses, one function for each.

`tests/test_torch_private.py` tests each function, so that a PyTorch release that changes one of them fails there.
"""

from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.utils.parametrize
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_FSDP = "torch.distributed.fsdp"


def in_backward() -> bool:
    """Return True while autograd executes a backward graph in the calling thread."""
    return graph_task_id() != -1


def graph_task_id() -> int:
    """Return the id of the backward that the calling thread executes, or -1 outside of a backward."""
    return torch._C._current_graph_task_id()


_fp32_precision = getattr(torch._C, "_get_fp32_precision_getter", None)
"""What `torch.backends.cudnn.conv.fp32_precision` calls, since PyTorch 2.9, in a sixth of its time."""


def convolutions_in_tf32() -> bool:
    """Return whether PyTorch's settings allow TF32 in convolutions of float32."""
    return torch.backends.cudnn.allow_tf32 if _fp32_precision is None else _fp32_precision("cuda", "conv") == "tf32"


def functorch_is_active() -> bool:
    """Return True under a `torch.func` transform (vmap, grad, jvp and their compositions)."""
    return torch._C._are_functorch_transforms_active()


def is_batched_gradient(grad: Tensor | None) -> bool:
    """Return True for a gradient in a backward of several gradients at once (`is_grads_batched=True`)."""
    return grad is not None and torch._C._functorch.is_legacy_batchedtensor(grad)  # pyright: ignore[reportAttributeAccessIssue]


def tensor_hooks(tensor: Tensor) -> dict | None:
    """Return the dict of a tensor's `register_hook` hooks. Clearing the dict disables the hooks."""
    return tensor._backward_hooks


def has_global_module_hooks() -> bool:
    """Return True if a hook is registered for all modules, as by `register_module_forward_hook`."""
    kinds = "forward_pre", "forward", "backward_pre", "backward"
    return any(getattr(torch.nn.modules.module, f"_global_{kind}_hooks") for kind in kinds)


def hook_dicts(module: torch.nn.Module) -> list[dict[int, Any]]:
    """Return the dicts of the forward hooks and pre-hooks of `module`, and of the options of these hooks."""
    return [getattr(module, name) for name in _HOOK_DICTS]


_HOOK_DICTS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


def saved_tensors_hooks_enabled() -> bool:
    """Return False inside `torch.autograd.graph.disable_saved_tensors_hooks()`."""
    return torch._C._autograd._saved_tensors_hooks_is_enabled()  # pyright: ignore[reportAttributeAccessIssue]


def top_saved_tensors_hooks() -> tuple[Callable, Callable] | None:
    """Return the pack and unpack hooks of the innermost `saved_tensors_hooks` context, or None outside of any.

    PyTorch 2.6 does not tell: None.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # pyright: ignore[reportAttributeAccessIssue]
    return None if top is None else top(False)


def parametrization_cache_enabled() -> bool:
    """Return True inside `torch.nn.utils.parametrize.cached()`."""
    return bool(torch.nn.utils.parametrize._cache_enabled)


def will_execute(node: torch.autograd.graph.Node) -> bool:
    """Return True if the backward that the calling thread executes will run `node`: `grad` of some inputs skips
    nodes."""
    return torch._C._will_engine_execute_node(node)


def queue_backward_callback(callback: Callable[[], Any]) -> None:
    """Call `callback` at the end of the backward that the calling thread executes."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def hooks_of(module: torch.nn.Module) -> list[dict[int, Callable[..., Any]]]:
    """Return the dicts of the hooks that run in the forward and the backward of `module`."""
    kinds = "forward", "forward_pre", "backward", "backward_pre"
    return [getattr(module, f"_{kind}_hooks") for kind in kinds]


def without_step_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer, which may be a shallow copy, empty dicts of hooks for its steps."""
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()


def run_parts(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation as those that it consists of, if it is one that autograd does not know; else NotImplemented."""
    is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(operation.name(), "CompositeImplicitAutograd")
    return operation.decompose(*args, **kwargs) if is_composite else NotImplemented


def run_cpu_implementation(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the implementation of an operator for the CPU, whatever its tensors are."""
    return operation.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)


def onednn_supports(dtype: torch.dtype) -> bool:
    """Return whether PyTorch convolves in this dtype by oneDNN on this CPU, rather than by im2col."""
    if dtype is torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported() if dtype is torch.bfloat16 else dtype is torch.float32


def backward_inside_function_modes(loss: Tensor) -> None:
    """`loss.backward()`, in which function modes stay active: those functions that modes see leave them."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def memory_key(tensor: Tensor) -> int:
    """Return the id of the storage of a tensor or its base, which is equal for tensors that share memory."""
    base = tensor if tensor._base is None else tensor._base
    try:
        return base.untyped_storage()._cdata
    except NotImplementedError:  # sparse and opaque tensors have no storage
        return id(base)


def has_torch_dispatch(tensor_type: Any) -> bool:
    """Return True for a subclass of `Tensor` that handles operations itself, as wrappers of other tensors do."""
    return tensor_type.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


def is_part_of_leaf(tensor: Tensor) -> bool:
    """Return True for a leaf of the autograd graph, such as a parameter, and for a view of a leaf."""
    return (tensor if tensor._base is None else tensor._base).is_leaf


def has_dispatch_mode() -> bool:
    """Return True inside a `TorchDispatchMode`, such as the tracing mode of a compiler."""
    return torch._C._len_torch_dispatch_stack() > 0


def without_dispatch_modes() -> AbstractContextManager:
    """Return a context in which no dispatch mode sees the operations. Tensor subclasses still do."""
    return _disable_current_modes() if has_dispatch_mode() else nullcontext()


def is_managed_by_fsdp(module: torch.nn.Module) -> bool:
    """Return True if FSDP (either version) shards the parameters of `module` and replaces them while it runs."""
    return vars(module).get("_is_fsdp_managed_module", False)


def is_distributed_wrapper(module: torch.nn.Module) -> bool:
    """Return True for a module of PyTorch's distributed wrappers, such as DDP or FSDP, whose attributes hold state."""
    return type(module).__module__.startswith(("torch.distributed", "torch.nn.parallel"))


def sharding_of(module: torch.nn.Module) -> str | None:
    """Return the sharding of the parameters of exactly this module: "fully_shard", "FullyShardedDataParallel" or
    None."""
    names = {cls.__name__ for cls in type(module).__mro__ if (cls.__module__ or "").startswith(_FSDP)}
    return "fully_shard" if "FSDPModule" in names else "FullyShardedDataParallel" if names else None


def has_hooks_of_fully_shard_only(module: torch.nn.Module) -> bool:
    """Return True if `fully_shard` has put its hooks on `module`, and nobody else has."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    others = module._backward_hooks or module._backward_pre_hooks or "forward" in vars(module)
    owners = {getattr(hook, "__module__", None) or "" for hook in hooks}
    return bool(owners) and not others and all(owner.startswith(f"{_FSDP}._fully_shard") for owner in owners)


def policy_of_fully_shard(module: Any) -> Any:
    """Return the `MixedPrecisionPolicy` with which `fully_shard` was called on `module`."""
    return module._get_fsdp_state()._mp_policy


def is_flattened_by_fsdp1(module: torch.nn.Module) -> bool:
    """Return True if `FullyShardedDataParallel` wraps this module, or holds its parameters in a flat parameter."""
    if sharding_of(module) == "FullyShardedDataParallel":
        return True
    parameters = (type(parameter) for parameter in module._parameters.values() if parameter is not None)
    return is_managed_by_fsdp(module) and not all(map(has_torch_dispatch, parameters))  # FSDP2 has DTensors


def class_before_fully_shard(cls: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """Return the class from which `fully_shard` made `cls`, or `cls` itself."""
    made = (cls.__module__ or "").startswith(_FSDP) and cls.__bases__[0].__name__ == "FSDPModule"
    return cls.__bases__[1] if made else cls


def process_group_named(name: str) -> torch.distributed.ProcessGroup:
    """Return the process group whose `group_name` is `name`."""
    resolve: Any = torch.distributed.distributed_c10d._resolve_process_group  # pyright: ignore[reportPrivateImportUsage]
    return resolve(name)


def below_autograd() -> AbstractContextManager:
    """Return a context in which operators run their device's implementation, and autograd records nothing."""
    return torch._C._AutoDispatchBelowAutograd()


def foreach_add_(tensors: list[Tensor], value: int) -> None:
    """Add `value` to each tensor."""
    torch._foreach_add_(tensors, value)  # pyright: ignore[reportPrivateImportUsage]


def foreach_copy_(tensors: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its tensor, which may have another dtype."""
    torch._foreach_copy_(tensors, sources)  # pyright: ignore[reportPrivateImportUsage]


def foreach_lerp_(tensors: list[Tensor], ends: list[Tensor], weight: float | list[Tensor]) -> None:
    """tensor += weight · (end − tensor) for each tensor and its end; a list has a weight for each tensor."""
    torch._foreach_lerp_(tensors, ends, weight)  # pyright: ignore[reportPrivateImportUsage]


def im2col_conv3x3(images: Tensor, weight: Tensor) -> Tensor:
    """Convolve images with a 3×3 weight and padding 1 on a CPU, by im2col and a matrix product rather than oneDNN."""
    return torch._C._nn.thnn_conv2d(images, weight, (3, 3), None, (1, 1), (1, 1))  # pyright: ignore[reportAttributeAccessIssue]


def im2col_conv3x3_backward(
    grad_output: Tensor, images: Tensor, weight: Tensor, mask: list[bool]
) -> tuple[Tensor, Tensor, None]:
    """Return grad_input and grad_weight of `im2col_conv3x3`, where `mask` is True. All have one memory format."""
    settings = [3, 3], [1, 1], [1, 1]
    return torch.ops.aten._slow_conv2d_backward.output_mask(grad_output, images, weight, *settings, mask)
