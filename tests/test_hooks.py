"""Hooks on a model and its modules fire once, with the values of plain."""

import copy
import functools
import pickle
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    MEMORY_EFFICIENT,
    assert_all_close,
    assert_close,
    assert_same_buffers,
    assert_same_gradients,
    assert_same_step,
    assert_same_values,
    patched,
    random_images,
    small_model,
    with_engine,
)
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from efficient_densenet.checkpoint import checkpoint
from efficient_densenet.models.backbone import MAPS

HOOK_TYPES = ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"]
BLOCKS = ["features.denseblock1", "features.denseblock3", "features.transition1"]
STEM = ["conv0", "norm0", "relu0", "pool0"]
PLACES: dict[str, tuple[dict, list[str]]] = {
    "network": ({"family": "bc", "drop_rate": 0.1}, ["", "features", *BLOCKS, "features.norm5"]),
    **{
        f"stem, {name}": ({"family": "imagenet"}, [f"features.{name}"]) for name in ("conv0", "norm0", "relu0", "pool0")
    },
    "last norm": ({"family": "bc"}, ["features.norm5"]),
    **{
        f"backbone, {maps}": (
            {"family": "bc", "features_only": True, "maps": maps},
            ["", "features", *BLOCKS, "features.transition1.conv"],
        )
        for maps in MAPS
    },
}
"""Settings of a network, and its modules with hooks."""


def _offloaded(model: nn.Module, x: Tensor) -> Tensor:
    with save_on_cpu():
        return model(x)


SAVED_TENSORS_HOOKS = {
    "torch.utils.checkpoint": functools.partial(torch_checkpoint, use_reentrant=False),
    "checkpoint": checkpoint,
    "save_on_cpu": _offloaded,
}


def _tensors(*values) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value.detach().clone()
        elif isinstance(value, (tuple, list)):
            yield from _tensors(*value)


