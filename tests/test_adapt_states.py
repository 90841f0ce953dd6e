"""What a block was verified for is noticed when it changes: its attributes, its dropout rates, its modules."""

import contextvars
import copy
import functools
import gc
import pickle
import sys
import weakref
from collections import deque
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from test_adapt_calls import Layer
from test_adapt_exactness import assert_same_steps, converted
from third_party_models import (
    GROWTH,
    START,
    FeaturesBlock,
    LayerHalves,
    assert_same_training,
    block_batch,
    features_block,
)
from torch import Tensor, nn

from efficient_densenet import make_efficient, restore
from efficient_densenet.adapt.fingerprint import change_since, fingerprint
from efficient_densenet.adapt.transitions import convert_transition
from efficient_densenet.engine import choose


class _Layer(LayerHalves):
    """A layer with states that are neutral at first, so that nothing is computed with them."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.scale, self.middle_drop_rate = 1.0, 0.0
        self.factor: Tensor | None = None
        self.between = nn.Identity()

    def forward(self, *features: Tensor) -> Tensor:
        output = self.between(self.first_half(*features))
        if self.factor is not None:
            output = output * self.factor
        output = F.dropout(output, self.middle_drop_rate, self.training)
        output = self.second_half(output)
        return output if self.scale == 1.0 else output * self.scale


def _block(layer: type[nn.Module] = _Layer, **options) -> tuple[nn.Module, nn.Module]:
    block = features_block(layer, **options)
    return block, copy.deepcopy(block)


@pytest.fixture(autouse=True)
def _no_warning_was_given_before(monkeypatch):
    monkeypatch.setattr(choose, "_warned", set())


CHANGES = {
    "second drop rate": lambda layer: setattr(layer, "middle_drop_rate", 0.3),
    "a tensor": lambda layer: setattr(layer, "factor", torch.full((), 0.5)),
    "a dropout in the place of an identity": lambda layer: setattr(layer, "between", nn.Dropout(0.3)),
    "another forward": lambda layer: setattr(layer, "forward", lambda *f: layer.first_half(*f)[:, :GROWTH]),
}


def test_a_tensor_changed_in_place_after_the_trial_is_noticed():
    block, plain = _block()
    for each in (block, plain):
        each.denselayer2.factor = torch.ones((), dtype=torch.double)
    assert make_efficient(block).changed[0].engine.startswith("checkpoint (found that by the parts of its layers")
    for each in (block, plain):
        each.denselayer2.factor.fill_(0.5)
    with pytest.warns(UserWarning, match="to 'plain': found that factor of a _Layer has changed"):
        assert_same_training(block, plain, block_batch())


@pytest.mark.parametrize("change", CHANGES)
def test_a_state_changed_after_the_trial_is_noticed(change):
    block, plain = _block()
    assert [each.engine for each in make_efficient(block).changed] == ["shared"]
    assert_same_training(block, plain, block_batch())
    _assert_noticed(CHANGES[change], block, plain)


def _assert_noticed(change: Callable, block: nn.Module, plain: nn.Module) -> None:
    for each in (block, plain):
        change(each.denselayer2)
    with pytest.warns(UserWarning, match="since it was verified|found a hook on, or a new forward of"):
        assert_same_training(block, plain, block_batch())


@pytest.mark.filterwarnings("ignore:falling back")
def test_the_warning_and_the_second_report_say_what_changed():
    block, plain = _block()
    make_efficient(block)
    block.denselayer2.scale = plain.denselayer2.scale = 0.5
    with pytest.warns(UserWarning, match="'plain': found that scale of a _Layer was 1.0 and is 0.5 since"):
        assert_same_training(block, plain, block_batch())
    (changed,) = make_efficient(block).changed
    assert changed.engine.startswith("checkpoint (found that by the parts of its layers it has other values")
    assert_same_training(block, plain, block_batch())
    block.denselayer2.scale = 1.0
    (changed,) = make_efficient(block).changed
    assert changed.engine == "shared"
    restore(block)
    assert type(block) is FeaturesBlock
    assert "_conversion" not in vars(block)


@pytest.mark.parametrize("name", [None, "builtins", "abc_models"])
def test_a_class_of_any_module_is_watched(name):
    """Notebooks and code generators make classes whose module has no name, or another's."""
    cls = type("_Generated", (_Layer,), {"__module__": name, "gain": 1.0, "forward": _scaled_by_its_gain})
    block, plain = _block(cls)
    assert [change.engine for change in make_efficient(block).changed] == ["shared"]
    for each in (block, plain):
        each.denselayer1.gain = 0.5
    with pytest.warns(UserWarning, match="gain of a _Generated was added"):
        assert_same_training(block, plain, block_batch())


