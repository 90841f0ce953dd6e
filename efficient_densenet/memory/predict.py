"""The memory of a training step, in numbers and as a table."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ..engine.choose import Engine, engine_blocks
from .sizes import format_bytes
from .step import (
    Loss,
    MetaModel,
    OptimizerLike,
    PersistentMemory,
    Precision,
    Shape,
    StepMemory,
    dense_layers,
    engine_of,
)

ENGINES = Engine.PLAIN, Engine.CHECKPOINT, Engine.SHARED


@dataclass(frozen=True)
class MemoryEstimate:
    """The memory of training and inference on inputs of one shape. All sizes are in bytes.

    Attributes:
        input_shape: of a batch.
        device_type: "cpu" or "cuda", for which this is true.
        precision: autocast's dtype, for which this is true.
        persistent: what training holds between steps: parameters, buffers, gradients, the optimizer's state.
        inputs: the batch.
        spare: what libraries may take besides: of the step's peak a hundredth, or a tenth by plain modules on a
            processor; and on a GPU 40 MiB for cuDNN.
        engine: the engine that the model has, "best" if that is chosen for it; "none" in a model without dense blocks.
        num_saved: of how many layers the shared engine saves the bottleneck, as a budget decides.
        step: a training step as the model is.
        by_engine: a training step by each engine that can run the model.
        refused: why another engine cannot, by its name.
        inference: the tensor peak of a forward without gradients.
    """

    input_shape: tuple[int, ...]
    device_type: str
    precision: torch.dtype | None
    persistent: PersistentMemory
    inputs: int
    spare: int
    engine: str
    num_saved: int
    step: StepMemory
    by_engine: dict[str, StepMemory]
    refused: dict[str, str]
    inference: int

    @property
    def tensor_peak(self) -> int:
        """The most that tensors hold at once during a training step, above what is held before it."""
        return self.step.tensor_peak

    @property
    def total(self) -> int:
        """The tensor peak, all that is held before the step, and what libraries may take: the smallest budget."""
        return self.held + self.tensor_peak + self.spare

    @property
    def held(self) -> int:
        """The bytes that are held before a step: the persistent memory and the batch."""
        return self.persistent.total + self.inputs

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def predict(
    model: nn.Module,
    input_shape: Shape,
    *,
    optimizer: OptimizerLike = None,
    precision: Precision = None,
    device: str | torch.device | None = None,
    loss: Loss | None = None,
) -> MemoryEstimate:
    """Predict the memory of `model` on inputs of `input_shape`, from sizes alone: nothing is allocated or computed.

    A copy of the model takes steps on the meta device, which takes seconds whatever the sizes are. What PyTorch's
    operations allocate inside themselves is known for those of DenseNets; for other networks it is less exact.

    Args:
        model: any module; it is not changed, and need not have data.
        input_shape: of a batch.
        optimizer: one that trains `model`, or a class or function that makes one of parameters, or "sgd" (with
            momentum), "adam", "adamw" or "rmsprop"; None for no optimizer.
        precision: autocast's dtype, or its name; None for no autocast.
        device: "cpu" or "cuda", on which the steps would run. Default: the model's device or, for a model on the meta
            device, a GPU if there is one.
        loss: a function of the model's output. Default: the cross entropy of an output (N, classes, ...), the sum of
            any other output.
    """
    from ..adapt.convert import convert  # imports the models, which import this package

    traced = MetaModel(model, optimizer=optimizer, precision=precision, device=device, loss=loss)
    engine = engine_of(traced.model)
    num_saved = sum(bool(layer.keep_bottleneck) for _, _, layer in dense_layers(traced.model))
    step = traced.training_step(input_shape)
    spare = traced.spare(step.tensor_peak)  # by the model's own engine
    inference = traced.inference(input_shape)
    by_engine, refused = dict[str, StepMemory](), dict[str, str]()
    for each in ENGINES if engine_blocks(traced.model) else ():
        convert(traced.model, each.value)
        try:
            by_engine[each.value] = traced.training_step(input_shape)
        except ValueError as error:
            refused[each.value] = str(error)
    return MemoryEstimate(
        tuple(input_shape),
        traced.device_type,
        traced.dtype,
        traced.persistent,
        traced.input_bytes(input_shape),
        spare,
        engine,
        num_saved,
        step,
        by_engine,
        refused,
        inference,
    )


def _lines(estimate: MemoryEstimate) -> Iterator[str]:
    shape = "×".join(map(str, estimate.input_shape))
    precision = "" if estimate.precision is None else f", autocast to {str(estimate.precision).removeprefix('torch.')}"
    yield f"training on {shape}, on {estimate.device_type}{precision}, engine {estimate.engine}"
    yield ""
    persistent, step = estimate.persistent, estimate.step
    rows = {
        "parameters": persistent.parameters + persistent.buffers,
        "gradients": persistent.gradients,
        "optimizer's state": persistent.optimizer_state,
        "batch": estimate.inputs,
        "features, saved for the backward": step.features,
        "scratch, at the worst moment": step.scratch,
        "libraries, at most": estimate.spare,
    }
    for name, size in (*rows.items(), ("peak", estimate.total)):
        yield f"{name:48}{format_bytes(size):>12}"
    yield ""
    yield f"{'part of the model':48}{'saved':>12}{'peak while it runs':>20}"
    for stage in step.stages:
        yield f"{stage.name:48}{format_bytes(stage.saved):>12}{format_bytes(stage.peak):>20}"
    yield ""
    for engine, other in estimate.by_engine.items():
        ratio = other.tensor_peak / max(estimate.by_engine.get("plain", other).tensor_peak, 1)
        saved = f", {estimate.num_saved} bottlenecks saved" if engine == Engine.SHARED and estimate.num_saved else ""
        yield f"{f'tensor peak by engine {engine}{saved}':48}{format_bytes(other.tensor_peak):>12}{ratio:>19.3f}×"
    for engine, reason in estimate.refused.items():
        yield f"engine {engine} cannot run it: {reason}"
    yield f"{'tensor peak of inference':48}{format_bytes(estimate.inference):>12}"
