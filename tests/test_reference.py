"""The shared stage in plain PyTorch, `engine.reference`: it equals plain, and every set of kernels equals it."""

import importlib
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from grids import grid
from helpers import add_conv_biases, assert_close, plan_stage, relative_error, small_model
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from efficient_densenet import FCDenseNet
from efficient_densenet.engine import reference
from efficient_densenet.engine.choose import Engine
from efficient_densenet.engine.reference import Consumer, Layer
from efficient_densenet.engine.skip import run_down, run_up
from efficient_densenet.engine.stage import backward as stage_backward
from efficient_densenet.engine.stage import forward as stage_forward
from efficient_densenet.engine.stage.run import Skip

SETS = {"portable": "torch", "numba_cpu.host.operations": "numba", "triton_gpu.host.operations": "triton"}
CONSUMERS = {"transition": "transition1", "norm": "norm5"}
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


class Stage:
    """A block of three layers, and what consumes its output."""

    def __init__(self, consumer: str) -> None:
        model = small_model("bc", block_config=(3, 1) if consumer == "transition" else (3,), efficient=False)
        self.block, self.consumer = model.features.denseblock1, model.features.get_submodule(CONSUMERS[consumer])
        self.sizes = [(3, 4, 7, 6)]

    def tensors(self) -> list[tuple]:
        return [*map(_layer, self.block.children()), _consumer(self.consumer)]

    def plain(self, x: Tensor) -> list[Tensor]:
        return [self.consumer(self.block(x))]

    def shared(self, x: Tensor) -> list[Tensor]:
        return [plan_stage(self.block, self.consumer, x).run(x)[0]]

    def reference(self, inputs: list[Tensor], weights: list[Tensor]) -> list[Any]:
        *layers, consumer = self.tensors()
        output, saved = reference.forward(*inputs, layers, consumer)
        grad_input, grads, grad_consumer = reference.backward(*weights, saved, layers, consumer)
        return [output, grad_input, *grads, grad_consumer]


class UNet:
    """Blocks of a U-Net on the way down and on the way up, the transition between them and the classifier."""

    def __init__(self) -> None:
        model = add_conv_biases(FCDenseNet(3, (2, 1, 3), 4, 0.0, 5, efficient=False).double())
        for name, parameter in model.named_parameters():
            if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.Conv2d) and name.endswith("bias"):
                nn.init.zeros_(parameter)  # the reference has none
        features = model.features
        self.down, self.transition, self.up = features.denseblock1, features.transition1, features.denseblock3
        self.classifier, self.room = model.classifier, features.rooms[0]
        self.sizes = [(3, 4, 7, 6), (3, self.room[0], 7, 6)]

    def tensors(self) -> list[tuple]:
        return [
            *map(_layer, self.down.children()),
            _consumer(self.transition)._replace(max_pools=True),
            *map(_layer, self.up.children()),
            Consumer(conv_weight=self.classifier.weight),
        ]

    def plain(self, x: Tensor, upsampled: Tensor) -> list[Tensor]:
        self.down.engine = self.up.engine = Engine.PLAIN
        output = self.down(x)
        return [self.transition(output), self.classifier(self.up(torch.cat([upsampled, output], 1)))]

    def shared(self, x: Tensor, upsampled: Tensor) -> list[Tensor]:
        self.down.engine = self.up.engine = Engine.SHARED
        output, skip = run_down(self.down, self.transition, x, self.room)
        assert isinstance(skip, Skip)
        return [output, run_up(_Upsampled(), self.up, self.classifier, upsampled, skip)]

    def reference(self, inputs: list[Tensor], weights: list[Tensor]) -> list[Any]:
        x, upsampled = inputs
        first, second, transition, *up, classifier = self.tensors()
        down = [first, second]
        output, skip = reference.forward(x, down, transition)
        logits, saved = reference.forward(upsampled, up, classifier, skip=skip)
        grad_up, *grads_up = reference.backward(weights[1], saved, up, classifier)
        grad_upsampled, grad_skip = grad_up.split([self.room[0], len(skip.mean)], 1)
        grad_x, *grads = reference.backward(weights[0], skip, down, transition, grad_features=grad_skip)
        return [output, logits, grad_x, grad_upsampled, *grads[0], grads[1], *grads_up[0], grads_up[1]]


