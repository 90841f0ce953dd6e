"""The model's structure, initialization, and errors for invalid arguments."""

import math

import pytest
import torch
from helpers import MEMORY_EFFICIENT, small_model
from torch import nn

from efficient_densenet import DenseNet, create_model


def test_names_of_layers_and_stem():
    names = [name for name, _ in small_model("bc").features.denseblock1.denselayer2.named_parameters()]
    assert names == ["norm1.weight", "norm1.bias", "conv1.weight", "norm2.weight", "norm2.bias", "conv2.weight"]
    basic = small_model("basic").features.denseblock1.denselayer2
    assert [name for name, _ in basic.named_parameters()] == ["norm1.weight", "norm1.bias", "conv1.weight"]
    assert basic.conv1.kernel_size == (3, 3)
    imagenet = [name for name, _ in small_model("imagenet").features.named_children()]
    assert imagenet[:4] == ["conv0", "norm0", "relu0", "pool0"]
    assert imagenet[-3:] == ["transition3", "denseblock4", "norm5"]


def test_input_features_come_first():
    block = small_model("bc").features.denseblock1
    x = torch.randn(2, 4, 5, 5, dtype=torch.double)
    assert torch.equal(block(x)[:, :4], x)


@pytest.mark.parametrize("engine", [True, False, *MEMORY_EFFICIENT])
def test_in_channels_classes_and_identity_head(engine):
    model = DenseNet(block_config=(1, 1), in_channels=1, num_classes=0, efficient=engine)
    assert isinstance(model.classifier, nn.Identity)
    assert model(torch.randn(2, 1, 8, 8)).shape == (2, model.num_features)
    assert create_model("densenet_bc_100_12", num_classes=7)(torch.randn(2, 3, 8, 8)).shape == (2, 7)


def test_aliases():
    """`memory_efficient` is `efficient`; without a bottleneck `bn_size` is 0 or None."""
    for bn_size in (0, None):
        assert not DenseNet(block_config=(1,), bn_size=bn_size).features.denseblock1.denselayer1.has_bottleneck
    assert DenseNet(block_config=(1,), memory_efficient=False).engine == "plain"
    assert DenseNet(block_config=(1,), memory_efficient="official").engine == "official"


def test_dropout_follows_the_last_convolution_in_training_mode_only():
    model = small_model("bc", drop_rate=0.5)
    layer = model.features.denseblock1.denselayer1
    x = torch.randn(4, 4, 9, 9, dtype=torch.double)
    zeros = (layer(x) == 0).double().mean().item()
    assert 0.3 < zeros < 0.7
    layer.eval()
    assert (layer(x) == 0).sum() == 0


@pytest.mark.parametrize(("init", "axis"), [("fan_out", 0), ("fan_in", 1)])
def test_initialization(init, axis):
    model = DenseNet(growth_rate=24, block_config=(4,), num_init_features=48, init=init)
    default = DenseNet(block_config=(1,), small_inputs=init == "fan_out")
    for each in (model, default):
        for module in each.modules():
            if isinstance(module, nn.Conv2d):
                fan = module.weight.shape[axis] * math.prod(module.kernel_size)
                rel_tolerance = 6 / math.sqrt(2 * module.weight.numel())
                assert module.weight.std().item() == pytest.approx(math.sqrt(2 / fan), rel=rel_tolerance)
            elif isinstance(module, nn.BatchNorm2d):
                assert module.weight.eq(1).all()
                assert module.bias.eq(0).all()
            elif isinstance(module, nn.Linear):
                assert module.bias.eq(0).all()


@pytest.mark.parametrize(
    ("small_inputs", "blocks", "smallest"), [(True, 1, 1), (True, 3, 4), (False, 1, 1), (False, 4, 29)]
)
def test_smallest_input(small_inputs, blocks, smallest):
    model = DenseNet(block_config=(1,) * blocks, small_inputs=small_inputs).eval()
    with torch.no_grad():
        assert model.features(torch.randn(1, 3, smallest, smallest)).shape[2:] == (1, 1)
        assert model(torch.randn(1, 3, smallest, smallest)).shape == (1, 10)
        if smallest > 1:
            message = f"found images of {smallest - 1}×{smallest}.*at least {smallest}×{smallest}"
            with pytest.raises(ValueError, match=message):
                model(torch.randn(1, 3, smallest - 1, smallest))


@pytest.mark.parametrize("efficient", [False, True, "shared"])
@pytest.mark.parametrize(("small_inputs", "blocks", "enough"), [(True, 3, 8), (False, 1, 5), (False, 3, 29)])
def test_a_batch_of_one_whose_last_map_is_a_pixel(small_inputs, blocks, enough, efficient):
    """It has no variance."""
    model = DenseNet(block_config=(1,) * blocks, small_inputs=small_inputs, efficient=efficient)
    message = rf"found a batch of one of {enough - 1}×{enough - 1}, .*two images or more, or .* {enough}×{enough}"
    with pytest.raises(ValueError, match=message):
        model(torch.randn(1, 3, enough - 1, enough - 1))
    assert model(torch.randn(1, 3, enough, enough)).isfinite().all()
    assert model(torch.randn(2, 3, enough - 1, enough - 1)).isfinite().all()
    model.features.eval()
    assert model(torch.randn(1, 3, enough - 1, enough - 1)).isfinite().all()


@pytest.mark.parametrize("shape", [(2, 4, 32, 32), (3, 32, 32), (2, 3, 32)])
def test_wrong_input_shapes_raise(shape):
    with pytest.raises(ValueError, match=r"found an input of shape .*needs \(N, 3, height, width\)"):
        DenseNet(block_config=(1,))(torch.randn(shape))


INVALID = [
    ({"growth_rate": -12}, "growth_rate is -12, but must be a whole number of at least 1"),
    ({"growth_rate": 1.5}, "growth_rate is 1.5"),
    ({"growth_rate": True}, "growth_rate is True"),
    ({"block_config": ()}, r"block_config is \(\), but must list the layers of each block"),
    ({"block_config": 16}, "block_config is 16"),
    ({"block_config": "16"}, "block_config is '16'"),
    ({"block_config": (2, 0)}, "a number of layers in block_config is 0"),
    ({"compression": 0}, r"compression is 0, but must be a number in \(0, 1\]"),
    ({"compression": 2}, r"compression is 2, but must be a number in \(0, 1\]"),
    ({"compression": "half"}, r"compression is 'half', but must be a number in \(0, 1\]"),
    ({"num_init_features": 0}, "num_init_features is 0"),
    ({"bn_size": -1}, "bn_size is -1, but must be a whole number of at least 0"),
    ({"drop_rate": 1.0}, r"drop_rate is 1.0, but must be a number in \[0, 1\)"),
    ({"drop_rate": float("nan")}, "drop_rate is nan"),
    ({"num_classes": -1}, "num_classes is -1"),
    ({"in_channels": 0}, "in_channels is 0"),
    ({"init": "xavier"}, "init is 'xavier', but must be one of 'fan_out', 'fan_in'"),
]


@pytest.mark.parametrize(("arguments", "message"), INVALID)
def test_invalid_arguments_raise_a_one_line_message(arguments, message):
    with pytest.raises(ValueError, match=message) as error:
        DenseNet(**arguments)
    assert "\n" not in str(error.value)
