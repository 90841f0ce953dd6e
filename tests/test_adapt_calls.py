"""What a converted layer consists of is known from its calls; what it does not call is never called for it."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from test_adapt_exactness import assert_same_steps, converted, layer_with, x_of
from third_party_models import GROWTH, START, FeaturesBlock, assert_same_training, block_batch, build, image_batch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.utils.flop_counter import FlopCounterMode

from efficient_densenet import make_efficient
from efficient_densenet.adapt.transitions import ConvertedTransition, convert_transition
from efficient_densenet.engine import choose


class Layer(nn.Module):
    """A layer with an activation that its forward does not call, and with equal activations, norms and convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.relu2, self.relu1, self.act = nn.LeakyReLU(0.1), nn.LeakyReLU(0.1), nn.LeakyReLU(0.1)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.conv1, self.conv2 = nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, GROWTH, 3, padding=1)

    def forward(self, *features: Tensor) -> Tensor:
        return self.halves(torch.cat(features, 1))

    def halves(self, x: Tensor) -> Tensor:
        return self.conv2(self.relu2(self.norm2(self.conv1(self.relu1(self.norm1(x))))))


def halves(function: Callable[[nn.Module, Tensor], Tensor]) -> type[nn.Module]:
    return layer_with(Layer, halves=function)


def changing(name: str, slope: float = 0.7) -> Callable[[nn.Module], object]:
    return lambda layer: setattr(layer, name, nn.LeakyReLU(slope))


def hooking(name: str) -> Callable[[nn.Module], object]:
    return lambda layer: getattr(layer, name).register_forward_hook(lambda module, args, output: output * 0.5)


FunctionFirst = halves(lambda s, x: s.conv2(s.act(s.norm2(s.conv1(F.leaky_relu(s.norm1(x), 0.1))))))
FunctionsOnly = halves(lambda s, x: s.conv2(F.leaky_relu(s.norm2(s.conv1(F.leaky_relu(s.norm1(x), 0.1))), 0.1)))
ReadsASlope = halves(lambda s, x: s.conv2(s.relu2(s.norm2(s.conv1(F.leaky_relu(s.norm1(x), s.act.negative_slope))))))
CallsForward = halves(lambda s, x: s.conv2(s.relu2(s.norm2(s.conv1(s.relu2.forward(s.norm1(x)))))))
OneUsedTwice = halves(lambda s, x: s.conv2(s.relu1(s.norm2(s.conv1(s.relu1(s.norm1(x)))))))
LeakyByDefault = halves(lambda s, x: s.conv2(F.leaky_relu(s.norm2(s.conv1(F.leaky_relu(s.norm1(x)))))))
NeverActivates = halves(lambda s, x: s.conv2(s.norm2(s.conv1(s.norm1(x)))))


_OUTSIDE = nn.Dropout(0.0)


def _one_for_each_mode(layer: nn.Module, x: Tensor) -> Tensor:
    act = layer.relu1 if layer.training else layer.relu2
    return layer.conv2(act(layer.norm2(layer.conv1(act(layer.norm1(x))))))


OneForEachMode = halves(_one_for_each_mode)
OutsideOfTheModel = halves(lambda s, x: s.conv2(s.relu2(s.norm2(s.conv1(_ACTIVATION(s.norm1(x)))))))
_ACTIVATION = nn.LeakyReLU(0.1)


class CallsAListsActivation(Layer):
    """Holds one of its activations in a list too, and calls it there."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.acts = [self.relu1]

    def halves(self, x: Tensor) -> Tensor:
        return self.conv2(self.relu2(self.norm2(self.conv1(self.acts[0](self.norm1(x))))))


class SecondDropout(Layer):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop2, self.drop1 = nn.Dropout(0.3), nn.Dropout(0.3)

    def halves(self, x: Tensor) -> Tensor:
        return self.drop2(super().halves(x))


# Each: the layer, its engine, and a change of one of its modules.
CHANGES = {
    "registered in another order: settings": (Layer, "shared", lambda s: setattr(s.relu1, "negative_slope", 0.7)),
    "registered in another order: replaced": (Layer, "shared", changing("relu1")),
    "registered in another order: a hook": (Layer, "shared", hooking("relu1")),
    "a function before a module": (FunctionFirst, "shared", changing("act")),
    "never called: replaced": (FunctionsOnly, "shared", changing("act")),
    "never called: a hook": (FunctionsOnly, "shared", hooking("act")),
    "never called: removed": (FunctionsOnly, "shared", lambda s: delattr(s, "act")),
    "a setting that the forward reads": (ReadsASlope, "shared", lambda s: setattr(s.act, "negative_slope", 0.7)),
    "a forward called without its hooks": (CallsForward, "checkpoint", hooking("relu2")),
    "a dropout among equal ones": (SecondDropout, "shared", lambda s: setattr(s.drop2, "p", 0.8)),
    "a dropout that is not called": (SecondDropout, "shared", lambda s: setattr(s.drop1, "p", 0.8)),
    "a module used twice": (OneUsedTwice, "shared", changing("relu1")),
    "constants that are left out": (LeakyByDefault, "shared", changing("act")),
    "another module for evaluation": (OneForEachMode, "checkpoint", changing("relu1")),
    "a module outside of the model": (OutsideOfTheModel, "checkpoint", lambda s: None),
    "a module that is called in a list": (CallsAListsActivation, "checkpoint", changing("relu1")),
    "no activation at all": (NeverActivates, "shared", changing("relu1")),
}


@pytest.mark.filterwarnings("ignore:falling back")
@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_of_one_module_changes_what_calls_it_and_nothing_else(kind):
    layer, expected_engine, change = CHANGES[kind]
    block, plain, engine = converted(layer)
    assert engine == expected_engine
    assert_same_steps(block, plain, 1)
    for each in (block, plain):
        change(each.denselayer2)
    assert_same_steps(block, plain, 1)


def test_an_attribute_of_a_module_outside_of_the_model_is_watched():
    block, plain, engine = converted(halves(lambda s, x: _OUTSIDE(Layer.halves(s, x))))
    assert engine == "checkpoint"
    _OUTSIDE.p = 0.5
    try:
        assert_same_steps(block, plain, 1)
    finally:
        _OUTSIDE.p = 0.0


class AsksTheFlagOfAnActivation(Layer):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop_rate = 0.3

    def halves(self, x: Tensor) -> Tensor:
        return F.dropout(super().halves(x), self.drop_rate, self.act.training)


class PassesItsFlagOn(FeaturesBlock):
    """A block that passes its own training mode to the layers."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = torch.cat([x, F.dropout(layer(x), layer.drop_rate, self.training)], 1)
        return x


