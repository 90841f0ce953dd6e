"""Evaluating a saved model on the test images of a data set."""

from dataclasses import replace
from pathlib import Path

from . import files
from .data import Dataset, load
from .data.augment import Transform
from .distributed import DistributedContext
from .loop import Trainer
from .models import CONFIG, ModelConfig, describe_classes, load_model, weights_of
from .options import RunOptions


def evaluate(path: Path, options: RunOptions, context: DistributedContext) -> None:
    """Print test loss and error of the model in `path`, on its own data or on --data with the same classes."""
    model, config = load_model(path)
    dataset = _dataset(path, options, config)
    trainer = Trainer(
        model, Transform(config.mean, config.std), replace(options, sync_bn=False, cuda_graph=False), context
    )
    loss, error = trainer.evaluate(dataset.test.to(context.device))
    if context.is_main_process:
        print(f"{path}: {config.name} on {len(dataset.test):,} test images of {dataset.name}")
        print(f"test loss {loss:.4f}, test error {error:.2%}")


def _dataset(path: Path, options: RunOptions, config: ModelConfig) -> Dataset:
    """The data set that the model in `path` was trained on, or that of --data if it has the same classes."""
    data, name = options.data, options.dataset
    if data is None:
        trained = files.load_json(weights_of(path).with_name(CONFIG))["options"]
        data = trained["data"]
        name = name or (data and trained["dataset"])
    dataset = load(data, name, config.image_size, options.workers, options.stream, config.channels, config.value_range)
    if dataset.classes != config.classes:
        raise ValueError(
            f"{dataset.name} has {describe_classes(dataset.classes)}, but {path} was trained on "
            f"{describe_classes(config.classes)}: give --data with the same"
        )
    return dataset
