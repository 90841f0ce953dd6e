"""Transitions and norms that run apart from their block: by the shared engine, on the features that it stored."""

import copy
import gc

import pytest
import torch
from helpers import assert_all_close, assert_same_buffers, assert_same_gradients, assert_same_values, plan_stage
from test_parts import CONSUMERS, Block, randomized
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from efficient_densenet import DenseNet
from efficient_densenet.engine import choose
from efficient_densenet.memory import tensor_peak

SIZE = (3, 4, 7, 6)


def _run_block(block: nn.Module, x: Tensor) -> Tensor:
    return plan_stage(block, None, x).run(x)[0]


def _run_consumer(consumer: nn.Module, x: Tensor) -> Tensor:
    output = choose.run_consumer(consumer, x)
    assert output is not None
    return output


def _ours(block: nn.Module, consumer: nn.Module, x: Tensor, change=lambda features: features) -> Tensor:
    return _run_consumer(consumer, change(_run_block(block, x)))


def _plain(block: nn.Module, consumer: nn.Module, x: Tensor, change=lambda features: features) -> Tensor:
    return consumer(change(block(x)))


def _compare(block: nn.Module, consumer: nn.Module, ours=_ours, theirs=_plain) -> None:
    """Outputs, gradients and buffers of two ways to run copies of the modules."""
    pairs = [(copy.deepcopy(block), copy.deepcopy(consumer)) for _ in range(2)]
    runs = [lambda x, pair=pair, run=run: run(*pair, x) for pair, run in zip(pairs, (ours, theirs), strict=True)]
    assert_same_values(*runs, torch.randn(*SIZE, dtype=torch.double))
    for actual, expected in zip(*pairs, strict=True):
        assert_same_gradients(actual, expected)
        assert_same_buffers(actual, expected)


@pytest.mark.parametrize("setting", ["mode", "eps"])
def test_a_consumer_that_normalizes_otherwise(setting):
    block, after = randomized(Block(), CONSUMERS["transition"]())
    if setting == "mode":
        after.eval()
    else:
        after[0].eps = 1e-2
    _compare(block, after)


def _changed_unseen(features: Tensor) -> Tensor:
    with torch.no_grad():
        features.mul_(2)
    return features


def _changed_part(features: Tensor) -> Tensor:
    features[:, 3:5].mul_(3)
    return features


def _changed_data(features: Tensor) -> Tensor:
    features.data = features.data * 2
    return features


