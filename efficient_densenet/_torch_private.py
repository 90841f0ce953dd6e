"""The private names of PyTorch that eager mode uses, and one function for each; compilers' are in `_compilers.py`.

A release of PyTorch may drop any of them. Importing the package and the engine `plain` need none; a feature that needs
one is lost, and says so. `tests/test_torch_private.py` tests each function, and removes each name in turn.
"""

import operator
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.utils.parametrize
from torch import Tensor

_FSDP = "torch.distributed.fsdp"
SHARED, PREDICTION, IM2COL = "the shared engine", "memory.predict", "im2col for tiny images"
SKIPS = "one matrix for both ends of a skip connection"

NAMES: dict[str, str] = {}
"""The feature that needs each private name below `torch`."""
MISSING: dict[str, str] = {}
"""The names that this PyTorch lacks, as in `NAMES`."""
_RAISES = object()
_told: set[str] = set()


def _private(name: str, feature: str, otherwise: Any = _RAISES) -> Any:
    """`torch.<name>`, which `feature` needs; where this PyTorch lacks it, a function that warns once and returns
    `otherwise`, or that raises RuntimeError."""
    NAMES[name] = feature
    try:
        return operator.attrgetter(name)(torch)
    except AttributeError:
        MISSING[name] = feature

    def stand_in(*args: Any, **kwargs: Any) -> Any:
        message = str(why_not(feature))
        if otherwise is _RAISES:
            raise RuntimeError(message)
        if message not in _told:
            _told.add(message)
            warnings.warn(message, stacklevel=3)
        return otherwise

    return stand_in


def why_not(feature: str) -> str | None:
    """The names that this PyTorch lacks and `feature` needs, as a sentence; None if it has them all."""
    missing = [f"torch.{name}" for name, needed_by in MISSING.items() if needed_by == feature]
    return f"found PyTorch {torch.__version__} without {', '.join(missing)}, which {feature} needs" if missing else None


_current_graph_task_id = _private(
    "_C._current_graph_task_id", "updating running statistics once under torch.utils.checkpoint", -1
)


def in_backward() -> bool:
    """Return True while autograd executes a backward graph in the calling thread."""
    return _current_graph_task_id() != -1


_fp32_precision = getattr(torch._C, "_get_fp32_precision_getter", None)
"""The function behind `torch.backends.cudnn.conv.fp32_precision` since PyTorch 2.9, in a sixth of its time."""


def convolutions_in_tf32() -> bool:
    """Return whether PyTorch's settings allow TF32 in convolutions of float32."""
    return torch.backends.cudnn.allow_tf32 if _fp32_precision is None else _fp32_precision("cuda", "conv") == "tf32"


functorch_is_active = _private("_C._are_functorch_transforms_active", "falling back under torch.func", False)
"""Returns True under a `torch.func` transform (vmap, grad, jvp and their compositions)."""

_is_legacy_batchedtensor = _private("_C._functorch.is_legacy_batchedtensor", SHARED)


def is_batched_gradient(grad: Tensor | None) -> bool:
    """Return True for a gradient in a backward of several gradients at once (`is_grads_batched=True`)."""
    return grad is not None and _is_legacy_batchedtensor(grad)


def leaves_not_to_save(tensors: Sequence[Tensor | None]) -> dict[int, Tensor]:
    """Return the tensors, by their positions, whose hooks would be lost if an autograd.Function saved them.

    Before PyTorch 2.10, this happens to leaves inside `saved_tensors_hooks`, such as those of `torch.utils.checkpoint`:
    a saved leaf is unpacked as another tensor, which clears the hooks of both when it is freed.
    """
    if not _UNPACKING_CLEARS_HOOKS:
        return {}
    return {i: each for i, each in enumerate(tensors) if each is not None and each.is_leaf}


_UNPACKING_CLEARS_HOOKS = torch.__version__ < "2.10"

_GLOBAL_HOOKS = tuple(f"_global_{kind}_hooks" for kind in ("forward_pre", "forward", "backward_pre", "backward"))
for _name in _GLOBAL_HOOKS:
    _private(f"nn.modules.module.{_name}", SHARED)


def has_global_module_hooks() -> bool:
    """Return True if a hook is registered for all modules, as by `register_module_forward_hook`."""
    return any(getattr(torch.nn.modules.module, name) for name in _GLOBAL_HOOKS)  # a compiler guards these attributes


