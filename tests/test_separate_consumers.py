"""Transitions and norms that run apart from their block: by the shared engine, on the features that it stored."""

import copy
import gc
import weakref

import pytest
import torch
from helpers import (
    assert_all_close,
    assert_same_buffers,
    assert_same_gradients,
    assert_same_values,
    freeze_norms,
    live_tensors,
    plan_stage,
    small_model,
)
from test_parts import CONSUMERS, Block, _randomized
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from efficient_densenet import DenseNet
from efficient_densenet.engine import choose
from efficient_densenet.engine.refuse import separate_consumer
from efficient_densenet.engine.stage.statistics import ForwardStatistics
from efficient_densenet.memory import tensor_peak

ALONE = {name: make for name, make in CONSUMERS.items() if name != "none"}
SIZE = (3, 4, 7, 6)


@pytest.fixture
def stored(monkeypatch) -> list[int]:
    """The channels of every write into features: a consumer that finds them stored adds none."""
    widths, write = [], ForwardStatistics.write

    def recording(self: ForwardStatistics, values: Tensor, *rest) -> None:
        widths.append(values.shape[1])
        write(self, values, *rest)

    monkeypatch.setattr(ForwardStatistics, "write", recording)
    return widths


def _run_consumer(consumer: nn.Module, x: Tensor) -> Tensor:
    output = choose.run_consumer(consumer, x)
    assert output is not None
    return output


def _engine(block: nn.Module, consumer: nn.Module, x: Tensor) -> Tensor:
    return _run_consumer(consumer, plan_stage(block, None, x).run(x)[0])


def _plain(block: nn.Module, consumer: nn.Module, x: Tensor) -> Tensor:
    return consumer(block(x))


def _compare(block: nn.Module, consumer: nn.Module, ours=_engine, theirs=_plain) -> None:
    """Outputs, gradients and buffers of two ways to run copies of the modules."""
    pairs = [(copy.deepcopy(block), copy.deepcopy(consumer)) for _ in range(2)]
    runs = [lambda x, pair=pair, run=run: run(*pair, x) for pair, run in zip(pairs, (ours, theirs), strict=True)]
    assert_same_values(*runs, torch.randn(*SIZE, dtype=torch.double))
    for actual, expected in zip(*pairs, strict=True):
        assert_same_gradients(actual, expected)
        assert_same_buffers(actual, expected)


@pytest.mark.parametrize("setting", ["mode", "eps"])
def test_a_consumer_that_normalizes_otherwise_stores_them_again(setting, stored):
    block, after = _randomized(Block(), ALONE["transition"]())
    if setting == "mode":
        after.eval()
    else:
        after[0].eps = 1e-2
    _compare(block, after)
    assert stored == [4, 3, 3, 3, 13]


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_transition_of_any_tensor(dims, memory_format, frozen):
    if memory_format is torch.channels_last and dims != 2:
        memory_format = torch.channels_last_3d if dims == 3 else torch.contiguous_format
    plain = small_model("bc", efficient=False, dims=dims).features.transition1
    if frozen:
        freeze_norms(plain)
    ours = copy.deepcopy(plain)
    x = torch.randn(2, plain.norm.num_features, *(5, 6, 4)[:dims], dtype=torch.double).to(memory_format=memory_format)
    output, _ = assert_same_values(lambda x: _run_consumer(ours, x), plain, x)
    assert output.is_contiguous(memory_format=memory_format)
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)


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


def _changed(change):
    def use(run_block, run_consumer):
        def run(block: nn.Module, consumer: nn.Module, x: Tensor) -> Tensor:
            return run_consumer(consumer, change(run_block(block, x)))

        return run

    return use


def _changed_unseen(features: Tensor) -> Tensor:
    with torch.no_grad():
        features.mul_(2)
    return features


def _changed_part(features: Tensor) -> Tensor:
    features[:, 3:5].mul_(3)
    return features


