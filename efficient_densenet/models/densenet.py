"""The DenseNet: its structure and its parameter names. How a dense block is executed is the engines' business."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy

from .._checks import check_between, check_choice, check_whole
from .._mixins import original_class
from ..engines import dispatch as engines
from ..engines import plain
from ..engines.parts import (
    BlockParts,
    ConsumerParts,
    LayerParts,
    NoPartsError,
    halves,
    register_block,
    register_consumer,
)
from ..engines.plain import RunFirstHalf
from .backbone import FeatureInfo, run_rectified
from .dimensions import CONVOLUTIONS, Modules, modules_for


class DenseLayer(nn.Module):
    """The `growth_rate` new features that a dense block adds in one step, made from all features before them.

    BN-ReLU-1×1-BN-ReLU-3×3 with a bottleneck of `bn_size * growth_rate` channels; BN-ReLU-3×3 where `bn_size` is 0.
    """

    def __init__(
        self,
        num_input_features: int,
        growth_rate: int,
        bn_size: int,
        drop_rate: float,
        keep_bottleneck: bool = False,
        dims: int = 2,
    ) -> None:
        super().__init__()
        modules = modules_for(dims)
        self.drop_rate, self.keep_bottleneck = drop_rate, keep_bottleneck
        self.has_bottleneck = bn_size > 0
        width = bn_size * growth_rate if self.has_bottleneck else growth_rate
        kernel = 1 if self.has_bottleneck else 3
        self.norm1 = modules.Norm(num_input_features)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = modules.Conv(num_input_features, width, kernel, padding=kernel // 2, bias=False)
        if self.has_bottleneck:
            self.norm2 = modules.Norm(width)
            self.relu2 = nn.ReLU(inplace=True)
            self.conv2 = modules.Conv(width, growth_rate, 3, padding=1, bias=False)

    def forward(
        self,
        features: Tensor | Sequence[Tensor],
        run_first_half: RunFirstHalf = plain.run_first_half,
    ) -> Tensor:
        features = [features] if isinstance(features, Tensor) else list(features)
        x = run_first_half(self, features)
        if self.has_bottleneck:
            x = self.conv2(self.relu2(self.norm2(x)))
        return F.dropout(x, self.drop_rate, self.training) if self.drop_rate > 0 else x

    def first_half(self, *features: Tensor) -> Tensor:
        """The first half: what is large and cheap to make again."""
        x = torch.cat(features, 1)  # a copy of a single one too: a ReLU may write into it where the norm is none
        return self.conv1(self.relu1(self.norm1(x)))


class DenseBlock(nn.Module):
    """`num_layers` dense layers, each reading the block's input and everything the layers before it made."""

    def __init__(
        self,
        num_layers: int,
        num_input_features: int,
        growth_rate: int,
        bn_size: int = 4,
        drop_rate: float = 0.0,
        efficient: bool | str = True,
        keep_bottleneck: bool = False,
        dims: int = 2,
    ) -> None:
        super().__init__()
        self.engine = engines.parse(efficient)
        for i in range(num_layers):
            width = num_input_features + i * growth_rate
            layer = DenseLayer(width, growth_rate, bn_size, drop_rate, keep_bottleneck, dims)
            self.add_module(f"denselayer{i + 1}", layer)

    def forward(self, x: Tensor) -> Tensor:
        return engines.run_block(self, x, engines.choose(self, x))

    def run_layers(self, x: Tensor, run_first_half: RunFirstHalf) -> Tensor:
        """The same output, made layer by layer, the first half of each by `run_first_half`."""
        features = [x]
        for layer in self.children():
            features.append(layer(features, run_first_half))
        return torch.cat(features, 1)

    def __prepare_scriptable__(self) -> nn.Module:  # torch.jit.script asks for it first
        raise NotImplementedError("torch.jit.script cannot compile a dense block: use torch.export or torch.jit.trace")


class Transition(nn.Sequential):
    """Between two blocks: fewer channels by a 1×1 convolution, half the height and width by average pooling."""

    def __init__(self, num_input_features: int, num_output_features: int, dims: int = 2) -> None:
        super().__init__()
        modules = modules_for(dims)
        self.norm = modules.Norm(num_input_features)
        self.relu = nn.ReLU(inplace=True)
        self.conv = modules.Conv(num_input_features, num_output_features, kernel_size=1, bias=False)
        self.pool = modules.AvgPool(kernel_size=2, stride=2)


def _layer_parts(layer: nn.Module) -> LayerParts:
    if original_class(layer) is not DenseLayer:
        raise NoPartsError(
            f"found a layer of class {type(layer).__name__}, which may do other things than a dense layer"
        )
    norm2, conv2, relu2 = (layer.norm2, layer.conv2, (layer.relu2,)) if layer.has_bottleneck else (None, None, ())
    return LayerParts(
        layer,
        *(layer.norm1, layer.conv1, norm2, conv2),
        activations=(layer.relu1, *relu2),
        drop_rate=layer.drop_rate if layer.training else 0.0,
        keep_bottleneck=layer.keep_bottleneck,
    )