def hook_dicts(module: torch.nn.Module) -> list[dict[int, Any]]:
    """Return the dicts of the hooks of `module`, and of the options of these hooks."""
    return [getattr(module, name) for name in _HOOK_DICTS]


_HOOK_DICTS = [name for name in vars(torch.nn.Module()) if "_hooks" in name]


saved_tensors_hooks_enabled = _private(
    "_C._autograd._saved_tensors_hooks_is_enabled", "falling back without their hooks", True
)
"""Returns False inside `torch.autograd.graph.disable_saved_tensors_hooks()`."""

_top_saved_tensors_hooks = _private("_C._autograd._top_saved_tensors_default_hooks", SKIPS)


def has_saved_tensors_hooks() -> bool:
    """Whether hooks for saved tensors are in force, or this PyTorch cannot tell."""
    return why_not(SKIPS) is not None or _top_saved_tensors_hooks(False) is not None


_cache_enabled = _private("nn.utils.parametrize._cache_enabled", "recomputing parametrizations", True)


def parametrization_cache_enabled() -> bool:
    """Return True inside `torch.nn.utils.parametrize.cached()`, and wherever that is not known."""
    if callable(_cache_enabled):
        return bool(_cache_enabled())
    return bool(torch.nn.utils.parametrize._cache_enabled)  # not looked up once: the value changes


_dispatch_has_kernel = _private("_C._dispatch_has_kernel_for_dispatch_key", PREDICTION)
_DispatchKeySet = _private("_C.DispatchKeySet", PREDICTION)
_parse_dispatch_key = _private("_C._parse_dispatch_key", PREDICTION)


def run_parts(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str | None = None) -> Any:
    """Run an operation as those that it consists of, if it is one that autograd does not know, and has no
    implementation of its own for the type of device; else NotImplemented."""
    is_composite = _dispatch_has_kernel(operation.name(), "CompositeImplicitAutograd")
    if device_type is not None:
        keys = device_type.upper(), "CompositeExplicitAutograd"
        is_composite = is_composite and not any(_dispatch_has_kernel(operation.name(), key) for key in keys)
    return operation.decompose(*args, **kwargs) if is_composite else NotImplemented