class _OneOutput(nn.Module):
    """A network whose maps are joined."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.network(x)
        return outputs if isinstance(outputs, Tensor) else torch.cat([each.flatten() for each in outputs])


@pytest.mark.parametrize("place", PLACES)
def test_hooks_of_all_types_and_their_removal(place):
    settings, names = PLACES[place]
    plain = small_model(**settings, efficient=False)
    if place.startswith("stem"):
        plain.features.relu0.inplace = False  # autograd refuses a backward hook on an in-place ReLU and before it
    models, seen, handles = [with_engine(plain, "shared"), plain], [[], []], []
    for model, calls in zip(models, seen, strict=True):
        for module_name in names:
            for hook_type in HOOK_TYPES:

                def record(module, *values, calls=calls, name=f"{hook_type} of {module_name}"):
                    calls.append((name, list(_tensors(*values))))

                handles.append(getattr(model.get_submodule(module_name), f"register_{hook_type}")(record))
    x = random_images(settings["family"])
    assert_same_step(*map(_OneOutput, models), x)
    assert sorted(name for name, _ in seen[0]) == sorted(name for name, _ in seen[1])
    assert len(seen[0]) == len(names) * len(HOOK_TYPES)
    expected = dict(seen[1])
    for name, values in seen[0]:
        for actual, value in zip(values, expected[name], strict=True):
            assert_close(actual, value)
    for handle in handles:
        handle.remove()
    assert_same_step(*map(_OneOutput, models), x)
    assert len(seen[0]) == len(names) * len(HOOK_TYPES)


@pytest.mark.parametrize("hook_type", ["forward_hook", "forward_pre_hook"])
def test_hooks_in_inference_mode_after_a_training_step(hook_type):
    """A checkpoint has wrapped them, to see what they change. Tensors of inference mode do not tell."""
    model, x = small_model("bc", efficient="checkpoint"), random_images("bc")
    seen = []
    norm = model.features.denseblock1.denselayer1.norm1
    getattr(norm, f"register_{hook_type}")(lambda *_: seen.append(torch.is_inference_mode_enabled()))
    model(x).sum().backward()
    with torch.inference_mode():
        model.eval()(x)
    assert seen == [False, True]


def _record_nothing(*_) -> None:
    pass


def test_a_model_with_hooks_is_pickled_after_a_checkpoint_has_wrapped_them():
    model = small_model("bc", efficient="checkpoint")
    norm = model.features.denseblock1.denselayer1.norm1
    norm.register_forward_hook(_record_nothing)
    model(random_images("bc")).sum().backward()
    for copied in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        (hook,) = copied.features.denseblock1.denselayer1.norm1._forward_hooks.values()
        assert hook is _record_nothing


@pytest.mark.parametrize("module_name", ["", "features", *BLOCKS, "features.norm5"])
def test_hooks_may_replace_values(module_name):
    plain = small_model("bc", efficient=False)
    efficient = with_engine(plain, "shared")
    for model in (efficient, plain):
        module = model.get_submodule(module_name)
        module.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        module.register_forward_hook(lambda module, args, output: output + 0.25)
        module.register_full_backward_hook(lambda module, grads, _: (grads[0] * 3,))
    assert_same_step(efficient, plain, random_images("bc"))


def _sgd_step(parameter: Tensor) -> None:
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=1e-3)


@pytest.mark.parametrize("engine", MEMORY_EFFICIENT)
def test_hooks_of_parameters_and_of_features(engine):
    """They change gradients; and steps of an optimizer within the backward update each parameter once."""
    plain = small_model("bc", efficient=False)
    efficient, grads = with_engine(plain, engine), []
    before = [parameter.detach().clone() for parameter in plain.parameters()]
    for model in (efficient, plain):
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: grad * 3 + 1)
            parameter.register_post_accumulate_grad_hook(_sgd_step)
        features = model.features(random_images("bc") * 0 + torch.linspace(0, 1, 63).view(9, 7))
        features.register_hook(lambda grad: grad * 2)
        features.retain_grad()
        features.square().sum().backward()
        grads.append(features.grad)
    assert_close(*grads)
    assert_same_gradients(efficient, plain)
    for actual, expected, old in zip(efficient.parameters(), plain.parameters(), before, strict=True):
        assert_close(actual.detach(), expected.detach())
        assert expected.grad is None or not torch.equal(actual, old)


@pytest.mark.parametrize("hooks", SAVED_TENSORS_HOOKS)
def test_hooks_of_parameters_stay_where_saved_tensors_have_hooks(hooks):
    """PyTorch before 2.10 removes them from the parameters that an autograd.Function saves."""
    family = "imagenet" if hooks == "save_on_cpu" else "bc"
    plain, x = small_model(family, efficient=False), random_images(family, 2)
    models, run = (with_engine(plain, "shared"), plain), SAVED_TENSORS_HOOKS[hooks]
    for parameter in (each for model in models for each in model.parameters()):
        parameter.register_hook(lambda grad: grad * 3 + 1)
    for _ in range(2):
        assert_same_values(*(functools.partial(run, model) for model in models), x)
        assert_same_gradients(*models)
    grads = []
    for model in models:
        weights = [each for each in model.parameters() if each.dim() == 4]
        first = torch.autograd.grad(run(model, x).square().sum(), weights, create_graph=True)
        grads.append(torch.autograd.grad(sum(grad.square().sum() for grad in first), weights))
    assert_all_close(*grads)


def test_global_module_hook_falls_back_with_a_warning_or_raises():
    model = small_model("bc", efficient=True)
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        with pytest.warns(UserWarning, match="found a hook on all modules"):
            model(random_images("bc"))
        with pytest.raises(RuntimeError, match="engine 'shared' cannot run here: found a hook on all modules"):
            model.set_engine("shared")(random_images("bc"))
    finally:
        handle.remove()
    assert {module for module in model.modules() if isinstance(module, nn.Conv2d)} <= set(seen)


class _Quantizing(TorchFunctionMode):
    """Rounds what convolutions compute."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return torch.round(result * 4) / 4 + 0 * result if func is torch.conv2d else result


CHANGED_FUNCTIONS = {
    "a _Quantizing, a function mode": _Quantizing,
    "a new torch.nn.functional.conv2d": lambda: patched(F, "conv2d", lambda conv2d, *args: conv2d(*args) * 2),
    "a new torch.nn.functional.relu": lambda: patched(F, "relu", lambda relu, x, inplace=False: relu(x) + 1),
    "a new torch.cat": lambda: patched(torch, "cat", lambda cat, *args: cat(*args) * 2),
}


@pytest.mark.filterwarnings("ignore:falling back")
@pytest.mark.parametrize("change", CHANGED_FUNCTIONS)
@pytest.mark.parametrize("family", ["bc", "imagenet"])
def test_functions_that_other_code_changes_are_called(change, family):
    """After a forward whose plan is kept; a backward may follow outside of a function mode."""
    plain, x = small_model(family, efficient=False), random_images(family)
    model, results = with_engine(plain, True), []
    for each in (model, plain):
        each(x)
        with CHANGED_FUNCTIONS[change]():
            output = each(x)
            if "mode" not in change:
                output.sum().backward()
        if "mode" in change:
            output.sum().backward()
        results.append(output.detach())
    assert_close(*results)
    assert_same_gradients(model, plain)
    assert_same_buffers(model, plain)
    with CHANGED_FUNCTIONS[change](), pytest.raises(RuntimeError, match=f"cannot run here: found {change}"):
        with_engine(plain, "shared")(x)


@pytest.mark.parametrize("engine", ["official", "checkpoint"])
def test_nothing_is_recomputed_under_a_function_mode(engine):
    model = small_model("bc", efficient=engine)
    with torch.device("cpu"):
        model(random_images("bc"))
    with _Quantizing(), pytest.raises(RuntimeError, match="found a _Quantizing, a function mode"):
        model(random_images("bc"))
