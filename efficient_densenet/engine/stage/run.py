"""The plan of a stage, from the modules of a block and its consumer: its specification, and where its tensors are.

A model may call a block and the transition after it separately: two stages, the second on the features of the first.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from ..._compilers import specialized
from ..._tensors import CHANNELS_LAST, as_dtype, compute_dtype, memory_format_of
from ..._torch_private import convolution_memory_format
from ...kernels.average_pooling import average_pool_dtype
from ...kernels.max_pooling import max_pool_dtype
from ...kernels.portable import to_pixel_matrix, to_spatial
from ...norms.frozen import eps_of, uses_running_statistics
from ...norms.sync_batch_norm import sync_group
from ..operator import Connected, are_ordinary, run_operator
from ..parts import BlockParts, ConsumerParts, Place, activation_spec, place_of
from ..sharded import run_inside
from .forward import StageInputs
from .masks import PER_BYTE, drawn
from .operator import STAGE
from .running_statistics import NormUpdate, RunningStatistics
from .spec import PER_NORM, ConsumerSpec, LayerSpec, StageSpec


class StageRequest(NamedTuple):
    """What a stage is to return and to save.

    Attributes:
        input_format: the memory format that x and the outputs have in the plain network, None if that is x's own.
        keeps_channels_last: the consumer's output stays in channels_last, in which it is computed, since only another
            stage reads it.
        return_features: it returns the block's output too.
        num_saved: how many of its layers, the last ones, save their bottlenecks if they leave it open; None where no
            layer saves any, since there is no backward.
        room: the columns that its features leave free before and after their own; it returns a `Skip` for the block's
            output then.
        skip: how many channels of its input, the last ones, are stored in the features already.
    """

    input_format: torch.memory_format | None = None
    keeps_channels_last: bool = False
    return_features: bool = False
    num_saved: int | None = 0
    room: tuple[int, ...] = ()
    skip: int = 0


USUAL_REQUEST = StageRequest()
_NO_TENSOR: Place = {"": None}, ""


class StagePlan:
    """The modules of a stage, layers or a consumer or both, as they are run on inputs like `x`.

    Attributes:
        spec: the settings of the modules.
        places: where the parameters of the modules are, four for each norm, as in `NormConv`, then running_mean and
            running_var of each frozen norm.
        sharded: the modules that the stage runs inside of.
        after: as in `ConsumerParts`.
        dropouts: the layer's number, the function and the rate, for each layer with dropout, and then the consumer.
    """

    def __init__(
        self,
        block: BlockParts,
        consumer: ConsumerParts | None,
        x: Tensor,
        request: StageRequest,
        sharded: Sequence[nn.Module] = (),
    ) -> None:
        self.spec = _read_spec(block, consumer, x, request)
        self.sharded, self.after = sharded, None if consumer is None else consumer.after
        units = [unit for layer in block.layers for unit in zip(layer.norms, layer.convolutions, strict=True)]
        units += [] if consumer is None else [(consumer.norm, consumer.conv)]
        self.places: list[Place] = []
        running: list[Place] = []
        updates, bias = [], None
        for (norm, conv), (features, columns, frozen) in zip(units, self.spec.norms, strict=True):
            if norm is None:
                self.places += [_NO_TENSOR] * 2
            elif frozen:
                running += [place_of(norm, "running_mean"), place_of(norm, "running_var")]
            else:
                updates.append(NormUpdate(norm, columns, bias if features is None else None))
            self.places += [] if norm is None else [place_of(norm, "weight"), place_of(norm, "bias")]
            self.places += [_NO_TENSOR] * 2 if conv is None else [place_of(conv, "weight"), place_of(conv, "bias")]
            bias = len(self.places) - 1
        self.num_parameters = len(self.places)
        self.places += running
        self.statistics = RunningStatistics(updates)
        with_dropout = [*block.layers, *([] if consumer is None else [consumer])]
        self.dropouts = [(i, each.dropout, each.drop_rate) for i, each in enumerate(with_dropout) if each.drop_rate]

    @property
    def tensors(self) -> list[Tensor | None]:
        """The parameters as they are now."""
        return [values[name] for values, name in self.places[: self.num_parameters]]

    def why_not_shapes(self, x: Tensor) -> str | None:
        """Why the input and the parameters as they are now do not fit one another, or None."""
        channels = x.shape[1] + self.spec.skip
        if channels != self.spec.in_channels:
            return f"found an input of {channels} channels, where the first norm takes {self.spec.in_channels}"
        return self.spec.why_not_shapes(self.tensors, x.dim() - 2)

    def run(self, x: Tensor, skip: "Skip | None" = None) -> tuple[Any, ...]:
        """The consumer's output, the block's output, or both: the only way into the operator."""
        return run_inside(self.sharded, partial(self._run, skip), x)

    def _run(self, skip: "Skip | None", x: Tensor) -> tuple[Any, ...]:
        if skip is not None:
            return self.apply(x, *self.tensors, skip=skip)
        stored = () if self.spec.layers else stored_features(x, self.spec)
        output, *features = self.apply(x, *self.tensors, stored=stored)
        if self.spec.consumer is not None and self.spec.consumer.pools:
            output = as_dtype(output, average_pool_dtype(output))
        if self.spec.consumer is not None and self.spec.consumer.max_pools:
            output = as_dtype(output, max_pool_dtype(output, output.dtype))
        return (output if self.after is None else self.after(output), *features)  # by ordinary autograd

    def apply(
        self, x: Tensor, *tensors: Tensor | None, stored: Sequence[Tensor] = (), skip: "Skip | None" = None
    ) -> tuple[Any, ...]:
        """The outputs before the operations after the consumer's convolution, with `tensors` as the parameters.

        `stored` are features that a block has stored already, and their statistics.
        """
        running, skipped = [values[name] for values, name in self.places[self.num_parameters :]], []
        masks, parameters = self._dropout_masks(x, tensors), tensors
        if skip is not None:  # `data`, since the block on the way down has saved the features, but not these columns
            features, statistics, spec, _ = skip.stored
            stored, parameters = [features.data], (*tensors, skip.edge)
            skipped = [] if self.spec.frozen else [statistics[:, : spec.order.total]]
        results = run_operator(STAGE, self.spec, StageInputs(x, parameters, running, masks, stored, skipped))
        count = self.spec.num_outputs
        features, statistics, *_ = *stored, *results[count:]
        if not torch.compiler.is_compiling():
            remember_features(self.spec, results[0], features, statistics)
        self.statistics.update(statistics, tensors)
        if self.spec.room:
            shape = torch.Size([len(x), *x.shape[2:]])
            return results[0], Skip(results[1], StoredOutput(features, statistics, self.spec, shape))
        return tuple(results[:count])

    def _dropout_masks(self, x: Tensor, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """What dropout keeps of each layer's output, as bits, and of the consumer's, as bytes. It is drawn in the shape
        and the memory format of the plain layer's output: its random numbers are the plain layer's."""
        if not self.dropouts:
            return []
        shape, num_layers = torch.Size([len(x), *x.shape[2:]]), len(self.spec.layers)
        formats = [self.spec.memory_format(x)] * (num_layers + 1)
        with torch.no_grad():
            if not torch.compiler.is_compiling() and are_ordinary(x) and x.device.type != "meta":
                weights = tensors[2::PER_NORM]
                layouts = tuple((weight.shape, weight.stride()) for weight in weights if weight is not None)
                flags = torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled, torch.get_num_threads()
                formats = _output_formats(self.spec, x.shape, x.device, layouts, flags)
            size = shape.numel(), self.spec.growth_rate
            masks = [torch.zeros(size, dtype=torch.uint8, device=x.device) for _ in range(self.spec.num_masks)]
            for i, dropout, drop_rate in self.dropouts:
                channels = self.spec.growth_rate if i < num_layers else len(cast(Tensor, tensors[2 - PER_NORM]))
                size, options = (len(x), channels, *x.shape[2:]), {"dtype": self.spec.torch_dtype, "device": x.device}
                kept = drawn(torch.empty(size, memory_format=formats[i], **options), dropout, drop_rate)
                if i < num_layers:
                    to_spatial(masks[i // PER_BYTE], shape).add_(kept, alpha=1 << i % PER_BYTE)
                else:
                    masks.append(to_pixel_matrix(kept).to(torch.uint8))
        return masks


class StoredOutput(NamedTuple):
    """The output of a block, (N, *spatial) being its `shape`, as a stage of this specification has stored it."""

    features: Tensor
    statistics: Tensor
    spec: StageSpec
    shape: torch.Size

    def images(self, edge: Tensor | None = None) -> Tensor:
        """The output, for modules that cannot read it where it is; with its place in autograd's graph."""
        order, first = self.spec.order, self.spec.output_order.first
        values = self.spec.values(self.features, self.statistics, order.slice(first, order.total))
        images = to_spatial(values if edge is None else Connected.apply(edge, values), self.shape)
        return images.contiguous(memory_format=self.spec.memory_format(images))


