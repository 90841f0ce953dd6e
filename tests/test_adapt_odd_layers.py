"""Generated layers with odd state, odd branches and odd ranges: converted or not, none differs from plain."""

import random
import time

import numpy
import pytest
import torch
import torch.nn.functional as F
from test_adapt_exactness import Layer, assert_same_steps, converted, x_of
from torch import Tensor, nn

from efficient_densenet import make_efficient


class Settings:
    scale = 0.5


class Smooth(nn.Module):
    """A module of an author's, with a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = 0.5

    def forward(self, y: Tensor) -> Tensor:
        return y * self.slope


SCALE, SCALES, SETTINGS = 0.5, {"scale": 0.5}, Settings()


def read_global(layer) -> float:
    return SCALE


def read_globals_of_containers(layer) -> float:
    return SCALES["scale"] * SETTINGS.scale


def change_global(layers) -> None:
    global SCALE
    SCALE = 2.0


def change_containers(layers) -> None:
    SCALES["scale"], SETTINGS.scale = 3.0, 2.0


def reset() -> None:
    global SCALE
    SCALE = SCALES["scale"] = Settings.scale = 0.5
    vars(SETTINGS).clear()


def changing(name: str, value):
    return lambda layers: [setattr(layer, name, value) for layer in layers]


def filling(name: str, value: float):
    return lambda layers: [getattr(layer, name).fill_(value) for layer in layers]


# Each: the attributes of a layer, how it reads its state, and how that is changed later.
STATES = {
    "number": (lambda: {"scale": 0.5}, lambda layer: layer.scale, changing("scale", 2.0)),
    "neutral number": (lambda: {"scale": 1.0}, lambda layer: layer.scale, changing("scale", 2.0)),
    "tensor": (lambda: {"gain": torch.tensor(0.5)}, lambda layer: layer.gain, filling("gain", 2.0)),
    "buffer": (lambda: {"alpha": nn.Buffer(torch.ones(()))}, lambda layer: layer.alpha, filling("alpha", 2.0)),
    "large buffer": (
        lambda: {"table": nn.Buffer(torch.full((4, 6, 5), 0.5))},
        lambda layer: layer.table.mean(),
        filling("table", 2.0),
    ),
    "flag": (lambda: {"on": nn.Buffer(torch.tensor(True))}, lambda layer: 0.5 + layer.on, filling("on", False)),
    "list": (lambda: {"scales": [0.5]}, lambda layer: layer.scales[0], changing("scales", [2.0])),
    "parameter": (lambda: {"alpha": nn.Parameter(torch.ones(()))}, lambda layer: layer.alpha, None),
    "module": (lambda: {"smooth": Smooth()}, lambda layer: layer.smooth(torch.ones(())), changing("smooth", nn.Tanh())),
    "global": (dict, read_global, change_global),
    "containers": (dict, read_globals_of_containers, change_containers),
}
BRANCHES = {
    "always": lambda layer, y: True,
    "never": lambda layer, y: False,
    "training": lambda layer, y: layer.training,
    "value": lambda layer, y: bool(y.mean() > -100),
    "values as a list": lambda layer, y: max(y.flatten().tolist()) < 1e4,
    "values in NumPy": lambda layer, y: y.detach().double().numpy().max() < 1e4,
    "gradient": lambda layer, y: y.requires_grad,
    "weight's gradient": lambda layer, y: layer.conv1.weight.requires_grad,
    "grad mode": lambda layer, y: torch.is_grad_enabled(),
    "inference mode": lambda layer, y: not torch.is_inference_mode_enabled(),
    "leaf": lambda layer, y: not y.is_leaf,
    "graph": lambda layer, y: y.grad_fn is not None,
    "Python": lambda layer, y: layer.training and random.random() < 0.5,
    "NumPy": lambda layer, y: layer.training and numpy.random.rand() < 0.5,
    "PyTorch": lambda layer, y: layer.training and torch.rand(()) < 0.5,
    "size": lambda layer, y: y.shape[2] == 3,
    "images": lambda layer, y: y.shape[0] > 2,
    "dtype": lambda layer, y: y.dtype == torch.float32,
    "autocast": lambda layer, y: torch.is_autocast_enabled("cpu"),
    "time": lambda layer, y: time.monotonic() < 0,
}
RANGES = {
    "clamp": lambda y, s: y.clamp(-30, 30) * s,
    "minimum": lambda y, s: torch.minimum(y, torch.full_like(y, 1e3)) * s,
    "hardtanh": lambda y, s: F.hardtanh(y, -50, 50) * s,
    "nan_to_num": lambda y, s: torch.nan_to_num(y) * s,
    "threshold": lambda y, s: F.threshold(y, -1e3, 0.0) * s,
    "in place": lambda y, s: y.mul_(s),
    "scaled back": lambda y, s: y * s / s,
    "detached": lambda y, s: y * s + (y * 0.5).detach(),
    "where": lambda y, s: torch.where(y > 1e5, y * 0, y * s),
}


def odd_layer(state: str, branch: str, kind: str, whole: bool) -> type:
    attributes, read, _ = STATES[state]

    class OddLayer(Layer):
        def __init__(self, channels: int) -> None:
            super().__init__(channels)
            for name, value in attributes().items():
                setattr(self, name, value)

        def odd(self, y: Tensor) -> Tensor:
            y = y.tanh() * 5 if whole else y
            return RANGES[kind](y, read(self)) if BRANCHES[branch](self, y) else y

    return OddLayer


def _cases() -> list:
    """Every state with every branch, each of them in a range, in parts and whole."""
    pairs = [(state, branch) for state in STATES for branch in BRANCHES]
    kinds = list(RANGES)
    cases = [(*pair, kinds[i % len(kinds)], i % 2 == 0) for i, pair in enumerate(pairs)]
    return [pytest.param(*case, marks=[] if i % 13 == 0 else pytest.mark.exhaustive) for i, case in enumerate(cases)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("state", "branch", "kind", "whole"), _cases())
def test_an_odd_layer_computes_what_it_did(state, branch, kind, whole):
    reset()
    block, plain, _ = converted(odd_layer(state, branch, kind, whole))
    assert_same_steps(block, plain)
    change = STATES[state][2]
    try:
        if change is not None:
            change(block.children())
            if state not in ("global", "containers"):
                change(plain.children())
            assert_same_steps(block, plain, 1)
            make_efficient(block)
            assert_same_steps(block, plain, 1)
        with torch.no_grad():
            for each in (block, plain):
                each.denselayer1.conv2.weight *= 1e4  # beyond every range
        assert_same_steps(block, plain, 1)
        block.float(), plain.float()
        with torch.autocast("cpu", torch.bfloat16):
            outputs = [each.eval()(x_of().float()) for each in (block, plain)]
        torch.testing.assert_close(*outputs, rtol=0.02, atol=0.02)
    finally:
        reset()
