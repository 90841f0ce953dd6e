"""Transitions and norms that run apart from their block: by the shared engine, on the features that it stored."""

import copy
import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch
from helpers import assert_same_buffers, assert_same_gradients, assert_same_values, plan_stage
from test_parts import CONSUMERS, Block, randomized
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from efficient_densenet import DenseNet, convert_batchnorm
from efficient_densenet.engine import choose
from efficient_densenet.memory import tensor_peak

SIZE = (3, 4, 7, 6)
Run = Callable[[Tensor], Tensor]


def _run_block(block: nn.Module, x: Tensor) -> Tensor:
    return plan_stage(block, None, x).run(x)[0]


def _run_consumer(consumer: nn.Module, x: Tensor) -> Tensor:
    output = choose.run_consumer(consumer, x)
    assert output is not None
    return output


def _changed_unseen(features: Tensor) -> Tensor:
    with torch.no_grad():
        return features.mul_(2)


def _changed_part(features: Tensor) -> Tensor:
    features[:, 3:5].mul_(3)
    return features


def _changed_data(features: Tensor) -> Tensor:
    features.data = features.data * 2
    return features


def _twice(block: Run, after: Run, x: Tensor) -> Tensor:
    features = block(x)
    return torch.cat([(after(features) * 2 + after(features).square()).flatten(), features.exp().flatten()])


def _after_the_block_s_backward(block: Run, after: Run, x: Tensor) -> Tensor:
    """The block's features are freed before the consumer could find them."""
    block(x).sum().backward()
    features = block(x)
    features.square().sum().backward(retain_graph=True)
    return after(features)


def _each_checkpointed(block: Run, after: Run, x: Tensor) -> Tensor:
    return torch_checkpoint(after, torch_checkpoint(block, x, use_reentrant=False), use_reentrant=False)


USES: dict[str, Callable[[Run, Run, Tensor], Tensor]] = {
    "nothing between": lambda block, after, x: after(block(x)),
    "in place": lambda block, after, x: after(block(x).add_(1)),
    "in place unseen by autograd": lambda block, after, x: after(_changed_unseen(block(x))),
    "a part in place": lambda block, after, x: after(_changed_part(block(x))),
    "other data": lambda block, after, x: after(_changed_data(block(x))),
    "a view": lambda block, after, x: after(block(x)[:]),
    "detached": lambda block, after, x: after(block(x).detach().requires_grad_()) + x.sum(),
    "twice": _twice,
    "after the block's backward": _after_the_block_s_backward,
    "each checkpointed": _each_checkpointed,
}
PREPARATIONS = {
    "alike": lambda after: None,
    "another mode": lambda after: after.eval(),
    "another eps": lambda after: setattr(after[0], "eps", 1e-2),
}


@pytest.mark.parametrize(
    ("use", "prepare"), [*((use, "alike") for use in USES), *(("nothing between", other) for other in PREPARATIONS)]
)
def test_uses(use, prepare):
    block, after = map(convert_batchnorm, randomized(Block(), CONSUMERS["transition"]()))
    PREPARATIONS[prepare](after)
    ours, plain = copy.deepcopy((block, after)), (block, after)
    runs = [
        partial(USES[use], partial(_run_block, ours[0]), partial(_run_consumer, ours[1])),
        partial(USES[use], *plain),
    ]
    assert_same_values(*runs, torch.randn(*SIZE, dtype=torch.double))
    for actual, expected in zip(ours, plain, strict=True):
        assert_same_gradients(actual, expected)
        assert_same_buffers(actual, expected)


def test_the_features_are_freed_in_the_backward():
    """The block's output is still there."""
    block, after = randomized(Block(), CONSUMERS["transition"]())
    kept = _run_block(block, torch.randn(*SIZE, dtype=torch.double, requires_grad=True))
    features = kept.grad_fn.block_features.features
    output = _run_consumer(after, kept)
    gc.disable()
    try:
        assert features() is not None
        output.sum().backward()
        assert features() is None
    finally:
        gc.enable()


def test_memory_of_blocks_and_transitions_as_separate_calls():
    """Separate calls cost the features' size once more: joined, the gradient of the block's output never exists."""
    model, peaks = DenseNet(8, (10, 10), num_init_features=8, efficient="shared"), []
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def separately(x: Tensor) -> Tensor:
        for name, module in model.features.named_children():
            output = None if name.startswith(("conv", "dense")) else choose.run_consumer(module, x)
            x = module(x) if output is None else output
        return x

    for run in (model.features, separately):
        x = torch.randn(4, 3, 32, 32)
        peaks.append(tensor_peak(lambda run=run, x=x: run(x).sum().backward()))
    assert peaks[1] <= peaks[0] + 1.3 * 4 * 32 * 32 * (8 + 10 * 8) * 4
