"""Which modules are recognized as dense blocks, how they are verified, and what the report says about the others."""

import copy
import functools
import pickle
import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from dense_families import Block, tiramisu
from helpers import convert_and_report
from third_party_models import (
    GROWTH,
    START,
    FeaturesBlock,
    TakesFeatures,
    assert_same_training,
    block_batch,
    build,
    features_block,
    image_batch,
    plain_reference,
)
from torch import Tensor, nn

from efficient_densenet import make_efficient, register_block, restore
from efficient_densenet.adapt import BlockParts, LayerParts
from efficient_densenet.engine import choose


@pytest.mark.filterwarnings("ignore:falling back")
def test_a_block_altered_after_conversion():
    """The altered layers run, and another call reports them."""
    model = build("torchvision_efficient")
    plain = plain_reference("torchvision_efficient", model)
    make_efficient(model)
    for each in (model, plain):
        layer = each.features.denseblock2.denselayer1
        layer.conv2 = nn.Sequential(layer.conv2, nn.Tanh())
        del each.features.denseblock1.denselayer2
        each.features.transition1 = nn.Sequential(nn.Conv2d(START + GROWTH, 7, 1), nn.AvgPool2d(2)).double()
    plain.features.transition1.load_state_dict(model.features.transition1.state_dict())
    report = convert_and_report(model)
    assert [(change.layers, change.engine[:17]) for change in report.changed] == [
        (1, "shared"),
        (3, "checkpoint (found"),
        (1, "shared"),
    ]
    assert_same_training(model, plain, image_batch("torchvision_efficient"))
    restore(model)
    assert list(map(type, model.modules())) == list(map(type, plain.modules()))


class _AlmostDense(nn.Module):
    """A block whose layers are those of a dense block, and whose forward differs from a dense block's."""

    def __init__(self, difference: str) -> None:
        super().__init__()
        self.difference = difference
        for i in range(3):
            self.add_module(f"layer{i}", TakesFeatures(START + i * GROWTH))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.children():
            output = layer(*(reversed(features) if self.difference == "order" and len(features) == 2 else features))
            if self.difference == "scaled":
                output = output * 0.9
            elif self.difference == "detached":
                features[-1] = features[-1].detach() if len(features) == 3 else features[-1]
            elif self.difference == "stochastic depth" and self.training:
                output = output * float(torch.rand(()) > 0.01)
            features.append(output)
        if self.difference == "two outputs":
            return features[0], torch.cat(features, 1)
        if self.difference == "fails":
            raise RuntimeError("no\nmore")
        if self.difference == "without the first output":
            del features[1]
        return torch.cat(features, 1)


REASONS = {
    "scaled": r"found the output of mul, where a dense layer has norm, activation and convolution",
    "detached": "found that by the parts of its layers it has other gradients in evaluation mode",
    "stochastic depth": r"found the output of mul, where a dense layer has",
    "two outputs": "found that it returns a tuple, where a dense block returns a tensor",
    "without the first output": r"found a Conv2d \(layer0.conv2\) inside layer 1, where a dense layer has",
    "fails": r"could not be tried: our trace calls it with one tensor of 6 channels .* raises RuntimeError: no\)$",
}


@pytest.mark.filterwarnings("ignore:falling back")
def test_a_block_that_passes_features_in_another_order_is_recomputed_layer_by_layer():
    block = _AlmostDense("order").double()
    plain = copy.deepcopy(block)
    (changed,) = convert_and_report(block).changed
    assert changed.engine == "checkpoint (found that layer 2 reads other features than all before it, in their order)"
    assert changed.recomputes == "each layer whole"
    assert_same_training(block, plain, block_batch())


