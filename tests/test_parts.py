"""The shared engine on blocks of other authors, of which it knows only the parts."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from grids import pairwise
from helpers import (
    add_conv_biases,
    assert_all_close,
    assert_close,
    assert_same_buffers,
    assert_same_gradients,
    assert_same_step,
    nodes_of,
    plan_stage,
    use_kernels,
)
from torch import Tensor, nn

from efficient_densenet import convert_batchnorm
from efficient_densenet._mixins import add_mixin
from efficient_densenet.engine import choose, parts
from efficient_densenet.engine.parts import BlockParts, ConsumerParts, LayerParts
from efficient_densenet.engine.refuse import joined_consumer

GROWTH = 3


class NormAct(nn.BatchNorm2d):
    """Batch norm and ReLU in one module."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


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
    def __init__(self, bottleneck: bool = True, newest_first: bool = True, drop_rate: float = 0.0) -> None:
        super().__init__(*(Layer(4 + i * GROWTH, bottleneck, newest_first, drop_rate) for i in range(3)))


def _block_parts(block: Block) -> BlockParts:
    return BlockParts(tuple(map(_layer_parts, block)), newest_first=any(layer.newest_first for layer in block))


def _layer_parts(layer: Layer) -> LayerParts:
    modules = (*layer.first, *layer.second) if layer.bottleneck else tuple(layer.second)
    drop_rate = layer.drop_rate if layer.training else 0.0
    return LayerParts(layer, *modules, drop_rate=drop_rate, dropout=F.dropout2d)


class Consumer(nn.Sequential):
    """A norm and the modules after it."""


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


def _consumer_parts(consumer: Consumer) -> ConsumerParts:
    norm, *rest = consumer
    if len(rest) < 2:
        return ConsumerParts(norm, after=F.relu_ if rest else None)
    relu, conv, *pool = rest
    pools = bool(pool) and parts.halves(pool[0])
    return ConsumerParts(norm, conv, pools, activations=(relu,), after=pool[0] if pool and not pools else None)


parts.register_block(Block, _block_parts)
parts.register_consumer(Consumer, _consumer_parts)


def _randomized(*modules: nn.Module | None) -> list[nn.Module | None]:
    for module in modules:
        for name, tensor in [] if module is None else module.double().state_dict().items():
            if tensor.dim() == 1:
                tensor.uniform_(0.3, 1.5) if name.endswith("var") else tensor.normal_(0.4, 0.3)
    return list(modules)


def _plain(block: nn.Module, x: Tensor, consumer: nn.Module | None) -> list[Tensor]:
    features = block(x)
    return [features] if consumer is None else [consumer(features), features]


def _shared(block: nn.Module, x: Tensor, consumer: nn.Module | None) -> list[Tensor]:
    assert choose.why_not(choose.Engine.SHARED, block, x) is None
    return list(plan_stage(block, consumer, x, return_features=consumer is not None).run(x))


def _assert_same(
    run,
    block: nn.Module,
    consumer: nn.Module | None,
    weights: tuple[float, ...] = (1, 2),
    memory_format: torch.memory_format = torch.contiguous_format,
) -> None:
    x, results = torch.randn(3, 4, 7, 6, dtype=torch.double).to(memory_format=memory_format), []
    models = [(copy.deepcopy(block), copy.deepcopy(consumer), run_model) for run_model in (run, _plain)]
    for model, after, run_model in models:
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        outputs = run_model(model, leaf, after)
        pairs = zip(weights, outputs, strict=False)
        sum(weight * output.square().sum() for weight, output in pairs if weight).backward()
        results.append([output.detach() for output in outputs[: len(weights)]] + [leaf.grad])
    assert_all_close(*results)
    for module, plain_module in zip(models[0][:2], models[1][:2], strict=True):
        if module is not None:
            assert_same_gradients(module, plain_module)
            assert_same_buffers(module, plain_module)


@pytest.mark.parametrize(
    *pairwise(
        lambda consumer, run, **_: (consumer == "none") == (run == "alone"),
        newest_first=[True, False],
        bottleneck=[True, False],
        frozen=[None, "all", "inside", "block", "consumer"],
        consumer=CONSUMERS,
        run=["alone", "with the features", "joined", "apart"],
        biases=[False, True],
        memory_format=[torch.contiguous_format, torch.channels_last],
        kernels=[("portable", 1), ("portable", 1 << 22), ("compiled", 7)],
    )
)
def test_either_order_of_channels_with_every_consumer(
    newest_first, bottleneck, frozen, consumer, run, biases, memory_format, kernels, monkeypatch
):
    use_kernels(monkeypatch, *kernels)
    block, after = _randomized(Block(bottleneck, newest_first, drop_rate=0.3), CONSUMERS[consumer]())
    if biases:
        add_conv_biases(block), after is None or add_conv_biases(after)
    block.train(frozen not in ("all", "block"))
    after is None or after.train(frozen not in ("all", "consumer"))
    for layer in block if frozen == "inside" else ():
        layer.second[0].eval()
    if frozen == "inside" and not bottleneck:
        after is None or after.eval()  # these are the norms that share their statistics with the consumer's
    alike = after is None or frozen in (None, "all", "inside")
    run = run if alike or run == "alone" else "apart"  # the norms of a stage normalize alike
    _assert_same(RUNS[run], block, after, (1, 2) if run == "with the features" else (1,), memory_format)


