"""The DenseNet: a classifier on `features`, or a backbone. The engines decide how a dense block is run."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from .._checks import check, choice, integer, number
from .._dimensions import DIMENSIONS
from ..engine.choose import EngineName
from .activations import ActivationFactory
from .base import DenseModel, check_architecture
from .budget import MemoryBudget
from .dimensions import CONVOLUTIONS
from .features import block_strides, build_features, dilate
from .layers import DenseBlock


class DenseNet(DenseModel):
    """A densely connected network (Huang et al., https://arxiv.org/abs/1608.06993), with or without bottlenecks.

    Args:
        growth_rate: channels that each layer adds (k in the paper).
        block_config: layers in each dense block; any number of blocks.
        compression: share of the channels that a transition keeps, in (0, 1].
        num_init_features: channels of the first convolution.
        bn_size: bottleneck width in multiples of `growth_rate`; 0 or None for layers without a bottleneck.
        drop_rate: dropout after each layer's last convolution.
        num_classes: size of the classifier's output; 0 makes it the identity, for pooled features.
        small_inputs: True for a 3×3 stem (CIFAR), False for the 7×7 stem with pooling (ImageNet).
        efficient: True for the best engine here, False for "plain", or an engine's name.
        in_channels: channels of the input images.
        init: "fan_out" draws convolutions as the original Torch code did for CIFAR, "fan_in" as torchvision does; the
            default is fan_out with small inputs and fan_in otherwise.
        memory_efficient: torchvision's and timm's name for `efficient`, which it replaces if given.
        keep_bottleneck: True makes the shared engine save each layer's bottleneck instead of recomputing it: this takes
            twice the memory and less time. False recomputes each. None saves those that leave a step's peak as it is,
            if `efficient` is True. A layer's own attribute of this name can be set at any time.
        memory_budget: bytes such as "6GiB" for all tensors of a training step. The first step on inputs of a shape
            decides which bottlenecks are saved, as by `memory.set_memory_budget`, which also knows the optimizer. Call
            that before `torch.compile`, under which nothing is decided.
        dims: 1 for signals (N, channels, length), 2 for images, 3 for volumes (N, channels, depth, height, width).
        output_stride: the largest stride of the last feature map with respect to the input. Transitions that would
            exceed it do not pool, and the 3×3 convolutions after them are dilated.
        features_only: True for a backbone: the model returns a tuple of feature maps, and has no classifier.
        out_indices: which maps a backbone returns, as in `features`.
        maps: what they are, as in `features`.
        activation: a name, "relu", "relu6", "leaky_relu", "prelu", "elu", "silu", "gelu" or "mish", also as torch
            writes it ("LeakyReLU"), or a class or function that makes a module: `activation=lambda: nn.LeakyReLU(0.2)`.
            Modules keep the names `relu0` to `relu5`, under which a PReLU's weights are in the state dict; its blocks
            run by `checkpoint`.
    """

    memory_budget: MemoryBudget | None = None  # also of models that were pickled by earlier versions

    def __init__(
        self,
        growth_rate: int = 12,
        block_config: Sequence[int] = (16, 16, 16),
        compression: float = 0.5,
        num_init_features: int = 24,
        bn_size: int | None = 4,
        drop_rate: float = 0.0,
        num_classes: int = 10,
        small_inputs: bool = True,
        efficient: bool | EngineName = True,
        *,
        in_channels: int = 3,
        init: Literal["fan_out", "fan_in"] | None = None,
        memory_efficient: bool | EngineName | None = None,
        keep_bottleneck: bool | None = None,
        memory_budget: int | str | None = None,
        dims: int = 2,
        output_stride: int | None = None,
        features_only: bool = False,
        out_indices: int | Sequence[int] | None = None,
        maps: str = "timm",
        activation: str | ActivationFactory = "relu",
    ) -> None:
        super().__init__()
        self._keep_arguments(locals())
        bn_size, init = bn_size or 0, init or ("fan_out" if small_inputs else "fan_in")
        efficient = efficient if memory_efficient is None else memory_efficient
        check_architecture(growth_rate, block_config, num_init_features)
        check("compression", compression, number(0, 1, "(]"))
        check("bn_size", bn_size, integer(0))
        check("drop_rate", drop_rate, number(0, 1, "[)"))
        check("num_classes", num_classes, integer(0))
        check("in_channels", in_channels, integer(1))
        check("init", init, choice("fan_out", "fan_in"))
        self.in_channels, self.num_classes = in_channels, num_classes
        self.small_inputs, self.dims = small_inputs, dims
        self.memory_budget = None if memory_budget is None else MemoryBudget(memory_budget)

        def make_block(num_layers: int, channels: int) -> DenseBlock:
            settings = growth_rate, bn_size, drop_rate, efficient, keep_bottleneck, dims
            return DenseBlock(num_layers, channels, *settings, activation=activation)

        strides = block_strides(len(block_config), small_inputs, output_stride)
        structure = block_config, num_init_features, compression, strides, make_block
        self.features, self.feature_info = build_features(
            *structure, in_channels=in_channels, small_inputs=small_inputs, dims=dims, activation=activation
        )
        self.num_features = self.feature_info.channels(-1)
        self.classifier = nn.Linear(self.num_features, num_classes) if num_classes else nn.Identity()
        self._initialize(init)
        if output_stride is not None:
            dilate(self.features, strides)
        if features_only:
            self._become_backbone(out_indices, maps)
        elif out_indices is not None:
            raise ValueError(f"out_indices is {out_indices!r}, but only a model with features_only=True returns maps")

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        self._check_input(x)
        if self.memory_budget is not None:
            self.memory_budget.prepare(self, x)
        if self.features_only:
            return self.features(x)
        return self.forward_head(self._rectified_features(x))

    def forward_features(self, x: Tensor) -> Tensor:
        """The last feature map, after the last norm and its activation, before pooling."""
        self._refuse_backbone("forward_features")
        self._check_input(x)
        return self._rectified_features(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """The logits of a last feature map; with `pre_logits`, the classifier's input."""
        self._refuse_backbone("forward_head")
        x = DIMENSIONS[self.dims].adaptive_avg_pool(x, 1)
        x = torch.flatten(x, 1)  # FX quantization knows this function, but not the method
        return x if pre_logits else self.classifier(x)

    def _rectified_features(self, x: Tensor) -> Tensor:
        # Not in place: a backward hook on the last norm (Grad-CAM) makes its output a view that must not be written.
        return self.features.last_activation(self.features(x))

    @property
    def features_only(self) -> bool:
        return bool(self.features.taps)

    def _smallest_input(self, pixels: int) -> int:
        # A transition halves and rounds down; the ImageNet stem halves twice and rounds up.
        size = pixels * max(self.feature_info.reduction())
        return size if self.small_inputs else max(size - 3, 1)

    def _last_block(self) -> nn.Module:
        return [self.features, *(module for module in self.features if isinstance(module, DenseBlock))][-1]

    def as_backbone(self, out_indices: int | Sequence[int] | None = None, *, maps: str = "timm") -> "Backbone":
        """Another model with the same modules that returns these feature maps; see `features`."""
        self._refuse_backbone("as_backbone")
        backbone: Any = type(self).__new__(type(self))
        nn.Module.__init__(backbone)  # gives it its own hooks and dict of submodules
        own = vars(backbone)
        own |= {name: value for name, value in vars(self).items() if name not in own} | {"training": self.training}
        backbone.features = self.features
        backbone._become_backbone(out_indices, maps)
        return backbone

    def _become_backbone(self, out_indices: int | Sequence[int] | None, maps: str) -> None:
        self.feature_info = self.feature_info.of_maps(out_indices, maps)
        self.features = self.features.tapped(self.feature_info)
        maps_only = {"features_only": True, "out_indices": self.feature_info.out_indices, "maps": maps}
        self.arguments = {**self.arguments, **maps_only}
        self.num_classes, self.num_features = 0, self.feature_info.channels(max(self.feature_info.out_indices))
        self._modules.pop("classifier", None)

    def get_classifier(self) -> nn.Module:
        self._refuse_backbone("get_classifier")
        return self.classifier

    def reset_classifier(self, num_classes: int) -> None:
        """Replace the classifier; with 0 classes, the model returns pooled features."""
        self._refuse_backbone("reset_classifier")
        check("num_classes", num_classes, integer(0))
        like = self.features.norm5.weight
        self.num_classes, self.classifier = num_classes, nn.Identity()
        self.arguments = {**self.arguments, "num_classes": num_classes}
        if num_classes:
            self.classifier = nn.Linear(self.num_features, num_classes, device=like.device, dtype=like.dtype)
            nn.init.zeros_(self.classifier.bias)
        self.classifier.train(self.training)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """timm's name for running the best engine, or plain."""
        self.set_engine(enable)

    def _refuse_backbone(self, method: str) -> None:
        if self.features_only:
            raise RuntimeError(f"{method} needs a whole model, but this one has features_only: call it for its maps")

    def _initialize(self, init: Literal["fan_out", "fan_in"]) -> None:
        for module in self.modules():
            if isinstance(module, CONVOLUTIONS):
                nn.init.kaiming_normal_(module.weight, mode=init, nonlinearity="relu")
            elif isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)