@pytest.mark.parametrize("difference", REASONS)
def test_a_block_that_computes_something_else_is_reported_and_recomputed_whole_at_most(difference):
    model = nn.Sequential(nn.Conv2d(3, START, 1), _AlmostDense(difference))
    model.add_module("good", FeaturesBlock([TakesFeatures(START)]))
    random = torch.get_rng_state()
    state, classes = copy.deepcopy(model.state_dict()), list(map(type, model[1].modules()))
    report = convert_and_report(model, "shared")
    assert torch.equal(torch.get_rng_state(), random)
    assert [change.name for change in report.changed] == ["good"]
    assert list(report.unchanged) == ["1"]
    assert re.match(REASONS[difference], report.unchanged["1"])
    assert "not changed\n  1: " in str(report)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert list(map(type, model[1].modules())) == classes
    assert all(module.training for module in model.modules())
    changed = {change.name: change for change in convert_and_report(model).changed}
    assert changed.keys() == ({"good"} if difference == "fails" else {"1", "good"})
    assert difference == "fails" or changed["1"].recomputes == "the block whole"


@pytest.mark.filterwarnings("ignore:falling back")
@pytest.mark.parametrize("parametrized", [False, True])
def test_a_module_with_a_second_name_does_not_stop_a_conversion(parametrized):
    block = Block(tiramisu).double()
    block.activation = block.layers[-1][1]
    for layer in block.layers if parametrized else ():
        nn.utils.parametrizations.weight_norm(layer[2])
    plain = copy.deepcopy(block)
    (changed,) = convert_and_report(nn.Sequential(block)).changed
    assert changed.engine.partition(" ")[0] == ("checkpoint" if parametrized else "shared")
    assert_same_training(block, plain, block_batch())


def test_a_block_of_which_nothing_is_a_layer_is_reported_with_the_modules_found():
    class _DenseBlock(nn.Sequential):
        pass

    report = convert_and_report(_DenseBlock(nn.Conv2d(3, 4, 1), nn.PReLU()))
    assert not report
    assert report.unchanged[""].startswith(
        "found a PReLU (1), where a dense layer has norm, activation and convolution"
    )
    assert str(report).startswith("nothing was changed\nnot changed\n  the model: found a PReLU")
    block = features_block()
    block.forward = block.forward
    assert convert_and_report(block).unchanged[""] == "found a forward that is compiled or was set on the instance"


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_computed_weights():
    block = features_block()
    torch.nn.utils.parametrizations.spectral_norm(block.denselayer1.conv1)
    state = copy.deepcopy(block.state_dict())
    assert convert_and_report(block).changed[0].engine.startswith("plain (found a parametrization")
    assert convert_and_report(block.eval()).changed[0].engine.startswith("checkpoint (found a parametrization")
    assert all(torch.equal(value, state[key]) for key, value in block.state_dict().items())
    old = features_block()
    torch.nn.utils.weight_norm(old.denselayer2.conv2)
    assert convert_and_report(old).unchanged[""].startswith("holds weights that are no parameters")
    assert all(parameter.grad is None for parameter in old.parameters())


@pytest.mark.parametrize("norm", [functools.partial(nn.GroupNorm, 2), nn.InstanceNorm2d])
def test_other_norms_run_through_the_checkpoint_engine(norm):
    block = features_block(norm=norm)
    plain = copy.deepcopy(block)
    report = convert_and_report(block)
    name = type(plain.denselayer1.norm1).__name__
    assert report.changed[0].engine.startswith(f"checkpoint (found a {name} inside a layer")
    choose._warned.clear()
    with pytest.warns(UserWarning, match=f"to 'checkpoint': found a {name}"):
        assert_same_training(block, plain, block_batch())


FUNCTIONS = {
    "leaky_relu": functools.partial(F.leaky_relu, negative_slope=0.1),
    "elu": F.elu,
    "silu": F.silu,
    "gelu": functools.partial(F.gelu, approximate="tanh"),
    "relu6": F.relu6,
    "mish": F.mish,
    "clamp": functools.partial(torch.clamp, min=0, max=6),
    "tanh": torch.tanh,
    "selu": F.selu,
}