def _joined(block: nn.Module, x: Tensor, consumer: nn.Module | None) -> list[Tensor]:
    return list(plan_stage(block, consumer, x).run(x))


def _apart(block: nn.Module, x: Tensor, consumer: nn.Module) -> list[Tensor]:
    output = choose.run_consumer(consumer, _joined(block, x, None)[0])
    assert output is not None
    return [output]


RUNS = {"alone": _joined, "joined": _joined, "with the features": _shared, "apart": _apart}


def test_frozen_layers_with_the_newest_features_first():
    block, after = _randomized(Block(), CONSUMERS["transition"]())
    for layer in list(block)[:2]:
        layer.requires_grad_(False)
    _assert_same(_shared, block, after)


@pytest.mark.parametrize("weights", [(1, 0), (0, 1)])
def test_a_loss_of_the_consumer_or_of_the_block_alone(weights):
    """Whose parameters have no part in the loss get no gradient."""
    _assert_same(_shared, *_randomized(Block(), CONSUMERS["transition"]()), weights)


def test_a_norm_with_an_activation_under_the_exactly_once_rule(monkeypatch):
    monkeypatch.setattr(parts, "NORMS", (*parts.NORMS, NormAct))

    class Fused(Layer):
        def __init__(self, channels: int) -> None:
            super().__init__(channels, bottleneck=True, newest_first=False, drop_rate=0.0)
            self.first[0], self.second[0] = NormAct(self.first[0].num_features), NormAct(self.second[0].num_features)

    class FusedBlock(Block):
        def __init__(self) -> None:
            nn.Sequential.__init__(self, Fused(4), Fused(7))

        def dense_parts(self) -> BlockParts:
            layers = ((layer, *layer.first, *layer.second) for layer in self)
            return BlockParts(tuple(LayerParts(*each, activations=(each[1].act, each[3].act)) for each in layers))

    (block,) = _randomized(convert_batchnorm(FusedBlock()))
    _assert_same(_shared, block, None)
    block[1].first[0].act = nn.Tanh()
    reason = choose.why_not(choose.Engine.SHARED, block, torch.randn(2, 4, 5, 5, dtype=torch.double))
    assert reason == "found a Tanh inside a layer, which is no activation of the shared engine"


class RunByEngines:
    """Mixin: a block that the engines run."""

    engine = choose.Engine.SHARED

    def forward(self, x: Tensor) -> Tensor:
        return choose.run_block(self, x, choose.plan_block(self, x))

    def run_layers(self, x: Tensor, run_first_half) -> Tensor:
        return super().forward(x)

    def dense_parts(self) -> BlockParts:
        return _block_parts(self)


def _run_by_engines() -> Block:
    (block,) = _randomized(Block(drop_rate=0.2))
    add_mixin(block, RunByEngines)
    return block


@pytest.mark.parametrize("copier", [lambda block: block, copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))])
def test_a_block_with_a_mixin_and_its_copies(copier):
    block = _run_by_engines()
    copied = copier(block)
    plain = copy.deepcopy(block)
    plain.__class__ = Block
    x = torch.randn(3, 4, 6, 5, dtype=torch.double)
    assert_same_step(copied, plain, x)
    assert_same_buffers(copied, plain)
    assert copied is block or all(p.grad is None for p in block.parameters())
    assert "SharedStage" in nodes_of(copied(x.requires_grad_()))


def test_a_block_with_a_mixin_has_its_own_values_without_gradients():
    block = _run_by_engines()
    plain = copy.deepcopy(block)
    plain.__class__ = Block
    x = torch.randn(3, 4, 6, 5, dtype=torch.double)
    with torch.no_grad():
        assert_close(block.eval()(x), plain.eval()(x))


class UnknownBlock(nn.Sequential):
    """A block without a registered reader."""

    engine = choose.Engine.SHARED


def test_unknown_blocks_and_consumers_are_not_eligible():
    x = torch.randn(2, 4, 5, 5, requires_grad=True)
    assert choose.why_not(choose.Engine.SHARED, UnknownBlock(Layer(4, True, True, 0.0)), x).startswith(
        "found a block of class UnknownBlock"
    )
    empty = Block()
    del empty[:]
    assert choose.why_not(choose.Engine.SHARED, empty, x) == "found a block without layers"
    with pytest.raises(RuntimeError, match=r"cannot run here: found a block of class UnknownBlock.*use another engine"):
        choose.plan_block(UnknownBlock(Layer(4, True, True, 0.0)), x)
    assert joined_consumer(parts.parts_of(Block()), nn.Sequential(nn.ReLU(), nn.BatchNorm2d(13))) is None
    assert parts.consumer_parts(nn.BatchNorm2d(13)) is not None
    assert parts.consumer_parts(NormAct(13)) is None


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        (nn.AvgPool2d(2), True),
        (nn.AvgPool2d((2, 2), stride=2), True),
        (nn.AvgPool2d(2, stride=1), False),
        (nn.AvgPool2d((2, 3)), False),
        (nn.AvgPool2d(2, padding=1), False),
        (nn.AvgPool2d(2, ceil_mode=True), False),
        (nn.AvgPool2d(2, divisor_override=3), False),
        (nn.AvgPool3d(2), True),
        (nn.AvgPool1d(2), True),
        (nn.AvgPool1d(3), False),
        (nn.MaxPool2d(2), False),
    ],
)
def test_which_poolings_halve_the_size(pool, expected):
    assert parts.halves(pool) is expected
