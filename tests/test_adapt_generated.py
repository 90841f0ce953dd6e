"""Generated layers, whose activations, dropouts and constants are registered, named, tied and used in every order.

Each is converted and then changed: a setting, a module, its class, a hook, its training flag. The converted block must
compute what an untouched twin with the same change computes, by an engine or by the author's forward with a warning.
"""

import copy
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import convert_and_report
from test_adapt_exactness import assert_same_steps, seed, x_of
from third_party_models import GROWTH, START, convert_pair, randomized
from torch import Tensor, nn

WIDTH = START
"""The width of a bottleneck: the channels of the first layer, so that its norms and convolutions are alike."""
MODULES = {
    "leaky": lambda: nn.LeakyReLU(0.1),
    "relu6": nn.ReLU6,
    "elu": nn.ELU,
    "relu": lambda: nn.ReLU(inplace=True),
    "hardtanh": lambda: nn.Hardtanh(-1.0, 6.0),
}
"""The activations of a layer, each with the function that computes the same in `FUNCTIONS`."""
FUNCTIONS = {
    "leaky": ("F.leaky_relu({}, 0.1)", "F.leaky_relu_({}, self.slope)", "F.leaky_relu({}, self.{name}.negative_slope)"),
    "relu6": ("F.relu6({})", "F.hardtanh({}, 0.0, self.bound)", "F.hardtanh({}, 0.0, self.{name}.max_val)"),
    "elu": ("F.elu({})", "F.elu({}, self.alpha)", "F.elu({}, self.{name}.alpha)"),
    "relu": ("torch.relu({})", "{}.relu_()", "F.relu({}, self.{name}.inplace)"),
    "hardtanh": ("F.hardtanh({}, -1.0, 6.0)", "F.hardtanh({}, -1.0, self.bound)", "self.{name}.forward({})"),
}
DROPOUTS = (
    "{}",
    "self.drop1({})",
    "self.drop2({})",
    "F.dropout({}, self.drop_rate, self.training)",
    "F.dropout({}, self.drop1.p, self.drop2.training)",
)
SETTINGS = {"negative_slope": 0.7, "max_val": 0.3, "alpha": 0.4, "p": 0.6, "inplace": False, "eps": 0.5}


