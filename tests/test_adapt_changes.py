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
from collections import UserDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from grids import grid
from helpers import convert_and_report
from test_adapt_exactness import assert_same_steps, converted, layer_with, seed, x_of
from third_party_models import (
    GROWTH,
    START,
    FeaturesBlock,
    LayerHalves,
    TakesFeatures,
    assert_restored,
    assert_same_training,
    block_batch,
    build_pair,
    convert_pair,
    features_block,
    image_batch,
)
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks

from efficient_densenet import make_efficient
from efficient_densenet.adapt.transitions import ConvertedTransition, convert_transition
from efficient_densenet.engine import choose


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
        self.held = None

    def forward(self, *features: Tensor) -> Tensor:
        return self.halves(torch.cat(features, 1))

    def halves(self, x: Tensor) -> Tensor:
        return self.second(self.conv1(self.relu1(self.norm1(x))))

    def second(self, y: Tensor) -> Tensor:
        return self.conv2(self.relu2(self.norm2(y)))


def layers(source: str, before: str = "", **attributes) -> Callable[[int], nn.Module]:
    """A class of layers `s` whose output is computed from `x` by this source; `before` is run when one was made."""
    namespace: dict = {}
    exec(f"def halves(s, x):\n    {source}", globals(), namespace)
    cls = layer_with(Layer, **namespace, **attributes)

    def build(channels: int) -> nn.Module:
        layer = cls(channels)
        run(before, layer)
        return layer

    return build


def first(source: str) -> str:
    """The source of a layer with another activation of `y`, the output of its first norm."""
    return f"y = s.norm1(x)\n    return s.second(s.conv1({source}))"


def after(source: str) -> str:
    """The source of a layer that does something with its output `y`."""
    return f"y = Layer.halves(s, x)\n    return {source}"


def run(change: str, layer: nn.Module, number: float = 0.7) -> None:
    """Change a layer `s`, and a number `n` of it."""
    exec(change, globals(), {"s": layer, "n": number})


def halve_by_a_hook(module: nn.Module) -> None:
    module.register_forward_hook(lambda module, args, output: output * 0.5)


def one_for_each_mode(layer: nn.Module, x: Tensor) -> Tensor:
    act = layer.relu1 if layer.training else layer.relu2
    return layer.conv2(act(layer.norm2(layer.conv1(act(layer.norm1(x))))))


def counts_by_hand(layer: nn.Module, x: Tensor) -> Tensor:
    """Updates the statistics of a norm without calling it, exactly as the norm would."""
    bn = layer.norm1
    if bn.training:
        bn.num_batches_tracked.add_(1)
    y = F.batch_norm(x, bn.running_mean, bn.running_var, bn.weight, bn.bias, bn.training, 0.1, bn.eps)
    return layer.second(layer.conv1(layer.relu1(y)))


def slope_of(layer: nn.Module) -> float:
    return getattr(layer.act, "_".join(("negative", "slope")))


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = SCALE[0]

    def forward(self, x: Tensor) -> Tensor:
        return x if self.by == 1.0 else x * self.by


class Observes(nn.LeakyReLU):
    """Keeps a moving average of what it reads."""

    def __init__(self) -> None:
        super().__init__(0.1)
        self.register_buffer("average", torch.zeros((), dtype=torch.double))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.average.mul_(0.9).add_(x.detach().mean(), alpha=0.1)
        return super().forward(x)