def run_cpu_implementation(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the implementation of an operator for the CPU, whatever its tensors are."""
    return operation.redispatch(_DispatchKeySet(_parse_dispatch_key("CPU")), *args, **kwargs)


_onednn_supports_float16 = _private("ops.mkldnn._is_mkldnn_fp16_supported", "predicting half precision", True)
_onednn_supports_bfloat16 = _private("ops.mkldnn._is_mkldnn_bf16_supported", "predicting half precision", True)


def onednn_supports(dtype: torch.dtype) -> bool:
    """Return whether PyTorch convolves in this dtype by oneDNN on this CPU, rather than by im2col."""
    if dtype is torch.float16:
        return _onednn_supports_float16()
    return _onednn_supports_bfloat16() if dtype is torch.bfloat16 else dtype is torch.float32


_run_backward = _private("autograd.Variable._execution_engine.run_backward", PREDICTION)


def backward_inside_function_modes(loss: Tensor) -> None:
    """`loss.backward()`, in which function modes stay active: those functions that modes see leave them."""
    _run_backward((loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True)


def memory_key(tensor: Tensor) -> int:
    """Return the id of the storage of a tensor or its base, which is equal for tensors that share memory."""
    base = base_of(tensor)
    try:
        return base.untyped_storage()._cdata
    except NotImplementedError:  # sparse and opaque tensors have no storage
        return id(base)


_select_conv_backend = _private("_C._select_conv_backend", SHARED)
_backend_memory_format = _private("_C._conv_determine_backend_memory_format", SHARED)


def convolution_memory_format(
    x: torch.Tensor, weight: torch.Tensor, padding: int, dilation: int
) -> torch.memory_format:
    """Return the memory format of the output of a convolution, whose values are not read."""
    ones, zeros = [1] * (x.dim() - 2), [0] * (x.dim() - 2)
    paddings, dilations = [padding for _ in ones], [dilation for _ in ones]
    return _backend_memory_format(
        x, weight, _select_conv_backend(x, weight, None, ones, paddings, dilations, False, zeros, 1)
    )


_disabled_torch_dispatch = _private("_C._disabled_torch_dispatch_impl", SHARED)


def has_torch_dispatch(tensor_type: Any) -> bool:
    """Return True for a subclass of `Tensor` that handles operations itself, as wrappers of other tensors do."""
    return tensor_type.__torch_dispatch__ is not _disabled_torch_dispatch


def parameters_of(*modules: torch.nn.Module) -> list[Tensor]:
    """Return the parameters of `modules`, also of `nn.DataParallel` replicas, whose `parameters()` is empty."""
    parameters = {}
    for module in (each for root in modules for each in root.modules()):
        for tensor in (*module._parameters.values(), *getattr(module, "_former_parameters", {}).values()):
            if tensor is not None:
                parameters[id(tensor)] = tensor
    return list(parameters.values())


def base_of(tensor: Tensor) -> Tensor:
    """Return the tensor of which `tensor` is a view, or itself."""
    return tensor if tensor._base is None else tensor._base


_len_torch_function_stack = _private("_C._len_torch_function_stack", "falling back under function modes", 0)
_function_modes = _private("overrides._get_current_function_mode_stack", "falling back under function modes", ())


def classes_of_function_modes() -> list[type]:
    """Return the class of each active `TorchFunctionMode` that other code has defined. PyTorch's own, such as that of a
    default device, change no values."""
    classes = [type(mode) for mode in _function_modes()] if _len_torch_function_stack() else []
    return [cls for cls in classes if not cls.__module__.startswith(("torch.", "efficient_densenet."))]


def name_of_function_mode() -> str | None:
    """Return the name of the first of `classes_of_function_modes`, or None."""
    return next((cls.__name__ for cls in classes_of_function_modes()), None)


_len_torch_dispatch_stack = _private("_C._len_torch_dispatch_stack", SHARED, 1)
_disable_current_modes = _private(
    "utils._python_dispatch._disable_current_modes", "selective checkpointing of batch norms", nullcontext()
)


def has_dispatch_mode() -> bool:
    """Return True inside a `TorchDispatchMode`, such as the tracing mode of a compiler."""
    return _len_torch_dispatch_stack() > 0


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


_resolve_process_group = _private("distributed.distributed_c10d._resolve_process_group", "synchronizing batch norms")


def process_group_named(name: str) -> torch.distributed.ProcessGroup:
    """Return the process group whose `group_name` is `name`."""
    return _resolve_process_group(name)


below_autograd = _private("_C._AutoDispatchBelowAutograd", SHARED)
"""A context in which operators run their device's implementation, and autograd records nothing."""

foreach_add_ = _private("_foreach_add_", SHARED)
"""Adds a number to each tensor."""

foreach_copy_ = _private("_foreach_copy_", SHARED)
"""Copies each of the second list's tensors into the first one's, which may have other dtypes."""

foreach_lerp_ = _private("_foreach_lerp_", SHARED)
"""tensor += weight · (end − tensor) for each tensor and its end; a list has a weight for each tensor."""

_im2col_conv = _private("_C._nn.thnn_conv2d", IM2COL)
_im2col_conv_backward = _private("ops.aten._slow_conv2d_backward.output_mask", IM2COL)


def im2col_conv3x3(images: Tensor, weight: Tensor) -> Tensor:
    """Convolve images with a 3×3 or 1×3 weight and padding 1 or 0 × 1 on a CPU, by im2col and a matrix product rather
    than oneDNN."""
    size = weight.shape[2:]
    return _im2col_conv(images, weight, size, None, (1, 1), (size[0] // 2, 1))


def im2col_conv3x3_backward(
    grad_output: Tensor, images: Tensor, weight: Tensor, mask: list[bool]
) -> tuple[Tensor, Tensor, None]:
    """Return grad_input and grad_weight of `im2col_conv3x3`, where `mask` is True. All have one memory format."""
    size = weight.shape[2:]
    return _im2col_conv_backward(grad_output, images, weight, size, [1, 1], [size[0] // 2, 1], mask)


_why_not_shared = why_not(SHARED)


def why_not_shared() -> str | None:
    """Return why the shared engine cannot run with this PyTorch, or None. It is known once all names are looked up."""
    return _why_not_shared
