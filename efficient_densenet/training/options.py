"""What a run can be told, and what it takes where it is not told."""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from .._checks import check_between, check_choice, check_integer
from ..models.zoo import create_model, list_models
from .data import DATASETS
from .recipes import RECIPES


@dataclass(frozen=True)
class Options:
    """The options of a training run.

    Args:
        efficient: True for the saving engine of this script, False for the plain network.
        data: directory of pictures: CIFAR-10 or -100 as torchvision lays them out, or train/ and test/ (or val/) with a
            folder of pictures for each class. An absent or empty one is filled by a download; without any,
            training is on the handwritten digits that ship with the package.
        save: directory of the results; by default checkpoints/ and a name made of data, model and engine.
        dataset: what to download into an absent directory: cifar10, cifar100, svhn or fashion_mnist.
        model: a name from the zoo, such as densenet121; by default a DenseNet-BC of this depth and growth rate.
        depth: convolutions and classifier, 6n + 4; by default 100, and 22 on the digits.
        growth_rate: channels that each layer adds; by default 12.
        drop_rate: dropout after each layer's last convolution.
        engine: plain, official, checkpoint, shared or best; in the place of what `efficient` means.
        n_epochs: passes over the training pictures; by default 300, and 20 on the digits.
        batch_size: pictures in an update, those of all processes together.
        micro_batch_size: the most pictures that a process runs at once; an update adds up their gradients. Batch norms
            normalise each micro-batch by its own statistics.
        recipe: step (lr divided by 10 at 50% and 75% of the epochs) or one_cycle (up and down once, for short runs); by
            default step, and one_cycle on the digits.
        lr: the highest learning rate.
        valid_size: training pictures set aside to choose the best epoch by; by default 5000, or a tenth of a
            smaller set.
        image_size: side that the pictures of an image folder are brought to; by default 32, and 224 for models of the
            zoo's ImageNet family.
        mirror: whether half of the pictures are mirrored in training; by default in CIFAR and image folders, and not
            where it would make another sign, as in digits.
        seed: the same seed gives the same run, exactly on a CPU.
        amp: bf16 or fp16 for mixed precision.
        channels_last: keep pictures and weights in the channels-last layout.
        compile: run the model through torch.compile.
        device: cpu, cuda (all visible GPUs), cuda:1, …; by default cuda where there is one.
        sync_bn: batch norms take their statistics over the pictures of all processes that torchrun started.
        workers: processes that decode pictures of folders too large for the memory.
        stream: True leaves the pictures of a folder in their files, False reads them all first; by default by size.
        resume: go on with the run in the directory of the results, from its options where none are given.
        overwrite: start over in a directory that holds a run.
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

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


FREE = {"efficient", "engine", "data", "dataset", "save", "channels_last", "compile", "device", "workers", "stream"} | {
    "resume",
    "overwrite",
    "evaluate",
    "tensorboard",
}
"""Options that may change when a run is gone on with: they change no number, or only its rounding."""

_DIGITS = {"depth": 22, "n_epochs": 20, "recipe": "one_cycle"}
_OTHERWISE = {"depth": 100, "n_epochs": 300, "recipe": "step"}


def parse(given: dict[str, Any], saving_engine: str) -> Options:
    """Options from what was given, checked, with the defaults that depend on nothing but other options."""
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
    defaults = dict(_DIGITS if options.data is None else _OTHERWISE)
    defaults["growth_rate"] = 12
    if options.model is not None:
        defaults["depth"] = defaults["growth_rate"] = None
    options = replace(options, **{k: v for k, v in defaults.items() if getattr(options, k) is None})
    options = replace(options, engine=options.engine or _engine(options.efficient, saving_engine))
    _check(options)
    return options


def _engine(efficient: bool | str, saving_engine: str) -> str:
    if isinstance(efficient, bool):
        return saving_engine if efficient else "plain"
    return _text("efficient", efficient)


def _text(name: str, value: Any) -> str:
    if isinstance(value, bool) or str(value) == "":
        raise ValueError(f"{name} is {value!r}, but needs a value: give --{name} VALUE")
    return str(value)


def _check(options: Options) -> None:
    check_choice("dataset", options.dataset, DATASETS)
    check_choice("engine", options.engine, ("best", "plain", "official", "checkpoint", "shared"))
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
        check_choice("amp", options.amp, ("bf16", "fp16"))
    if options.model is not None and options.model not in list_models():
        create_model(options.model)  # says which names there are
    if options.depth is not None:
        layers_in_blocks(options.depth)
    for field in fields(options):
        flag = field.type is bool or (field.type == bool | None and getattr(options, field.name) is not None)
        if flag and not isinstance(getattr(options, field.name), bool):
            raise ValueError(f"{field.name} is {getattr(options, field.name)!r}, but must be True or False")
    if options.resume and options.overwrite:
        raise ValueError("found --resume and --overwrite, but a run is gone on with or started over: give one of them")


def layers_in_blocks(depth: int) -> tuple[int, int, int]:
    """Three equal blocks of two-convolution layers; the stem, two transitions and the classifier are the other four."""
    layers, rest = divmod(depth - 4, 6)
    if rest or layers < 1:
        raise ValueError(f"depth is {depth}, but must be 6n + 4, such as 22, 40 or 100")
    return (layers,) * 3
