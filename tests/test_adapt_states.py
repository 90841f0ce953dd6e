"""What a block was verified for is noticed when it changes: its attributes, its dropout rates, its modules."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.nn.functional as F
from third_party_models import GROWTH, START, FeaturesBlock, LayerHalves, assert_same_training
from torch import Tensor, nn

from efficient_densenet import make_efficient, restore
from efficient_densenet.adapt.fingerprint import fingerprint
from efficient_densenet.engines import dispatch


class _Options:
    def __init__(self) -> None:
        self.offset = 0.0


class _Layer(LayerHalves):
    """A layer with states that are neutral at first."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.scale, self.middle_drop_rate, self.rates = 1.0, 0.0, [0.0]
        self.options = _Options()
        self.factor = torch.ones((), dtype=torch.double)
        self.between = nn.Identity()

    def forward(self, *features: Tensor) -> Tensor:
        output = self.between(self.first_half(*features)) * self.factor
        output = F.dropout(output, self.middle_drop_rate, self.training)
        output = F.dropout(output, self.rates[0], self.training)
        return self.second_half(output) * self.scale + self.options.offset


def _block() -> tuple[nn.Module, nn.Module]:
    block = FeaturesBlock([_Layer(START), _Layer(START + GROWTH)]).double()
    return block, copy.deepcopy(block)


CHANGES = {
    "scale": lambda layer: setattr(layer, "scale", 0.5),
    "second drop rate": lambda layer: setattr(layer, "middle_drop_rate", 0.3),
    "item of a list": lambda layer: layer.rates.__setitem__(0, 0.3),
    "attribute of an object": lambda layer: setattr(layer.options, "offset", 1.0),
    "tensor in place": lambda layer: layer.factor.fill_(0.5),
    "another tensor": lambda layer: setattr(layer, "factor", torch.full((), 0.5)),
    "a dropout in the place of an identity": lambda layer: setattr(layer, "between", nn.Dropout(0.3)),
    "another forward": lambda layer: setattr(layer, "forward", lambda *f: layer.first_half(*f)[:, :GROWTH]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_state_changed_after_the_trial_is_noticed(change):
    block, plain = _block()
    assert [each.engine for each in make_efficient(block).changed] == ["shared"]
    x = torch.randn(3, START, 6, 5, dtype=torch.double)
    assert_same_training(block, plain, x)
    for each in (block, plain):
        CHANGES[change](each.denselayer2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same_training(block, plain, x)


def test_the_warning_and_the_second_report_say_what_changed():
    block, plain = _block()
    make_efficient(block)
    block.denselayer2.scale = plain.denselayer2.scale = 0.5
    dispatch._warned.clear()
    x = torch.randn(3, START, 6, 5, dtype=torch.double)
    with pytest.warns(UserWarning, match="'checkpoint'.*scale of a _Layer was 1.0 and is 0.5.*other values"):
        assert_same_training(block, plain, x)
    (changed,) = make_efficient(block).changed
    assert changed.engine.startswith("checkpoint (")
    block.denselayer2.scale = 1.0
    (changed,) = make_efficient(block).changed
    assert changed.engine == "shared"
    restore(block)
    assert type(block) is FeaturesBlock
    assert "_conversion" not in vars(block)


def test_an_engine_asked_for_by_name_raises_when_the_state_has_changed():
    block, _ = _block()
    make_efficient(block, "shared")
    block.denselayer1.scale = 2.0
    with pytest.raises(RuntimeError, match=r"engine 'shared' cannot run here.*scale of a _Layer was 1.0 and is 2.0"):
        block(torch.randn(3, START, 6, 5, dtype=torch.double, requires_grad=True))


def test_a_state_that_computes_the_same_is_verified_once(monkeypatch):
    block, plain = _block()
    make_efficient(block)
    block.denselayer2.note = "fold 3"
    x = torch.randn(3, START, 6, 5, dtype=torch.double)
    assert_same_training(block, plain, x)
    monkeypatch.setattr("efficient_densenet.adapt.converted.trial", None)  # no second trial
    assert_same_training(block, plain, x)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda block: pickle.loads(pickle.dumps(block))])
def test_a_copy_notices_a_change_of_its_own(copied):
    block, plain = _block()
    make_efficient(block)
    twin = copied(block)
    twin.denselayer1.scale = plain.denselayer1.scale = 0.5
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same_training(twin, plain, torch.randn(3, START, 6, 5, dtype=torch.double))
    assert make_efficient(block).changed[0].engine == "shared"


def test_a_fingerprint_refers_to_no_module_or_tensor():
    def leaves(value):
        return [leaf for each in value for leaf in leaves(each)] if isinstance(value, tuple) else [value]

    block, _ = _block()
    assert {type(leaf) for leaf in leaves(fingerprint(block))} <= {int, float, str, bool, type(None)}
