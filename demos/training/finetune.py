"""The weights that a run begins with, `--weights`: those of another run, some that have a name, or those of a file."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from efficient_densenet.models.densenet import DenseNet
from efficient_densenet.weights.key_names import new_names
from efficient_densenet.weights.load import load_weights
from efficient_densenet.weights.named import NAMES, PUBLISHED, TRAINED, find_checkpoint, find_published
from efficient_densenet.weights.source import read_state_dict

from .models import CONFIG, WEIGHTS, ModelConfig, describe_classes, load_model, weights_of


@dataclass(frozen=True)
class PretrainedWeights:
    """Weights to fine-tune, and what their source says of them. They are read, or downloaded, by `load_into` only.

    Args:
        name: what to call them.
        read: returns the tensors, by the names of any known library.
        options: those that the weights determine: of the network, and the size of images.
        inputs: the `channels`, `mean`, `std` and `value_range` of the images that they were trained on, or None if
            nothing says so.
        classes: the names of the classes, likewise.
    """

    name: str
    read: Callable[[], Mapping[str, Any]]
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, Any] | None = None
    classes: tuple[str, ...] | None = None

    def complete(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The `given` options and those that the weights determine, of which only the size of images may be another."""
        completed = dict(given)
        for name, value in self.options.items():
            if given.get(name) is None:
                completed[name] = value
            elif given[name] != value and name != "image_size":
                network = self.options["model"] or "a DenseNet-BC of depth {depth} and growth rate {growth_rate}"
                raise ValueError(
                    f"found --{name} {given[name]}, but the weights {self.name} are of "
                    f"{network.format_map(self.options)}: leave it out, or give other --weights"
                )
        return completed

    def load_into(self, model: DenseNet, classes: tuple[str, ...]) -> list[str]:
        """Load all but a classifier of other classes, and say in sentences what was done."""
        state_dict = self.read()
        keys = [key for key, name in new_names(state_dict).items() if name == "classifier.bias"]  # a backbone has none
        count = len(state_dict[keys[0]]) if keys else None
        same_classes = len(classes) == count if self.classes is None else classes == self.classes
        skip, adapt_input = () if same_classes else "classifier", "sum" if self.inputs is None else None
        try:
            report = load_weights(model, state_dict, skip=skip, adapt_input=adapt_input)
        except ValueError as exc:
            differences = str(exc).partition("unchanged: ")[2]
            raise ValueError(
                f"the weights {self.name} are not of this network ({differences[:100]} …): name theirs with --model, "
                "or with --depth and --growth_rate"
            ) from exc
        said = [f"weights: {len(report.used)} tensors of {self.name}"]
        if not same_classes:
            theirs = describe_classes(self.classes) if self.classes else f"{count} classes" if count else "none"
            said.append(f"the classifier is new: for {describe_classes(classes)}, where the weights have {theirs}")
        if report.adapted:
            said.append(f"the first convolution is adapted to {model.in_channels} input channels")
        if self.inputs is None:
            said.append("the images are normalized by their own mean and std, since a file of weights has none")
        return said


def find_weights(weights: str, given: Mapping[str, Any]) -> PretrainedWeights:
    """What `--weights` names. The `given` options say of which network a file of weights is."""
    if weights in TRAINED:
        network = {"model": TRAINED[weights].model, "depth": None, "growth_rate": None}
        return _of_run(weights, find_checkpoint(weights), network)
    if weights in NAMES:
        return _of_torchvision(weights, given.get("model"))
    path = Path(weights)
    if path.is_dir() or (path.name == WEIGHTS and (path.parent / CONFIG).exists()):
        return _of_run(weights, path)
    if not path.exists():
        raise ValueError(
            f"found no weights {weights}: give the directory of a run, a file of weights, or a name: "
            f"{', '.join([*TRAINED, *NAMES])}"
        )
    if given.get("model") is None and given.get("depth") is None:
        raise ValueError(
            f"found weights of an unknown network in {weights}, since no run's {CONFIG} is beside it: name the network "
            "with --model, or with --depth and --growth_rate"
        )
    return PretrainedWeights(weights, partial(read_state_dict, path))


def _of_run(name: str, path: Path, network: Mapping[str, Any] | None = None) -> PretrainedWeights:
    weights = weights_of(path)
    config = ModelConfig.beside(weights)
    options = network or {key: getattr(config, key) for key in ("model", "depth", "growth_rate")}
    options = {**options, "image_size": config.image_size}
    return PretrainedWeights(
        name, lambda: load_model(weights)[0].state_dict(), options, inputs_of(config), config.classes
    )


def _of_torchvision(name: str, model: str | None) -> PretrainedWeights:
    if model not in PUBLISHED:
        found = "no --model" if model is None else f"--model {model}"
        raise ValueError(
            f"found {found} with --weights {name}, but torchvision has weights for {', '.join(PUBLISHED)}: give one as "
            "--model"
        )
    entry = find_published(model, name)
    transforms: Any = entry.transforms()
    inputs = {"channels": 3, "value_range": None} | {
        key: [255 * value for value in getattr(transforms, key)] for key in ("mean", "std")
    }
    size = {"model": model, "image_size": transforms.crop_size[0]}
    return PretrainedWeights(
        f"{name} of torchvision", lambda: read_state_dict(entry.source()), size, inputs, entry.classes
    )


def inputs_of(config: ModelConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in ("channels", "mean", "std", "value_range")}
