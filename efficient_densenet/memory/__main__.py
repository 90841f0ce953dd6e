"""The memory of a training step of a model, and what fits a card, without running it:

python -m efficient_densenet.memory densenet121 --batch_size 64 --image_size 224 --budget 8GiB
python -m efficient_densenet.memory torchvision:densenet121 --card 8GB
python -m efficient_densenet.memory densenet121 --card 8GB --in_channels 1 --num_classes 14 --image_size 512
"""

import argparse
import importlib
import inspect
import json
import logging
import operator
import sys
from typing import Any

import torch
from torch import nn

from ..adapt import make_efficient
from ..engine.choose import Engine
from ..models.arguments import THEIR_WORDS
from ..models.zoo import VARIANTS, create_model
from .budget import BudgetPlan, Planner, batch_that_fits, keep
from .card import describe_card, usable, what_fits
from .meta import OPTIMIZERS
from .peaks import tensor_peak
from .predict import predict
from .sizes import format_bytes, parse_bytes
from .step import PRECISIONS, MetaModel, autocast_dtype, default_loss, logger


def main(words: list[str] | None = None) -> None:
    options = make_parser().parse_args(words)
    logger.setLevel(logging.INFO if options.verbose else logging.WARNING)
    logger.addHandler(progress := logging.StreamHandler())
    try:
        _report(options)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        raise SystemExit(f"error: {error}") from error
    finally:
        logger.removeHandler(progress)


def _report(options: argparse.Namespace) -> None:
    model = _build(options, "meta")
    usual = 32 if VARIANTS.get(options.model, {}).get("small_inputs", ":" not in options.model) else 224
    sides, dims = options.image_size or [usual], options.dims or 2
    channels = getattr(model, "in_channels", options.in_channels or 3)
    image_shape = (channels, *(sides * dims if len(sides) == 1 else sides))
    if options.json and options.card is None:
        raise ValueError("--json prints what fits a card: give --card too")
    if options.card is not None:
        for name in ("measure", "budget", "device"):
            if getattr(options, name):
                raise ValueError(f"found --card, which plans for a GPU's memory alone, with --{name}: leave one out")
        _report_card(options, model, image_shape)
        return
    shape = (64 if options.batch_size is None else options.batch_size, *image_shape)
    settings: dict[str, Any] = {key: getattr(options, key) for key in ("optimizer", "precision", "device")}
    plan = None
    if options.budget is not None:
        budget = parse_bytes("budget", options.budget)
        traced = MetaModel(model, **settings)
        planner = Planner(traced, shape)
        plan = planner.plan(budget)
        print(f"smallest budget, with no bottleneck saved: {format_bytes(planner.smallest)}")
        print(f"largest batch, with no bottleneck saved: {batch_that_fits(traced, image_shape, budget):,}")
        print(f"budget: {plan}\n", flush=True)
        keep(model, plan.kept)
    estimate = predict(model, shape, **settings)
    print(estimate)
    if options.measure:
        peak = _measured_peak(options, shape, estimate.device_type, plan)
        print(f"{'tensor peak, measured':48}{format_bytes(peak):>12}{peak / estimate.tensor_peak:>11.3f}× predicted")


def _build(options: argparse.Namespace, device: str) -> Any:
    given = {name: getattr(options, name) for name in ("in_channels", "num_classes", "dims")}
    arguments = {name: value for name, value in given.items() if value is not None}
    if ":" not in options.model:
        with torch.device(device):
            return create_model(options.model, efficient=options.engine, **arguments)
    sys.path.append("")  # where a file of one's own is
    try:
        build = _resolve(*options.model.split(":", 1))
        theirs = {THEIR_WORDS.get(name, (name,))[0]: name for name in inspect.signature(build).parameters}
        with torch.device(device):
            model = build(**{theirs.get(name, name): value for name, value in arguments.items()})
    except (ImportError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{options.model} built no model: {error}; it is called with --dims, --in_channels and --num_classes: "
            "leave out what it does not take, or give a function of your own, as in my_file:build"
        ) from error
    return make_efficient(model, options.engine)


