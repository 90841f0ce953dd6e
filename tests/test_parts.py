"""The shared engine on blocks of other authors, of which it knows the parts alone, and what runs apart from a block."""

import copy
import gc
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from grids import sampled
from helpers import (
    MEMORY_EFFICIENT,
    add_conv_biases,
    assert_all_close,
    assert_same_buffers,
    assert_same_gradients,
    assert_same_step,
    assert_same_values,
    can_join,
    plan_stage,
    use_kernels,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from efficient_densenet import DenseBlock, DenseNet, convert_batchnorm
from efficient_densenet.engine import choose, parts
from efficient_densenet.engine.parts import BlockParts, ConsumerParts, LayerParts
from efficient_densenet.memory import tensor_peak

GROWTH = 3


class Layer(nn.Module):
    """A layer that concatenates its output before or after its input."""

    def __init__(self, channels: int, bottleneck: bool, newest_first: bool, drop_rate: float) -> None:
        super().__init__()
        width = 5 if bottleneck else channels
        self.bottleneck, self.newest_first, self.drop_rate = bottleneck, newest_first, drop_rate
        self.first = nn.ModuleList([nn.BatchNorm2d(channels), nn.Conv2d(channels, width, 1, bias=False)])
        self.second = nn.ModuleList([nn.BatchNorm2d(width), nn.Conv2d(width, GROWTH, 3, padding=1, bias=False)])

    def forward(self, x: Tensor) -> Tensor:
        output = x
        for norm, conv in (self.first, self.second) if self.bottleneck else (self.second,):
            output = conv(F.relu(norm(output)))
        output = F.dropout2d(output, self.drop_rate, self.training)
        return torch.cat([output, x] if self.newest_first else [x, output], 1)


class Block(nn.Sequential):
    """Three layers; with `new_features_only` the output lacks the channels of the input."""

    def __init__(
        self,
        bottleneck: bool = True,
        newest_first: bool = True,
        drop_rate: float = 0.0,
        new_features_only: bool = False,
    ) -> None:
        super().__init__(*(Layer(4 + i * GROWTH, bottleneck, newest_first, drop_rate) for i in range(3)))
        self.new_features_only = new_features_only

    def forward(self, x: Tensor) -> Tensor:
        output, new = super().forward(x), 3 * GROWTH
        if not self.new_features_only:
            return output
        return output[:, :new] if self[0].newest_first else output[:, -new:]


def _block_parts(block: Block) -> BlockParts:
    newest_first = any(layer.newest_first for layer in block)
    return BlockParts(tuple(map(_layer_parts, block)), newest_first, block.new_features_only)


def _layer_parts(layer: Layer) -> LayerParts:
    modules = (*layer.first, *layer.second) if layer.bottleneck else tuple(layer.second)
    drop_rate = layer.drop_rate if layer.training else 0.0
    return LayerParts(layer, *modules, drop_rate=drop_rate, dropout=F.dropout2d)


class Consumer(nn.Sequential):
    """A norm and the modules after it."""

    def consumer_parts(self) -> ConsumerParts:
        norm, *rest = self
        if len(rest) < 2:
            return ConsumerParts(norm, after=F.relu_ if rest else None)
        relu, conv, *pool = rest
        pools = bool(pool) and parts.halves(pool[0], conv)
        return ConsumerParts(norm, conv, pools, activations=(relu,), after=pool[0] if pool and not pools else None)


CONSUMERS = {
    "none": lambda: None,
    "norm": lambda: Consumer(nn.BatchNorm2d(13)),
    "norm, relu": lambda: Consumer(nn.BatchNorm2d(13), nn.ReLU()),
    "transition": lambda: Consumer(
        nn.BatchNorm2d(13), nn.ReLU(), nn.Conv2d(13, 6, 1, bias=False), nn.AvgPool2d(2, stride=2)
    ),
    "transition that keeps the size": lambda: Consumer(nn.BatchNorm2d(13), nn.ReLU(), nn.Conv2d(13, 6, 1, bias=False)),
    "transition with another pooling": lambda: Consumer(
        nn.BatchNorm2d(13), nn.ReLU(), nn.Conv2d(13, 6, 1, bias=False), nn.MaxPool2d(3, stride=2)
    ),
}


parts.register_block(Block, _block_parts)


def test_what_is_no_class_of_blocks_is_not_registered():
    with pytest.raises(TypeError, match="but register_block needs a class, and a function of its blocks"):
        parts.register_block(nn.Sequential(), _block_parts)
    with pytest.raises(TypeError, match="but register_block needs a class"):
        parts.register_block(Block, None)


def randomized(*modules: nn.Module | None) -> list[nn.Module | None]:
    """The modules in float64, with random norms."""
    for module in modules:
        for name, tensor in [] if module is None else module.double().state_dict().items():
            if tensor.dim() == 1:
                tensor.uniform_(0.3, 1.5) if name.endswith("var") else tensor.normal_(0.4, 0.3)
    return list(modules)


def _plain(block: nn.Module, x: Tensor, consumer: nn.Module | None) -> list[Tensor]:
    features = block(x)
    return [features] if consumer is None else [consumer(features), features]


def _joined(block: nn.Module, x: Tensor, consumer: nn.Module | None) -> list[Tensor]:
    return list(plan_stage(block, consumer, x).run(x))


def _with_features(block: nn.Module, x: Tensor, consumer: nn.Module) -> list[Tensor]:
    assert choose.why_not(choose.Engine.SHARED, block, x) is None
    return list(plan_stage(block, consumer, x, return_features=True).run(x))


def _apart(block: nn.Module, x: Tensor, consumer: nn.Module) -> list[Tensor]:
    return [choose.run_consumer(consumer, plan_stage(block, None, x).run(x)[0])]


RUNS = {"alone": _joined, "joined": _joined, "with the features": _with_features, "apart": _apart}
LOSSES = {"alone": [(1,)], "joined": [(1,)], "with the features": [(1, 2), (1, 0), (0, 1)], "apart": [(1,)]}
"""The weights of the outputs in the loss: of an output outside of it, what is behind it gets no gradient."""


def _valid(consumer, run, frozen, new_features_only, loss, **_):
    alike = frozen in (None, "all", "inside")  # the norms of a stage normalize alike
    return (
        (consumer == "none") == (run == "alone")
        and (alike or run in ("alone", "apart"))
        and not (new_features_only and run != "alone")
        and loss < len(LOSSES[run])
    )


@pytest.mark.parametrize(
    *sampled(
        _valid,
        newest_first=[True, False],
        new_features_only=[False, True],
        bottleneck=[True, False],
        frozen=[None, "all", "inside", "block", "consumer"],
        drop_rate=[0.0, 0.3],
        consumer=list(CONSUMERS),
        run=list(RUNS),
        loss=[0, 1, 2],
        biases=[False, True],
        trainable=["all", "last layer", "consumer"],
        memory_format=[torch.contiguous_format, torch.channels_last],
        kernels=[("portable", 1), ("portable", 1 << 22), ("compiled", 7)],
        penalty=[False, True],
    )
)
def test_blocks_of_either_order_with_every_consumer(
    newest_first,
    new_features_only,
    bottleneck,
    frozen,
    drop_rate,
    consumer,
    run,
    loss,
    biases,
    trainable,
    memory_format,
    kernels,
    penalty,
    monkeypatch,
):
    use_kernels(monkeypatch, *kernels)
    block, after = randomized(Block(bottleneck, newest_first, drop_rate, new_features_only), CONSUMERS[consumer]())
    if biases:
        add_conv_biases(block), after is None or add_conv_biases(after)
    block.train(frozen not in ("all", "block"))
    after is None or after.train(frozen not in ("all", "consumer"))
    for layer in block if frozen == "inside" else ():
        layer.second[0].eval()
    if frozen == "inside" and not bottleneck:
        after is None or after.eval()  # these are the norms that share their statistics with the consumer's
    for layer in list(block)[: {"all": 0, "last layer": 2, "consumer": 3}[trainable]]:
        layer.requires_grad_(False)
    x, results = torch.randn(3, 4, 7, 6, dtype=torch.double).to(memory_format=memory_format), []
    weights = LOSSES[run][loss]
    models = [(copy.deepcopy(block), copy.deepcopy(after), run_model) for run_model in (RUNS[run], _plain)]
    for model, consumer_, run_model in models:
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        outputs = run_model(model, leaf, consumer_)[: len(weights)]
        value = sum(weight * output.square().sum() for weight, output in zip(weights, outputs, strict=True) if weight)
        if penalty:
            (grad,) = torch.autograd.grad(value, leaf, create_graph=True)
            value = value.sin() + grad.square().sum()
        value.backward()
        results.append([*(output.detach() for output in outputs), leaf.grad])
    if not penalty:
        assert results[0][0].is_contiguous(memory_format=memory_format)
    assert_all_close(*results, 1e-9 if penalty else 1e-10)
    for module, plain_module in zip(models[0][:2], models[1][:2], strict=True):
        if module is not None:
            assert_same_gradients(module, plain_module, 1e-9 if penalty else 1e-10)
            assert_same_buffers(module, plain_module)


def test_what_the_shared_engine_does_not_know():
    class UnknownBlock(nn.Sequential):
        engine = choose.Engine.SHARED

    x, unknown = torch.randn(2, 4, 5, 5, requires_grad=True), UnknownBlock(Layer(4, True, True, 0.0))
    assert choose.why_not(choose.Engine.SHARED, unknown, x).startswith("found a block of class UnknownBlock")
    with pytest.raises(RuntimeError, match=r"cannot run here: found a block of class UnknownBlock.*use another engine"):
        choose.plan_block(unknown, x)
    empty = Block()
    del empty[:]
    assert choose.why_not(choose.Engine.SHARED, empty, x) == "found a block without layers"
    assert not can_join(Block(), nn.Sequential(nn.ReLU(), nn.BatchNorm2d(13)), x)
    assert not can_join(Block(new_features_only=True), CONSUMERS["norm"](), x)
    assert parts.consumer_parts(nn.BatchNorm2d(13)) is not None


@pytest.mark.parametrize("bn_size", [0, 2])
@pytest.mark.parametrize("engine", [*MEMORY_EFFICIENT, True])
def test_a_dense_block_of_this_package_that_returns_its_new_features(engine, bn_size):
    settings = {"drop_rate": 0.2, "efficient": False}
    plain = DenseBlock(3, 5, 4, bn_size, new_features_only=True, **settings).double()
    whole = DenseBlock(3, 5, 4, bn_size, **settings).double()
    whole.load_state_dict(plain.state_dict())
    assert (plain.num_output_features, whole.num_output_features) == (12, 17)
    efficient = copy.deepcopy(plain)
    efficient.engine = choose.parse(engine)
    x = torch.randn(2, 5, 6, 7, dtype=torch.double)
    assert_same_step(efficient, plain, x)
    assert_same_values(plain, lambda x: whole(x)[:, -12:], x)


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        (nn.AvgPool2d(2), True),
        (nn.AvgPool2d((2, 2), stride=2), True),
        (nn.AvgPool2d(2, stride=1), False),
        (nn.AvgPool2d((2, 3)), False),
        (nn.AvgPool2d(2, padding=1), False),
        (nn.AvgPool2d([2, 2], [2], [0, 0]), True),
        (nn.AvgPool2d([2, 3]), False),
        (nn.AvgPool2d(2, ceil_mode=True), False),
        (nn.AvgPool2d(2, divisor_override=3), False),
        (nn.AvgPool1d(2), False),
        (nn.AvgPool3d(2), False),
        (nn.MaxPool2d(2), False),
    ],
)
def test_poolings_that_halve_the_size(pool, expected):
    assert parts.halves(pool, nn.Conv2d(4, 2, 1)) is expected


# Transitions and norms that run apart, on the features that their block stored

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