def _scaled_by_its_gain(layer: _Layer, *features: Tensor) -> Tensor:
    output = _Layer.forward(layer, *features)
    return output if layer.gain == 1.0 else output * layer.gain


def test_an_engine_asked_for_by_name_raises_when_the_state_has_changed():
    block, _ = _block()
    make_efficient(block, "shared")
    block.denselayer1.scale = 2.0
    with pytest.raises(RuntimeError, match=r"engine 'shared' cannot run here.*scale of a _Layer was 1.0 and is 2.0"):
        block(torch.randn(3, START, 6, 5, dtype=torch.double, requires_grad=True))


def test_what_no_method_reads_and_the_verified_state_keep_the_engine():
    block, plain = _block()
    make_efficient(block)
    block.denselayer2.note = "fold 3"
    block.register_forward_hook(lambda module, args, output: setattr(module, "features", output))
    assert_same_training(block, plain, block_batch())
    block.denselayer1.scale = 0.5
    block.denselayer1.scale = 1.0
    assert_same_training(block, plain, block_batch())


@pytest.mark.filterwarnings("ignore:falling back")
def test_no_trial_runs_in_a_forward(monkeypatch):
    block, plain = _block()
    make_efficient(block)
    monkeypatch.setattr("efficient_densenet.adapt.find.trial", None)
    for each in (block, plain):
        each.denselayer1.scale = 0.5
    assert_same_training(block, plain, block_batch())


def test_the_rate_of_a_dropout_module_may_change_if_its_place_was_verified():
    layers = [
        nn.Sequential(nn.BatchNorm2d(c), nn.ReLU(), nn.Conv2d(c, GROWTH, 3, padding=1), nn.Dropout(0.2))
        for c in (START, START + GROWTH)
    ]
    block = _Concatenating(*layers).double()
    plain = copy.deepcopy(block)
    assert [change.engine for change in make_efficient(block).changed] == ["shared"]
    for each in (block, plain):
        each[0][3].p, each[1][3].p = 0.4, 0.0
    assert_same_training(block, plain, block_batch())


