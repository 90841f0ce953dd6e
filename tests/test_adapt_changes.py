"""What a layer consists of is known from its calls, and what it was verified for is noticed when it changes."""

import contextvars
import copy
import cProfile
import functools
import gc
import os
import pickle
import sys
import weakref
from collections import UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from grids import grid
from helpers import convert_and_report
from test_adapt_exactness import assert_same_steps, converted, layer_with, x_of
from third_party_models import (
    GROWTH,
    START,
    FeaturesBlock,
    LayerHalves,
    TakesFeatures,
    assert_same_training,
    block_batch,
    build,
    features_block,
    image_batch,
    plain_reference,
)
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

from efficient_densenet import make_efficient, restore
from efficient_densenet.adapt.guard import change_since, guard_of
from efficient_densenet.adapt.transitions import ConvertedTransition, convert_transition
from efficient_densenet.engine import choose

Change = Callable[[nn.Module], object]


@pytest.fixture(autouse=True)
def _no_warning_was_given_before(monkeypatch):
    monkeypatch.setattr(choose, "_warned", set())


class Layer(nn.Module):
    """A layer with an activation that its forward does not call, and with equal activations, norms and convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.relu2, self.relu1, self.act = nn.LeakyReLU(0.1), nn.LeakyReLU(0.1), nn.LeakyReLU(0.1)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.conv1, self.conv2 = nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, GROWTH, 3, padding=1)
        self.drop2, self.drop1 = nn.Dropout(0.3), nn.Dropout(0.3)
        self.drop_rate = self.drop_path_rate = 0.3
        self.register_buffer("alpha", torch.tensor(0.3))
        self.acts, self.held = [self.relu1], None

    def forward(self, *features: Tensor) -> Tensor:
        return self.halves(torch.cat(features, 1))

    def halves(self, x: Tensor) -> Tensor:
        return self.second(self.conv1(self.relu1(self.norm1(x))))

    def second(self, y: Tensor) -> Tensor:
        return self.conv2(self.relu2(self.norm2(y)))


def halves(function: Callable[[Layer, Tensor], Tensor]) -> type[nn.Module]:
    return layer_with(Layer, halves=function)


def first(function: Callable[[Layer, Tensor], Tensor]) -> type[nn.Module]:
    """A layer with another activation after its first norm."""
    return halves(lambda s, x: s.second(s.conv1(function(s, s.norm1(x)))))


def after(function: Callable[[Layer, Tensor], Tensor]) -> type[nn.Module]:
    return halves(lambda s, x: function(s, Layer.halves(s, x)))


def changing(name: str, slope: float = 0.7) -> Change:
    return lambda layer: setattr(layer, name, nn.LeakyReLU(slope))


def setting(name: str, value: object) -> Change:
    place, _, attribute = name.rpartition(".")
    return lambda layer: setattr(layer.get_submodule(place), attribute, value)


def hooking(name: str) -> Change:
    return lambda layer: getattr(layer, name).register_forward_hook(lambda module, args, output: output * 0.5)


def _one_for_each_mode(layer: nn.Module, x: Tensor) -> Tensor:
    act = layer.relu1 if layer.training else layer.relu2
    return layer.conv2(act(layer.norm2(layer.conv1(act(layer.norm1(x))))))


def _counts_by_hand(layer: nn.Module, x: Tensor) -> Tensor:
    """Updates the statistics of a norm without calling it, exactly as the norm would."""
    bn = layer.norm1
    if bn.training:
        bn.num_batches_tracked.add_(1)
    y = F.batch_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias, bn.training, 0.1, bn.eps)
    return layer.second(layer.conv1(layer.relu1(y)))


class _HoldsNoList(Layer):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        del self.acts, self.alpha  # a list of modules and a tensor, where code reads attributes of any name


def _slope_of(layer: nn.Module) -> float:
    return getattr(layer.act, "_".join(("negative", "slope")))


def _replace_forward(module: nn.Module) -> None:
    module.forward = lambda x, forward=module.forward: forward(x)


class _Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = _scale[0]

    def forward(self, x: Tensor) -> Tensor:
        return x if self.by == 1.0 else x * self.by


class _HoldsScales(Layer):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.scales = _Scales()

    def halves(self, x: Tensor) -> Tensor:
        return _Scales()(self.scales(super().halves(x)))


_scale = [1.0]
_OUTSIDE = nn.Dropout(0.0)
FunctionsOnly = halves(lambda s, x: s.conv2(F.leaky_relu(s.norm2(s.conv1(F.leaky_relu(s.norm1(x), 0.1))), 0.1)))
SecondDropout = after(lambda s, y: s.drop2(y))

# Each: the layer, its engine, and a change of one of its modules.
CHANGES: dict[str, tuple[type[nn.Module], str, Change]] = {
    "registered in another order: settings": (Layer, "shared", setting("relu1.negative_slope", 0.7)),
    "registered in another order: a hook": (Layer, "shared", hooking("relu1")),
    "never called: a hook": (FunctionsOnly, "shared", hooking("act")),
    "never called: removed": (FunctionsOnly, "shared", lambda s: delattr(s, "act")),
    "a setting that the forward reads": (
        first(lambda s, x: F.leaky_relu(x, s.act.negative_slope)),
        "shared",
        setting("act.negative_slope", 0.7),
    ),
    "a setting that other code reads": (
        layer_with(_HoldsNoList, halves=lambda s, x: s.second(s.conv1(F.leaky_relu(s.norm1(x), _slope_of(s))))),
        "shared",
        setting("act.negative_slope", 0.7),
    ),
    "a norm's forward, which updates once": (Layer, "shared", lambda s: _replace_forward(s.norm1)),
    "a forward called without its hooks": (first(lambda s, x: s.relu2.forward(x)), "shared", hooking("relu2")),
    "the settings of a forward called without its hooks": (
        first(lambda s, x: s.relu2.forward(x)),
        "shared",
        setting("relu2.negative_slope", 0.7),
    ),
    "a dropout among equal ones": (SecondDropout, "shared", setting("drop2.p", 0.8)),
    "a dropout that is not called": (SecondDropout, "shared", setting("drop1.p", 0.8)),
    "a rate": (
        halves(lambda s, x: F.dropout(Layer.halves(s, x), s.drop_rate, s.training)),
        "shared",
        setting("drop_rate", 0.95),
    ),
    "a rate among equal ones": (
        after(lambda s, y: y if s.drop_path_rate > 0.98 else F.dropout(y, s.drop_rate, s.training)),
        "shared",
        setting("drop_path_rate", 0.99),
    ),
    "a rate that is capped": (
        after(lambda s, y: F.dropout(y, min(s.drop_rate, 0.4), s.training)),
        "checkpoint",
        setting("drop_rate", 0.95),
    ),
    "a buffer": (
        after(lambda s, y: y if s.alpha >= 0.5 else y * s.alpha),
        "checkpoint",
        lambda s: s.alpha.fill_(0.9),
    ),
    "statistics of a norm that is not called": (
        halves(_counts_by_hand),
        "",
        lambda s: s.register_forward_hook(lambda *_: None),
    ),
    "the flag of another module": (
        after(lambda s, y: F.dropout(y, s.drop_rate, s.act.training)),
        "shared",
        setting("act.training", False),
    ),
    "constants that are left out": (first(lambda s, x: F.leaky_relu(x)), "shared", changing("act")),
    "another module for evaluation": (halves(_one_for_each_mode), "checkpoint", changing("relu1")),
    "a module outside of the model": (after(lambda s, y: _OUTSIDE(y)), "shared", lambda s: setattr(_OUTSIDE, "p", 0.5)),
    "a module that is called in a list": (first(lambda s, x: s.acts[0](x)), "shared", changing("relu1")),
    "a module that the forward makes": (_HoldsScales, "shared", lambda s: _scale.__setitem__(0, 0.5)),
    "a bias that is removed": (
        after(lambda s, y: y if s.conv2.bias is not None else y * 2),
        "shared",
        lambda s: setattr(s.conv2, "bias", None),
    ),
    "a parameter that is added": (
        layer_with(
            _HoldsNoList,
            halves=lambda s, x: Layer.halves(s, x) * s.gamma if hasattr(s, "gamma") else Layer.halves(s, x),
        ),
        "shared",
        lambda s: s.register_parameter("gamma", nn.Parameter(torch.full((), 0.5, dtype=torch.double))),
    ),
    "no activation at all": (first(lambda s, x: x), "shared", changing("relu1")),
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
    try:
        assert_same_steps(block, plain, 1)
    finally:
        _OUTSIDE.p, _scale[0] = 0.0, 1.0


class Made:
    def __init__(self) -> None:
        self.number = _numbers["number"]


@dataclass
class Config:
    number: float = 0.1


@dataclass
class Slope:
    slope: float = 0.1


class Pair(NamedTuple):
    number: float = 0.1


class Slots:
    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0.1


class OneSlot:
    __slots__ = "number"

    def __init__(self) -> None:
        self.number = 0.1


class Numbers(Enum):
    LOW, HIGH = 0.1, 0.7

    def __init__(self, number: float) -> None:
        self.number = number

    def __repr__(self) -> str:
        return "one of the numbers"


class Dict(dict):
    number = 0.1


class Text(str):
    pass


class Deque(deque):
    pass


class Number(float):
    def __repr__(self) -> str:
        return "a number"


class OfTheLibrary(UserDict):
    pass


class HasAProperty(type):
    @property
    def number(cls) -> float:
        return _numbers["number"]


class OfAMetaclass(metaclass=HasAProperty):
    pass


class Says:
    def __repr__(self) -> str:
        return str(_numbers["number"])


class Called:
    number = 0.1

    def __call__(self) -> float:
        return _numbers["number"]


_numbers, _variable = {"number": 0.1}, contextvars.ContextVar("number", default=0.1)
_deep = {"a": [("b", {"number": 0.1})]}
_helper = ModuleType("helper")
exec("NUMBER = 0.1\ndef number():\n    return NUMBER", vars(_helper))
sys.modules["adapt_calls_helper"] = _helper


def _function() -> float:
    return _function.number


_function.number = 0.1


@functools.wraps(F.relu)
def _wraps_torch_s() -> float:
    return _numbers["number"]


def _matches(layer: nn.Module) -> float:
    match layer.held:
        case Slope(slope):
            return slope
    raise AssertionError


def _appends(layer: nn.Module) -> float:
    numbers = []
    for number in layer.held:
        numbers.append(number)
    return numbers[0]


@functools.lru_cache
def _cached() -> list[float]:
    return [0.1]


def _imported(layer: nn.Module) -> float:
    import adapt_calls_helper

    return adapt_calls_helper.NUMBER


# Each: where a layer's forward reads a number, the number's change, and what the layer holds at first.
WATCHED = {
    "an attribute": (lambda s: s.held, lambda s, n: setattr(s, "held", n), lambda: 0.1),
    "a list": (lambda s: s.held[0], lambda s, n: s.held.__setitem__(0, n), lambda: [0.1]),
    "an attribute of any name": (
        lambda s: getattr(s, "".join(("he", "ld"))),
        lambda s, n: setattr(s, "held", n),
        lambda: 0.1,
    ),
    "an attribute that is absent at first": (
        lambda s: s.absent if hasattr(s, "absent") else 0.1,
        lambda s, n: setattr(s, "absent", n),
    ),
    "collections": (lambda s: _deep["a"][0][1]["number"], lambda s, n: _deep["a"][0][1].update(number=n)),
    "an argument of a partial": (
        lambda s: s.held(0.0),
        lambda s, n: s.held.args[0].__setitem__(0, n),
        lambda: functools.partial(lambda numbers, zero: numbers[0] + zero, [0.1]),
    ),
    "a global of a helper module": (lambda s: _helper.number(), lambda s, n: setattr(_helper, "NUMBER", n)),
    "a function's attribute": (lambda s: _function(), lambda s, n: setattr(_function, "number", n)),
    "a function that wraps torch's": (lambda s: _wraps_torch_s(), lambda s, n: _numbers.update(number=n)),
    "a namespace": (
        lambda s: s.held.number,
        lambda s, n: setattr(s.held, "number", n),
        lambda: SimpleNamespace(number=0.1),
    ),
    "a list, beside one of the forward's own": (_appends, lambda s, n: s.held.__setitem__(0, n), lambda: [0.1]),
    "a dataclass": (lambda s: s.held.number, lambda s, n: setattr(s.held, "number", n), Config),
    "a NamedTuple": (lambda s: s.held.number, lambda s, n: setattr(s, "held", Pair(n)), Pair),
    "an object with slots": (lambda s: s.held.number, lambda s, n: setattr(s.held, "number", n), Slots),
    "an enum's member": (
        lambda s: s.held.value,
        lambda s, n: setattr(s, "held", Numbers.HIGH if n > 0.5 else Numbers.LOW),
        lambda: Numbers.LOW,
    ),
    "an enum's attribute": (
        lambda s: Numbers.LOW.number,
        lambda s, n: setattr(Numbers.LOW, "number", n),
    ),
    "an attribute of a dict": (lambda s: s.held.number, lambda s, n: setattr(s.held, "number", n), Dict),
    "an attribute of a partial": (
        lambda s: s.held.number if vars(s.held) else 0.1,
        lambda s, n: setattr(s.held, "number", n),
        lambda: functools.partial(_appends),
    ),
    "an object with one slot": (lambda s: s.held.number, lambda s, n: setattr(s.held, "number", n), OneSlot),
    "a text of an author's class": (
        lambda s: float(s.held),
        lambda s, n: setattr(s, "held", Text(n)),
        lambda: Text(0.1),
    ),
    "a number of an author's class": (
        lambda s: s.held[0] + 0.0,
        lambda s, n: s.held.__setitem__(0, Number(n)),
        lambda: [Number(0.1)],
    ),
    "a pattern of a class": (_matches, lambda s, n: setattr(s.held, "slope", n), Slope),
    "a metaclass's property": (lambda s: OfAMetaclass.number, lambda s, n: _numbers.update(number=n)),
    "an object's text": (lambda s: float(repr(s.held)), lambda s, n: _numbers.update(number=n), Says),
    "a format": (lambda s: float(f"{s.held}"), lambda s, n: setattr(s, "held", n), lambda: 0.1),
    "a method that a layer holds": (
        lambda s: s.held(),
        lambda s, n: _numbers.update(number=n),
        lambda: Called().__call__,
    ),
    "a dropout's attribute": (lambda s: s.drop1.number, lambda s, n: setattr(s.drop1, "number", n)),
    "a function that the layer holds": (
        lambda s: s.held(),
        lambda s, n: _numbers.update(number=n),
        lambda: lambda: _numbers["number"],
    ),
    "a class": (lambda s: Called.number, lambda s, n: setattr(Called, "number", n)),
    "a deque": (lambda s: s.held[0], lambda s, n: s.held.__setitem__(0, n), lambda: deque([0.1])),
    "an object that is called": (lambda s: s.held(), lambda s, n: _numbers.update(number=n), Called),
    "an object as the forward makes it": (lambda s: Made().number, lambda s, n: _numbers.update(number=n)),
}
UNKNOWN = {
    "a context variable": (lambda s: _variable.get(), lambda s, n: _variable.set(n)),
    "a module imported in the forward": (_imported, lambda s, n: setattr(_helper, "NUMBER", n)),
    "a cached function": (lambda s: _cached()[0], lambda s, n: _cached().__setitem__(0, n)),
    "a long list of an author's class": (
        lambda s: s.held[0],
        lambda s, n: s.held.__setitem__(0, n),
        lambda: Deque([0.1] * 1001),
    ),
    "a class of Python's library": (
        lambda s: s.held["number"],
        lambda s, n: s.held.update(number=n),
        lambda: OfTheLibrary(number=0.1),
    ),
    "all globals": (lambda s: globals()["_numb" + "ers"]["number"], lambda s, n: _numbers.update(number=n)),
    "a flag of PyTorch": (
        lambda s: 0.7 if torch.backends.cudnn.benchmark else 0.1,
        lambda s, n: setattr(torch.backends.cudnn, "benchmark", n > 0.5),
    ),
    "the environment": (
        lambda s: float(os.environ.get("ADAPT_NUMBER", "0.1")),
        lambda s, n: os.environ.update(ADAPT_NUMBER=str(n)),
    ),
}
PLACES = WATCHED | UNKNOWN
USES = {
    "a slope": lambda s, x, n: s.second(s.conv1(F.leaky_relu(s.norm1(x), n))),
    "a limit": lambda s, x, n: s.conv2(F.hardtanh(s.norm2(s.conv1(s.relu1(s.norm1(x)))), -n, n)),
    "a rate of dropout": lambda s, x, n: F.dropout(Layer.halves(s, x), max(n - 0.1, 0.0), s.training),
    "a condition": lambda s, x, n: Layer.halves(s, x) * (2.0 if n > 0.5 else 1.0) if n > 0.5 else Layer.halves(s, x),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("place", "use"),
    [*((place, "a slope") for place in PLACES), *(("a list", use) for use in USES if use != "a slope")],
)
def test_a_number_changed_after_conversion_counts_wherever_a_forward_reads_it(place, use):
    (read, change, *made), used = PLACES[place], USES[use]

    class Reads(_HoldsNoList):
        def __init__(self, channels: int) -> None:
            super().__init__(channels)
            self.held = made[0]() if made else None
            self.drop1.number = 0.1

        def halves(self, x: Tensor) -> Tensor:
            return used(self, x, read(self))

    block, plain, engine = converted(Reads)
    expected = "shared" if use == "a slope" and place in WATCHED else ""
    assert engine == expected or (use != "a slope" and engine)
    assert_same_steps(block, plain, 1)
    try:
        for each in (block, plain):
            change(each.denselayer2, 0.7)
        assert_same_steps(block, plain, 1)
    finally:
        change(block.denselayer2, 0.1)


def test_what_a_caller_writes_on_the_input_is_read():
    layer = layer_with(TakesFeatures, forward=lambda s, *x: TakesFeatures.forward(s, *x) * getattr(x[0], "number", 1.0))
    block, _, engine = converted(layer)
    assert engine == ""
    x = x_of()
    x.number = 0.0
    assert block(x)[:, START:].abs().max() == 0


def test_a_conversion_beside_a_profiler():
    profiler = cProfile.Profile()
    profiler.enable()
    assert converted(Layer)[2] == "shared"
    assert sys.getprofile() is not None
    profiler.disable()
    assert converted(Layer)[2] == "shared"


def test_no_garbage_is_collected_in_a_trace(monkeypatch):
    """Finalizers of other objects would count as functions of the block."""
    collects: list[bool] = []
    monkeypatch.setattr("efficient_densenet.adapt.find.describe_difference", lambda *_: collects.append(gc.isenabled()))
    assert converted(Layer)[2] == "shared"
    assert collects == [False]
    assert gc.isenabled()


_between = [0.5]


class HoldsATensor(_HoldsNoList):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.tensor = torch.full((), 0.5, dtype=torch.double)

    def halves(self, x: Tensor) -> Tensor:
        return super().halves(x) * self.tensor


@pytest.mark.filterwarnings("ignore:falling back")
def test_a_tensor_replaced_between_the_forward_and_the_backward_of_a_recomputed_layer_raises():
    block = FeaturesBlock([HoldsATensor(START), HoldsATensor(START + GROWTH)]).double()
    assert convert_and_report(block).changed[0].engine.startswith("checkpoint")
    output = block(x_of())
    block.denselayer2.tensor = torch.ones((), dtype=torch.double)
    with pytest.raises(RuntimeError, match="tensor of a HoldsATensor has changed between the forward of"):
        output.sum().backward()


@pytest.mark.filterwarnings("ignore:falling back")
@pytest.mark.parametrize("engine", [True, "official"])
def test_a_value_changed_between_the_forward_and_the_backward_of_a_recomputed_layer_raises(engine):
    block = FeaturesBlock([after(lambda s, y: y * _between[0])(START + i * GROWTH) for i in range(2)]).double()
    make_efficient(block, engine)
    output = block(x_of())
    _between[0] = 0.25
    try:
        with pytest.raises(RuntimeError, match=r"_between in .* has changed between the forward of a OddLayer and its"):
            output.sum().backward()
    finally:
        _between[0] = 0.5
    block(x_of()).sum().backward()


_held = deque([2.0])


class DropsWhatLayersReturn(FeaturesBlock):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = torch.cat([x, F.dropout(layer(x), _held[0] / 2 - 1, self.training)], 1)
        return x


class PoolsByAnySize(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(super().forward(x), int(_held[0]))


AROUND = {
    "a rate of a block": lambda: DropsWhatLayersReturn([Layer(START), Layer(START + GROWTH)]),
    "the size of a pooling": lambda: PoolsByAnySize(nn.BatchNorm2d(START), nn.ReLU(), nn.Conv2d(START, 4, 1)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", AROUND)
def test_a_number_of_a_block_or_a_transition_counts_too(kind):
    torch.manual_seed(3)
    block = AROUND[kind]().double()
    plain = copy.deepcopy(block)
    if isinstance(block, PoolsByAnySize):
        convert_transition(block)
    make_efficient(block)
    assert_same_steps(block, plain, 1)
    _held[0] = 3.0
    try:
        assert_same_steps(block, plain, 1)
    finally:
        _held[0] = 2.0


class PassesItsFlagOn(FeaturesBlock):
    """A block that passes its own training mode to the layers."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = torch.cat([x, F.dropout(layer(x), layer.drop_rate, self.training)], 1)
        return x