CHANGES = {
    "in place": lambda features: features.add_(1),
    "in place unseen by autograd": _changed_unseen,
    "a part in place": _changed_part,
    "other data": _changed_data,
    "a view": lambda features: features.view_as(features),
    "a part": lambda features: torch.cat([features[:, :5], features[:, 5:] * 2], 1),
    "detached": lambda features: features.detach().requires_grad_(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_features_that_were_changed_between(change):
    block, after = randomized(Block(), CONSUMERS["transition"]())
    if change == "detached":  # the block gets no gradient, then
        block.requires_grad_(False)
        runs = [
            lambda x, run=run: run(block, after.eval(), x, CHANGES[change]).square().sum() for run in (_ours, _plain)
        ]
        x, parameters = torch.randn(*SIZE, dtype=torch.double), list(after.parameters())
        assert_all_close(*(torch.autograd.grad(run(x), parameters) for run in runs))
        return
    _compare(block, after, *(lambda *args, run=run: run(*args, CHANGES[change]) for run in (_ours, _plain)))


def _twice(run_block, run_consumer):
    def run(block: nn.Module, consumer: nn.Module, x: Tensor) -> Tensor:
        features = run_block(block, x)
        return run_consumer(consumer, features) * 2 + run_consumer(consumer, features).square()

    return run


def _features_too(run_block, run_consumer):
    def run(block: nn.Module, consumer: nn.Module, x: Tensor) -> Tensor:
        features = run_block(block, x)
        return torch.cat([run_consumer(consumer, features).flatten(), features.exp().flatten()])

    return run


def _after_the_block_s_backward(run_block, run_consumer):
    """The block's features are freed before the consumer could find them."""

    def run(block: nn.Module, consumer: nn.Module, x: Tensor) -> Tensor:
        run_block(block, x).sum().backward()
        features = run_block(block, x)
        features.square().sum().backward(retain_graph=True)
        return run_consumer(consumer, features)

    return run


@pytest.mark.parametrize("use", [_twice, _features_too, _after_the_block_s_backward])
def test_uses(use):
    block, after = randomized(Block(), CONSUMERS["transition"]())
    _compare(block, after, use(_run_block, _run_consumer), use(lambda b, x: b(x), lambda c, x: c(x)))


@pytest.mark.parametrize("around", ["block and consumer", "each"])
def test_inside_torch_s_checkpoint(around):
    block, after = randomized(Block(), CONSUMERS["transition"]())

    def ours(block: nn.Module, consumer: nn.Module, x: Tensor) -> Tensor:
        if around == "each":
            features = torch_checkpoint(_run_block, block, x, use_reentrant=False)
            return torch_checkpoint(_run_consumer, consumer, features, use_reentrant=False)
        return torch_checkpoint(_ours, block, consumer, x, use_reentrant=False)

    _compare(block, after, ours)


def test_features_that_hooks_pack_are_not_unpacked_for_a_consumer():
    block, after = randomized(Block(), CONSUMERS["transition"]())
    unpacked = []
    hooks = torch.clone, lambda tensor: unpacked.append(tensor) or tensor
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        output = _ours(block, after, torch.randn(*SIZE, dtype=torch.double, requires_grad=True))
        assert not unpacked
    output.sum().backward()
    assert unpacked


def test_the_features_are_freed_in_the_backward():
    """Though the block's output is still there."""
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


def _hooked(transition: nn.Module) -> None:
    transition[2].register_forward_hook(lambda *_: None)


REFUSED = {
    "nothing to train": (lambda transition: transition.requires_grad_(False), lambda x: x),
    "a hook": (_hooked, lambda x: x),
    "another convolution": (lambda t: t.__setitem__(2, nn.Conv2d(13, 6, 3, padding=1).double()), lambda x: x),
    "another activation": (lambda transition: transition.__setitem__(1, nn.Tanh()), lambda x: x),
    "no norm": (lambda transition: transition.__setitem__(0, nn.ReLU()), lambda x: x),
    "other channels": (lambda _: None, lambda x: x[:, :12]),
    "no image": (lambda _: None, lambda x: x[:0]),
    "no batch": (lambda _: None, lambda x: x[0]),
    "another precision": (lambda _: None, lambda x: x.float()),
    "a single value": (lambda _: None, lambda x: x[:1, :, :1, :1]),
}


@pytest.mark.parametrize("what", REFUSED)
def test_where_it_cannot_run(what):
    (transition,), x = randomized(CONSUMERS["transition"]()), torch.randn(3, 13, 7, 6, dtype=torch.double)
    with torch.no_grad():
        assert choose.run_consumer(transition, x) is None
    assert choose.run_consumer(transition, x) is not None
    change, input_of = REFUSED[what]
    change(transition)
    assert choose.run_consumer(transition, input_of(x)) is None


class _Recording(nn.Module):
    """Calls a consumer, and records what the dispatcher would return for it."""

    def __init__(self, consumer: nn.Module) -> None:
        super().__init__()
        self.consumer, self.outputs = consumer, []

    def forward(self, x: Tensor) -> Tensor:
        self.outputs.append(choose.run_consumer(self.consumer, x))
        return self.consumer(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.* is deprecated")
def test_under_transforms_and_in_tracing_it_is_called():
    (transition,) = randomized(CONSUMERS["transition"]().eval())
    recording, x = _Recording(transition), torch.randn(2, 13, 4, 4, dtype=torch.double)
    torch.func.grad(lambda x: recording(x).sum())(x)
    torch.jit.trace(recording, x)
    torch.export.export(recording, (x,))
    with torch.autograd.forward_ad.dual_level():
        recording(torch.autograd.forward_ad.make_dual(x, x))
    assert len(recording.outputs) >= 4
    assert all(output is None for output in recording.outputs)


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