class Skip(NamedTuple):
    """A block's output, which the block of its size on the way up of a U-Net reads where it is stored. `edge` is its
    place in autograd's graph, (pixels, channels) without memory."""

    edge: Tensor
    stored: StoredOutput

    def images(self) -> Tensor:
        return self.stored.images(self.edge)


class BlockFeatures:
    """The features of a block without a consumer, and their statistics, as attributes of the block's node.

    A model may call a block and the transition after it separately. The transition then uses the block's features and
    statistics, which are stored only once. The reference to the features is weak: they live exactly as long as they are
    saved for the block's backward, and are never packed or copied for the consumer.
    """

    def __init__(self, spec: StageSpec, output: Tensor, features: Tensor, statistics: Tensor) -> None:
        self.spec, self.version, self.address = spec, output._version, output.data_ptr()
        self.features, self.statistics = TensorWeakRef(features), statistics


def remember_features(spec: StageSpec, output: Tensor, features: Tensor, statistics: Tensor) -> None:
    """Let what reads a block's output find the features. Only an ordinary output, with a node, has them."""
    if spec.consumer is None and type(output) is Tensor and output.grad_fn is not None:
        output.grad_fn.block_features = BlockFeatures(spec, output, features, statistics)  # pyright: ignore[reportAttributeAccessIssue]


