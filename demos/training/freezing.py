"""The parts of a network that fine-tuning leaves as they are: `--freeze features`, or a number of dense blocks."""

import itertools

from torch import nn

from efficient_densenet._checks import Rule
from efficient_densenet.models.densenet import DenseNet
from efficient_densenet.models.layers import DenseBlock

FEATURES = "features"

FREEZE = Rule(
    f"{FEATURES}, or a number of dense blocks such as 2",
    lambda value: isinstance(value, str) and (value == FEATURES or (value.isdecimal() and len(value) < 4)),
)


def frozen_parts(model: DenseNet, freeze: str | None) -> list[nn.Module]:
    """All features, or the stem and so many dense blocks with the transitions after them; none if it is None."""
    if freeze is None:
        return []
    children = dict(model.features.named_children())
    if freeze == FEATURES:
        return list(children.values())
    blocks = [name for name, module in children.items() if isinstance(module, DenseBlock)]
    number = int(freeze)
    if number > len(blocks):
        raise ValueError(
            f"freeze is {freeze}, but the network has {len(blocks)} dense blocks: give 0 to {len(blocks)}, or features"
        )
    trained = [*blocks, None][number]  # the first block that is trained
    return [children[name] for name in itertools.takewhile(lambda name: name != trained, children)]


def freeze_parameters(model: DenseNet, freeze: str | None) -> None:
    """Let nothing compute gradients of the frozen parts, and bring all parts into the modes of a training step."""
    for part in frozen_parts(model, freeze):
        part.requires_grad_(False)
    set_training_modes(model, freeze)


def set_training_modes(model: DenseNet, freeze: str | None) -> None:
    """Training mode, but eval mode in frozen parts: their batch norms use and keep the statistics that they have."""
    model.train()
    for part in frozen_parts(model, freeze):
        part.eval()


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def describe_frozen(model: nn.Module) -> str:
    """How many of its parameters are frozen, in words; empty if none is."""
    counts = [parameter.numel() for parameter in model.parameters() if not parameter.requires_grad]
    if not counts:
        return ""
    total = sum(parameter.numel() for parameter in model.parameters())
    return f"frozen: {sum(counts):,} of {total:,} parameters, and the statistics of their batch norms"
