"""Modules that the shared engine runs as one node: a block, with or without its consumer, a consumer, and a stem."""

import copy

import torch
from helpers import run_stem, run_with_features, small_model
from torch import Tensor, nn

from efficient_densenet.engine import choose

KINDS = ["block", "transition", "norm", "features too", "consumer", "apart", "stem"]
"""A block alone; with the transition or the norm after it; with its features as a second output; a transition alone;
a block and a transition as two nodes; and the first four modules of a network for large images."""

_MODULES = {
    "block": ["denseblock1"],
    "transition": ["denseblock1", "transition1"],
    "norm": ["denseblock2", "norm5"],
    "features too": ["denseblock1", "transition1"],
    "consumer": ["transition1"],
    "apart": ["denseblock1", "transition1"],
    "stem": ["conv0", "norm0", "relu0", "pool0"],
}


class Subject(nn.Module):
    """Modules of a small network, which run by the shared engine or, with `is_plain`, one after the other."""

    def __init__(self, kind: str, is_plain: bool = False, **settings) -> None:
        super().__init__()
        model = small_model("imagenet" if kind == "stem" else "bc", block_config=(2, 1), efficient="shared", **settings)
        self.kind, self.is_plain, self.block = kind, is_plain, [model.features.denseblock1]
        self.modules_in_turn = model.features
        for name in list(model.features._modules):
            if name not in _MODULES[kind]:
                del model.features._modules[name]

    def plain(self) -> "Subject":
        """A copy that runs plain modules."""
        copied = copy.deepcopy(self)
        copied.is_plain = True
        for name, module in copied.modules_in_turn.named_children():
            if name.startswith("denseblock"):
                module.engine = choose.Engine.PLAIN
        return copied

    def _apply(self, *arguments) -> "Subject":  # the stem's block, too, gets another dtype
        self.block[0]._apply(*arguments)
        return super()._apply(*arguments)

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = modules = list(self.modules_in_turn)
        if self.is_plain or not torch.is_grad_enabled():  # as in a reentrant checkpoint
            outputs = [x := module(x) for module in modules]
            return _joined(outputs[1], outputs[0]) if self.kind == "features too" else x
        if self.kind == "stem":
            return run_stem([*modules, *self.block], self.block[0], x)
        if self.kind == "consumer":
            return choose.run_consumer(first, x)
        if self.kind == "apart":
            return choose.run_consumer(*rest, first(x))
        if self.kind == "features too":
            return _joined(*run_with_features(first, *rest, x))
        return self.modules_in_turn(x)

    def input(self, batch: int = 2, size: tuple[int, ...] = (5, 6), **options) -> Tensor:
        channels = next(each for each in self.modules() if hasattr(each, "num_features")).num_features
        return torch.randn(batch, 3 if self.kind == "stem" else channels, *size, dtype=torch.double, **options)


def _joined(output: Tensor, features: Tensor) -> Tensor:
    return torch.cat([output.flatten(1), features.flatten(1)], 1)
