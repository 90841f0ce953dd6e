"""Every set of kernels implements the whole interface, with its parameter names."""

import importlib
import inspect
import itertools

import pytest
import torch
from helpers import small_model, with_engine

from efficient_densenet.engine.stage import backward as stage_backward
from efficient_densenet.engine.stage import forward as stage_forward
from efficient_densenet.engine.stem import forward as stem_forward
from efficient_densenet.kernels.interface import Kernels

MEMBERS = {name: member for name, member in vars(Kernels).items() if inspect.isfunction(member) and name[0] != "_"}
IMPLEMENTATIONS = {
    "portable": "torch",
    "numba_cpu.host.operations": "numba",
    "triton_gpu.host.operations": "triton",
}


def _parameters(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values() if p.name != "self"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("member", MEMBERS)
def test_each_kernel_has_the_interface_s_parameters(member, implementation):
    pytest.importorskip(IMPLEMENTATIONS[implementation])
    kernels = importlib.import_module(f"efficient_densenet.kernels.{implementation}")
    assert _parameters(getattr(kernels, member)) == _parameters(MEMBERS[member])


PAIRS = list(itertools.product(IMPLEMENTATIONS, repeat=2))
COMMON = [("portable", "triton_gpu.host.operations"), ("triton_gpu.host.operations", "portable")]


@pytest.mark.parametrize(
    ("forward", "backward"),
    [pytest.param(*each, marks=[] if each in COMMON else pytest.mark.exhaustive) for each in PAIRS],
)
def test_a_backward_may_run_another_set_than_its_forward(forward, backward, monkeypatch):
    """As where PyTorch's setting for TF32 changes in between, and the Triton kernels have passed for one precision."""
    sets = []
    for each in forward, backward:
        pytest.importorskip(IMPLEMENTATIONS[each])
        sets.append(importlib.import_module(f"efficient_densenet.kernels.{each}"))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    model, results = small_model("imagenet", block_config=(1, 2, 1)), []
    images = torch.randn(3, 3, 24, 20)
    for network in with_engine(model, "shared").float(), with_engine(model, "plain"):
        for module in stage_forward, stem_forward:
            monkeypatch.setattr(module, "kernels_for", lambda *_, **__: sets[0])
        output = network(images.to(next(network.parameters()).dtype))
        for module in stage_backward, stem_forward:  # the stem's backward computes its convolution again
            monkeypatch.setattr(module, "kernels_for", lambda *_, **__: sets[1])
        (output * torch.arange(5)).sin().sum().backward()
        results.append([output.detach(), *(parameter.grad for parameter in network.parameters())])
    largest = max(float(each.abs().max()) for each in results[1])
    for shared, plain in zip(*results, strict=True):  # a gradient may be zero but for rounding
        assert (shared - plain).abs().max() <= 1e-3 * (plain.abs().max() + 0.01 * largest)
