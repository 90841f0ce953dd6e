"""Is a trained model as good when it is run in other ways? Its test error by each of them.

    python benchmarks/robustness.py                                  the digits of checkpoints/
    python benchmarks/robustness.py --checkpoint checkpoints/digits --ways plain,bf16

Prints a Markdown table, and writes robustness_<name of the checkpoint>.csv to benchmarks/results.
"""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import rows as results
import torch
from methods import as_list
from options import run_command
from torch import Tensor, nn

from efficient_densenet._extras import need
from efficient_densenet.engine import choose
from efficient_densenet.models.densenet import DenseNet
from efficient_densenet.models.layers import DenseBlock

sys.path.append(str(results.ROOT / "demos"))
from training.data.augment import Transform
from training.models import ModelConfig, load_model
from training.options import RunOptions
from training.run import dataset_of_run

BATCH_SIZE = 100

Forward = Callable[[Tensor], Tensor]


def measure(checkpoint: str = "", data: str | None = None, ways: Any = None, folder: str = "") -> None:
    """Measure the test error of a model in several ways, and write a CSV file.

    Args:
        checkpoint: the directory of a run of demos/cp_demo.py. Default: checkpoints/digits.
        data: the data set, as the demos take it. Default: that of the run.
        ways: of plain, shared, bf16, channels_last, torchvision and onnxruntime. Default: all; plain in any case.
        folder: where to write the CSV file. Default: benchmarks/results.
    """
    names = as_list(ways) if ways else list(WAYS)
    if unknown := [name for name in names if name not in WAYS]:
        raise ValueError(f"unknown way {unknown[0]!r}: there are {', '.join(WAYS)}")
    path = Path(checkpoint) if checkpoint else results.ROOT / "checkpoints" / "digits"
    _, config = load_model(path)
    test = dataset_of_run(path, RunOptions(data=data), config).test
    outputs = {name: _outputs(path, config, test, name) for name in WAYS if name in ("plain", *names)}
    measured = [_row(path.name, name, logits, outputs["plain"], test.labels) for name, logits in outputs.items()]
    print(table(measured))
    target = (Path(folder) if folder else results.RESULTS) / f"robustness_{path.name}.csv"
    results.write(target, measured)


@torch.no_grad()
def _outputs(path: Path, config: ModelConfig, test: Any, way: str) -> Tensor:
    model, _ = load_model(path)
    normalize = Transform(config.mean, config.std, padding=0, horizontal_flip=False).normalize
    size = (BATCH_SIZE, config.channels, config.image_size, config.image_size)
    forward = WAYS[way](model, torch.zeros(size))
    batches = torch.arange(len(test)).split(BATCH_SIZE)
    return torch.cat([forward(normalize(images)).float() for images, _ in test.fetch(batches)])


def _row(checkpoint: str, way: str, logits: Tensor, plain: Tensor, labels: Tensor) -> dict[str, Any]:
    return {
        "checkpoint": checkpoint,
        "way": way,
        "images": len(labels),
        "test_error": f"{(logits.argmax(1) != labels).double().mean().item():.4f}",
        "other_classes": int((logits.argmax(1) != plain.argmax(1)).sum()),
        "largest_difference": f"{((logits - plain).abs().max() / plain.abs().max()).item():.1e}",
        **results.provenance(),
    }


def table(measured: list[dict[str, Any]]) -> str:
    """The rows as a Markdown table."""
    lines = ["| run as | test error | images in another class than plain's | outputs' largest difference |"]
    lines.append("|---|---:|---:|---:|")
    for row in measured:
        error = f"{float(row['test_error']):.2%}"
        lines.append(f"| `{row['way']}` | {error} | {row['other_classes']} | {row['largest_difference']} |")
    return "\n".join(lines)


# The ways: a function from normalized images to outputs


def _plain(model: DenseNet, images: Tensor) -> Forward:
    return model.set_engine("plain")


def _shared(model: DenseNet, images: Tensor) -> Forward:
    model.set_engine("shared")

    def forward(images: Tensor) -> Tensor:
        with mock.patch.object(choose, "_has_faster_forward", return_value=True):  # not plain for want of gradients
            return model(images)

    return forward


def _bf16(model: DenseNet, images: Tensor) -> Forward:
    forward = _shared(model, images)

    def under_autocast(images: Tensor) -> Tensor:
        with torch.autocast(images.device.type, torch.bfloat16):
            return forward(images)

    return under_autocast


def _channels_last(model: DenseNet, images: Tensor) -> Forward:
    forward = _shared(model.to(memory_format=torch.channels_last), images)
    return lambda images: forward(images.contiguous(memory_format=torch.channels_last))


def _torchvision(model: DenseNet, images: Tensor) -> Forward:
    """torchvision's own class with these weights, strictly. A model for small images has another stem there."""
    densenet = need("torchvision.models", extra="bench").DenseNet
    blocks = [block for block in model.modules() if isinstance(block, DenseBlock)]
    layer: Any = next(blocks[0].children())
    block_config = [len(list(block.children())) for block in blocks]
    other = densenet(
        layer.conv2.out_channels,
        block_config,
        model.features.conv0.out_channels,
        num_classes=model.classifier.out_features,
    )
    other.features.conv0 = model.features.conv0
    if not hasattr(model.features, "pool0"):
        for name in ("norm0", "relu0", "pool0"):
            setattr(other.features, name, nn.Identity())
    other.load_state_dict(model.state_dict())
    return other.eval()


def _onnxruntime(model: DenseNet, images: Tensor) -> Forward:
    runtime = need("onnxruntime", extra="bench")
    batch = torch.export.Dim("batch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own
        program = torch.onnx.export(model, (images,), dynamo=True, dynamic_shapes={"x": {0: batch}}, verbose=False)
    content = program.model_proto.SerializeToString()
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda images: torch.from_numpy(session.run(None, {name: images.numpy()})[0])


WAYS: dict[str, Callable[[DenseNet, Tensor], Forward]] = {
    "plain": _plain,
    "shared": _shared,
    "bf16": _bf16,
    "channels_last": _channels_last,
    "torchvision": _torchvision,
    "onnxruntime": _onnxruntime,
}


if __name__ == "__main__":
    run_command(measure)