class _WithFunction(nn.Module):
    def __init__(self, channels: int, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(channels), nn.Conv2d(channels, 8, 1)
        self.norm2, self.conv2 = nn.BatchNorm2d(8), nn.Conv2d(8, GROWTH, 3, padding=1)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        new = self.conv2(self.function(self.norm2(self.conv1(self.function(self.norm1(x))))))
        return torch.cat([x, new], 1)


@pytest.mark.filterwarnings("ignore:falling back")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_activation_that_is_a_function(name):
    block = nn.Sequential(*(_WithFunction(START + i * GROWTH, FUNCTIONS[name]) for i in range(3))).double()
    plain = copy.deepcopy(block)
    (change,) = convert_and_report(block).changed
    assert change.engine.partition(" ")[0] == ("checkpoint" if name in ("clamp", "tanh", "selu") else "shared")
    assert_same_training(block, plain, block_batch())


@pytest.mark.filterwarnings("ignore:falling back")
@pytest.mark.parametrize("activation", ["prelu", "elu", "tanh"])
def test_other_activations(activation):
    model = pytest.importorskip("monai.networks.nets").DenseNet(
        2, 3, 5, init_features=START, growth_rate=GROWTH, block_config=(2, 1), act=activation
    )
    plain = copy.deepcopy(model.double())
    report = convert_and_report(model)
    if activation in ("tanh", "prelu"):
        found = {"tanh": "Tanh", "prelu": "PReLU"}[activation]
        assert report.changed[0].engine.startswith(f"checkpoint (found a {found} inside a layer")
    else:
        assert [each.engine for each in report.changed] == ["shared", "shared"]
    assert_same_training(model, plain, image_batch("monai"))


class _CustomBlock(nn.Module):
    """A block whose structure shows no layers: one module holds all norms, and another all convolutions."""

    def __init__(self) -> None:
        super().__init__()
        channels = [START + i * GROWTH for i in range(3)]
        self.norms = nn.ModuleList(map(nn.BatchNorm2d, channels))
        self.convolutions = nn.ModuleList(nn.Conv2d(c, GROWTH, 3, padding=1, bias=False) for c in channels)

    def forward(self, x: Tensor) -> Tensor:
        for norm, conv in zip(self.norms, self.convolutions, strict=True):
            x = torch.cat([x, conv(F.relu(norm(x)))], 1)
        return x


def _custom_parts(block: _CustomBlock) -> BlockParts:
    pairs = zip(block.norms, block.convolutions, strict=True)
    return BlockParts(tuple(LayerParts(norm, norm, conv) for norm, conv in pairs))


def test_a_custom_block_with_a_registered_reader():
    assert not convert_and_report(_CustomBlock())
    register_block(_CustomBlock, _custom_parts)
    block = _CustomBlock().double()
    plain = copy.deepcopy(block)
    report = convert_and_report(nn.Sequential(block))
    assert [change.engine for change in report.changed] == ["shared"]
    assert_same_training(pickle.loads(pickle.dumps(block)), plain, block_batch())
    restore(block)
    assert type(block) is _CustomBlock


class _MisreadBlock(_CustomBlock):
    """A block for which the registered reader is wrong."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def test_a_registered_reader_is_verified_by_a_trace():
    register_block(_CustomBlock, _custom_parts)
    report = convert_and_report(_MisreadBlock())
    assert not report
    assert "has other values" in report.unchanged[""]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_conversion_inside_gradient_and_autocast_modes(mode):
    model = build("gpleiss_efficient")
    plain = plain_reference("gpleiss_efficient", model)
    with mode():
        assert len(convert_and_report(model)) == 3
    assert_same_training(model, plain, image_batch("gpleiss_efficient"))


def test_a_model_on_the_meta_device_is_verified_on_the_cpu():
    densenet = pytest.importorskip("torchvision.models.densenet")
    with torch.device("meta"):
        model = densenet.DenseNet(4, (2, 1), 6)
    assert len(convert_and_report(model)) == 2
    assert all(parameter.is_meta for parameter in model.parameters())
