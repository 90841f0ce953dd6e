"""FrozenBatchNorm2d of detection libraries, whose statistics are constants in any mode; `test_matches_plain` has the
numbers of layers, consumers and stems with them."""

import copy

import pytest
import torch
import torchvision
from frozen_norms import CLASSES, Buffers, ConstantInForward, TorchvisionNorm, named, replace_norms
from helpers import assert_same_step, can_join, convert_and_report, nodes_of, random_images, small_model, with_engine
from torch import Tensor, nn

from efficient_densenet.engine import choose
from efficient_densenet.engine.parts import is_norm
from efficient_densenet.norms.frozen import eps_of, is_frozen_batch_norm


class Halved(Buffers):
    """The name and the buffers, but another function."""

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self._affine(1e-5)
        return x * scale / 2 + shift


class OfVectors(Buffers):
    def forward(self, x: Tensor) -> Tensor:
        raise TypeError("expects vectors")


@pytest.mark.parametrize("cls", CLASSES)
def test_classes_that_are_frozen_norms(cls):
    norm = CLASSES[cls](3)
    assert is_frozen_batch_norm(norm)
    assert is_norm(norm)
    assert eps_of(norm) == {"constant in forward": 1e-3, "without eps": 0.0}.get(cls, 1e-5)
    plain = replace_norms(small_model("bc", efficient=False), CLASSES[cls])
    assert_same_step(with_engine(plain, "shared"), plain, random_images("bc"))


def test_classes_that_are_not():
    trainable, missing = named(ConstantInForward)(3), named(ConstantInForward)(3)
    del trainable.weight
    trainable.weight = nn.Parameter(torch.ones(3))
    missing.running_var = None
    of_another_name = ConstantInForward(3)
    for norm in (nn.BatchNorm2d(3).eval(), of_another_name, named(Halved)(3), named(OfVectors)(3), trainable, missing):
        assert not is_frozen_batch_norm(norm)


def test_norms_that_normalize_otherwise_are_told_apart():
    """They share no statistics with norms of another eps, or with norms of batch statistics."""
    model = replace_norms(small_model("bc", efficient="shared"), CLASSES["constant in forward"], "transition1")
    x = torch.randn(2, 4, 3, 3).double()
    assert not can_join(model.features.denseblock1, model.features.transition1, x)
    mixed = replace_norms(small_model("bc", efficient="shared"), CLASSES["constant in forward"], "denselayer2.norm1")
    assert "eps" in choose.why_not(choose.Engine.SHARED, mixed.features.denseblock1, x)
    mixed = replace_norms(small_model("bc", efficient="shared"), TorchvisionNorm, "denseblock1.denselayer1.norm1")
    assert "training mode" in choose.why_not(choose.Engine.SHARED, mixed.train().features.denseblock1, x)


def test_torchvision_s_densenet_with_frozen_norms_is_converted():
    config = {"growth_rate": 8, "block_config": (2, 3, 2), "num_init_features": 8, "num_classes": 5}
    plain = replace_norms(torchvision.models.DenseNet(**config), TorchvisionNorm).double()
    model, x = copy.deepcopy(plain), torch.randn(2, 3, 64, 64, dtype=torch.double)
    assert [change.engine for change in convert_and_report(model).changed] == ["shared"] * 3
    assert "SharedStage" in nodes_of(model.features(x))
    assert_same_step(model, plain, x)