def _block_parts(block: nn.Module) -> BlockParts:
    return BlockParts(tuple(map(_layer_parts, block.children())))


def _transition_parts(transition: nn.Module) -> ConsumerParts | None:
    if list(transition._modules) != ["norm", "relu", "conv", "pool"]:
        return None
    norm, relu, conv, pool = transition
    pools = halves(pool)
    return ConsumerParts(norm, conv, pools, activations=(relu,), after=None if pools else pool)


register_block(DenseBlock, _block_parts)
register_consumer(Transition, _transition_parts)


class Features(nn.Sequential):
    """Stem, blocks, transitions and the last norm in turn; a block runs together with what consumes it where it can.

    Gives the last one's output, or those of the modules in it that `tapped` names.
    """

    def __init__(self, modules: OrderedDict[str, nn.Module], tapped: Sequence[str] = ()) -> None:
        super().__init__(modules)
        self.tapped = tuple(tapped)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        maps: dict[str, Tensor] = {}
        following = list(self._modules.items())
        x, consumed = self._stem(x)
        following = following[consumed:]
        while following:
            (name, module), *following = following
            if following and isinstance(module, DenseBlock) and type(module).forward is DenseBlock.forward:
                x, consumed = self._stage(name, module, *following[0], x, maps)
                following = following[consumed:]
            else:
                x = module(x)
                if name in self.tapped:
                    maps[name] = x
        if "norm5" in maps:
            maps["norm5"] = F.relu(maps["norm5"])
        return tuple(maps[name] for name in self.tapped) if self.tapped else x

    def _stem(self, x: Tensor) -> tuple[Tensor, int]:
        """What the stem gives, and how many modules have run; or `x` and 0, where they are to run one by one."""
        block = next((module for module in self if isinstance(module, DenseBlock)), None)
        if block is None or any(name in self.tapped for name in list(self._modules)[:3]):
            return x, 0
        return engines.run_stem(list(self), block, x)

    def _stage(
        self, name: str, block: DenseBlock, after: str, consumer: nn.Module, x: Tensor, maps: dict[str, Tensor]
    ) -> tuple[Tensor, int]:
        """What `block` gives, or what follows on it does, and how many modules beside it have run."""
        if f"{after}.relu" in self.tapped:
            x, maps[f"{after}.relu"] = run_rectified(block, consumer, x)
        elif name in self.tapped:
            x, maps[name] = engines.run_tapped(block, consumer, x)
        else:
            x, consumed = engines.run_stage(block, consumer, x)
            if not consumed:
                return x, 0
        if after in self.tapped:
            maps[after] = x
        return x, 1

    def handing_out(self, info: FeatureInfo) -> "Features":
        """The same modules, up to the last that `info` names."""
        names = [name.removeprefix("features.") for name in info.module_name()]
        last, *inside = info.module_name(max(info.out_indices)).removeprefix("features.").split(".")
        kept = OrderedDict(list(self._modules.items())[: list(self._modules).index(last) + 1])
        if inside:
            transition = kept[last]
            kept[last] = nn.Sequential(OrderedDict(norm=transition.norm, relu=transition.relu))
            kept[last].training = transition.training
        handing_out = Features(kept, names)
        handing_out.training = self.training  # and not that of what is inside, which may differ
        return handing_out