@pytest.mark.filterwarnings("ignore:falling back")
def test_a_layer_drops_by_the_flag_that_its_author_s_forward_asks():
    torch.manual_seed(3)
    has_a_rate = layer_with(Layer, rate=lambda self: self.drop_rate)
    block = PassesItsFlagOn([has_a_rate(START), has_a_rate(START + GROWTH)]).double()
    plain = copy.deepcopy(block)
    assert len(convert_and_report(block)) == 1
    outputs = []
    for each in (block, plain):
        each.denselayer2.eval()
        torch.manual_seed(0)
        outputs.append(each(x_of()))
    torch.testing.assert_close(*outputs)


def test_a_name_that_leads_to_another_module_than_before_is_noticed():
    """Two names of one activation, of which the layer calls both."""
    block = FeaturesBlock([Layer(START), Layer(START + GROWTH)]).double()
    for layer in block.children():
        layer.relu2 = layer.relu1
    plain = copy.deepcopy(block)
    assert convert_and_report(block).changed[0].engine == "shared"
    for each in (block, plain):
        changing("relu2")(each.denselayer1)
    with pytest.warns(UserWarning, match="other modules have several names since it was verified"):
        block(x_of())
    plain(x_of())
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


GLOBAL_HOOKS = [global_hooks.register_module_forward_pre_hook, global_hooks.register_module_full_backward_hook]


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