def _resolve(package: str, name: str) -> Any:
    """What has this name in a module, or in the least nested of the modules that its import has imported."""
    found = importlib.import_module(package)
    if not hasattr(found, name.split(".")[0]):
        inner = [each for key, each in sys.modules.items() if key.startswith(f"{package}.") and name in vars(each)]
        found = min(inner, key=lambda module: module.__name__.count("."), default=found)
    return operator.attrgetter(name)(found)


def _report_card(options: argparse.Namespace, model: nn.Module, image_shape: tuple[int, ...]) -> None:
    """Print a row for each engine and precision when it is known."""
    found = []
    card = describe_card(options.card)
    if not options.json:
        print(f"{options.model} on {'×'.join(map(str, image_shape))}, optimizer {options.optimizer};")
        asked = "" if options.batch_size is None else f"{f'batch of {options.batch_size:,}':>18}"
        print(f"{card}\n")
        print(f"{'engine':12}{'precision':12}{'largest batch':>14}{'peak':>12}{asked}", flush=True)
    engines = ["plain", "shared"] if options.engine is True else [options.engine]
    precisions = [options.precision] if options.precision else ["float32", "bf16"]
    settings: dict[str, Any] = {"engines": engines, "precisions": precisions, "optimizer": options.optimizer}
    for fit in what_fits(model, image_shape[1:], options.card, batch_size=options.batch_size, **settings):
        found.append(fit)
        if not options.json:
            batch = f"{fit.largest_batch:,}" if fit.largest_batch else "none; of one"
            sizes = f"{batch:>14}{format_bytes(fit.peak):>12}"
            if options.batch_size is not None and not fit.refused:
                sizes += f"{format_bytes(fit.sizes[options.batch_size]):>18}"
            print(f"{fit.engine:12}{fit.precision:12}{fit.refused or sizes}", flush=True)
    if options.json:
        sizes = {"card": parse_bytes("card", options.card), "usable": usable(options.card)}
        fits = [{**each._asdict(), "peak": each.peak} for each in found]
        print(json.dumps({"input": image_shape, **sizes, "fits": fits}, indent=2))


def _measured_peak(options: argparse.Namespace, shape: tuple[int, ...], device: str, plan: BudgetPlan | None) -> int:
    """The tensor peak of a real step."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("found --measure without a GPU: add --device cpu")
    model = _build(options, device)
    if plan is not None:
        keep(model, plan.kept)
    x, dtype = torch.randn(shape, device=device), autocast_dtype(options.precision)

    def step() -> None:
        with torch.autocast(device, dtype, enabled=dtype is not None):
            loss = default_loss(model(x))
        loss.backward()

    step()
    return tensor_peak(step, device)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="efficient-densenet memory", description="The memory of a training step, without running it."
    )
    parser.add_argument("model", help="a model of the zoo, or module:function, as torchvision:densenet121")
    parser.add_argument("--batch_size", type=int, help="images in a step; by default 64, or with --card the largest")
    parser.add_argument(
        "--image_size", type=int, nargs="+", help="one number for all sides, or each; by default of the model's data"
    )
    parser.add_argument("--in_channels", type=int, help="channels of the input")
    parser.add_argument("--num_classes", type=int)
    parser.add_argument("--dims", type=int, choices=[1, 2, 3], help="3 for volumes, 1 for signals")
    parser.add_argument("--card", metavar="8GB", help="print the largest batches that fit a GPU of this memory")
    parser.add_argument("--json", action="store_true", help="print what fits a card as JSON")
    parser.add_argument("--budget", help="bytes such as 8GiB: what a step within them saves instead of recomputing it")
    parser.add_argument("--engine", default=True, choices=[each.value for each in Engine])
    parser.add_argument("--optimizer", default="sgd", choices=list(OPTIMIZERS))
    parser.add_argument("--precision", choices=list(PRECISIONS), help="autocast's dtype; by default float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="by default a GPU, if there is one")
    parser.add_argument("--measure", action="store_true", help="run a step, and print its peak beside the predicted")
    parser.add_argument("--verbose", action="store_true", help="say which step is predicted")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
