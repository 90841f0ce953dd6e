"""The options of a run: what a user may give, and the defaults that depend on other options."""

import secrets
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from efficient_densenet._checks import Rule, check, choice, integer, number, optional
from efficient_densenet.memory.sizes import parse_bytes
from efficient_densenet.models.zoo import VARIANTS, create_model

from .data import DATASETS
from .freezing import FREEZE
from .recipes import RECIPES
from .schema import path_name

PAIR = ("data", "save")
"""Options that may be given by position, together."""
LETTERS = {"e": "efficient", "a": "amp"}
"""As everywhere, a letter stands for the only option that it begins; these begin several."""

SWITCH = {"True": True, "true": True, "1": True, "False": False, "false": False, "0": False}
"""What may be typed for True and False."""

ENGINES = ("best", "plain", "official", "checkpoint", "shared")
PARALLEL = ("ddp", "fsdp", "dp")
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
        dataset: cifar10, cifar100, svhn or fashion_mnist: which one to take from the directory, or to download into it
            if it is not there; by default what is there, and cifar10 into an absent directory.
        model: a name from the zoo, such as densenet121; by default a DenseNet-BC of this depth and growth rate.
        depth: convolutions and classifier, 6n + 4; by default 100, and 22 on the digits.
        growth_rate: channels that each layer adds; by default 12.
        weights: weights to begin with, instead of random ones: the directory of a run or its model.pt, a name such as
            torchvision's DEFAULT (a directory of the same name is ./name), or a file of weights for --model. They
            determine the network, and how images are normalized. A classifier for other classes is replaced.
        freeze: what stays as it is in them: features, which is all but the classifier, or a number of dense blocks,
            which are frozen with the stem before them. Their batch norms keep their statistics.
        drop_rate: dropout after each layer's last convolution.
        engine: plain, official, checkpoint, shared or best; takes precedence over `efficient`.
        n_epochs: passes over the training images; by default 300, and 20 on the digits.
        batch_size: images in an update, over all processes together.
        micro_batch_size: the most images that a process runs at once; an update accumulates their gradients. Batch
            norms normalize each micro-batch by its own statistics.
        recipe: step (lr divided by 10 at 50% and 75% of the epochs) or one_cycle (warm-up and cosine decay, for short
            runs); by default step, and one_cycle on the digits.
        lr: the highest learning rate.
        weight_decay: the L2 penalty of SGD; the papers' is 1e-4.
        valid_size: training images held out to choose the best epoch by; by default 5000, or a tenth of a smaller set.
            With 0 training is on all of them, and the weights of the last epoch are kept.
        image_size: height and width that the images of an image folder are resized to; by default 32, and 224 for
            models of the zoo's ImageNet family.
        mirror: whether half of the training images are flipped horizontally; by default in CIFAR and image folders, and
            not where a flip changes the class, as in digits.
        seed: the same seed gives the same run, exactly on a CPU. None draws one, which config.json then has.
        amp: bf16 or fp16 for automatic mixed precision.
        keep_bottleneck: the shared engine keeps each layer's bottleneck for the backward instead of recomputing it:
            a faster step in more memory, with the same numbers.
        memory: bytes such as 6GiB for all tensors of a training step; they decide which bottlenecks are kept and, where
            a batch does not fit, micro_batch_size. By default most of what is free on a GPU.
        channels_last: use the channels-last memory format for images and weights.
        compile: run the model through torch.compile.
        cuda_graph: on one GPU, launch forward and backward of a step as one CUDA graph.
        device: cpu, cuda (all visible GPUs), cuda:1, …; by default cuda if available.
        parallel: how several devices train: ddp (DistributedDataParallel) or fsdp (parameters, gradients and momentum
            sharded by fully_shard) in the processes of torchrun, or dp (DataParallel) in one; by default ddp under
            torchrun, and dp for several visible GPUs without it.
        sync_bn: synchronize the statistics of batch norms over all processes that torchrun started.
        workers: processes that decode the images of folders too large for memory.
        stream: True decodes the images of a folder batch by batch, False all of them first; by default by size.
        resume: resume the run in the directory of the results, with its options where none are given; auto also begins
            one where there is none, as a command that is restarted needs.
        accept_changed_data: resume although images were replaced, removed or added since.
        overwrite: start over in a directory that contains a run.
        evaluate: no training: test loss and error of the model in the directory of the results, or in one named here,
            or of weights that have a name.
        tensorboard: write TensorBoard's event files too.
    """

    efficient: bool | str = True
    data: str | None = None
    save: str | None = None
    dataset: str | None = None
    model: str | None = None
    depth: int | None = None
    growth_rate: int | None = None
    weights: str | None = None
    freeze: str | None = None
    drop_rate: float = 0.0
    engine: str | None = None
    n_epochs: int | None = None
    batch_size: int = 64
    micro_batch_size: int | None = None
    recipe: str | None = None
    lr: float = 0.1
    weight_decay: float = 1e-4
    valid_size: int | None = None
    image_size: int | None = None
    mirror: bool | None = None
    seed: int | None = 0
    amp: str | None = None
    keep_bottleneck: bool = False
    memory: str | None = None
    channels_last: bool = False
    compile: bool = False
    cuda_graph: bool = False
    device: str | None = None
    parallel: str | None = None
    sync_bn: bool = False
    workers: int = 2
    stream: bool | None = None
    resume: bool | Literal["auto"] = False
    accept_changed_data: bool = False
    overwrite: bool = False
    evaluate: bool | str = False
    tensorboard: bool = False


@dataclass(frozen=True)
class RunOptions(Options):
    """Checked options, with their defaults filled in. `depth` and `growth_rate` are None for a model of the zoo."""

    engine: str = "best"
    n_epochs: int = 300
    recipe: str = "step"
    seed: int = 0


def _is_size(value: Any) -> bool:
    try:
        return isinstance(value, str) and parse_bytes("memory", value) > 0
    except ValueError:
        return False


_boolean = Rule("True or False", lambda value: isinstance(value, bool))
_size = integer(1, 2**31 - 1)
_pixels = integer(1, 2**16)

DEPTH = Rule("6n + 4, such as 22, 40 or 100", lambda value: integer(10, 10_000).accepts(value) and (value - 4) % 6 == 0)

RULES = {
    "efficient": choice(True, False, *ENGINES),
    "data": optional(path_name()),
    "save": optional(path_name()),
    "dataset": optional(choice(*DATASETS)),
    "model": optional(Rule("the name of a model of the zoo that labels images", choice(*VARIANTS).accepts)),
    "depth": optional(DEPTH),
    "growth_rate": optional(integer(1, 10_000)),
    "weights": optional(path_name()),
    "freeze": optional(FREEZE),
    "drop_rate": number(0, 1, "[)"),
    "engine": choice(*ENGINES),
    "n_epochs": _size,
    "batch_size": _size,
    "micro_batch_size": optional(_size),
    "recipe": choice(*RECIPES),
    "lr": number(0, float("inf"), "()"),
    "weight_decay": number(0, 1, "[)"),
    "valid_size": optional(integer(0, 2**31 - 1)),
    "image_size": optional(_pixels),
    "mirror": optional(_boolean),
    "seed": integer(0, 2**63 - 1),
    "amp": optional(choice(*AMP_DTYPES)),
    "keep_bottleneck": _boolean,
    "memory": optional(Rule("bytes such as 6GiB", _is_size)),
    "channels_last": _boolean,
    "compile": _boolean,
    "cuda_graph": _boolean,
    "device": optional(path_name()),
    "parallel": optional(choice(*PARALLEL)),
    "sync_bn": _boolean,
    "workers": integer(0, 1024),
    "stream": optional(_boolean),
    "resume": Rule("True or False, or auto", choice(True, False, "auto").accepts),
    "accept_changed_data": _boolean,
    "overwrite": _boolean,
    "evaluate": Rule("True, False or a path", lambda value: isinstance(value, bool) or path_name().accepts(value)),
    "tensorboard": _boolean,
}
"""What each checked option must be, on the command line and in the files of a run."""

_DIGITS_DEFAULTS = {"depth": 22, "n_epochs": 20, "recipe": "one_cycle"}
_DEFAULTS = {"depth": 100, "n_epochs": 300, "recipe": "step"}


def parse(given: dict[str, Any], efficient_engine: str) -> RunOptions:
    """Check the `given` options and fill in the defaults; `efficient_engine` is what --efficient True means."""
    given = dict(given)
    given["efficient"] = SWITCH.get(str(given.get("efficient", True)), given.get("efficient"))
    for name in ("data", "save", "device", "model", "engine", "weights", "freeze", "memory"):
        if given.get(name) is not None:
            given[name] = _text(name, given[name])
    options = Options(**given)
    if options.model is not None and (options.depth or options.growth_rate):
        raise ValueError(
            f"found --model {options.model} with --depth or --growth_rate, but a model of the zoo has its own: "
            "leave out one or the other"
        )
    defaults: dict[str, Any] = dict(_DIGITS_DEFAULTS if options.data is None else _DEFAULTS)
    defaults |= {"growth_rate": 12, "seed": secrets.randbits(31)}
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
    if options.model is not None and options.model not in VARIANTS:
        create_model(options.model)  # raises an error that lists the names
        raise ValueError(f"model is {options.model!r}, which labels pixels: choose one that labels images")
    for name, rule in RULES.items():
        check(name, getattr(options, name), rule)
    if options.resume and options.overwrite:
        raise ValueError(
            "found --resume and --overwrite, but a run is either resumed or started over: give one of them"
        )
    for name in ("resume", "overwrite", "weights", "freeze"):
        if options.evaluate is not False and getattr(options, name):
            raise ValueError(
                f"found --evaluate and --{name}, but a model that is evaluated is not trained: give one of them"
            )
    if options.accept_changed_data and not options.resume:
        raise ValueError(
            "found --accept_changed_data without --resume, but only a run that is resumed had other data: add --resume "
            "or leave it out"
        )


def block_config_for(depth: int) -> tuple[int, int, int]:
    """Three equal blocks of two-convolution layers; the stem, two transitions and the classifier are the other four."""
    check("depth", depth, DEPTH)
    layers = (depth - 4) // 6
    return layers, layers, layers