class _Upsampled(nn.Module):
    """A transition up whose input is upsampled already."""

    def upsampled(self, x: Tensor, size: Sequence[int]) -> Tensor:
        return x


NETWORKS = {"U-Net": UNet, **{consumer: partial(Stage, consumer) for consumer in CONSUMERS}}


def _layer(layer: nn.Module) -> Layer:
    second = [] if not hasattr(layer, "conv2") else [*layer.norm2.parameters(), layer.conv2.weight]
    return Layer(*layer.norm1.parameters(), layer.conv1.weight, *second)


def _consumer(consumer: nn.Module) -> Consumer:
    if isinstance(consumer, nn.BatchNorm2d):
        return Consumer(*consumer.parameters())
    return Consumer(*consumer.norm.parameters(), consumer.conv.weight)


def _flat(values: Sequence[Any]) -> list[Tensor]:
    return [each for each in tree_leaves(list(values)) if isinstance(each, Tensor)]


def _differentiated(run, network: Stage | UNet, inputs: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    leaves = [each.clone().requires_grad_() for each in inputs]
    outputs = run(*leaves)
    weights = [each.to(output.dtype) for each, output in zip(weights, outputs, strict=True)]
    grads = torch.autograd.grad(outputs, [*leaves, *_flat(network.tensors())], weights)
    return [*(output.detach() for output in outputs), *grads]


def _example(network: Stage | UNet) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Inputs, weights of the outputs in a loss, and what the reference computes: the outputs and all gradients."""
    inputs = [torch.randn(size).double() for size in network.sizes]
    with torch.no_grad():
        weights = [torch.randn_like(output) for output in network.plain(*inputs)]
        return inputs, weights, _flat(network.reference(inputs, weights))


@pytest.mark.parametrize("name", NETWORKS)
def test_the_reference_equals_plain(name):
    network = NETWORKS[name]()
    inputs, weights, found = _example(network)
    expected = _differentiated(network.plain, network, inputs, weights)
    for each, other in zip(found, expected, strict=True):
        assert_close(each, other)


@pytest.mark.parametrize(
    *grid(
        # Triton's interpreter multiplies float32.
        lambda kernel_set, dtype, **_: not kernel_set.startswith("triton") or dtype is torch.float32,
        kernel_set=SETS,
        dtype=DTYPES,
        name=NETWORKS,
    )
)
def test_every_set_of_kernels_equals_the_reference(kernel_set, name, dtype, monkeypatch):
    """The error in low precision, of several inputs together, is at most twice plain's."""
    pytest.importorskip(SETS[kernel_set])
    kernels = importlib.import_module(f"efficient_densenet.kernels.{kernel_set}")
    for module in stage_forward, stage_backward:
        monkeypatch.setattr(module, "kernels_for", lambda *_, **__: kernels)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    network = NETWORKS[name]()
    # Triton's kernels are interpreted.
    examples = [_example(network) for _ in range(1 if kernel_set.startswith("triton") else 20)]
    for module in vars(network).values():
        if isinstance(module, nn.Module):
            module.to(dtype)

    errors = [
        sum(
            relative_error(_differentiated(run, network, [each.to(dtype) for each in inputs], weights), exact)
            for inputs, weights, exact in examples
        )
        for run in (network.shared, network.plain)
    ]
    assert errors[0] <= max(2 * errors[1], 1e-10)


def test_how_it_works_quotes_the_reference():
    root = Path(__file__).parents[1]
    page, code = (root / each for each in ("docs/how-it-works.md", "efficient_densenet/engine/reference.py"))
    quoted = page.read_text().partition("from the last to the first:\n\n```text\n")[2].partition("```")[0]
    assert "grad_accum[:, read] += " in quoted
    assert textwrap.indent(quoted, " " * 8) in code.read_text()