class Source:
    """The source of a layer's forward, and the modules and constants that the layer registers."""

    def __init__(self, number: int) -> None:
        self.random = random.Random(number)
        self.kind = self.random.choice(list(MODULES))
        self.has_bottleneck = self.random.random() < 0.6
        self.is_tied, self.in_block = self.random.random() < 0.2, self.random.random() < 0.15
        output = "x"
        for place in "12"[: 1 + self.has_bottleneck]:
            output = f"self.conv{place}({self._activated(f'self.norm{place}({output})')})"
        self.expression = self.random.choice(DROPOUTS).format(output)
        unused = [name for name in ("act1", "act2", "act3", "drop1", "drop2") if self.random.random() < 0.3]
        used = [name for name in ("act1", "act2", "act3", "drop1", "drop2") if f".{name}" in self.expression]
        others = ["norm1", *["norm2"] * self.has_bottleneck, *used, *(name for name in unused if name not in used)]
        self.activations = [name for name in others if name.startswith("act")]
        self.order = [*self.random.sample([*others, "conv1"], len(others) + 1), *["conv2"] * self.has_bottleneck]

    def _activated(self, value: str) -> str:
        name = self.random.choice(["act1", "act2", "act3"])
        call = self.random.choice(["self.{name}({})"] * 4 + ["self.acts[0]({})", *FUNCTIONS[self.kind]])
        return call.replace("{name}", name).format(value)

    def layer(self, channels: int) -> nn.Module:
        namespace = {"F": F, "torch": torch, "nn": nn}
        exec(f"class Layer(nn.Module):\n    def forward(self, x):\n        return {self.expression}", namespace)
        layer = namespace["Layer"]()
        layer.slope, layer.bound, layer.alpha, layer.drop_rate = 0.1, 6.0, 1.0, 0.3
        layer.acts = [MODULES[self.kind]()]
        width, size = (WIDTH, 1) if self.has_bottleneck else (GROWTH, 3)
        make = {
            "norm1": lambda: nn.BatchNorm2d(channels),
            "norm2": lambda: nn.BatchNorm2d(WIDTH),
            "conv1": lambda: nn.Conv2d(channels, width, size, padding=size // 2),
            "conv2": lambda: nn.Conv2d(WIDTH, GROWTH, 3, padding=1),
        }
        for name in self.order:
            default = MODULES[self.kind] if name.startswith("act") else lambda: nn.Dropout(0.3)
            layer.add_module(name, make.get(name, default)())
        if self.is_tied and len(self.activations) > 1:
            setattr(layer, self.activations[1], getattr(layer, self.activations[0]))
        return layer


class Block(nn.Module):
    def __init__(self, source: Source) -> None:
        super().__init__()
        self.layers = nn.ModuleList(source.layer(START + i * GROWTH) for i in range(2))
        if source.in_block and source.activations:  # all layers use one activation
            for layer in self.layers[1:]:
                setattr(layer, source.activations[0], getattr(self.layers[0], source.activations[0]))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


def set_(layer: Any, name: str) -> None:
    """Change the settings of a module."""
    for setting, value in SETTINGS.items():
        if hasattr(getattr(layer, name), setting):
            setattr(getattr(layer, name), setting, value)


def replace(layer: nn.Module, name: str) -> None:
    """Put a module of the same class and other settings in the place of one."""
    setattr(layer, name, copy.deepcopy(getattr(layer, name)))
    set_(layer, name)


def retype(layer: nn.Module, name: str) -> None:
    settings = {key: value for key, value in SETTINGS.items() if hasattr(getattr(layer, name), key)}
    other = nn.Dropout2d(0.5) if isinstance(getattr(layer, name), nn.Dropout) else nn.Softplus()
    setattr(layer, name, getattr(layer, name) if name == "norm1" else other)
    vars(getattr(layer, name)).update(settings)


def remove(layer: nn.Module, name: str) -> None:
    """Delete a module if the layer does without it, or else put another in its place."""
    before = getattr(layer, name)
    delattr(layer, name)
    try:
        layer(torch.zeros(2, layer.norm1.num_features, 3, 3, dtype=layer.norm1.weight.dtype))
    except AttributeError:
        setattr(layer, name, copy.deepcopy(before))
        retype(layer, name)


def hook_of_gradient(layer: nn.Module, name: str) -> None:
    vars(getattr(layer, name))["inplace"] = False  # which such a hook does not allow
    getattr(layer, name).register_full_backward_pre_hook(lambda module, grads: tuple(grad * 0.5 for grad in grads))


def halved(module: nn.Module, args: object, output: Tensor) -> Tensor:
    return output * 0.5


CHANGES = [
    *(set_, replace, retype, remove),
    lambda layer, name: getattr(layer, name).register_forward_hook(halved),
    hook_of_gradient,
    lambda layer, _: vars(layer).update(slope=0.8, bound=0.2, alpha=0.5, drop_rate=0.6),
    lambda layer, _: set_(SimpleNamespace(act=layer.acts[0]), "act"),
    lambda layer, _: layer.acts[0].register_forward_hook(halved),
]


def made(number: int) -> tuple[Source, nn.Module]:
    torch.manual_seed(number)
    source = Source(number)
    return source, randomized(Block(source))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "number", [pytest.param(i, marks=[] if i < 16 else pytest.mark.exhaustive) for i in range(400)]
)
def test_a_generated_layer_changed_after_conversion_computes_what_its_twin_computes(number):
    source, block = made(number)
    block, plain, _ = convert_pair(block)
    assert_same_steps(copy.deepcopy(block), copy.deepcopy(plain), 1)
    for change in source.random.sample(CHANGES, 3):
        name = source.random.choice([name for name in source.order if name[:3] in ("act", "dro")] or ["norm1"])
        pair = copy.deepcopy(block), copy.deepcopy(plain)
        for each in pair:
            change(each.layers[1], name)
        assert_same_steps(*pair, 1)
    for training in (True, False):  # the training flag of one module
        name = source.random.choice([name for name, _ in plain.layers[1].named_modules()])
        outputs = []
        for each in (copy.deepcopy(block), copy.deepcopy(plain)):
            each.train(training)
            each.layers[1].get_submodule(name).train(not training)
            seed()
            outputs.append(each(x_of()))
        torch.testing.assert_close(*outputs, rtol=0, atol=1e-10)


def test_most_generated_layers_run_by_the_shared_engine():
    reports = [convert_and_report(made(number)[1]) for number in range(12)]
    engines = [change.engine.partition(" ")[0] for report in reports for change in report.changed]
    assert engines.count("shared") > 10
    assert "plain" not in engines
