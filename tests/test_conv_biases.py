"""Convolutions with biases in the shared engine: results of plain, which computes them as torch modules."""

import copy
import statistics

import pytest
import torch
from grids import grid
from helpers import (
    KERNELS,
    add_conv_biases,
    assert_close,
    assert_same_buffers,
    assert_same_gradients,
    assert_same_step,
    backward,
    freeze_norms,
    freeze_parameters,
    random_images,
    small_model,
    use_kernels,
    with_engine,
)
from test_parts import CONSUMERS, Block, _assert_same, _randomized, _shared
from torch import Tensor, nn

from efficient_densenet import DenseNet
from efficient_densenet.engine import choose
from efficient_densenet.engine.parts import parts_of
from efficient_densenet.engine.refuse import joined_consumer
from efficient_densenet.engine.stage import groups
from efficient_densenet.engine.stage import run as shared

WHERE = {"every": "", "first": "conv1", "last": "conv2", "transition": "transition"}


@pytest.fixture(params=[True, False], ids=["a_layer_at_a_time", "a_stage_at_a_time"])
def _layer_groups(request, monkeypatch):
    monkeypatch.setattr(groups, "LAYER_GROUP_BYTES", 0 if request.param else groups.LAYER_GROUP_BYTES)


def _biased(family: str = "bc", where: str = "", **overrides) -> DenseNet:
    return add_conv_biases(small_model(family, efficient=False, **overrides), where)


def _valid(family, frozen, where, keep, **_):
    """Layers without bottlenecks have neither a second norm and convolution nor anything to keep."""
    return family != "basic" or not (frozen == "norm2" or where == "last" or keep)


@pytest.mark.parametrize(
    *grid(
        _valid,
        family=["basic", "bc", "imagenet"],
        where=WHERE,
        drop_rate=[0.0, 0.3],
        frozen=[None, "", "norm1", "norm2"],
        keep=[False, True],
        kernels=KERNELS,
    )
)
def test_outputs_gradients_and_buffers_match_plain(family, where, drop_rate, frozen, keep, kernels, monkeypatch):
    use_kernels(monkeypatch, *kernels)
    plain = _biased(family, WHERE[where], drop_rate=drop_rate, keep_bottleneck=keep)
    if frozen is not None:
        freeze_norms(plain, frozen)
    efficient = with_engine(plain, "shared")
    for batch in (2, 7):
        assert_same_step(efficient, plain, random_images(family, batch))
        assert_same_buffers(efficient, plain)


def test_blocks_and_transitions_with_biases_are_one_node():
    model = _biased().set_engine("shared")
    node, names = model.features(random_images("bc")).grad_fn, []
    while node is not None and node.next_functions:
        names.append(node.name())
        node = next((node for node, _ in node.next_functions if node is not None), None)
    assert names == ["SharedStageBackward"] * 3 + ["ConvolutionBackward0"]


@pytest.mark.parametrize(("dims", "size"), [(1, (16,)), (3, (8, 9, 8))])
@pytest.mark.parametrize("bn_size", [0, 2])
@pytest.mark.parametrize("frozen", [None, ""])
def test_signals_and_volumes(dims, size, bn_size, frozen):
    plain = small_model("bc", efficient=False, dims=dims, bn_size=bn_size, drop_rate=0.2)
    add_conv_biases(plain)
    if frozen is not None:
        freeze_norms(plain)
    efficient = with_engine(plain, "shared")
    assert_same_step(efficient, plain, torch.randn(2, 3, *size, dtype=torch.double))
    assert_same_buffers(efficient, plain)


@pytest.mark.usefixtures("_layer_groups")
@pytest.mark.parametrize("frozen", [None, ""])
@pytest.mark.parametrize("newest_first", [True, False])
@pytest.mark.parametrize("bottleneck", [True, False])
@pytest.mark.parametrize("consumer", CONSUMERS)
def test_blocks_of_other_authors(consumer, bottleneck, newest_first, frozen):
    block, after = _randomized(Block(bottleneck, newest_first, drop_rate=0.2), CONSUMERS[consumer]())
    for module in (block, after):
        if module is not None:
            add_conv_biases(module)
            if frozen is not None:
                module.eval()
    _assert_same(_shared, block, after)


TRAINABLE = {
    "all but biases": lambda name: not name.endswith("bias"),
    "biases of convolutions": lambda name: name.endswith("bias") and "conv" in name,
    "all but biases of convolutions": lambda name: not (name.endswith("bias") and "conv" in name),
    "one first convolution's bias": lambda name: name.endswith("block2.denselayer1.conv1.bias"),
    "one last convolution's bias": lambda name: name.endswith("block1.denselayer2.conv2.bias"),
    "a transition's bias": lambda name: name.endswith("transition1.conv.bias"),
}