@pytest.mark.filterwarnings("ignore:falling back", "ignore:Full backward hook is firing")
@pytest.mark.parametrize(("name", "engine"), [("torchvision", "checkpoint"), ("gpleiss", True)])
def test_hooks_on_a_layer_get_the_arguments_that_its_block_gives_it(name, engine):
    """A list of features, or each as an argument, though a layer may take their concatenation too."""

    def double_first(module, args):
        first, *others = args[0] if isinstance(args[0], list) else args
        doubled = (first * 2, *others)
        return (list(doubled),) if isinstance(args[0], list) else doubled

    def tripled(module, grad_input, grad_output):
        """Autograd hands a hook no gradients of a list."""
        return None if grad_input[0] is None else tuple(grad * 3 for grad in grad_input)

    model, x = build(name), image_batch(name)
    plain = plain_reference(name, model)
    for each in (model, plain):
        layer = each.features.denseblock1.denselayer2
        layer.register_forward_pre_hook(double_first)
        layer.register_full_backward_hook(tripled)
    make_efficient(model, engine)
    assert_same_training(model, plain, x)


class Neutral(LayerHalves):
    """A layer with states that are neutral at first, so that nothing is computed with them."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.scale, self.middle_drop_rate = 1.0, 0.0
        self.factor: Tensor | None = None
        self.between, self.activation = nn.Identity(), F.relu

    def forward(self, *features: Tensor) -> Tensor:
        output = self.between(self.first_half(*features))
        if self.factor is not None:
            output = output * self.factor
        output = F.dropout(output, self.middle_drop_rate, self.training)
        output = self.conv2(self.activation(self.norm2(output)))
        return output if self.scale == 1.0 else output * self.scale

    def half(self, y: Tensor) -> Tensor:
        return F.relu(y) * 0.5


def _block(layer: type[nn.Module] = Neutral) -> tuple[nn.Module, nn.Module]:
    block = features_block(layer)
    return block, copy.deepcopy(block)


def _pickled(block: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(block))


# Each: what is changed in a layer, or in a copy of it, and what the warning names.
NOTICED: dict[str, tuple[Change, str]] = {
    "second drop rate": (setting("middle_drop_rate", 0.3), "middle_drop_rate of a Neutral was 0.0 and is 0.3"),
    "a scale": (setting("scale", 0.5), "scale of a Neutral was 1.0 and is 0.5"),
    "an equal value of another type": (setting("scale", 1), "scale of a Neutral was 1.0 and is 1"),
    "a tensor": (lambda layer: setattr(layer, "factor", torch.full((), 0.5)), "factor of a Neutral has changed"),
    "a dropout": (lambda layer: setattr(layer, "between", nn.Dropout(0.3)), "a Identity has become a Dropout"),
    "another forward": (
        lambda layer: setattr(layer, "forward", lambda *f: layer.first_half(*f)[:, :GROWTH]),
        "forward of a Neutral was added",
    ),
    "a function": (setting("activation", F.elu), "activation of a Neutral has changed"),
    "a lambda": (setting("activation", lambda y: F.elu(y)), "activation of a Neutral has changed"),
    "a method": (lambda layer: setattr(layer, "activation", layer.half), "activation of a Neutral has changed"),
    "a function in C": (setting("activation", torch.tanh), "activation of a Neutral has changed"),
}


@pytest.mark.parametrize(*grid(change=NOTICED, copied=[None, copy.deepcopy, _pickled], strength=1))
def test_a_state_changed_after_the_trace_is_noticed_in_copies_too(change, copied, monkeypatch):
    block, plain = _block()
    assert [each.engine for each in convert_and_report(block).changed] == ["shared"]
    monkeypatch.setattr("efficient_densenet.adapt.find.tracing", None)  # no trace runs in a forward
    twin = block if copied is None else copied(block)
    if change != "a lambda":  # before its first forward, too
        assert_same_training(twin, plain, block_batch())
    for each in (twin, plain):
        NOTICED[change][0](each.denselayer2)
    with pytest.warns(UserWarning, match=f"{NOTICED[change][1]}|found a hook on, or a new forward of"):
        assert_same_training(twin, plain, block_batch())


@pytest.mark.filterwarnings("ignore:falling back")
def test_a_second_call_verifies_what_has_changed_and_an_engine_by_name_raises():
    block, plain = _block()
    make_efficient(block, "shared")
    block.denselayer2.scale = plain.denselayer2.scale = 0.5
    with pytest.raises(RuntimeError, match=r"engine 'shared' cannot run here.*scale of a Neutral was 1.0 and is 0.5"):
        block(x_of())
    (changed,) = convert_and_report(block).changed
    assert changed.engine.startswith("checkpoint (found the output of mul, where")
    assert_same_training(block, plain, block_batch())
    for each in (block, plain):
        each.denselayer2.scale, each.denselayer2.factor = 1.0, torch.ones((), dtype=torch.double)
    assert convert_and_report(block).changed[0].engine.startswith("checkpoint (found the output of mul inside layer 2")
    for each in (block, plain):
        each.denselayer2.factor.fill_(0.5)
    assert_same_training(block, plain, block_batch())
    block.denselayer2.factor = None
    assert convert_and_report(block).changed[0].engine == "shared"
    forward = block.forward
    restore(block)
    assert type(block) is FeaturesBlock
    assert torch.equal(forward(x_of()), block(x_of()))
    assert "_conversion" not in vars(block)


@pytest.mark.parametrize("name", [None, "builtins"])
def test_a_class_of_any_module_is_watched(name):
    """Notebooks and code generators make classes whose module has no name, or another's."""

    def scaled(layer: Neutral, *features: Tensor) -> Tensor:
        output = Neutral.forward(layer, *features)
        return output if layer.gain == 1.0 else output * layer.gain

    block, plain = _block(type("_Generated", (Neutral,), {"__module__": name, "gain": 1.0, "forward": scaled}))
    assert [change.engine for change in convert_and_report(block).changed] == ["shared"]
    for each in (block, plain):
        each.denselayer1.gain = 0.5
    with pytest.warns(UserWarning, match="gain of a _Generated was added"):
        assert_same_training(block, plain, block_batch())


def test_what_no_method_reads_and_the_verified_state_keep_the_engine():
    block, plain = _block()
    make_efficient(block)
    block.denselayer2.note = "fold 3"
    block.register_forward_hook(lambda module, args, output: setattr(module, "features", output))
    assert_same_training(block, plain, block_batch())
    block.denselayer1.scale = 0.5
    block.denselayer1.scale = 1.0
    assert_same_training(block, plain, block_batch())


def test_a_guard_keeps_no_module_or_tensor_alive_and_no_new_object_has_an_old_one_s_place():
    block, _ = _block()
    block.denselayer1.factor, block.denselayer1.activation = torch.zeros(100), lambda y: F.relu(y)
    state, number, others = guard_of(block), id(block.denselayer1.activation), []
    block.denselayer1.activation = None
    while not others or (id(others[-1]) != number and len(others) < 1000):
        others.append(lambda y: F.elu(y))
    block.denselayer1.activation = others[-1]
    assert change_since(state, block) is not None
    references = [weakref.ref(each) for each in (block, block.denselayer1, block.denselayer1.factor)]
    del block
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
    assert state
