"""What a stage hands on to the next one stays in channels_last, in which it is computed; nobody else sees that."""

import pytest
import torch
from helpers import assert_close, assert_same_step, random_images, small_model, with_engine
from torch import Tensor

from efficient_densenet import DenseNet, make_efficient
from efficient_densenet._tensors import memory_format_of
from efficient_densenet.engine.choose import Engine
from efficient_densenet.engine.stage.operator import STAGE

FORMATS = [torch.contiguous_format, torch.channels_last]


@pytest.fixture
def inputs_of_stages(monkeypatch) -> list[Tensor]:
    seen, compute = [], STAGE.compute

    def recording(spec, inputs):
        seen.append(inputs.x)
        return compute(spec, inputs)

    monkeypatch.setattr(STAGE, "compute", recording)
    return seen


@pytest.mark.parametrize("memory_format", FORMATS)
def test_stages_hand_on_channels_last_and_return_the_format_of_their_input(inputs_of_stages, memory_format):
    model, images = small_model("bc", drop_rate=0.2), random_images("bc").contiguous(memory_format=memory_format)
    output = model.features(images)
    stem, *handed_on = map(memory_format_of, inputs_of_stages)
    assert (stem, handed_on) == (memory_format, [torch.channels_last] * 2)
    assert memory_format_of(output) is memory_format
    assert_same_step(model, with_engine(model, "plain"), images)


@pytest.mark.parametrize("memory_format", FORMATS)
def test_a_block_that_must_be_called_gets_the_users_format(inputs_of_stages, memory_format):
    model, images = small_model("bc"), random_images("bc").contiguous(memory_format=memory_format)
    expected, formats = with_engine(model, "plain")(images), []
    model.features.denseblock2.register_forward_hook(lambda block, inputs, _: formats.append(inputs[0]))
    assert_close(model(images), expected)
    assert [memory_format_of(x) for x in formats] == [memory_format]
    assert len(inputs_of_stages) > 1


def test_a_block_of_another_engine_gets_the_users_format():
    model, images = small_model("bc"), random_images("bc")
    expected, seen = with_engine(model, "plain")(images), []
    block = model.features.denseblock2
    block.engine = Engine.CHECKPOINT
    block.denselayer1.norm1.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    assert_close(model(images), expected)
    assert memory_format_of(seen[0]) is torch.contiguous_format


@pytest.mark.parametrize("memory_format", FORMATS)
def test_what_is_tapped_has_the_users_format(memory_format):
    images = random_images("bc").contiguous(memory_format=memory_format)
    outputs = [
        DenseNet(4, (2, 2, 2), num_init_features=8, efficient=engine, features_only=True).double()(images)
        for engine in (False, "shared")
    ]
    formats = [[memory_format_of(x) for x in features] for features in outputs]
    assert formats[0] == formats[1]


def test_a_converted_model():
    torchvision = pytest.importorskip("torchvision")
    torch.manual_seed(0)
    model = torchvision.models.DenseNet(4, (2, 2), num_init_features=8, num_classes=3).double()
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    expected = model.features(images)
    make_efficient(model, "shared")
    output = model.features(images)
    assert_close(output, expected, 1e-8)
    assert memory_format_of(output) is memory_format_of(expected)


def test_signals_have_no_channels_last(inputs_of_stages):
    model = DenseNet(4, (2, 2), num_init_features=8, dims=1, efficient="shared").double()
    model(torch.randn(2, 3, 64, dtype=torch.float64))
    assert all(x.is_contiguous() for x in inputs_of_stages)
