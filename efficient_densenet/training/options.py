"""The options of a run: what a user may give, and the defaults that depend on other options."""

from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from .._checks import check_between, check_choice, check_integer
from ..models.zoo import VARIANTS, create_model
from .data import DATASETS
from .recipes import RECIPES

ENGINES = ("best", "plain", "official", "checkpoint", "shared")
AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Options:
    """The options of a training run as a user gives them; None stands for a default that depends on other options.

    Args:
        efficient: True for the memory-saving engine of this script, False for the plain network.
        data: directory of images: CIFAR-10 or -100 in torchvision's layout, or train/ and test/ (or val/) with a folder
            of images for each class. An absent or empty directory is filled by a download; without this option,
            training is on the handwritten digits that ship with the package.
        save: directory of the results; by default checkpoints/ and a name made of data, model and engine.
        dataset: what to download into an absent directory: cifar10, cifar100, svhn or fashion_mnist.
        model: a name from the zoo, such as densenet121; by default a DenseNet-BC of this depth and growth rate.
        depth: convolutions and classifier, 6n + 4; by default 100, and 22 on the digits.
        growth_rate: channels that each layer adds; by default 12.
        drop_rate: dropout after each layer's last convolution.
        engine: plain, official, checkpoint, shared or best; takes precedence over `efficient`.
        n_epochs: passes over the training images; by default 300, and 20 on the digits.
        batch_size: images in an update, over all processes together.
        micro_batch_size: the most images that a process runs at once; an update accumulates their gradients. Batch
            norms normalize each micro-batch by its own statistics.
        recipe: step (lr divided by 10 at 50% and 75% of the epochs) or one_cycle (warm-up and cosine decay, for short
            runs); by default step, and one_cycle on the digits.
        lr: the highest learning rate.
        valid_size: training images held out to choose the best epoch by; by default 5000, or a tenth of a smaller set.
        image_size: height and width that the images of an image folder are resized to; by default 32, and 224 for
            models of the zoo's ImageNet family.
        mirror: whether half of the training images are flipped horizontally; by default in CIFAR and image folders, and
            not where a flip changes the class, as in digits.
        seed: the same seed gives the same run, exactly on a CPU.
        amp: bf16 or fp16 for automatic mixed precision.
        channels_last: use the channels-last memory format for images and weights.
        compile: run the model through torch.compile.
        device: cpu, cuda (all visible GPUs), cuda:1, …; by default cuda if available.
        sync_bn: synchronize the statistics of batch norms over all processes that torchrun started.
        workers: processes that decode the images of folders too large for memory.
        stream: True decodes the images of a folder batch by batch, False all of them first; by default by size.
        resume: resume the run in the directory of the results, with its options where none are given.
        overwrite: start over in a directory that contains a run.
        evaluate: no training: test loss and error of the model in the directory of the results, or in one named here.
        tensorboard: write TensorBoard's event files too.
    """

    efficient: bool | str = True
    data: str | None = None
    save: str | None = None
    dataset: str = "cifar10"
    model: str | None = None
    depth: int | None = None
    growth_rate: int | None = None
    drop_rate: float = 0.0
    engine: str | None = None
    n_epochs: int | None = None
    batch_size: int = 64
    micro_batch_size: int | None = None
    recipe: str | None = None
    lr: float = 0.1
    valid_size: int | None = None
    image_size: int | None = None
    mirror: bool | None = None
    seed: int = 0
    amp: str | None = None
    channels_last: bool = False
    compile: bool = False
    device: str | None = None
    sync_bn: bool = False
    workers: int = 2
    stream: bool | None = None
    resume: bool = False
    overwrite: bool = False
    evaluate: bool | str = False
    tensorboard: bool = False


@dataclass(frozen=True)
class RunOptions(Options):
    """Checked options, with their defaults filled in. `depth` and `growth_rate` are None for a model of the zoo."""

    engine: str = "best"
    n_epochs: int = 300
    recipe: str = "step"


_DIGITS_DEFAULTS = {"depth": 22, "n_epochs": 20, "recipe": "one_cycle"}
_DEFAULTS = {"depth": 100, "n_epochs": 300, "recipe": "step"}


def parse(given: dict[str, Any], efficient_engine: str) -> RunOptions:
    """Check the `given` options and fill in the defaults; `efficient_engine` is what --efficient True means."""
    given = dict(given)
    for name in ("data", "save", "device", "model", "engine"):
        if given.get(name) is not None:
            given[name] = _text(name, given[name])
    options = Options(**given)
    if options.model is not None and (options.depth or options.growth_rate):
        raise ValueError(
            f"found --model {options.model} with --depth or --growth_rate, but a model of the zoo has its own: "
            "leave out one or the other"
        )
    defaults: dict[str, Any] = dict(_DIGITS_DEFAULTS if options.data is None else _DEFAULTS)
    defaults["growth_rate"] = 12
    if options.model is not None:
        defaults["depth"] = defaults["growth_rate"] = None
    values = asdict(options)
    values |= {name: default for name, default in defaults.items() if values[name] is None}
    values["engine"] = options.engine or _engine(options.efficient, efficient_engine)
    resolved = RunOptions(**values)
    _check(resolved)
    return resolved


def _engine(efficient: bool | str, efficient_engine: str) -> str:
    if isinstance(efficient, bool):
        return efficient_engine if efficient else "plain"
    return _text("efficient", efficient)


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool) or str(value) == "":
        raise ValueError(f"{name} is {value!r}, but needs a value: give --{name} VALUE")
    return str(value)


def _check(options: RunOptions) -> None:
    check_choice("dataset", options.dataset, DATASETS)
    check_choice("engine", options.engine, ENGINES)
    check_choice("recipe", options.recipe, tuple(RECIPES))
    check_integer("batch_size", options.batch_size, at_least=1)
    check_integer("n_epochs", options.n_epochs, at_least=1)
    check_integer("seed", options.seed, at_least=0)
    check_integer("workers", options.workers, at_least=0)
    check_between("lr", options.lr, 0, float("inf"), "()")
    check_between("drop_rate", options.drop_rate, 0, 1, "[)")
    for name in ("depth", "growth_rate", "micro_batch_size", "valid_size", "image_size"):
        if getattr(options, name) is not None:
            check_integer(name, getattr(options, name), at_least=1)
    if options.amp is not None:
        check_choice("amp", options.amp, tuple(AMP_DTYPES))
    if options.model is not None and options.model not in VARIANTS:
        create_model(options.model)  # raises an error that lists the names
        raise ValueError(f"model is {options.model!r}, which labels pixels: choose one that labels images")
    if options.depth is not None:
        block_config_for(options.depth)
    for field in fields(options):
        value = getattr(options, field.name)
        if (field.type is bool or (field.type == bool | None and value is not None)) and not isinstance(value, bool):
            raise ValueError(f"{field.name} is {value!r}, but must be True or False")
    if options.resume and options.overwrite:
        raise ValueError(
            "found --resume and --overwrite, but a run is either resumed or started over: give one of them"
        )


def block_config_for(depth: int) -> tuple[int, int, int]:
    """Three equal blocks of two-convolution layers; the stem, two transitions and the classifier are the other four."""
    layers, rest = divmod(depth - 4, 6)
    if rest or layers < 1:
        raise ValueError(f"depth is {depth}, but must be 6n + 4, such as 22, 40 or 100")
    return layers, layers, layers