@pytest.mark.usefixtures("_layer_groups")
@pytest.mark.parametrize("trainable", TRAINABLE)
@pytest.mark.parametrize("frozen", [None, "norm", "norm2"])
@pytest.mark.parametrize("input_requires_grad", [False, True])
def test_partly_frozen_parameters(trainable, frozen, input_requires_grad):
    plain = _biased(drop_rate=0.2)
    freeze_parameters(plain, TRAINABLE[trainable])
    if frozen:
        freeze_norms(plain, frozen)
    efficient, grads = with_engine(plain, "shared"), []
    for model in (efficient, plain):
        torch.manual_seed(3)
        x = random_images("bc", 2).requires_grad_(input_requires_grad)
        model(x).square().sum().backward()
        grads.append(x.grad)
    if input_requires_grad:
        assert_close(*grads)
    assert_same_gradients(efficient, plain)
    assert_same_buffers(efficient, plain)


@pytest.mark.usefixtures("_layer_groups")
@pytest.mark.parametrize("name", ["denseblock2.denselayer1.conv1", "denseblock1.denselayer2.conv2", "transition1.conv"])
def test_the_gradient_of_one_bias_alone_and_again(name):
    plain = _biased()
    freeze_norms(plain, "norm")
    x, grads = random_images("bc", 2), []
    for model in (with_engine(plain, "shared"), plain):
        bias, loss = model.get_parameter(f"features.{name}.bias"), model(x).square().sum()
        grads.append([torch.autograd.grad(loss, bias, retain_graph=again)[0] for again in (True, False)])
    for actual, expected in zip(*grads, strict=True):
        assert expected.abs().max() > 1e-3
        assert_close(actual, expected)


@pytest.mark.parametrize(
    *grid(
        bn_size=[0, 2],
        training=[True, False],
        return_features=[False, True],
        kernels=[("portable", 1 << 22), ("compiled", 7)],
    )
)
def test_gradcheck(bn_size, training, return_features, kernels, monkeypatch):
    use_kernels(monkeypatch, *kernels)
    sizes = {"bn_size": bn_size, "growth_rate": 2, "num_init_features": 2, "block_config": (2, 2)}
    features = _biased(**sizes).train(training).features
    block, transition = features.denseblock1, features.transition1
    parts = parts_of(block)
    x = torch.randn(2, 2, 3, 4, dtype=torch.double, requires_grad=True)
    stage = shared.StagePlan(parts, joined_consumer(parts, transition), x, return_features)

    def function(x, *tensors):
        return stage.apply(x, *tensors)

    assert torch.autograd.gradcheck(function, (x, *stage.tensors))


PRECISIONS = {
    "float32": (torch.float32, False),
    "bfloat16": (torch.bfloat16, False),
    "bfloat16 autocast": (torch.float32, True),
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("family", ["basic", "bc"])
def test_the_error_in_low_precision_is_at_most_twice_plain_s(family, precision, frozen):
    """The median over several networks: in a single one, rounding may switch a ReLU on or off."""
    (dtype, autocast), ratios = PRECISIONS[precision], []
    for seed in range(7):
        torch.manual_seed(seed)
        float64_model = _biased(family, drop_rate=0.0)
        if frozen:
            freeze_norms(float64_model)
        x = random_images(family, batch=8)
        expected = _results(float64_model, x)
        plain = copy.deepcopy(float64_model).to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            models = with_engine(plain, "shared"), plain
            error, plain_error = (_error(_results(model, x.to(dtype)), expected) for model in models)
        ratios.append(error / plain_error)
    assert statistics.median(ratios) <= 2


def _results(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    output, grad = backward(model, x)
    buffers = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    return [output, grad, *(p.grad.clone() for p in model.parameters()), *buffers]


def _error(actual: list[Tensor], expected: list[Tensor]) -> float:
    parts = [(a.double() - b).norm() / (b.norm() + 1e-3) for a, b in zip(actual, expected, strict=True)]
    return torch.stack(parts).norm().item()


def test_a_bias_of_another_dtype_in_a_transition_runs_outside_the_stage():
    model = small_model("bc", efficient="shared")
    block, transition = model.features.denseblock1, model.features.transition1
    transition.conv.bias = nn.Parameter(torch.zeros(transition.conv.out_channels))
    assert joined_consumer(parts_of(block), transition) is None


def test_a_bias_of_another_dtype_in_a_layer_falls_back():
    model = small_model("bc", efficient="shared")
    block = model.features.denseblock1
    block.denselayer1.conv1.bias = nn.Parameter(torch.zeros(block.denselayer1.conv1.out_channels))
    x = torch.randn(2, 4, 5, 5, dtype=torch.double, requires_grad=True)
    assert "found float32, float64 in a Conv2d" in (choose.why_not(choose.Engine.SHARED, block, x) or "")
