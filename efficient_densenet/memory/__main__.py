"""The memory of a training step of a model of the zoo, without running it:

python -m efficient_densenet.memory densenet121 --batch_size 64 --image_size 224 --budget 8GiB
"""

import argparse
import logging
import sys
from typing import Any

import torch

from ..engine.choose import Engine
from ..models.zoo import FC_VARIANTS, VARIANTS, create_model
from .budget import BudgetPlan, Planner, batch_that_fits, keep
from .optimizer_state import OPTIMIZERS
from .peaks import tensor_peak
from .picture import draw
from .predict import predict
from .sizes import format_bytes, parse_bytes
from .step import PRECISIONS, MetaModel, autocast_dtype, default_loss, logger


def main(words: list[str] | None = None) -> None:
    options = make_parser().parse_args(words)
    logger.setLevel(logging.INFO)
    logger.addHandler(progress := logging.StreamHandler())
    try:
        _report(options)
    except (ValueError, OSError, ModuleNotFoundError) as error:
        raise SystemExit(f"error: {error}") from error
    finally:
        logger.removeHandler(progress)


def _report(options: argparse.Namespace) -> None:
    with torch.device("meta"):
        model = create_model(options.model, efficient=options.engine)
    size = options.image_size or (32 if VARIANTS.get(options.model, {}).get("small_inputs", True) else 224)
    image_shape = (model.in_channels, *[size] * model.dims)
    shape = (options.batch_size, *image_shape)
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
        keep(model, plan)
    estimate = predict(model, shape, **settings)
    print(estimate)
    if options.measure:
        peak = _measured_peak(options, shape, estimate.device_type, plan)
        print(f"{'tensor peak, measured':48}{format_bytes(peak):>12}{peak / estimate.tensor_peak:>11.3f}× predicted")
    if options.picture is not None:
        draw(estimate, options.picture, plan and plan.budget)
        print(f"\npicture: {options.picture}")


def _measured_peak(options: argparse.Namespace, shape: tuple[int, ...], device: str, plan: BudgetPlan | None) -> int:
    """The tensor peak of a real step."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("found --measure without a GPU: add --device cpu")
    model = create_model(options.model, efficient=options.engine).to(device)
    if plan is not None:
        keep(model, plan)
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
    parser.add_argument("model", metavar="model", choices=[*VARIANTS, *FC_VARIANTS], help="a model of the zoo")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--image_size", type=int, help="height and width; by default what the model was made for")
    parser.add_argument("--budget", help="bytes such as 8GiB: what a step within them saves instead of recomputing it")
    parser.add_argument("--engine", default=True, choices=[each.value for each in Engine])
    parser.add_argument("--optimizer", default="sgd", choices=list(OPTIMIZERS))
    parser.add_argument("--precision", default="float32", choices=list(PRECISIONS), help="autocast's dtype")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="by default a GPU, if there is one")
    parser.add_argument("--measure", action="store_true", help="run a step, and print its peak beside the predicted")
    parser.add_argument("--picture", metavar="FILE", help="draw the memory over the step")
    return parser


if __name__ == "__main__":
    main(sys.argv[1:])
