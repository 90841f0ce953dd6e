"""How many kernels a layer launches on a GPU, counted without one."""

import pytest
import torch
from gpu_trace import trace_step

from efficient_densenet import DenseNet

pytest.importorskip("triton", reason="needs Triton")

LAYER_LAUNCHES = {4: (7, 11), 0: (5, 7)}
"""The most launches of a layer, forward and backward, by `bn_size`: one with a bottleneck, and one without.

Forward: norm, ReLU and product of the bottleneck in one and its statistics, the activation, the 3×3 convolution, its
statistics in two, and the copy of the new channels less their mean. Backward: the gradient of the new channels, the
bottleneck again; the activation, the two gradients of the 3×3 convolution, a copy of one, the ReLU and sums, and what
finishes those; the bottleneck's gradient, both gradients of its convolution in one, and what finishes those.
"""


def step_launches(num_layers, precision, **settings):
    """Launches of the forward, and of the backward, of a network of one block."""
    with torch.device("meta"):
        model = DenseNet(8, (num_layers,), num_init_features=8, efficient="shared", **settings)
        x = torch.empty(2, 3, 8, 8).to(memory_format=torch.channels_last)
    step = trace_step(model, x, precision)
    return step.by_name("forward"), step.by_name("backward")


@pytest.mark.parametrize("bn_size", LAYER_LAUNCHES)
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_launches_of_a_layer(precision, bn_size):
    two, three = (step_launches(num_layers, precision, bn_size=bn_size) for num_layers in (2, 3))
    forward, backward = (many - few for few, many in zip(two, three, strict=True))
    assert forward["conv1x1_forward"] == backward["conv1x1_backward"] == (bn_size > 0)
    assert forward["combine_statistics"] == backward["finish_backward"] == 1 + (bn_size > 0)
    assert forward.total() <= LAYER_LAUNCHES[bn_size][0], forward
    assert backward.total() <= LAYER_LAUNCHES[bn_size][1], backward


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_running_statistics_and_weights_take_launches_of_a_stage_and_not_of_a_norm(precision):
    forward, backward = step_launches(5, precision)
    assert forward["_foreach_lerp_"] == forward["_foreach_add_"] == 1
    assert forward["_foreach_copy_"] == backward["_foreach_copy_"] == (precision == "bf16")
    assert forward["mul_"] == 1


def test_gradients_of_layer_groups_are_not_copied(monkeypatch):
    """autograd copies what anyone else refers to."""
    monkeypatch.setattr("efficient_densenet.engine.stage.groups.LAYER_GROUP_BYTES", 1)
    few, many = (step_launches(num_layers, "float32")[1] for num_layers in (2, 3))
    assert (many - few)["copy_"] == 0
    assert (many - few).total() <= LAYER_LAUNCHES[4][1] + 3  # a stage has a few scalars for each of its groups