USES = {
    "consumer twice": (_twice, 1),
    "features too": (_features_too, 1),
    "in place": (_changed(lambda features: features.add_(1)), 2),
    "in place unseen by autograd": (_changed(_changed_unseen), 2),
    "a part in place": (_changed(_changed_part), 2),
    "a view": (_changed(lambda features: features.view_as(features)), 2),
    "a part": (_changed(lambda features: torch.cat([features[:, :5], features[:, 5:] * 2], 1)), 2),
    "detached": (_changed(lambda features: features.detach().requires_grad_()), 2),
}


@pytest.mark.parametrize("use", USES)
def test_uses_of_the_features_between(use, stored):
    wrap, writes = USES[use]
    block, after = _randomized(Block(), ALONE["transition"]())
    if use == "detached":  # and the block without gradients, then
        block.requires_grad_(False)
    ours, theirs = wrap(_run_block, _run_consumer), wrap(lambda block, x: block(x), lambda consumer, x: consumer(x))
    if use == "detached":
        x = torch.randn(*SIZE, dtype=torch.double)
        results = []
        for run in (ours, theirs):
            after.zero_grad()
            run(block, after.eval(), x).square().sum().backward()
            results.append([parameter.grad.clone() for parameter in after.parameters()])
        assert_all_close(*results)
    else:
        _compare(block, after, ours, theirs)
    assert [width for width in stored if width == 13] == [13] * (writes - 1)


def _run_block(block: nn.Module, x: Tensor) -> Tensor:
    return plan_stage(block, None, x).run(x)[0]


@pytest.mark.parametrize("order", ["block first", "consumer first"])
def test_backward_again_with_retain_graph(order):
    block, after = _randomized(Block(), ALONE["transition"]())
    x, results = torch.randn(*SIZE, dtype=torch.double), []
    for run_block, run_consumer in ((_run_block, _run_consumer), (lambda b, x: b(x), lambda c, x: c(x))):
        leaf = x.clone().requires_grad_()
        features = run_block(block, leaf)
        if order == "block first":  # its features are freed before the consumer could find them
            features.sum().backward()
            leaf.grad = None
            features = run_block(block, leaf)
            features.square().sum().backward(retain_graph=True)
        output = run_consumer(after, features)
        output.square().sum().backward(retain_graph=True)
        (output * 3).sum().backward()
        results.append((output.detach(), leaf.grad))
        block.zero_grad()
    assert_all_close(*results)


def test_a_consumer_after_the_block_s_backward_stores_the_features_again(stored):
    block, after = _randomized(Block(), ALONE["transition"]())
    features = _run_block(block, torch.randn(*SIZE, dtype=torch.double, requires_grad=True))
    features.sum().backward()
    _run_consumer(after, features)
    assert stored == [4, 3, 3, 3, 13]


@pytest.mark.parametrize("around", ["block and consumer", "each"])
def test_inside_torch_s_checkpoint(around):
    block, after = _randomized(Block(), ALONE["transition"]())

    def ours(block: nn.Module, consumer: nn.Module, x: Tensor) -> Tensor:
        if around == "each":
            features = torch_checkpoint(_run_block, block, x, use_reentrant=False)
            return torch_checkpoint(_run_consumer, consumer, features, use_reentrant=False)
        return torch_checkpoint(_engine, block, consumer, x, use_reentrant=False)

    _compare(block, after, ours)


def test_features_that_hooks_pack_are_not_unpacked_for_a_consumer():
    block, after = _randomized(Block(), ALONE["transition"]())
    unpacked = []

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.clone(), unpack):
        output = _engine(block, after, torch.randn(*SIZE, dtype=torch.double, requires_grad=True))
        assert not unpacked
    output.sum().backward()
    assert unpacked


def test_nothing_outlives_the_graph():
    block, after = _randomized(Block(), ALONE["transition"]())
    kept, gone = _run_block(block, torch.randn(*SIZE, dtype=torch.double, requires_grad=True)), []
    gone.append(kept.grad_fn.block_features.features)
    output = _run_consumer(after, kept)
    gone.append(weakref.ref(output.grad_fn))
    gc.collect()
    gc.disable()
    try:
        assert gone[0]() is not None
        output.sum().backward()  # `kept` is still there, and its features are not
        assert gone[0]() is None
        del output
        assert gone[1]() is None
    finally:
        gc.enable()


