"""The private names of PyTorch: they do what the package expects, and where one is gone, the feature that needs it."""

import ast
import copy
import importlib
import operator
import re
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from helpers import assert_all_close, random_images, results_of, small_model, with_engine
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import efficient_densenet
from efficient_densenet import _torch_private, doctor
from efficient_densenet._compilers import (
    READS_CONVERTED_MODULES,
    constant_to_compilers,
    may_read_converted_modules,
    skipped_by_compilers,
    specialized,
)
from efficient_densenet._torch_private import (
    backward_inside_function_modes,
    below_autograd,
    class_before_fully_shard,
    convolutions_in_tf32,
    foreach_add_,
    foreach_copy_,
    foreach_lerp_,
    functorch_is_active,
    has_dispatch_mode,
    has_global_module_hooks,
    has_hooks_of_fully_shard_only,
    has_torch_dispatch,
    hook_dicts,
    hooks_of,
    im2col_conv3x3,
    im2col_conv3x3_backward,
    in_backward,
    is_batched_gradient,
    is_flattened_by_fsdp1,
    is_managed_by_fsdp,
    is_part_of_leaf,
    memory_key,
    onednn_supports,
    parametrization_cache_enabled,
    policy_of_fully_shard,
    process_group_named,
    run_cpu_implementation,
    run_parts,
    saved_tensors_hooks_enabled,
    sharding_of,
    tensor_hooks,
    top_saved_tensors_hooks,
    without_dispatch_modes,
    without_step_hooks,
)
from efficient_densenet.engine import choose
from efficient_densenet.kernels.convolution import conv3x3
from efficient_densenet.memory import predict, tensor_peak

PACKAGE = Path(efficient_densenet.__file__).parent
KNOWN = "torch.nn.modules.", "torch.utils._python_dispatch.TorchDispatchMode", "torch.utils._pytree"
"""Base classes of public modules and modes, and trees: every version that is claimed has them."""


