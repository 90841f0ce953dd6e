"""The options of a run: what a user may give, what each must be, and the defaults that depend on other options."""

import secrets
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Annotated, Any, get_args

import torch

from efficient_densenet._checks import Rule, check, choice, integer, number
from efficient_densenet.models.zoo import VARIANTS, create_model
from efficient_densenet.weights.config import DEPTH

from .data import DATASETS
from .recipes import RECIPES

AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
PER_CALL = {"efficient", "engine", "device", "cuda_graph", "resume", "accept_changed_data", "overwrite", "evaluate"}
"""Options that a resumed run takes from the present command; the engine only if it is given."""
CHANGEABLE = PER_CALL | {"data", "dataset", "save", "keep_bottleneck", "channels_last", "compile", "workers", "stream"}
"""Options that may change when a run is resumed: they change no number, or only its rounding. (With dropout,
`channels_last` and `compile` draw other random numbers.)"""

NONE = [("data", "digits"), ("amp", "float32")]
"""Words for what is done without an option."""


Switch = Annotated[bool, choice(True, False)]
Text = Annotated[str, Rule("a path or a name", lambda value: isinstance(value, str) and value != "")]
Count = Annotated[int, integer(1, 2**31 - 1)]
Engine = Annotated[str, choice("best", "plain", "official", "checkpoint", "shared")]
Model = Annotated[str, Rule("the name of a model of the zoo that labels images", choice(*VARIANTS).accepts)]


@dataclass(frozen=True)
class Options:
    """The options of a training run as a user gives them; None stands for a default that depends on other options.

    Args:
        data: directory of images: CIFAR-10 or -100 in torchvision's layout, or train/ and test/ (or val/) with a folder
            of images for each class. One that is called cifar, cifar100 and so on and is absent or empty is filled by a
            download; without this option, or by the word digits, training is on the handwritten digits that ship with
            the package.
        save: directory of the results; by default checkpoints/ and a name made of data, model and engine.
        efficient: True for the memory-saving engine of this script, False for the plain network.
        dataset: cifar10, cifar100, fashion_mnist or mnist: which one to take from the directory, or to download into it
            if it is not there; by default what is there.
        model: a name from the zoo, such as densenet121; by default a DenseNet-BC of this depth and growth rate.
        depth: convolutions and classifier, 6n + 4; by default 100, and 22 on the digits.
        growth_rate: channels that each layer adds; by default 12.
        weights: weights to begin with, instead of random ones: the directory of a run or its model.pt, a name such as
            torchvision's DEFAULT (a directory of the same name is ./name), or a file of weights for --model. They
            determine the network, and how images are normalized. A classifier for other classes is replaced.
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
        amp: bf16 or fp16 for automatic mixed precision; float32 for none.
        keep_bottleneck: the shared engine keeps each layer's bottleneck for the backward instead of recomputing it:
            a faster step in more memory, with the same numbers. False recomputes each; by default those are kept that
            leave the peak as it is.
        channels_last: use the channels-last memory format for images and weights.
        compile: run the model through torch.compile.
        cuda_graph: launch forward and backward of a step as one CUDA graph; by default on one GPU, without --compile
            and --micro_batch_size.
        device: cpu, cuda (all visible GPUs, by DataParallel), cuda:1, …; by default cuda if available. The processes of
            torchrun train by DistributedDataParallel.
        sync_bn: synchronize the statistics of batch norms over all processes that torchrun started.
        workers: processes that decode the images of folders too large for memory.
        stream: True decodes the images of a folder batch by batch, False all of them first; by default by size.
        resume: resume the run in the directory of the results, with its options where none are given; auto also begins
            one where there is none, as a command that is restarted needs.
        accept_changed_data: resume although images were replaced, removed or added since.
        overwrite: start over in a directory that contains a run.
        evaluate: no training: test loss and error of the model in the directory of the results, or in one named here,
            or of weights that have a name.
    """

    data: Text | None = None
    save: Text | None = None
    _: KW_ONLY
    efficient: Switch | Engine = True
    dataset: Annotated[str, choice(*DATASETS)] | None = None
    model: Model | None = None
    depth: Annotated[int, DEPTH] | None = None
    growth_rate: Annotated[int, integer(1, 10_000)] | None = None
    weights: Text | None = None
    drop_rate: Annotated[float, number(0, 1, "[)")] = 0.0
    engine: Engine | None = None
    n_epochs: Count | None = None
    batch_size: Count = 64
    micro_batch_size: Count | None = None
    recipe: Annotated[str, choice(*RECIPES)] | None = None
    lr: Annotated[float, number(0, torch.finfo(torch.float32).max, "()")] = 0.1
    weight_decay: Annotated[float, number(0, 1, "[)")] = 1e-4
    valid_size: Annotated[int, integer(0, 2**31 - 1)] | None = None
    image_size: Annotated[int, integer(1, 2**16)] | None = None
    mirror: Switch | None = None
    seed: Annotated[int, integer(0, 2**63 - 1)] | None = 0
    amp: Annotated[str, choice(*AMP_DTYPES)] | None = None
    keep_bottleneck: Switch | None = None
    channels_last: Switch = False
    compile: Switch = False
    cuda_graph: Switch | None = None
    device: Text | None = None
    sync_bn: Switch = False
    workers: Annotated[int, integer(0, 256)] = 2
    stream: Switch | None = None
    resume: Switch | Annotated[str, choice("auto")] = False
    accept_changed_data: Switch = False
    overwrite: Switch = False
    evaluate: Switch | Text = False