if TYPE_CHECKING:

    class Backbone(DenseNet):
        """A `DenseNet` that returns feature maps."""

        __call__: Callable[[Tensor], tuple[Tensor, ...]]


def features(model: nn.Module, out_indices: int | Sequence[int] | None = None, *, maps: str = "timm") -> "Backbone":
    """`model` as a backbone of the same modules, which returns a tuple of the maps of `out_indices`.

    Args:
        model: a `DenseNet`, which does not change. Model and backbone share their parameters, training mode and
            engine.
        out_indices: 0 for the stem's map, i for block i, negative from the end; a single number n for the last n maps;
            all maps by default.
        maps: "raw" for the blocks' outputs; "normalised_rectified" for the outputs of the norm and ReLU that follow;
            "timm" for timm's maps, which are raw except for the last map.

    Examples:
        >>> c2, c3, c4 = features(densenet121(), (2, 3, 4))(images)

    torchvision's `BackboneWithFPN`, which runs modules one by one, takes `model.features` and {"denseblock2": "0", …}.
    """
    as_backbone = getattr(model, "as_backbone", None)
    if as_backbone is None:
        raise TypeError(
            f"found a {type(model).__name__}, but features takes a DenseNet of this package: for another library's, "
            "use its own features or torchvision.models.feature_extraction"
        )
    return as_backbone(out_indices, maps=maps)
