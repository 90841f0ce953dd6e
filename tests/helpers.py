"""Shared by the tests: small networks of every family, comparisons of training steps, and the choice of kernels."""

import contextlib
import copy
import gc
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

from efficient_densenet import DenseNet, conversion_report, create_model, kernels, make_efficient
from efficient_densenet.adapt import Report
from efficient_densenet.engine import choose, plan
from efficient_densenet.engine.network import run_sequence
from efficient_densenet.engine.stage.run import StagePlan, StageRequest
from efficient_densenet.kernels import row_tiles

FAMILIES = {
    "basic": {"name": "densenet_40_12", "block_config": (2, 1, 2), "growth_rate": 3, "num_init_features": 4},
    "bc": {"name": "densenet_bc_100_12", "block_config": (2, 1, 2), "growth_rate": 3, "num_init_features": 4},
    "imagenet": {"name": "densenet121", "block_config": (1, 2, 1, 1), "growth_rate": 4, "num_init_features": 6},
}
ACTIVATIONS = {
    "identity": nn.Identity,
    "relu": nn.ReLU,
    "leaky_relu": lambda: nn.LeakyReLU(0.2),
    "elu": lambda: nn.ELU(0.7),
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU("tanh"),
    "hardtanh": nn.ReLU6,
    "mish": nn.Mish,
}
SIZES = {"basic": (9, 7), "bc": (9, 7), "imagenet": (69, 75)}
Run = Callable[[Tensor], Tensor]
RECOMPUTING = ("official", "checkpoint")
MEMORY_EFFICIENT = (*RECOMPUTING, "shared")


def small_model(family: str, **overrides) -> DenseNet:
    """A few layers of a zoo family in float64, with random weights and biases in its norms."""
    model = create_model(**FAMILIES[family] | {"num_classes": 5} | overrides).double()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=0.5, std=0.3)
    return model


def convert_and_report(model: nn.Module, engine: bool | str = True) -> Report:
    """Convert `model`, and return the report of it, also where nothing was converted."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "make_efficient has converted nothing")
        assert make_efficient(model, engine) is model
    return conversion_report(model)


def add_conv_biases(model: nn.Module, substring: str = "") -> nn.Module:
    """Give random biases to the convolutions with `substring` in their names."""
    convolutions = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.conv._ConvNd) and substring in name
    ]
    for conv in convolutions:
        conv.bias = nn.Parameter(torch.randn(conv.out_channels, dtype=conv.weight.dtype))
    return model


def random_images(family: str, batch: int = 5) -> Tensor:
    return torch.randn(batch, 3, *SIZES[family], dtype=torch.double)


def with_engine(model: DenseNet, engine: bool | str) -> DenseNet:
    return copy.deepcopy(model).set_engine(engine)


def backward(model: Run, x: Tensor, seed: int = 1) -> tuple[Tensor, Tensor]:
    """The output and the input's gradient of one seeded forward and backward."""
    torch.manual_seed(seed)
    x = x.detach().requires_grad_()
    output = model(x)
    output.square().sum().backward()
    return output.detach(), x.grad


@contextlib.contextmanager
def patched(owner: object, name: str, new: Callable) -> Iterator[None]:
    """A function of a module or class is `new` for a while, whose first argument is what it was."""
    before = getattr(owner, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, lambda *args, **kwargs: new(before, *args, **kwargs))
        yield


def freeze_norms(model: nn.Module, substring: str = "") -> None:
    """Put the batch norms with `substring` in their names in eval mode, with random running statistics."""
    norms = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and substring in name
    ]
    assert norms, f"no norm has {substring!r} in its name"
    for norm in norms:
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        norm.eval()