@dataclass(frozen=True)
class RunOptions(Options):
    """Checked options, with their defaults filled in. `depth` and `growth_rate` are None for a model of the zoo."""

    engine: str = "best"
    n_epochs: int = 300
    recipe: str = "step"
    seed: int = 0


def check_option(name: str, value: Any) -> None:
    """Raise ValueError unless the option may have this value: one of the rules in its annotation, or None."""
    annotation = Options.__annotations__[name]
    kinds = (annotation,) if hasattr(annotation, "__metadata__") else get_args(annotation)
    rules: list[Rule] = [kind.__metadata__[0] for kind in kinds if hasattr(kind, "__metadata__")]
    if type(None) in kinds:
        rules.append(choice(None))
    needed = ", or ".join(rule.needed.replace("one of None", "None") for rule in rules)
    check(name, value, Rule(needed, lambda value: any(rule.accepts(value) for rule in rules)))


def parse(given: dict[str, Any], efficient_engine: str) -> RunOptions:
    """Check the `given` options and fill in the defaults; `efficient_engine` is what --efficient True means."""
    words: dict[str, Any] = {name: None if (name, value) in NONE else value for name, value in given.items()}
    options = Options(**words)
    if isinstance(options.model, str) and options.model not in VARIANTS:
        create_model(options.model)  # raises an error that lists the names, but for one that labels pixels
    for name, value in asdict(options).items():
        check_option(name, value)
    _refuse_contradictions(options)
    on_digits, from_zoo = options.data is None, options.model is not None
    defaults = {"n_epochs": 20 if on_digits else 300, "recipe": "one_cycle" if on_digits else "step"}
    defaults |= {"depth": None if from_zoo else 22 if on_digits else 100, "growth_rate": None if from_zoo else 12}
    engine = options.efficient
    if isinstance(engine, bool):
        engine = efficient_engine if engine else "plain"
    defaults |= {"seed": secrets.randbits(31), "engine": engine}
    values = asdict(options)
    return RunOptions(**values | {name: default for name, default in defaults.items() if values[name] is None})


def _refuse_contradictions(options: Options) -> None:
    for name in ("resume", "overwrite", "weights"):
        if options.evaluate is not False and getattr(options, name):
            raise ValueError(
                f"found --evaluate and --{name}, but a model that is evaluated is not trained: give one of them"
            )
    contradictions = {
        "found --model with --depth or --growth_rate, but a model of the zoo has its own: leave out one or the other": (
            options.model is not None and (options.depth or options.growth_rate)
        ),
        "found --resume and --overwrite, but a run is either resumed or started over: give one of them": (
            options.resume and options.overwrite
        ),
        "found --accept_changed_data without --resume, but only a run that is resumed had other data: add --resume": (
            options.accept_changed_data and not options.resume
        ),
    }
    for sentence, applies in contradictions.items():
        if applies:
            raise ValueError(sentence)