class _Concatenating(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = torch.cat([x, layer(x)], 1)
        return x


def _pickled(block: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(block))


@pytest.mark.parametrize("copied", [copy.deepcopy, _pickled])
def test_a_copy_keeps_the_engine_and_notices_a_change_of_its_own(copied):
    block, plain = _block()
    make_efficient(block)
    twin = copied(block)
    assert_same_training(twin, plain, block_batch())
    _assert_noticed(lambda layer: setattr(layer, "scale", 0.5), twin, plain)
    assert make_efficient(block).changed[0].engine == "shared"


class _Flagged(LayerHalves):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.register_buffer("enabled", torch.tensor(1))
        self.register_buffer("gain", None)

    def forward(self, *features: Tensor) -> Tensor:
        output = self.second_half(self.first_half(*features))
        output = output * 0.5 if self.enabled else output
        return output if self.gain is None else output * self.gain


@pytest.mark.filterwarnings("ignore:falling back")
def test_flags_in_buffers_count():
    block, plain = _block(_Flagged)
    assert make_efficient(block).changed[0].engine.startswith("checkpoint")
    for each in (block, plain):
        each.denselayer1.enabled.fill_(0), each.denselayer2.enabled.fill_(0)
    assert_same_training(block, plain, block_batch())
    assert make_efficient(block).changed[0].engine.startswith("checkpoint")  # it asks for the flag's value
    for each in (block, plain):
        each.denselayer1.gain = torch.tensor(0.5, dtype=torch.double)
    assert_same_training(block, plain, block_batch())


def test_a_fingerprint_keeps_no_module_or_tensor_alive():
    block, _ = _block()
    block.denselayer1.factor = torch.zeros(100)
    references = [weakref.ref(each) for each in (block, block.denselayer1, block.denselayer1.factor)]
    state = fingerprint(block)
    del block
    gc.collect()
    assert [reference() for reference in references] == [None] * 3
    assert state


class Called:
    number = 0.1

    def __call__(self) -> float:
        return _numbers["number"]


def _function_of(number: float) -> Callable[[], float]:
    def function() -> float:
        return function.number

    function.number = number
    return function


_numbers, _variable = {"number": 0.1}, contextvars.ContextVar("number", default=0.1)
_dicts = {"a": {"b": {"c": {"number": 0.1}}}}
_deep = {"a": {"b": {"c": {"d": {"e": {"number": 0.1}}}}}}
_helper = ModuleType("helper")
exec("NUMBER = 0.1\ndef number():\n    return NUMBER", vars(_helper))
_function = _function_of(0.1)


@functools.lru_cache
def _cached() -> list[float]:
    return [0.1]


def _imported(layer: nn.Module) -> float:
    import adapt_calls_helper

    return adapt_calls_helper.NUMBER


sys.modules["adapt_calls_helper"] = _helper

# Each: where a layer's forward reads a number, the number's change, and what the layer holds at first.
PLACES = {
    "an attribute": (lambda s: s.held, lambda s, n: setattr(s, "held", n), lambda: 0.1),
    "a list": (lambda s: s.held[0], lambda s, n: s.held.__setitem__(0, n), lambda: [0.1]),
    "a large dict": (
        lambda s: s.held[100],
        lambda s, n: s.held.update({100: n}),
        lambda: dict.fromkeys(range(150), 0.1),
    ),
    "an argument of a partial": (
        lambda s: s.held(0.0),
        lambda s, n: s.held.args[0].__setitem__(0, n),
        lambda: functools.partial(lambda numbers, zero: numbers[0] + zero, [0.1]),
    ),
    "a class": (lambda s: Called.number, lambda s, n: setattr(Called, "number", n)),
    "a context variable": (lambda s: _variable.get(), lambda s, n: _variable.set(n)),
    "four dicts": (lambda s: _dicts["a"]["b"]["c"]["number"], lambda s, n: _dicts["a"]["b"]["c"].update(number=n)),
    "six dicts": (
        lambda s: _deep["a"]["b"]["c"]["d"]["e"]["number"],
        lambda s, n: _deep["a"]["b"]["c"]["d"]["e"].update(number=n),
    ),
    "a global of a helper module": (lambda s: _helper.number(), lambda s, n: setattr(_helper, "NUMBER", n)),
    "a module imported in the forward": (_imported, lambda s, n: setattr(_helper, "NUMBER", n)),
    "a cached function": (lambda s: _cached()[0], lambda s, n: _cached().__setitem__(0, n)),
    "a function's attribute": (lambda s: _function(), lambda s, n: setattr(_function, "number", n)),
    "all globals": (lambda s: globals()["_numb" + "ers"]["number"], lambda s, n: _numbers.update(number=n)),
    "a deque": (lambda s: s.held[0], lambda s, n: s.held.__setitem__(0, n), lambda: deque([0.1])),
    "a function that the layer holds": (
        lambda s: s.held(),
        lambda s, n: _numbers.update(number=n),
        lambda: lambda: _numbers["number"],
    ),
    "an object that is called": (lambda s: s.held(), lambda s, n: _numbers.update(number=n), Called),
}
UNWATCHED = (
    "six dicts",
    "a cached function",
    "all globals",
    "a deque",
    "an object that is called",
)
USES = {
    "a slope": lambda s, x, n: s.conv2(s.relu2(s.norm2(s.conv1(F.leaky_relu(s.norm1(x), n))))),
    "a limit": lambda s, x, n: s.conv2(F.hardtanh(s.norm2(s.conv1(s.relu1(s.norm1(x)))), -n, n)),
    "a rate of dropout": lambda s, x, n: F.dropout(Layer.halves(s, x), max(n - 0.1, 0.0), s.training),
    "a condition": lambda s, x, n: Layer.halves(s, x) * (2.0 if n > 0.5 else 1.0) if n > 0.5 else Layer.halves(s, x),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("place", "use"),
    [*((place, "a slope") for place in PLACES), *(("a deque", use) for use in USES if use != "a slope")],
)
def test_a_number_changed_after_conversion_counts_wherever_a_forward_reads_it(place, use):
    read, change, *made = PLACES[place]

    class Reads(Layer):
        def __init__(self, channels: int) -> None:
            super().__init__(channels)
            self.held = made[0]() if made else None

        def halves(self, x: Tensor) -> Tensor:
            return USES[use](self, x, read(self))

    block, plain, engine = converted(Reads)
    assert engine == ("checkpoint" if place in UNWATCHED else "shared")
    assert_same_steps(block, plain, 1)
    try:
        for each in (block, plain):
            change(each.denselayer2, 0.7)
        assert_same_steps(block, plain, 1)
    finally:
        change(block.denselayer2, 0.1)


_held = deque([2.0])


class DropsWhatLayersReturn(FeaturesBlock):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.children():
            x = torch.cat([x, F.dropout(layer(x), _held[0] / 2 - 1, self.training)], 1)
        return x


class NormOfAnyEps(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)
        statistics = self.running_mean, self.running_var
        return F.batch_norm(x, *statistics, self.weight, self.bias, self.training, self.momentum, _held[0] / 2e5)


class PoolsByAnySize(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(super().forward(x), int(_held[0]))


def _with_norms_of_any_eps() -> nn.Module:
    layers = [Layer(START), Layer(START + GROWTH)]
    for i, layer in enumerate(layers):
        layer.norm1 = NormOfAnyEps(START + i * GROWTH)
    return FeaturesBlock(layers)


AROUND = {
    "a rate of a block": lambda: DropsWhatLayersReturn([Layer(START), Layer(START + GROWTH)]),
    "the eps of a norm": _with_norms_of_any_eps,
    "the size of a pooling": lambda: PoolsByAnySize(nn.BatchNorm2d(START), nn.ReLU(), nn.Conv2d(START, 4, 1)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", AROUND)
def test_a_number_of_a_block_a_norm_or_a_transition_counts_too(kind):
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


class _HasAnActivation(LayerHalves):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.activation: Callable[[Tensor], Tensor] = F.relu

    def half(self, y: Tensor) -> Tensor:
        return F.relu(y) * 0.5

    def forward(self, *features: Tensor) -> Tensor:
        return self.conv2(self.activation(self.norm2(self.first_half(*features))))


ACTIVATIONS = {
    "a function": lambda layer: F.elu,
    "a lambda": lambda layer: lambda y: F.elu(y),
    "a method": lambda layer: layer.half,
    "a function in C": lambda layer: torch.tanh,
}


@pytest.mark.parametrize(
    ("copied", "activation"), [(copy.deepcopy, "a function"), *((_pickled, name) for name in ACTIVATIONS)]
)
def test_a_copy_notices_another_function_before_its_first_forward(copied, activation):
    block, plain = _block(_HasAnActivation)
    for layer in (*block.children(), *plain.children()):
        layer.activation = torch.relu if activation == "a function in C" else F.relu
    make_efficient(block)
    twin = copied(block)
    for each in (twin, plain):
        each.denselayer1.activation = ACTIVATIONS[activation](each.denselayer1)
    with pytest.warns(UserWarning, match="activation of a _HasAnActivation"):
        assert_same_training(twin, plain, block_batch())


def test_another_function_in_the_place_of_one_that_is_gone_is_noticed():
    block, _ = _block(_HasAnActivation)
    block.denselayer1.activation = lambda y: F.relu(y)
    state = fingerprint(block)
    number, others = id(block.denselayer1.activation), []
    block.denselayer1.activation = None
    while not others or (id(others[-1]) != number and len(others) < 1000):
        others.append(lambda y: F.elu(y))
    block.denselayer1.activation = others[-1]
    assert change_since(state, block) == "activation of a _HasAnActivation has changed"
