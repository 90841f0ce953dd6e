"""A stage's output stays in channels_last, in which it is computed, for the next stage; nobody else sees that."""

import pytest
import torch
import torchvision
from helpers import assert_close, assert_same_step, random_images, small_model, with_engine

from efficient_densenet import make_efficient
from efficient_densenet._tensors import memory_format_of
from efficient_densenet.engine.choose import Engine

FORMATS = [
    (2, torch.contiguous_format),
    (2, torch.channels_last),
    (3, torch.contiguous_format),
    (3, torch.channels_last_3d),
]
two_dimensional = pytest.mark.parametrize("memory_format", [each for dims, each in FORMATS if dims == 2])


@pytest.mark.parametrize(("dims", "memory_format"), [*FORMATS, (1, torch.contiguous_format)])
def test_the_output_has_the_format_of_the_first_convolution_s(dims, memory_format):
    model = small_model("bc", dims=dims, drop_rate=0.2).to(memory_format=memory_format)
    images = torch.randn(3, 3, *(9, 8, 6)[:dims], dtype=torch.double).contiguous(memory_format=memory_format)
    expected = memory_format_of(model.features.conv0(images))  # volumes of doubles are contiguous
    assert memory_format_of(model.features(images)) is expected
    assert_same_step(model, with_engine(model, "plain"), images)


@two_dimensional
def test_a_block_that_must_be_called_or_has_another_engine_gets_the_users_format(memory_format):
    model, images = small_model("bc"), random_images("bc").contiguous(memory_format=memory_format)
    expected, seen = with_engine(model, "plain")(images), []
    block = model.features.denseblock2
    handle = block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    assert_close(model(images), expected)
    handle.remove()
    block.engine = Engine.CHECKPOINT
    block.denselayer1.norm1.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    assert_close(model(images), expected)
    assert [memory_format_of(x) for x in seen] == [memory_format] * 2


@two_dimensional
def test_feature_maps_have_the_users_format(memory_format):
    images = random_images("bc").contiguous(memory_format=memory_format)
    plain = small_model("bc", efficient=False, features_only=True)
    formats = [[memory_format_of(x) for x in model(images)] for model in (with_engine(plain, "shared"), plain)]
    assert formats[0] == formats[1]


def test_a_converted_model():
    model = torchvision.models.DenseNet(4, (2, 2), num_init_features=8, num_classes=3).double()
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    expected = model.features(images)
    make_efficient(model, "shared")
    output = model.features(images)
    assert_close(output, expected, 1e-8)
    assert memory_format_of(output) is memory_format_of(expected)