def freeze_parameters(model: nn.Module, trainable: Callable[[str], bool]) -> None:
    """Let only the parameters whose names satisfy `trainable` require gradients: some of them, but not all."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trainable(name))
    assert len({parameter.requires_grad for parameter in model.parameters()}) == 2


def assert_same_step(actual: nn.Module, expected: nn.Module, x: Tensor, tolerance: float = 1e-10) -> None:
    """Outputs, gradients and, after the step, buffers of two models are close."""
    assert_same_values(actual, expected, x, tolerance)
    assert_same_gradients(actual, expected, tolerance)
    assert_same_buffers(actual, expected, tolerance)


def assert_same_values(actual: Run, expected: Run, x: Tensor, tolerance: float = 1e-10) -> tuple[Tensor, Tensor]:
    """Outputs and input gradients of one step of each are close; those of the first are returned."""
    results = backward(actual, x), backward(expected, x)
    assert_all_close(*results, tolerance)
    return results[0]


def assert_same_gradients(actual: nn.Module, expected: nn.Module, tolerance: float = 1e-10) -> None:
    expected_parameters = dict(expected.named_parameters())
    for name, parameter in actual.named_parameters():
        expected_grad = expected_parameters[name].grad
        if expected_grad is None:
            assert parameter.grad is None, name
        else:
            assert parameter.grad is not None, f"{name} has no gradient"
            assert_close(parameter.grad, expected_grad, tolerance)


def assert_same_buffers(actual: nn.Module, expected: nn.Module, tolerance: float = 1e-10) -> None:
    expected_buffers = dict(expected.named_buffers())
    assert expected_buffers.keys() == dict(actual.named_buffers()).keys()
    for name, buffer in actual.named_buffers():
        assert_close(buffer, expected_buffers[name], 0 if name.endswith("num_batches_tracked") else tolerance)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    """Errors are at most `tolerance` times the largest expected magnitude, which counts as 1 where it is smaller."""
    largest = expected.abs().max().item() if expected.is_floating_point() else 0
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * max(1.0, largest))


def results_of(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, the input's gradient and all parameters' gradients of one step."""
    model.zero_grad()
    return [*backward(model, x), *(parameter.grad.clone() for parameter in model.parameters())]


def relative_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    parts = [(a.double() - b).norm() / (b.norm() + 1e-3) for a, b in zip(actual, expected, strict=True)]
    return torch.stack(parts).norm().item()


def nodes_of(output: Tensor) -> list[str]:
    """The names of all autograd nodes behind a tensor, the last first."""
    seen, todo = [], [output.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.append(node)
            todo += [before for before, _ in reversed(node.next_functions)]
    return [node.name().removesuffix("0").removesuffix("Backward") for node in seen]


def live_tensors() -> int:
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def assert_all_close(actual: Iterable[Tensor], expected: Iterable[Tensor], tolerance: float = 1e-10) -> None:
    for result, reference in zip(actual, expected, strict=True):
        assert_close(result, reference, tolerance)


def plan_stage(block: nn.Module, consumer: nn.Module | None, x: Tensor, return_features: bool = False) -> StagePlan:
    """The shared engine's plan of a block and what consumes its output."""
    stage = plan.make_plan(x, block, consumer, StageRequest(return_features=return_features))
    assert isinstance(stage, StagePlan)
    assert (stage.spec.consumer is None) == (consumer is None)
    return stage


def can_join(block: nn.Module, consumer: nn.Module, x: Tensor) -> bool:
    stage = plan.make_plan(x, block, consumer)
    return isinstance(stage, StagePlan) and stage.spec.consumer is not None


def run_with_features(block: nn.Module, consumer: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output of a consumer, and of the block before it, as one stage where that can be."""
    modules = ("block", block), ("consumer", consumer)
    output, outputs = run_sequence(modules, x, lambda module: module is block, ["block"])
    return output, outputs["block"]


def run_stem(modules: Sequence[nn.Module], block: nn.Module, x: Tensor) -> Tensor | None:
    """The output of the first four modules as one node; None where they are to be called."""
    first = list(modules).index(block)
    may_run = choose.may_run_engines(block, x) and choose.may_be_shared(block)
    plans = plan.plans_of_network([*modules[first:], *modules[:first]]) if may_run else None
    stem = None if plans is None else plan.plan_stem(plans, modules, first, x)
    return None if stem is None else stem.run(x)


def use_kernels(monkeypatch: pytest.MonkeyPatch, name: str, tile: int) -> None:
    """Select the shared engine's kernels and their tile, in bytes (portable) or rows (compiled)."""
    if name == "compiled":
        if not kernels.numba_supports(torch.empty(1)):
            pytest.skip("needs Numba and a PyTorch with GNU OpenMP")
        monkeypatch.setattr(importlib.import_module(f"{kernels.__name__}.numba_cpu.host.tiling"), "TILE", tile)
    else:
        monkeypatch.setattr(kernels, "numba_supports", lambda values: False)
        monkeypatch.setitem(row_tiles.TILE_BYTES, "cpu", tile)


KERNELS = [("portable", 1), ("portable", 3000), ("portable", 1 << 22), ("compiled", 7), ("compiled", 256)]


def kernel_modules(package: str, *names: str) -> list:
    """Modules of the kernels of `numba_cpu` or `triton_gpu` by their names, of whichever folder."""
    folders = {"numba_cpu": ("host", "kernels", "compiler"), "triton_gpu": ("host", "device")}[package]
    paths = [f"{kernels.__name__}.{package}.{folder}.{name}" for name in names for folder in folders]
    return [importlib.import_module(path) for path in paths if importlib.util.find_spec(path)]