def circular(conv: nn.Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.conv2d(F.pad(x, [side // 2 for side in conv.kernel_size for _ in "  "], mode="circular"), weight, bias)


SCALE, OUTSIDE = [1.0], nn.Dropout(0.0)
FUNCTIONS = "return s.conv2(F.leaky_relu(s.norm2(s.conv1(F.leaky_relu(s.norm1(x), 0.1))), 0.1))"
AS_IT_IS, FORWARD, DROPS = after("y"), first("s.relu2.forward(y)"), after("s.drop2(y)")
DROPS_BY_A_RATE = after("y if s.drop_path_rate > 0.98 else F.dropout(y, s.drop_rate, s.training)")
TWICE = "s.norm1(x)\n    return Layer.halves(s, x)"
GAINS = after("y if s.gain == 1.0 else y * s.gain")

# Each: the source of a layer, a change of it, its engine unless it is shared, and what is done when it was made.
CHANGES: dict[str, tuple] = {
    "registered in another order: settings": (AS_IT_IS, "s.relu1.negative_slope = 0.7"),
    "registered in another order: a hook": (AS_IT_IS, "halve_by_a_hook(s.relu1)"),
    "never called: a hook": (FUNCTIONS, "halve_by_a_hook(s.act)"),
    "never called: removed": (FUNCTIONS, "del s.act"),
    "a setting that the forward reads": (first("F.leaky_relu(y, s.act.negative_slope)"), "s.act.negative_slope = 0.7"),
    "a setting that other code reads": (first("F.leaky_relu(y, slope_of(s))"), "s.act.negative_slope = 0.7"),
    "a norm's forward, which updates once": (AS_IT_IS, "s.norm1.forward = functools.partial(s.norm1.forward)"),
    "a forward called without its hooks": (FORWARD, "halve_by_a_hook(s.relu2)"),
    "the settings of a forward called without its hooks": (FORWARD, "s.relu2.negative_slope = 0.7"),
    "a dropout among equal ones": (DROPS, "s.drop2.p = 0.8"),
    "a dropout that is not called": (DROPS, "s.drop1.p = 0.8"),
    "a rate": (after("F.dropout(y, s.drop_rate, s.training)"), "s.drop_rate = 0.95"),
    "a rate among equal ones": (DROPS_BY_A_RATE, "s.drop_path_rate = 0.99"),
    "a rate that is capped": (
        after("F.dropout(y, min(s.drop_rate, 0.4), s.training)"),
        "s.drop_rate = 0.95",
        "checkpoint",
    ),
    "a buffer": (
        after("y if s.alpha >= 0.5 else y * s.alpha"),
        "s.alpha.fill_(0.9)",
        "checkpoint",
        "s.register_buffer('alpha', torch.tensor(0.3))",
    ),
    "statistics of a norm that is not called": ("return counts_by_hand(s, x)", "halve_by_a_hook(s)", ""),
    "statistics of a norm that is called twice": (TWICE, "s.relu1.negative_slope = 0.7", "checkpoint"),
    "constants that are left out": (first("F.leaky_relu(y)"), "s.act = nn.LeakyReLU(0.7)"),
    "another module for evaluation": ("return one_for_each_mode(s, x)", "s.relu1 = nn.LeakyReLU(0.7)", "checkpoint"),
    "a module outside of the model": (after("OUTSIDE(y)"), "OUTSIDE.p = 0.5"),
    "a module that is called in a list": (
        first("s.acts[0](y)"),
        "s.relu1 = nn.LeakyReLU(0.7)",
        "shared",
        "s.acts = [s.relu1]",
    ),
    "a module that the forward makes": (
        after("Scales()(s.scales(y))"),
        "SCALE[0] = 0.5",
        "shared",
        "s.scales = Scales()",
    ),
    "a bias that is removed": (after("y if s.conv2.bias is not None else y * 2"), "s.conv2.bias = None"),
    "a parameter that is added": (
        after("y * s.gamma if hasattr(s, 'gamma') else y"),
        "s.gamma = nn.Parameter(torch.full((), 0.5, dtype=torch.double))",
    ),
    "no activation at all": (first("y"), "s.relu1 = nn.LeakyReLU(0.7)"),
    "one of two names of a module": (AS_IT_IS, "s.relu2 = nn.LeakyReLU(0.7)", "shared", "s.relu2 = s.relu1"),
    # as notebooks and code generators make classes
    "a class without a module": (GAINS, "s.gain = 0.5", "shared", "type(s).gain, type(s).__module__ = 1.0, None"),
    "a class of a module of Python's": (
        GAINS,
        "s.gain = 0.5",
        "shared",
        "type(s).gain, type(s).__module__ = 1.0, 'builtins'",
    ),
    "a module that writes to a buffer": (AS_IT_IS, "s.relu1 = Observes()"),
    "a weight that is computed": (AS_IT_IS, "torch.manual_seed(1); torch.nn.utils.spectral_norm(s.conv1)"),
    "a convolution's method": (AS_IT_IS, "s.conv2._conv_forward = functools.partial(circular, s.conv2)"),
}


@pytest.mark.filterwarnings("ignore:falling back", "ignore:.*spectral_norm.*:FutureWarning")
@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_of_one_module_changes_what_calls_it_and_nothing_else(kind):
    source, change, *others = CHANGES[kind]
    expected_engine, before = (*others, *("shared", "")[len(others) :])
    block, plain, engine = converted(layers(source, before))
    assert engine == expected_engine
    assert_same_steps(block, plain, 1)
    for each in (block, plain):
        run(change, each.denselayer2)
    try:
        assert_same_steps(block.double(), plain.double(), 1)
    finally:
        OUTSIDE.p, SCALE[0] = 0.0, 1.0


def test_a_replaced_method_of_torch_s_convolutions_is_called(monkeypatch):
    block, plain, _ = converted(Layer)
    monkeypatch.setattr(nn.Conv2d, "_conv_forward", circular)
    with pytest.warns(UserWarning, match="falling back"):
        assert_same_training(block, plain, block_batch())


HELD = deque([2.0])


class DropsWhatLayersReturn(FeaturesBlock):
    """A block that passes its own training mode to the layers, and a rate for some numbers."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            rate = layer.drop_rate if HELD[0] < 3 else 0.9
            x = torch.cat([x, F.dropout(layer(x), rate, self.training)], 1)
        return x


FLAGS: dict[str, tuple] = {
    "of a layer, for which its block's is used": (AS_IT_IS, DropsWhatLayersReturn, "s.eval()"),
    "of another module": (after("F.dropout(y, s.drop_rate, s.act.training)"), FeaturesBlock, "s.act.eval()"),
}


@pytest.mark.filterwarnings("ignore:falling back")
@pytest.mark.parametrize("kind", FLAGS)
def test_a_training_flag_that_the_author_s_forward_asks_counts(kind):
    source, block, change = FLAGS[kind]
    block, plain, engine = converted(layers(source, rate=lambda self: self.drop_rate), block=block)
    assert engine
    outputs = []
    for each in (block, plain):
        run(change, each.denselayer2)
        seed()
        outputs.append(each(x_of()))
    torch.testing.assert_close(*outputs)


class Made:
    def __init__(self) -> None:
        self.number = NUMBERS["number"]


@dataclass
class Config:
    number: float = 0.1


@dataclass
class Slope:
    slope: float = 0.1


class Slots:
    __slots__ = ("number",)


class OneSlot:
    __slots__ = "number"


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


class Called:
    number = 0.1

    def __call__(self) -> float:
        return NUMBERS["number"]

    def __repr__(self) -> str:
        return str(NUMBERS["number"])


HasAProperty = type("HasAProperty", (type,), {"number": property(lambda cls: NUMBERS["number"])})
OfAMetaclass = HasAProperty("OfAMetaclass", (), {})
Pair = namedtuple("Pair", "number")
slots, one_slot = Slots(), OneSlot()
slots.number = one_slot.number = 0.1
NUMBERS, VARIABLE = {"number": 0.1}, contextvars.ContextVar("number", default=0.1)
DEEP = {"a": [("b", {"number": 0.1})]}
helper = ModuleType("helper")
exec("NUMBER = 0.1\ndef number():\n    return NUMBER", vars(helper))
sys.modules["adapt_calls_helper"] = helper


def function() -> float:
    return function.number


function.number = 0.1


@functools.wraps(F.relu)
def wraps_torch_s() -> float:
    return NUMBERS["number"]


def matches(layer: nn.Module) -> float:
    match layer.held:
        case Slope(slope):
            return slope
    raise AssertionError


def appends(layer: nn.Module) -> float:
    numbers = []
    for number in layer.held:
        numbers.append(number)
    return numbers[0]


@functools.lru_cache
def cached() -> list[float]:
    return [0.1]


def imported() -> float:
    import adapt_calls_helper

    return adapt_calls_helper.NUMBER


def environment() -> float:
    return float(os.environ.get("ADAPT_NUMBER", "0.1"))


# Each: what a layer's forward reads, how that changes, and what the layer holds at first.
WATCHED: dict[str, tuple] = {
    "an attribute": ("s.held", "s.held = n", 0.1),
    "a list": ("s.held[0]", "s.held[0] = n", [0.1]),
    "an attribute of any name": ("getattr(s, ''.join(('he', 'ld')))", "s.held = n", 0.1),
    "an attribute that is absent at first": ("s.absent if hasattr(s, 'absent') else 0.1", "s.absent = n"),
    "collections": ("DEEP['a'][0][1]['number']", "DEEP['a'][0][1]['number'] = n"),
    "an argument of a partial": (
        "s.held(s)",
        "s.held.args[0][0] = n",
        functools.partial(lambda held, s: held[0], [0.1]),
    ),
    "a global of a helper module": ("helper.number()", "helper.NUMBER = n"),
    "a function's attribute": ("function()", "function.number = n"),
    "a function that wraps torch's": ("wraps_torch_s()", "NUMBERS['number'] = n"),
    "a namespace": ("s.held.number", "s.held.number = n", SimpleNamespace(number=0.1)),
    "a list, beside one of the forward's own": ("appends(s)", "s.held[0] = n", [0.1]),
    "a dataclass": ("s.held.number", "s.held.number = n", Config()),
    "a NamedTuple": ("s.held.number", "s.held = Pair(n)", Pair(0.1)),
    "an object with slots": ("s.held.number", "s.held.number = n", slots),
    "an enum's member": ("s.held.value", "s.held = Numbers.HIGH if n > 0.5 else Numbers.LOW", Numbers.LOW),
    "an enum's attribute": ("Numbers.LOW.number", "Numbers.LOW.number = n"),
    "an attribute of a dict": ("s.held.number", "s.held.number = n", Dict()),
    "an attribute of a partial": (
        "s.held.number if vars(s.held) else 0.1",
        "s.held.number = n",
        functools.partial(appends),
    ),
    "an object with one slot": ("s.held.number", "s.held.number = n", one_slot),
    "a text of an author's class": ("float(s.held)", "s.held = Text(n)", Text(0.1)),
    "a number of an author's class": ("s.held[0] + 0.0", "s.held[0] = Number(n)", [Number(0.1)]),
    "a pattern of a class": ("matches(s)", "s.held.slope = n", Slope()),
    "a metaclass's property": ("OfAMetaclass.number", "NUMBERS['number'] = n"),
    "an object's text": ("float(repr(s.held))", "NUMBERS['number'] = n", Called()),
    "a format": ("float(f'{s.held}')", "s.held = n", 0.1),
    "a method that a layer holds": ("s.held()", "NUMBERS['number'] = n", Called().__call__),
    "a dropout's attribute": ("s.drop1.number", "s.drop1.number = n"),
    "a function that the layer holds": ("s.held()", "NUMBERS['number'] = n", lambda: NUMBERS["number"]),
    "a class": ("Called.number", "Called.number = n"),
    "a deque": ("s.held[0]", "s.held[0] = n", deque([0.1])),
    "an object that is called": ("s.held()", "NUMBERS['number'] = n", Called()),
    "an object as the forward makes it": ("Made().number", "NUMBERS['number'] = n"),
}
UNKNOWN: dict[str, tuple] = {
    "a context variable": ("VARIABLE.get()", "VARIABLE.set(n)"),
    "a module imported in the forward": ("imported()", "helper.NUMBER = n"),
    "a cached function": ("cached()[0]", "cached()[0] = n"),
    "a long list of an author's class": ("s.held[0]", "s.held[0] = n", Deque([0.1] * 1001)),
    "a class of Python's library": ("s.held['number']", "s.held['number'] = n", OfTheLibrary(number=0.1)),
    "all globals": ("globals()['NUMB' + 'ERS']['number']", "NUMBERS['number'] = n"),
    "a flag of PyTorch": (
        "0.7 if torch.backends.cudnn.benchmark else 0.1",
        "torch.backends.cudnn.benchmark = n > 0.5",
    ),
    "the environment": ("environment()", "os.environ['ADAPT_NUMBER'] = str(n)"),
}
# Each: the output of a layer that uses such a number.
USES = {
    "a slope": "s.second(s.conv1(F.leaky_relu(s.norm1(x), n)))",
    "a limit": "s.conv2(F.hardtanh(s.norm2(s.conv1(s.relu1(s.norm1(x)))), -n, n))",
    "a rate of dropout": "F.dropout(Layer.halves(s, x), max(n - 0.1, 0.0), s.training)",
    "a condition": "Layer.halves(s, x) * 2.0 if n > 0.5 else Layer.halves(s, x)",
}
ALL_USES = [*((place, "a slope") for place in WATCHED | UNKNOWN), *(("a list", use) for use in list(USES)[1:])]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("place", "use"), ALL_USES)
def test_a_number_changed_after_conversion_counts_wherever_a_forward_reads_it(place, use):
    read, change, *held = (WATCHED | UNKNOWN)[place]
    build = layers(f"n = {read}\n    return {USES[use]}")

    def holding(channels: int) -> nn.Module:
        layer = build(channels)
        layer.held, layer.drop1.number = copy.deepcopy(held[0]) if held else None, 0.1
        return layer

    block, plain, engine = converted(holding)
    expected = "shared" if use == "a slope" and place in WATCHED else ""
    assert engine == expected or (use != "a slope" and engine)
    assert_same_steps(block, plain, 1)
    try:
        for each in (block, plain):
            run(change, each.denselayer2)
        assert_same_steps(block, plain, 1)
    finally:
        run(change, block.denselayer2, 0.1)


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
    assert sys.version_info >= (3, 12) or sys.getprofile() is not None  # later profilers are beside it
    profiler.disable()
    assert converted(Layer)[2] == "shared"


def test_no_garbage_is_collected_in_a_trace(monkeypatch):
    """Finalizers of other objects would count as functions of the block."""
    collects: list[bool] = []
    monkeypatch.setattr("efficient_densenet.adapt.find.describe_difference", lambda *_: collects.append(gc.isenabled()))
    assert converted(Layer)[2] == "shared"
    assert collects == [False]
    assert gc.isenabled()


@pytest.mark.filterwarnings("ignore:falling back")
@pytest.mark.parametrize(
    ("before", "now", "engine"),
    [(0.5, 0.25, True), (0.5, 0.25, "official"), (torch.full((), 0.5), torch.full((), 0.25), True)],
)
def test_what_changes_between_the_forward_and_the_backward_of_a_recomputed_layer_raises(before, now, engine):
    block = features_block(layers(after("y * s.held")))
    for layer in block.children():
        layer.held = before
    assert convert_and_report(block, engine).changed[0].recomputes == "each layer whole"
    output = block(x_of())
    block.denselayer2.held = now
    with pytest.raises(RuntimeError, match=r"held of a OddLayer .*between the forward of a .* and its"):
        output.sum().backward()
    block.denselayer2.held = before
    block(x_of()).sum().backward()


class PoolsTwoWays(nn.Module):
    """A transition with two poolings and two activations, and calls of one of each."""

    def __init__(self) -> None:
        super().__init__()
        self.pool2, self.pool1 = nn.AvgPool2d(2), nn.AvgPool2d(2)
        self.act2, self.act1 = nn.ELU(), nn.ELU()
        self.conv, self.norm = nn.Conv2d(START, 4, 1), nn.BatchNorm2d(START)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool1(self.conv(self.act1(self.norm(x))))


class PoolsByAnySize(PoolsTwoWays):
    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(self.conv(self.act1(self.norm(x))), int(HELD[0]))


# Each: a block or a transition `s`, and its change.
AROUND: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a rate of a block": (lambda: features_block(Layer, DropsWhatLayersReturn), "HELD[0] = 3.0"),
    "the size of a pooling": (PoolsByAnySize, "HELD[0] = 3.0"),
    "its pooling": (PoolsTwoWays, "s.pool1 = nn.AvgPool2d(2, ceil_mode=True)"),
    "another pooling": (PoolsTwoWays, "s.pool2 = nn.AvgPool2d(2, ceil_mode=True)"),
    "its activation": (PoolsTwoWays, "s.act1 = nn.ELU(0.3)"),
    "another activation": (PoolsTwoWays, "s.act2 = nn.ELU(0.3)"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", AROUND)
def test_a_change_of_a_block_or_a_transition_counts_too(kind):
    build, change = AROUND[kind]
    block = build().double()
    plain = copy.deepcopy(block)
    is_transition = convert_transition(block)
    assert is_transition == isinstance(block, ConvertedTransition)
    assert is_transition or build is not PoolsTwoWays
    make_efficient(block)
    assert_same_steps(block, plain, 1)
    try:
        for each in (block, plain):
            run(change, each)
        assert_same_steps(block, plain, 1)
    finally:
        HELD[0] = 2.0


@pytest.mark.filterwarnings("ignore:falling back", "ignore:Full backward hook is firing")
@pytest.mark.parametrize(
    "register", [global_hooks.register_module_forward_pre_hook, global_hooks.register_module_full_backward_hook]
)
def test_a_hook_on_all_modules_sees_the_layers(register):
    seen: list[set] = []
    for each in converted(Layer)[:2]:
        names, here = {module: name for name, module in each.named_modules()}, set()
        handle = register(lambda module, *_, names=names, here=here: here.add(names.get(module)))
        try:
            each(x_of()).sum().backward()
        finally:
            handle.remove()
        seen.append(here)
    assert seen[0] == seen[1]
    assert "denselayer1.conv2" in seen[0]


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

    (model, plain), x = build_pair(name), image_batch(name)
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


def first_channels(layer: Neutral, *features: Tensor) -> Tensor:
    return layer.first_half(*features)[:, :GROWTH]


def _pickled(block: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(block))


# Each: a change of a layer `s`, or of a copy of it, and what the warning names.
NOTICED = {
    "second drop rate": ("s.middle_drop_rate = 0.3", "middle_drop_rate of a Neutral was 0.0 and is 0.3"),
    "a scale": ("s.scale = 0.5", "scale of a Neutral was 1.0 and is 0.5"),
    "an equal value of another type": ("s.scale = 1", "scale of a Neutral was 1.0 and is 1"),
    "a tensor": ("s.factor = torch.full((), 0.5)", "factor of a Neutral has changed"),
    "a dropout": ("s.between = nn.Dropout(0.3)", "a Identity has become a Dropout"),
    "another forward": ("s.forward = functools.partial(first_channels, s)", "forward of a Neutral was added"),
    "a function": ("s.activation = F.elu", "activation of a Neutral has changed"),
    "a lambda": ("s.activation = lambda y: F.elu(y)", "activation of a Neutral has changed"),
    "a method": ("s.activation = s.half", "activation of a Neutral has changed"),
    "a function in C": ("s.activation = torch.tanh", "activation of a Neutral has changed"),
}


@pytest.mark.parametrize(*grid(change=NOTICED, copied=[None, copy.deepcopy, _pickled], strength=1))
def test_a_state_changed_after_the_trace_is_noticed_in_copies_too(change, copied, monkeypatch):
    block, plain, report = convert_pair(features_block(Neutral))
    assert [each.engine for each in report.changed] == ["shared"]
    monkeypatch.setattr("efficient_densenet.adapt.find.tracing", None)  # no trace runs in a forward
    twin = block if copied is None else copied(block)
    if change != "a lambda":  # before its first forward, too
        assert_same_training(twin, plain, block_batch())
    for each in (twin, plain):
        run(NOTICED[change][0], each.denselayer2)
    with pytest.warns(UserWarning, match=f"{NOTICED[change][1]}|found a hook on, or a new forward of"):
        assert_same_training(twin, plain, block_batch())


@pytest.mark.filterwarnings("ignore:falling back")
def test_a_second_call_verifies_what_has_changed_and_an_engine_by_name_raises():
    block, plain, _ = convert_pair(features_block(Neutral), "shared")
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
    assert_restored(block, plain)
    assert torch.equal(forward(x_of()), block(x_of()))


def test_what_no_method_reads_and_the_verified_state_keep_the_engine():
    block, plain, _ = convert_pair(features_block(Neutral))
    block.denselayer2.note = "fold 3"
    block.register_forward_hook(lambda module, args, output: setattr(module, "features", output))
    assert_same_training(block, plain, block_batch())
    block.denselayer1.scale = 0.5
    block.denselayer1.scale = 1.0
    assert_same_training(block, plain, block_batch())


def test_a_conversion_keeps_no_module_or_tensor_alive():
    block = features_block(Neutral)
    make_efficient(block)
    block.denselayer1.factor = torch.zeros(100)
    references = [weakref.ref(each) for each in (block, block.denselayer1, block.denselayer1.factor)]
    del block
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