def _private_names(path: Path) -> set[str]:
    """The dotted names with a private part that a file reads below `torch`."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
    return {name for name in names if re.match(r"torch\.([a-zA-Z]\w*\.)*_[a-z]", name)}


def test_private_names_of_torch_are_in_two_files():
    others = {path for path in PACKAGE.rglob("*.py") if path.name not in ("_torch_private.py", "_compilers.py")}
    found = {(path.name, name) for path in others for name in _private_names(path) if not name.startswith(KNOWN)}
    assert not found
    assert _private_names(PACKAGE / "_compilers.py")


@pytest.fixture
def without(monkeypatch):
    """A function that looks up all names again, as in a PyTorch that lacks one."""
    lookup = operator.attrgetter

    def attrgetter(name, missing):
        if name == missing:
            raise AttributeError(name)
        return lookup(name)

    def remove(missing):
        with monkeypatch.context() as patch:
            patch.setattr(operator, "attrgetter", lambda name: attrgetter(name, missing))
            importlib.reload(_torch_private)

    yield remove
    importlib.reload(_torch_private)


USES = {
    _torch_private.SHARED: lambda model, x: with_engine(model, "shared")(x),
    _torch_private.PREDICTION: lambda model, x: predict(model, x.shape),
    "synchronizing batch norms": lambda model, x: process_group_named("0"),
}
"""Features that raise without one of their private names."""


@pytest.mark.parametrize("name", _torch_private.NAMES)
def test_a_name_that_torch_lacks_costs_the_feature_that_needs_it_and_neither_the_import_nor_plain(
    name, without, monkeypatch
):
    model, x, feature = small_model("bc", block_config=(2,)), random_images("bc"), _torch_private.NAMES[name]
    expected = results_of(with_engine(model, "plain"), x)
    monkeypatch.setattr(choose, "_warned", set())
    without(name)
    sentence = f"found PyTorch {torch.__version__} without torch.{name}, which {feature} needs"
    assert any(sentence in line for line, _ in zip(doctor.report(), range(2), strict=False))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for engine in ("plain", "best", "checkpoint"):
            assert_all_close(results_of(with_engine(model, engine), x), expected)
    assert all(sentence in str(warning.message) for warning in caught)
    if feature == _torch_private.SHARED:
        assert caught
    elif feature == _torch_private.IM2COL:
        images, weight = torch.randn(2, 3, 4, 5), torch.randn(6, 3, 3, 3)
        assert torch.equal(conv3x3(images, weight, 1), F.conv2d(images, weight, padding=1))
    if feature in USES:
        with pytest.raises((RuntimeError, ValueError), match=re.escape(sentence)):
            USES[feature](model, x)


def test_a_lost_name_is_warned_of_once(without):
    without("_C._current_graph_task_id")
    model = small_model("bc", efficient="plain", block_config=(1,))
    with pytest.warns(UserWarning, match=r"without torch\._C\._current_graph_task_id, which updating running stat"):
        model(random_images("bc"))
    model(random_images("bc"))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_in_backward_is_true_in_a_recomputation_and_in_its_thread_alone(use_reentrant):
    seen = []

    def function(x):
        thread = threading.Thread(target=lambda: seen.append(in_backward()))
        thread.start()
        thread.join()
        seen.append(in_backward())
        return x.sin()

    torch_checkpoint(function, torch.ones(2, requires_grad=True), use_reentrant=use_reentrant).sum().backward()
    assert seen == [False, False, False, True]
    assert not in_backward()


def test_is_batched_gradient():
    seen = [is_batched_gradient(None), is_batched_gradient(torch.ones(2))]
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda grad: seen.append(is_batched_gradient(grad)))
    torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True)
    assert seen == [False, False, True]


def test_functorch_is_active():
    seen = [functorch_is_active()]
    torch.func.grad(lambda x: (seen.append(functorch_is_active()), x.sum())[1])(torch.ones(2))
    torch.func.vmap(lambda x: (seen.append(functorch_is_active()), x)[1])(torch.ones(2))
    assert seen == [False, True, True]


def test_clearing_the_hooks_of_a_tensor_disables_them():
    x = torch.ones(2, requires_grad=True)
    assert not tensor_hooks(x)
    x.register_hook(lambda grad: grad * 2)
    hooks = tensor_hooks(x)
    saved = dict(hooks)
    hooks.clear()
    x.sum().backward()
    assert x.grad.tolist() == [1, 1]
    hooks.update(saved)
    x.sum().backward()
    assert x.grad.tolist() == [3, 3]


def test_parametrization_cache_enabled():
    with torch.nn.utils.parametrize.cached():
        assert parametrization_cache_enabled()
    assert not parametrization_cache_enabled()


@pytest.mark.parametrize("kind", ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"])
def test_has_global_module_hooks(kind):
    assert not has_global_module_hooks()
    handle = getattr(torch.nn.modules.module, f"register_module_{kind}")(lambda *_: None)
    assert has_global_module_hooks()
    handle.remove()
    assert not has_global_module_hooks()


def test_memory_key():
    x, y = torch.ones(4, requires_grad=True), torch.ones(4)
    assert memory_key(x) == memory_key(x[1:]) == memory_key(x.detach())
    assert memory_key(x) != memory_key(y)
    two = TwoTensor(x.detach(), y)
    assert memory_key(two) == memory_key(two.view(2, 2))
    sparse = y.to_sparse()
    assert memory_key(sparse) == memory_key(sparse) != memory_key(y.to_sparse())


def test_is_part_of_leaf():
    x = torch.ones(4, requires_grad=True)
    assert is_part_of_leaf(x)
    assert is_part_of_leaf(x[1:].view(3, 1))
    assert not is_part_of_leaf(x * 1)


def test_has_torch_dispatch():
    assert has_torch_dispatch(TwoTensor)
    assert not has_torch_dispatch(torch.Tensor)
    assert not has_torch_dispatch(nn.Parameter)


def test_without_dispatch_modes():
    class Recording(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            seen.append(operation)
            return operation(*args, **(kwargs or {}))

    seen = []
    assert not has_dispatch_mode()
    with Recording():
        assert has_dispatch_mode()
        with without_dispatch_modes():
            torch.ones(1).sin()
        assert seen == []
        torch.zeros(1)
    with without_dispatch_modes():
        torch.ones(1)
    assert len(seen) == 1


@pytest.mark.skipif(torch.__version__ < "2.9", reason="PyTorch 2.6 does not tell")
def test_top_saved_tensors_hooks():
    assert top_saved_tensors_hooks() is None
    pack, unpack = (lambda tensor: tensor), (lambda tensor: tensor)
    with torch.autograd.graph.save_on_cpu(), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert top_saved_tensors_hooks() == (pack, unpack)


@pytest.mark.filterwarnings("ignore:.*FSDP.*:UserWarning", "ignore::FutureWarning")
def test_what_fsdp_makes_of_modules():
    plain, modules = nn.Linear(2, 2), [nn.Sequential(nn.Linear(2, 2)) for _ in range(2)]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        fully_shard(modules[0], mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        wrapper = FullyShardedDataParallel(modules[1], use_orig_params=True, device_id=torch.device("cpu"))
    finally:
        dist.destroy_process_group()
    assert [is_managed_by_fsdp(module[0]) for module in modules] == [True, True]
    assert not is_managed_by_fsdp(plain)
    wrapped = [*modules, wrapper]
    assert [sharding_of(module) for module in wrapped] == ["fully_shard", None, "FullyShardedDataParallel"]
    assert sharding_of(modules[0][0]) is None
    assert [is_flattened_by_fsdp1(module) for module in (*wrapped, modules[0][0], modules[1][0], plain)] == [
        *(False, False, True),
        *(False, True, False),
    ]
    assert class_before_fully_shard(type(modules[0])) is nn.Sequential
    assert policy_of_fully_shard(modules[0]).param_dtype is torch.bfloat16
    assert [has_hooks_of_fully_shard_only(module) for module in (*wrapped, plain)] == [True, False, False, False]
    modules[0].register_forward_hook(lambda module, args, output: None)
    assert not has_hooks_of_fully_shard_only(modules[0])
    assert class_before_fully_shard(type(wrapper)) is type(wrapper)
    assert class_before_fully_shard(nn.Linear) is nn.Linear


def test_process_group_named():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.new_group([0])
        assert process_group_named(group.group_name) is group
    finally:
        dist.destroy_process_group()


def test_below_autograd():
    x = torch.ones(2, requires_grad=True)
    with below_autograd():
        y = torch.ops.aten.sin.default(x)
    assert y.grad_fn is None
    assert torch.ops.aten.sin.default(x).grad_fn is not None


def test_foreach_operations():
    tensors = [torch.tensor(1), torch.tensor([2, 3])]
    foreach_add_(tensors, 4)
    assert [tensor.tolist() for tensor in tensors] == [5, [6, 7]]
    for weight in (0.25, [torch.tensor(0.25), torch.tensor(0.25)]):
        values = [torch.zeros(1), torch.ones(2)]
        foreach_lerp_(values, [torch.full([1], 4.0), torch.full([2], 5.0)], weight)
        assert [tensor.tolist() for tensor in values] == [[1], [2, 2]]
    narrowed = [torch.empty(2, dtype=torch.bfloat16), torch.empty(1, dtype=torch.float16)]
    foreach_copy_(narrowed, [torch.tensor([1.5, 2]), torch.tensor([3.0])])
    assert [tensor.tolist() for tensor in narrowed] == [[1.5, 2], [3]]


@pytest.mark.parametrize("allowed", [False, True])
def test_convolutions_in_tf32(allowed, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
    assert convolutions_in_tf32() is allowed
    if hasattr(torch.backends.cudnn, "conv"):  # since PyTorch 2.9
        assert (torch.backends.cudnn.conv.fp32_precision == "tf32") is allowed


def test_im2col_convolutions():
    shapes = (2, 3, 4, 5), (6, 3, 3, 3), (2, 6, 4, 5)
    images, weight, grad_output = (torch.randn(*shape).to(memory_format=torch.channels_last) for shape in shapes)
    output = F.conv2d(images.requires_grad_(), weight.requires_grad_(), padding=1)
    torch.testing.assert_close(im2col_conv3x3(images.detach(), weight.detach()), output, rtol=1e-4, atol=1e-4)
    expected = torch.autograd.grad(output, (images, weight), grad_output)
    arguments = grad_output, images.detach(), weight.detach()
    for mask in ([True, True, False], [True, False, False]):
        for each, grad, needed in zip(im2col_conv3x3_backward(*arguments, mask), expected, mask, strict=False):
            if needed:
                torch.testing.assert_close(each, grad, rtol=1e-4, atol=1e-4)
            else:
                assert each is None


def _compiled(function, **options):
    torch._dynamo.reset()
    graphs = []

    def record(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes if node.op.startswith("call")])
        return graph

    return torch.compile(function, backend=record, **options), graphs


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_constant_to_compilers():
    calls = []

    @constant_to_compilers
    def length(text):
        calls.append(text)
        return len(list(reversed(text.split())))

    compiled, _ = _compiled(lambda x: x * length("one two"), fullgraph=True)
    for _ in range(3):
        assert compiled(torch.ones(1)).item() == 2
    assert len(calls) == 1


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_specialized(fresh_compiler):
    """A compiler takes a number that has changed for a variable, which `constant_to_compilers` cannot have."""

    class Scaling(nn.Module):
        scale = 0.1

        def forward(self, x):
            return x * text_length(specialized(self.scale))

    @constant_to_compilers
    def text_length(value):
        return len(str(value))

    model = Scaling()
    compiled, graphs = _compiled(model, fullgraph=True)
    for scale in (0.1, 0.25, 0.125, 0.1):
        model.scale = scale
        assert compiled(torch.ones(1)).item() == len(str(scale))
    assert len(graphs) == 3
    assert specialized(0.1) == 0.1


@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("missing", [None, "_FrameAction", "_FrameExecStrategy", "set_code_exec_strategy", "skip_code"])
def test_skipped_by_compilers(missing, monkeypatch):
    import torch._dynamo  # which looks up its own names

    if missing:
        monkeypatch.delattr(torch._C._dynamo.eval_frame, missing, raising=False)

    def inner(x):
        return x.cos()

    @skipped_by_compilers
    def outer(x):
        return inner(x).sin()

    @torch.compiler.disable(recursive=False)
    def outside_of_graphs(x, function):
        return function(x)

    for function, names in ((outer, {"exp", "tan"}), (lambda x: inner(x).sin(), {"exp", "cos", "sin", "tan"})):
        compiled, graphs = _compiled(lambda x, function=function: outside_of_graphs(x.exp(), function).tan())
        x = torch.ones(2)
        assert torch.equal(compiled(x), x.exp().cos().sin().tan())
        assert {str(target) for targets in graphs for target in targets} == names


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_may_read_converted_modules():
    assert may_read_converted_modules()
    compiled, _ = _compiled(lambda x: x + may_read_converted_modules(), fullgraph=True)
    assert compiled(torch.zeros(1)).item() == READS_CONVERTED_MODULES


def test_saved_tensors_hooks_enabled():
    assert saved_tensors_hooks_enabled()
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert not saved_tensors_hooks_enabled()


def test_hook_dicts():
    module = nn.ReLU()
    before = [dict(hooks) for hooks in hook_dicts(module)]
    module.register_forward_pre_hook(lambda *values: None, with_kwargs=True)
    module.register_forward_hook(lambda *values: None, with_kwargs=True, always_call=True)
    assert all(hook_dicts(module))
    for hooks, saved in zip(hook_dicts(module), before, strict=True):
        hooks.clear()
        hooks.update(saved)
    assert not any(hook_dicts(module))
    assert torch.equal(module(-torch.ones(1)), torch.zeros(1))


def test_backward_inside_function_modes():
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **kwargs or {})

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return torch.mul(grad, 2)

    x = torch.ones(3, requires_grad=True)
    with Mode():
        loss = Doubled.apply(x).sum()
        seen.clear()
        backward_inside_function_modes(loss)
    assert torch.mul in seen
    assert x.grad is not None
    assert x.grad.tolist() == [2, 2, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_onednn_supports(dtype):
    """By the memory of a convolution: im2col takes the columns, nine times the input."""
    images, weight = torch.zeros(2, 16, 64, 64, dtype=dtype), torch.zeros(16, 16, 3, 3, dtype=dtype)
    peak = tensor_peak(lambda: torch.conv2d(images, weight, padding=1))
    assert onednn_supports(dtype) == (peak < 5 * images.nbytes)


def test_hooks_of():
    module = nn.Linear(1, 1)
    for register in (
        module.register_forward_hook,
        module.register_forward_pre_hook,
        module.register_full_backward_hook,
        module.register_full_backward_pre_hook,
    ):
        register(lambda *_: None)
    assert [len(hooks) for hooks in hooks_of(module)] == [1, 1, 1, 1]


def test_without_step_hooks():
    called = []
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append("after"))
    other = copy.copy(optimizer)
    without_step_hooks(other)
    other.step()
    assert called == []
    optimizer.step()
    assert called == ["before", "after"]


def test_run_parts():
    x = torch.ones(2, 3)
    assert torch.equal(run_parts(torch.ops.aten.matmul.default, (x, x.t()), {}), x @ x.t())
    assert run_parts(torch.ops.aten.mm.default, (x, x.t()), {}) is NotImplemented


def test_run_cpu_implementation():
    """On tensors that are not on a CPU."""
    seen = []
    library = torch.library.Library("efficient_densenet_tests", "DEF")
    library.define("seen(Tensor x) -> Tensor")
    library.impl("seen", lambda x: seen.append(x.device.type) or x.clone(), "CompositeExplicitAutograd")
    operation = torch.ops.efficient_densenet_tests.seen.default
    assert run_cpu_implementation(operation, (torch.empty(2, device="meta"),), {}).is_meta
    assert seen == ["meta"]