def stored_output(x: Tensor) -> StoredOutput | None:
    """Where the block whose output is x has stored it. None if x is no such output or was changed, or if the features
    do not exist any more."""
    block = getattr(x.grad_fn, "block_features", None)  # no other node has it, as after an in-place operation
    if not isinstance(block, BlockFeatures) or block.version != x._version or block.address != x.data_ptr():
        return None  # `.data` may have been replaced
    features = block.features()
    shape = torch.Size([len(x), *x.shape[2:]])
    return None if features is None else StoredOutput(features, block.statistics, block.spec, shape)


def stored_features(x: Tensor, spec: StageSpec) -> list[Tensor]:
    """The features of the block whose output is x, where they are stored, and, unless the norms are frozen, their
    statistics. The list is empty if the consumer with this specification cannot read them: if they are not all features
    of the matrix, or if it does not normalize as the layers of the block do."""
    stored = None if spec.has_count else stored_output(x)
    if stored is None or stored.spec.new_features_only or stored.spec.skip:
        return []
    features, statistics, block, _ = stored
    if (spec.frozen, spec.eps, spec.sync_group) != (block.frozen, block.eps, block.sync_group):
        return []
    return [features] if spec.frozen else [features, statistics[:, : features.shape[1]]]


@lru_cache(maxsize=256)
def _output_formats(
    spec: StageSpec, size: torch.Size, device: torch.device, weights: Sequence[tuple], flags: tuple
) -> list[torch.memory_format]:
    """The memory format of each plain layer's output on an input of this size, as PyTorch chooses it, by sizes and
    process-wide flags too. `weights` are shapes and strides."""
    formats, of_features, layouts = [], CHANNELS_LAST.get(len(size)), iter(weights)
    if of_features is None or not spec.channels_last:
        of_features = torch.contiguous_format
    options = {"dtype": spec.torch_dtype, "device": device}
    for layer in spec.layers:
        output_format = of_features
        for dilation in (1, layer.dilation)[not layer.width :]:
            shape, stride = next(layouts)
            if shape[1] == 1:  # PyTorch's batch norm returns one channel with contiguous strides
                output_format = torch.contiguous_format
            x = torch.empty(size[0], shape[1], *size[2:], memory_format=output_format, **options)
            weight = torch.empty_strided(shape, stride, **options)
            output_format = convolution_memory_format(x, weight, shape[-1] // 2 * dilation, dilation)
        formats.append(output_format)
        if output_format != of_features:  # features of two formats are concatenated into a contiguous tensor
            of_features = torch.contiguous_format
    for shape, stride in layouts:  # the consumer's
        x = torch.empty(size[0], shape[1], *size[2:], memory_format=of_features, **options)
        formats.append(convolution_memory_format(x, torch.empty_strided(shape, stride, **options), 0, 1))
    return formats


def _read_spec(block: BlockParts, consumer: ConsumerParts | None, x: Tensor, request: StageRequest) -> StageSpec:
    """The specification of these modules. Settings of layers are Python's numbers: modules accept NumPy's too, which
    are equal, but operators do not."""
    norm = consumer.norm if consumer is not None and not block.layers else block.layers[0].norm1
    group, layers = sync_group(norm), []
    first_saved = len(block.layers) - (request.num_saved or 0)
    for i, layer in enumerate(block.layers):
        norm2, activations = layer.norm2, [activation_spec(layer.activation(norm)) for norm in range(2)]
        saves = i >= first_saved if layer.keep_bottleneck is None else bool(layer.keep_bottleneck)
        layers.append(
            LayerSpec(
                0 if norm2 is None else layer.conv1.weight.shape[0],
                int(layer.last_conv.dilation[0]),
                specialized(float(layer.drop_rate)),
                norm2 is not None and request.num_saved is not None and saves,
                norm2 is not None and uses_running_statistics(norm2),
                0.0 if norm2 is None else specialized(float(eps_of(norm2))),
                *activations,
            )
        )
    end, keeps_channels_last = None, False
    if consumer is not None:
        activation = activation_spec(consumer.activation)
        max_pooling = consumer.max_pools, specialized(float(consumer.drop_rate))
        end = ConsumerSpec(
            consumer.conv is not None, consumer.pools, activation, consumer.norm is not None, *max_pooling
        )
        keeps_channels_last = request.keeps_channels_last and consumer.after is None and x.dim() in CHANNELS_LAST
    return StageSpec(
        dtype=str(compute_dtype(x)).removeprefix("torch."),
        channels_last=(request.input_format or memory_format_of(x)) is not torch.contiguous_format,
        keeps_channels_last=keeps_channels_last,
        in_channels=norm.weight.shape[0],
        growth_rate=block.layers[0].last_conv.weight.shape[0] if block.layers else 0,
        newest_first=block.newest_first,
        new_features_only=block.new_features_only,
        return_features=request.return_features,
        room=request.room,
        skip=request.skip,
        frozen=uses_running_statistics(norm),
        eps=specialized(float(eps_of(norm))),
        sync_group=None if group is None else group.name,
        layers=tuple(layers),
        consumer=end,
    )
