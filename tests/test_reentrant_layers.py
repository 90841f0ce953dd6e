"""Layers that checkpoint inside with `use_reentrant=True`, PyTorch's default, in converted models."""

import copy

import pytest
import torch
from helpers import assert_all_close, assert_close
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from efficient_densenet import convert_batchnorm, make_efficient


class ReentrantLayer(nn.Module):
    """As CAM++ and SE-DenseNets have it: a checkpointed bottleneck, and a gate that makes the engines call it whole."""

    def __init__(self, channels: int, growth_rate: int) -> None:
        super().__init__()
        self.norm1, self.relu1 = nn.BatchNorm2d(channels), nn.ReLU()
        self.conv1 = nn.Conv2d(channels, 8, 1, bias=False)
        self.norm2, self.relu2 = nn.BatchNorm2d(8), nn.ReLU()
        self.conv2 = nn.Conv2d(8, growth_rate, 3, padding=1, bias=False)
        self.gate = nn.Conv2d(growth_rate, growth_rate, 1)

    def bottleneck(self, x: Tensor) -> Tensor:
        return self.conv1(self.relu1(self.norm1(x)))

    def forward(self, x: Tensor) -> Tensor:
        checkpoints = self.training and x.requires_grad
        x = torch_checkpoint(self.bottleneck, x, use_reentrant=True) if checkpoints else self.bottleneck(x)
        x = self.conv2(self.relu2(self.norm2(x)))
        return x * self.gate(x.mean((2, 3), keepdim=True)).sigmoid()


class Block(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = torch.cat([x, layer(x)], 1)
        return x


@pytest.mark.filterwarnings("ignore:falling back:UserWarning")
@pytest.mark.parametrize("engine", ["official", "checkpoint", True])
def test_layers_with_reentrant_checkpoints_run_in_converted_models(engine):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 6, 3), Block(ReentrantLayer(6 + 4 * i, 4) for i in range(3))).double()
    ours = copy.deepcopy(plain)
    convert_batchnorm(plain)  # the author's checkpoints would update the running statistics twice
    report = make_efficient(ours, engine)
    assert [changed.name for changed in report.changed] == ["1"]
    x = torch.randn(4, 3, 8, 8, dtype=torch.double)
    for _ in range(2):
        for model in (plain, ours):
            model(x).square().sum().backward()
    for actual, expected in zip(ours.parameters(), plain.parameters(), strict=True):
        assert_close(actual.grad, expected.grad)
    assert_all_close(ours.buffers(), plain.buffers())
