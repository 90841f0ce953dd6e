"""What a block was verified for is noticed when it changes: its attributes, its dropout rates, its modules."""

import contextvars
import copy
import functools
import gc
import os
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from third_party_models import (
    GROWTH,
    START,
    FeaturesBlock,
    LayerHalves,
    TakesFeatures,
    assert_same_training,
    block_batch,
    features_block,
)
from torch import Tensor, nn

from efficient_densenet import make_efficient, restore
from efficient_densenet.adapt.fingerprint import change_since, fingerprint
from efficient_densenet.engine import choose


class _Options:
    def __init__(self) -> None:
        self.offset = 0.0


class _Layer(LayerHalves):
    """A layer with states that are neutral at first, so that nothing is computed with them."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.scale, self.middle_drop_rate, self.rates = 1.0, 0.0, [0.0]
        self.options = _Options()
        self.factor: Tensor | None = None
        self.between = nn.Identity()

    def forward(self, *features: Tensor) -> Tensor:
        output = self.between(self.first_half(*features))
        if self.factor is not None:
            output = output * self.factor
        output = F.dropout(output, self.middle_drop_rate, self.training)
        output = self.second_half(F.dropout(output, self.rates[0], self.training))
        output = output if self.scale == 1.0 else output * self.scale
        return output + self.options.offset if self.options.offset else output


def _block(layer: type[nn.Module] = _Layer, **options) -> tuple[nn.Module, nn.Module]:
    block = features_block(layer, **options)
    return block, copy.deepcopy(block)


@pytest.fixture(autouse=True)
def _no_warning_was_given_before(monkeypatch):
    monkeypatch.setattr(choose, "_warned", set())


CHANGES = {
    "scale": lambda layer: setattr(layer, "scale", 0.5),
    "second drop rate": lambda layer: setattr(layer, "middle_drop_rate", 0.3),
    "item of a list": lambda layer: layer.rates.__setitem__(0, 0.3),
    "attribute of an object": lambda layer: setattr(layer.options, "offset", 1.0),
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


def test_a_rate_of_dropout_that_was_verified_may_change():
    block, plain = _block(TakesFeatures, drop_rate=0.2)
    make_efficient(block)
    for each in (block, plain):
        each.denselayer1.drop_rate, each.denselayer2.drop_rate = 0.4, 0.0
    assert_same_training(block, plain, block_batch())


@pytest.mark.filterwarnings("ignore:falling back")
def test_no_trial_runs_in_a_forward(monkeypatch):
    block, plain = _block()
    make_efficient(block)
    monkeypatch.setattr("efficient_densenet.adapt.converted.trial", None)
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


class _GainNorm(nn.BatchNorm2d):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.gain = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.gain


def test_a_norm_with_attributes_of_its_own_is_not_taken_for_torch_s():
    block, plain = _block(TakesFeatures, norm=_GainNorm)
    assert "holds a _GainNorm with attributes of its own: gain" in make_efficient(block).unchanged[""]
    for each in (block, plain):
        each.denselayer1.norm2.gain = 0.1
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


class _Clips:
    """A class that holds a flag, and objects that hold it out of sight."""

    on = False

    def __init__(self) -> None:
        self._state = {"on": False}

    @property
    def is_on(self) -> bool:
        return self._state["on"]


class _Owner(nn.Module):
    on = False

    def __init__(self) -> None:
        super().__init__()
        self.on = False


_clips, _variable, _ACTIVATION = _Clips(), contextvars.ContextVar("on", default=False), torch.relu


def _unless_on(flags: list, y: Tensor) -> Tensor:
    return y * 2 if flags[0] else y


class _ReadsAround(LayerHalves):
    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.owner, self.flags = [_Owner()], dict.fromkeys(range(150), False)
        self.last: Callable[[Tensor], Tensor] = functools.partial(_unless_on, [False])

    def forward(self, *features: Tensor) -> Tensor:
        y = self.conv2(_ACTIVATION(self.norm2(self.first_half(*features))))
        is_on = _Clips.on or _clips.is_on or _variable.get() or os.environ.get("_ON")
        return self.last(y * 2 if is_on or self.owner[0].on or self.flags[100] else y)


OUTSIDE = {
    "a class": lambda layer, patch: patch.setattr(_Clips, "on", True),
    "an object behind a property": lambda layer, patch: patch.setitem(_clips._state, "on", True),
    "a context variable": lambda layer, patch: _variable.set(True),
    "the environment": lambda layer, patch: patch.setenv("_ON", "1"),
    "a function of a library": lambda layer, patch: patch.setitem(globals(), "_ACTIVATION", torch.tanh),
    "a module in a list": lambda layer, patch: setattr(layer.owner[0], "on", True),
    "a large dict": lambda layer, patch: layer.flags.update({100: True}),
    "a keyword of a partial": lambda layer, patch: layer.last.args[0].__setitem__(0, True),
}


@pytest.mark.parametrize("change", OUTSIDE)
def test_a_state_around_the_module_changed_after_the_trial_is_noticed(change, monkeypatch):
    block, plain = _block(_ReadsAround)
    assert [each.engine for each in make_efficient(block).changed] == ["shared"]
    assert_same_training(block, plain, block_batch())
    change_layer = functools.partial(OUTSIDE[change], patch=monkeypatch)
    contextvars.copy_context().run(_assert_noticed, change_layer, block, plain)


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