@pytest.mark.filterwarnings("ignore:falling back")
@pytest.mark.parametrize("flag", ["denselayer2.act", "denselayer2"])
def test_a_layer_drops_by_the_flag_that_its_author_s_forward_asks(flag):
    torch.manual_seed(3)
    if flag == "denselayer2":
        block: nn.Module = PassesItsFlagOn([HasARate(START), HasARate(START + GROWTH)])
    else:
        block = FeaturesBlock([AsksTheFlagOfAnActivation(START), AsksTheFlagOfAnActivation(START + GROWTH)])
    plain = copy.deepcopy(block.double())
    assert len(make_efficient(block)) == 1
    outputs = []
    for each in (block, plain):
        each.get_submodule(flag).eval()
        torch.manual_seed(0)
        outputs.append(each(x_of()))
    torch.testing.assert_close(*outputs)


class HasARate(Layer):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop_rate = 0.3

    def rate(self) -> float:
        return self.drop_rate


def test_a_name_that_leads_to_another_module_than_before_is_noticed():
    """Two names of one activation, of which the layer calls both."""
    block = FeaturesBlock([Layer(START), Layer(START + GROWTH)]).double()
    for layer in block.children():
        layer.relu2 = layer.relu1
    plain = copy.deepcopy(block)
    assert make_efficient(block).changed[0].engine == "shared"
    for each in (block, plain):
        changing("relu2")(each.denselayer1)
    choose._warned.clear()
    with pytest.warns(UserWarning, match="other modules have several names since it was verified"):
        block(x_of())
    plain(x_of())
    assert_same_steps(block, plain, 1)


@pytest.mark.parametrize("spare", ["norm", "conv"])
def test_an_equal_norm_or_convolution_that_is_not_called_gets_no_gradient(spare):
    class Spare(Layer):
        def __init__(self, channels: int) -> None:
            super().__init__(channels)
            modules = dict(self._modules)
            self._modules.clear()  # registered first
            self.spare = nn.BatchNorm2d(channels) if spare == "norm" else nn.Conv2d(channels, channels, 1)
            self._modules.update(modules)

    block, plain, _ = converted(Spare)
    assert_same_steps(block, plain, 1)


class PoolsTwoWays(nn.Module):
    """A transition with two poolings and two activations, and calls of one of each."""

    def __init__(self) -> None:
        super().__init__()
        self.pool2, self.pool1 = nn.AvgPool2d(2), nn.AvgPool2d(2)
        self.act2, self.act1 = nn.ELU(), nn.ELU()
        self.conv, self.norm = nn.Conv2d(START, 4, 1), nn.BatchNorm2d(START)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool1(self.conv(self.act1(self.norm(x))))


@pytest.mark.parametrize("change", ["pool1", "pool2", "act1", "act2"])
def test_a_transition_calls_what_its_author_s_forward_calls(change):
    transition = PoolsTwoWays().double()
    plain = copy.deepcopy(transition)
    assert convert_transition(transition)
    assert isinstance(transition, ConvertedTransition)
    assert_same_training(transition, plain, block_batch())
    for each in (transition, plain):
        setattr(each, change, nn.AvgPool2d(2, ceil_mode=True) if change.startswith("pool") else nn.ELU(0.3))
    assert_same_training(transition, plain, torch.randn(2, START, 5, 7, dtype=torch.double))


GLOBAL_HOOKS = [
    global_hooks.register_module_forward_pre_hook,
    global_hooks.register_module_forward_hook,
    global_hooks.register_module_full_backward_pre_hook,
    global_hooks.register_module_full_backward_hook,
]


@pytest.mark.filterwarnings("ignore:falling back", "ignore:Full backward hook is firing")
@pytest.mark.parametrize("register", GLOBAL_HOOKS)
def test_a_hook_on_all_modules_sees_the_layers(register):
    seen: list[set] = []
    for convert in (False, True):
        model = build("torchvision")
        for module in model.modules():  # whose results a backward hook may not let change in place
            if isinstance(module, nn.ReLU):
                module.inplace = False
        if convert:
            make_efficient(model)
        names, here = {module: name for name, module in model.named_modules()}, set()
        handle = register(lambda module, *_, names=names, here=here: here.add(names.get(module)))
        try:
            output = model.features.denseblock2(torch.randn(2, 7, 8, 8, dtype=torch.double, requires_grad=True))
            output.sum().backward()
        finally:
            handle.remove()
        seen.append(here)
    assert seen[0] == seen[1]
    assert "features.denseblock2.denselayer1.conv2" in seen[0]


@pytest.mark.filterwarnings("ignore:falling back")
def test_flops_are_counted_in_the_layers():
    model = build("torchvision")
    make_efficient(model)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(image_batch("torchvision"))
    assert any(name.endswith("denseblock1.denselayer2.conv2") for name in counter.get_flop_counts())
