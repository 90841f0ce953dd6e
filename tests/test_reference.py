"""The shared stage in a hundred lines, `engine.reference`: it equals plain, and every set of kernels equals it."""

import importlib
import textwrap
from pathlib import Path

import pytest
import torch
from grids import grid
from helpers import assert_close, plan_stage, relative_error, small_model
from torch import Tensor, nn

from efficient_densenet.engine import reference
from efficient_densenet.engine.reference import Consumer, Layer
from efficient_densenet.engine.stage import backward as stage_backward
from efficient_densenet.engine.stage import forward as stage_forward

SETS = {"portable": "torch", "numba_cpu.host.operations": "numba", "triton_gpu.host.operations": "triton"}
CONSUMERS = {"transition": "transition1", "norm": "norm5"}
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def _stage(consumer: str) -> tuple[nn.Module, nn.Module, Tensor]:
    """A block of three layers, what consumes its output, and an input."""
    model = small_model("bc", block_config=(3, 1) if consumer == "transition" else (3,), efficient=False)
    features = model.features
    return features.denseblock1, features.get_submodule(CONSUMERS[consumer]), torch.randn(3, 4, 7, 6).double()


def _parameters(block: nn.Module, consumer: nn.Module) -> tuple[list[Layer], Consumer]:
    layers = [
        Layer(*layer.norm1.parameters(), layer.conv1.weight, *layer.norm2.parameters(), layer.conv2.weight)
        for layer in block.children()
    ]
    if isinstance(consumer, nn.BatchNorm2d):
        return layers, Consumer(*consumer.parameters())
    return layers, Consumer(*consumer.norm.parameters(), consumer.conv.weight)


def _reference(block: nn.Module, consumer: nn.Module, x: Tensor, weights: Tensor) -> list[Tensor]:
    """The output and all gradients, of x and of the parameters in their order."""
    layers, last = _parameters(block, consumer)
    with torch.no_grad():
        output, saved = reference.forward(x, layers, last)
        grad_input, grads, grads_of_last = reference.backward(weights, saved, layers, last)
    return [output, grad_input, *(each for layer in grads for each in layer), *filter(torch.is_tensor, grads_of_last)]


def _differentiated(run, block: nn.Module, consumer: nn.Module, x: Tensor, weights: Tensor) -> list[Tensor]:
    layers, last = _parameters(block, consumer)
    leaf = x.clone().requires_grad_()
    inputs = [leaf, *(each for layer in layers for each in layer), *filter(torch.is_tensor, last)]
    output = run(leaf)
    return [output.detach(), *torch.autograd.grad(output, inputs, weights.to(output.dtype))]


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_the_reference_equals_plain(consumer):
    block, last, x = _stage(consumer)
    weights = torch.randn_like(last(block(x)))
    plain = _differentiated(lambda x: last(block(x)), block, last, x, weights)
    for found, expected in zip(_reference(block, last, x, weights), plain, strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize(
    *grid(
        # Triton's interpreter multiplies float32.
        lambda kernel_set, dtype, **_: not kernel_set.startswith("triton") or dtype is torch.float32,
        kernel_set=SETS,
        dtype=DTYPES,
        consumer=CONSUMERS,
    )
)
def test_every_set_of_kernels_equals_the_reference(kernel_set, consumer, dtype, monkeypatch):
    """The error in low precision, of several inputs together, is at most twice plain's."""
    pytest.importorskip(SETS[kernel_set])
    kernels = importlib.import_module(f"efficient_densenet.kernels.{kernel_set}")
    for module in stage_forward, stage_backward:
        monkeypatch.setattr(module, "kernels_for", lambda *_, **__: kernels)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    block, last, first = _stage(consumer)
    examples = []
    others = 1 if kernel_set.startswith("triton") else 19  # which is interpreted
    for x in (first, *(torch.randn_like(first) for _ in range(others))):
        weights = torch.randn_like(last(block(x)))
        examples.append((x.to(dtype), weights, _reference(block, last, x, weights)))
    block, last = block.to(dtype), last.to(dtype)

    runs = (lambda x: plan_stage(block, last, x).run(x)[0]), (lambda x: last(block(x)))
    errors = [
        sum(relative_error(_differentiated(run, block, last, x, weights), exact) for x, weights, exact in examples)
        for run in runs
    ]
    assert errors[0] <= max(2 * errors[1], 1e-10)


def test_how_it_works_quotes_the_reference():
    root = Path(__file__).parents[1]
    page, code = (root / each for each in ("docs/how-it-works.md", "efficient_densenet/engine/reference.py"))
    quoted = page.read_text().partition("from the last to the first:\n\n```text\n")[2].partition("```")[0]
    assert "grad_accum[:, read] += " in quoted
    assert textwrap.indent(quoted, " " * 8) in code.read_text()
