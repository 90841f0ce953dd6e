"""What the host is asked to do, counted rather than timed: calls of PyTorch's operations and launches of kernels."""

import pytest
import torch
from checkpoint_outcomes import CountingOperations
from helpers import use_kernels

from efficient_densenet import DenseBlock, kernels
from efficient_densenet.engine.stage import operator
from efficient_densenet.kernels import few_rows, scratch
from efficient_densenet.kernels.comparison import OPERATIONS, Case
from efficient_densenet.kernels.interface import AffineInput, Gradients
from efficient_densenet.kernels.numba_cpu.host import openmp

ALLOCATIONS = {torch.ops.aten.empty_like.default, torch.ops.aten.new_empty.default}
ONE_TILE = {"portable": 1 << 22, "compiled": 256}

PORTABLE_CALLS = {
    "batch_statistics": 2,
    "affine_forward": 4,
    "affine_backward": 8,
    "conv1x1_forward": 6,
    "conv1x1_forward_with_statistics": 9,
    "conv1x1_backward": 23,
    "conv1x1_next_bottleneck": 29,
    "conv1x1_next_bottleneck_in_place": 29,
    "conv3x3_forward": 7,
    "conv3x3_forward_with_statistics": 9,
    "conv3x3_backward": 18,
    "pooled_conv1x1_forward": 10,
    "pooled_conv1x1_backward": 22,
    "batch_norm_grad_input": 7,
}
"""The most operations that a portable kernel may call for one tile, with those on the vectors of its norms."""

LAYER_CALLS = {"portable": (20, 43), "compiled": (8, 23)}
"""The most operations that a layer may call, forward and backward, but for those inside of the update of running
statistics."""

LAYER_LAUNCHES = {"portable": (0, 0), "compiled": (2, 3)}
"""Forward: the bottleneck and the 3×3 convolution. Backward: both, and the gradient of the layer's new channels."""


class CountedKernels:
    """A set of kernels, the operations that the last call of one has called, and how many tensors it has returned."""

    def __init__(self, module):
        self.module = module

    def __getattr__(self, name):
        def kernel(*arguments):
            with CountingOperations() as counted:
                result = getattr(self.module, name)(*arguments)
            self.counts = counted.counts
            results = [] if isinstance(result, AffineInput) else result if isinstance(result, Gradients) else [result]
            self.num_results = sum(each is not None for each in results)
            return result

        return kernel


def call(module, operation):
    """Call a kernel for a small contiguous case until its scratch memory is there."""
    case, counted = Case((2, 4, 4), 6, 8), CountedKernels(module)
    vars(case).update(
        {name: value.contiguous() for name, value in vars(case).items() if isinstance(value, torch.Tensor)}
    )
    with scratch.reused():
        for _ in range(3):
            OPERATIONS[operation](counted, case)
    return counted


@pytest.mark.parametrize("operation", OPERATIONS)
def test_portable_kernels_call_few_operations(operation):
    counts = call(few_rows, operation).counts
    assert counts.total() <= PORTABLE_CALLS[operation], counts


@pytest.mark.parametrize("operation", sorted(OPERATIONS.keys() - {"affine_forward"}))  # which is portable's
def test_compiled_kernels_allocate_what_they_return_and_nothing_else(operation):
    called = call(compiled_kernels(), operation)
    if operation == "conv1x1_next_bottleneck_in_place":
        assert called.counts.pop(torch.ops.aten.clone.default) == 1  # of a weight that is a slice
    if operation == "pooled_conv1x1_backward":
        assert called.counts.pop(torch.ops.aten.div.Tensor) == 1  # of the weight, by the pixels of a window
    assert set(called.counts) <= ALLOCATIONS
    assert called.counts.total() == called.num_results


def compiled_kernels():
    values = torch.empty(1)
    if not kernels.numba_supports(values):
        pytest.skip("needs Numba and a PyTorch with GNU OpenMP")
    return kernels.kernels_for(values)


def count(run, monkeypatch):
    """The operations that `run` calls, outside of the operators and, where a dispatch mode ends, inside."""
    with CountingOperations() as counted, monkeypatch.context() as patch:
        patch.setattr(operator, "autocast_disabled", lambda x: counted)
        run()
    return counted.counts.total()


def costs(num_layers, launches, monkeypatch):
    """Operations and launches of the forward, and of the backward, of a block."""
    block, x = DenseBlock(num_layers, 6, 4, efficient="shared"), torch.randn(2, 6, 4, 4, requires_grad=True)
    block(x).sum().backward()  # allocates the gradients
    numbers, outputs = [], []
    for run in (lambda: outputs.append(block(x).sum()), lambda: outputs.pop().backward()):
        launches.clear()
        numbers += [count(run, monkeypatch), len(launches)]
    return numbers


@pytest.mark.parametrize("name", LAYER_CALLS)
def test_the_cost_of_a_layer(name, monkeypatch):
    """Of each of four more layers in a block whose images make one tile."""
    use_kernels(monkeypatch, name, ONE_TILE[name])
    launches, run = [], openmp.run
    monkeypatch.setattr(openmp, "run", lambda *arguments: launches.append(arguments) or run(*arguments))
    few, many = (costs(num_layers, launches, monkeypatch) for num_layers in (4, 8))
    calls, layer_launches, backward_calls, backward_launches = ((b - a) / 4 for a, b in zip(few, many, strict=True))
    assert (layer_launches, backward_launches) == LAYER_LAUNCHES[name]
    assert calls <= LAYER_CALLS[name][0], calls
    assert backward_calls <= LAYER_CALLS[name][1], backward_calls