class DenseNet(nn.Module):
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
        in_channels: channels of the input pictures.
        init: "fan_out" draws convolutions as the original Torch code did for CIFAR, "fan_in" as torchvision does; the
            default is fan_out with small inputs and fan_in otherwise.
        memory_efficient: torchvision's and timm's word for `efficient`; given, it takes its place.
        keep_bottleneck: True for the shared engine to keep each layer's bottleneck rather than make it again: twice the
            memory, less time. A layer's own attribute of this name can be set at any time.
        dims: 1 for signals (N, channels, length), 2 for pictures, 3 for volumes (N, channels, depth, height, width).
        output_stride: how many pixels of the input, at most, one of the last map stands for. The transitions beyond it
            do not pool, and the 3×3 convolutions after them are dilated.
        features_only: True for a backbone: the model gives a tuple of maps, and has no classifier.
        out_indices, maps: which maps, as `features` takes them.
    """

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
        efficient: bool | str = True,
        *,
        in_channels: int = 3,
        init: str | None = None,
        memory_efficient: bool | str | None = None,
        keep_bottleneck: bool = False,
        dims: int = 2,
        output_stride: int | None = None,
        features_only: bool = False,
        out_indices: int | Sequence[int] | None = None,
        maps: str = "timm",
    ) -> None:
        super().__init__()
        modules = modules_for(dims)
        bn_size = bn_size or 0
        init = init or ("fan_out" if small_inputs else "fan_in")
        efficient = efficient if memory_efficient is None else memory_efficient
        _check_arguments(
            growth_rate,
            block_config,
            compression,
            num_init_features,
            bn_size,
            drop_rate,
            num_classes,
            in_channels,
            init,
        )
        self.in_channels, self.num_classes, self.small_inputs = in_channels, num_classes, small_inputs
        self.dims = dims
        strides = _strides(len(block_config), small_inputs, output_stride)
        self.features = Features(_stem(in_channels, num_init_features, small_inputs, modules))
        channels = num_init_features
        info = [_info(channels, 1 if small_inputs else 2, "conv0" if small_inputs else "relu0")]
        for i, num_layers in enumerate(block_config, start=1):
            block = DenseBlock(num_layers, channels, growth_rate, bn_size, drop_rate, efficient, keep_bottleneck, dims)
            self.features.add_module(f"denseblock{i}", block)
            channels += num_layers * growth_rate
            info.append(_info(channels, strides[i - 1], f"denseblock{i}"))
            if i < len(block_config):
                compressed = max(int(channels * compression), 1)
                self.features.add_module(f"transition{i}", Transition(channels, compressed, dims))
                channels = compressed
        self.features.add_module("norm5", modules.Norm(channels))
        info[-1] = _info(channels, strides[-1], "norm5")
        self.feature_info = FeatureInfo(info, range(len(info)))
        self.num_features = channels
        self.classifier = nn.Linear(channels, num_classes) if num_classes else nn.Identity()
        self._initialise(init)
        if output_stride is not None:
            _dilate(self.features, strides)
        if features_only:
            self._hand_out(out_indices, maps)
        elif out_indices is not None:
            raise ValueError(f"out_indices is {out_indices!r}, but only a model with features_only=True hands out maps")

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        self._check_input(x)
        if self.features_only:
            return self.features(x)
        return self.forward_head(self._rectified_features(x))

    def forward_features(self, x: Tensor) -> Tensor:
        """The last map, normalised and rectified, before it is pooled."""
        self._refuse_backbone("forward_features")
        self._check_input(x)
        return self._rectified_features(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """What the classifier makes of the last map; with `pre_logits`, what it is given."""
        self._refuse_backbone("forward_head")
        x = modules_for(self.dims).adaptive_avg_pool(x, 1)
        x = torch.flatten(x, 1)  # which FX quantisation sees through, where it does not know the method
        return x if pre_logits else self.classifier(x)

    def _rectified_features(self, x: Tensor) -> Tensor:
        # Not in place: a backward hook on the last norm (Grad-CAM) makes its output a view that must not be written.
        return F.relu(self.features(x))

    @property
    def features_only(self) -> bool:
        return bool(self.features.tapped)

    @property
    def smallest_input(self) -> int:
        """The least height and width that leave a pixel to the last map.

        A transition halves rounding down; the ImageNet stem halves twice rounding up.
        """
        reduction = max(self.feature_info.reduction())
        return reduction if self.small_inputs else max(reduction - 3, 1)

    def as_backbone(self, out_indices: int | Sequence[int] | None = None, *, maps: str = "timm") -> "DenseNet":
        """Another model, of the same modules, that gives these maps; see `features`."""
        self._refuse_backbone("as_backbone")
        backbone = type(self).__new__(type(self))
        nn.Module.__init__(backbone)  # with hooks and a list of parts of its own
        own = vars(backbone)
        own |= {name: value for name, value in vars(self).items() if name not in own} | {"training": self.training}
        backbone.features = self.features
        backbone._hand_out(out_indices, maps)
        return backbone

    def _hand_out(self, out_indices: int | Sequence[int] | None, maps: str) -> None:
        self.feature_info = self.feature_info.of_maps(out_indices, maps)
        self.features = self.features.handing_out(self.feature_info)
        self.num_classes, self.num_features = 0, self.feature_info.channels(max(self.feature_info.out_indices))
        self._modules.pop("classifier", None)

    def get_classifier(self) -> nn.Module:
        self._refuse_backbone("get_classifier")
        return self.classifier

    def reset_classifier(self, num_classes: int) -> None:
        """Put a new classifier in the place of the old one; 0 for none, so that the model gives pooled features."""
        self._refuse_backbone("reset_classifier")
        check_whole("num_classes", num_classes, at_least=0)
        like = self.features.norm5.weight
        self.num_classes, self.classifier = num_classes, nn.Identity()
        if num_classes:
            self.classifier = nn.Linear(self.num_features, num_classes, device=like.device, dtype=like.dtype)
            nn.init.zeros_(self.classifier.bias)
        self.classifier.train(self.training)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """timm's word for running the best engine, or plain."""
        self.set_engine(enable)

    def _refuse_backbone(self, asked: str) -> None:
        if self.features_only:
            raise RuntimeError(f"{asked} needs a whole model, but this one has features_only: call it for its maps")

    def set_engine(self, efficient: bool | str) -> "DenseNet":
        """Run every dense block by this engine from now on; nothing else about the model changes."""
        engine = engines.parse(efficient)
        for module in self.modules():
            if isinstance(module, DenseBlock):
                module.engine = engine
        return self

    @property
    def engine(self) -> str:
        """The engine's name in words; what `efficient=True` chose is in brackets."""
        return engines.describe(next(m.engine for m in self.modules() if isinstance(m, DenseBlock)))

    def _initialise(self, init: str) -> None:
        for module in self.modules():
            if isinstance(module, CONVOLUTIONS):
                nn.init.kaiming_normal_(module.weight, mode=init, nonlinearity="relu")
            elif isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def _check_input(self, x: Tensor) -> None:
        if torch.jit.is_tracing() or torch.compiler.is_compiling() or isinstance(x, Proxy):
            return  # A tracer would take the sizes it is shown for the only ones allowed.
        if x.dim() != self.dims + 2 or x.shape[1] != self.in_channels:
            sides = ", ".join(modules_for(self.dims).sides)
            raise ValueError(
                f"found an input of shape {tuple(x.shape)}, but this model needs (N, {self.in_channels}, {sides})"
            )
        if min(x.shape[2:]) < self.smallest_input:
            found, least = ("×".join(map(str, sizes)) for sizes in (x.shape[2:], [self.smallest_input] * self.dims))
            raise ValueError(
                f"found {modules_for(self.dims).inputs} of {found}, but this model's poolings need at least {least}: "
                "enlarge them, or use fewer blocks"
            )