def _none_where(consumer: nn.Module, x: Tensor) -> None:
    assert choose.run_consumer(consumer, x) is None


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_where_it_cannot_run():
    (transition,) = _randomized(ALONE["transition"]())
    x = torch.randn(*SIZE, dtype=torch.double)[:, :1].repeat(1, 13, 1, 1)
    assert separate_consumer(transition, x) is not None
    with torch.no_grad():
        _none_where(transition, x)
    _none_where(copy.deepcopy(transition).requires_grad_(False), x)
    _none_where(transition, x[:, :12])
    _none_where(transition, x[:0])
    _none_where(transition, x[0])
    _none_where(transition, x.float())
    _none_where(transition, x[:1, :, :1, :1])
    _none_where(nn.Sequential(nn.ReLU(), nn.BatchNorm2d(13)).double(), x)
    hooked = copy.deepcopy(transition)
    hooked[2].register_forward_hook(lambda *_: None)
    _none_where(hooked, x)
    other = copy.deepcopy(transition)
    other[2] = nn.Conv2d(13, 6, 3, padding=1).double()
    _none_where(other, x)
    other = copy.deepcopy(transition)
    other[1] = nn.Tanh()
    _none_where(other, x)
    with torch.autograd.forward_ad.dual_level():
        _none_where(transition, torch.autograd.forward_ad.make_dual(x, x))
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        _none_where(transition, x)
    finally:
        handle.remove()
    assert choose.run_consumer(transition, x) is not None


class _Recording(nn.Module):
    """Calls a consumer, and records what the dispatcher would return for it."""

    def __init__(self, consumer: nn.Module) -> None:
        super().__init__()
        self.consumer, self.outputs = consumer, []

    def forward(self, x: Tensor) -> Tensor:
        self.outputs.append(choose.run_consumer(self.consumer, x))
        return self.consumer(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated")
def test_under_a_torch_func_transform_and_in_tracing_it_is_called():
    (transition,) = _randomized(ALONE["transition"]().eval())
    recording, x = _Recording(transition), torch.randn(2, 13, 4, 4, dtype=torch.double)
    torch.func.grad(lambda x: recording(x).sum())(x)
    torch.jit.trace(recording, x)
    torch.export.export(recording, (x,))
    assert recording.outputs
    assert all(output is None for output in recording.outputs)


def test_steps_do_not_leak():
    """Tensors are counted without garbage collection, so that reference cycles are detected too."""
    block, after = _randomized(Block(), ALONE["transition"]())

    def step(i: int) -> None:
        x = torch.randn(2 + i % 3, 4, 5 + i % 2, 6, dtype=torch.double, requires_grad=True)
        features = _run_block(block, x)
        output = _run_consumer(after, features)
        if i % 4:  # some forwards are never followed by a backward
            (output.sum() + features.sum()).backward()

    step(1)
    gc.collect()
    gc.disable()
    try:
        before = live_tensors()
        for i in range(20):
            step(i)
        assert live_tensors() == before
    finally:
        gc.enable()


def _peak(separately: bool, engine: str = "shared") -> int:
    """Of a training step in which the first block's features dominate."""
    model = DenseNet(8, (10, 10), num_init_features=8, efficient=engine)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    x = torch.randn(8, 3, 32, 32)

    def step() -> None:
        for name, module in model.features.named_children() if separately else ():
            output = None if name.startswith(("conv", "dense")) else choose.run_consumer(module, step.x)
            step.x = module(step.x) if output is None else output
        (step.x if separately else model.features(x)).sum().backward()

    step.x = x
    peak = tensor_peak(step)
    step.x = None
    return peak


def test_memory_of_blocks_and_transitions_as_separate_calls():
    """Separate calls cost the features' size once more: joined, the gradient of the block's output never exists."""
    features = 8 * 32 * 32 * (8 + 10 * 8) * 4
    joined, separate = _peak(False), _peak(True)
    assert separate <= joined + 1.3 * features