def _stem(
    in_channels: int, num_init_features: int, small_inputs: bool, modules: Modules
) -> OrderedDict[str, nn.Module]:
    if small_inputs:
        return OrderedDict(conv0=modules.Conv(in_channels, num_init_features, kernel_size=3, padding=1, bias=False))
    return OrderedDict(
        conv0=modules.Conv(in_channels, num_init_features, kernel_size=7, stride=2, padding=3, bias=False),
        norm0=modules.Norm(num_init_features),
        relu0=nn.ReLU(inplace=True),
        pool0=modules.MaxPool(kernel_size=3, stride=2, padding=1),
    )


def _info(channels: int, reduction: int, module: str) -> dict[str, Any]:
    return {"num_chs": channels, "reduction": reduction, "module": f"features.{module}"}


def _strides(num_blocks: int, small_inputs: bool, output_stride: int | None) -> list[int]:
    """How many pixels of the input one of each block's stands for."""
    strides = [(1 if small_inputs else 4) * 2**i for i in range(num_blocks)]
    if output_stride is None:
        return strides
    check_choice("output_stride", output_stride, strides)
    return [min(stride, output_stride) for stride in strides]


def _dilate(features: Features, strides: Sequence[int]) -> None:
    """Where a block's stride is not twice that of the block before, the transition between does not pool, and
    convolutions from there on reach as much further."""
    dilation = 1
    for i, (before, after) in enumerate(pairwise(strides), start=1):
        if after == before:
            features.get_submodule(f"transition{i}").pool = nn.Identity()
            dilation *= 2
        for module in features.get_submodule(f"denseblock{i + 1}").modules():
            if isinstance(module, CONVOLUTIONS) and set(module.kernel_size) == {3}:
                module.dilation = module.padding = (dilation,) * len(module.kernel_size)


def _check_arguments(
    growth_rate: Any,
    block_config: Any,
    compression: Any,
    num_init_features: Any,
    bn_size: Any,
    drop_rate: Any,
    num_classes: Any,
    in_channels: Any,
    init: Any,
) -> None:
    check_whole("growth_rate", growth_rate, at_least=1)
    if not isinstance(block_config, Sequence) or isinstance(block_config, str) or not block_config:
        raise ValueError(
            f"block_config is {block_config!r}, but must list the layers of each block, such as (16, 16, 16)"
        )
    for layers in block_config:
        check_whole("a number of layers in block_config", layers, at_least=1)
    check_between("compression", compression, 0, 1, "(]")
    check_whole("num_init_features", num_init_features, at_least=1)
    check_whole("bn_size", bn_size, at_least=0)
    check_between("drop_rate", drop_rate, 0, 1, "[)")
    check_whole("num_classes", num_classes, at_least=0)
    check_whole("in_channels", in_channels, at_least=1)
    check_choice("init", init, ("fan_out", "fan_in"))
