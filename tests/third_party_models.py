"""Small DenseNets of other libraries, and small models whose forward is written as in other repositories."""

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from helpers import assert_all_close, assert_same_buffers, assert_same_gradients, convert_and_report
from torch import Tensor, nn

from efficient_densenet import restore
from efficient_densenet.adapt import Report

GROWTH, CONFIG, START, CLASSES = 4, (2, 3, 1), 6, 5
SHAPE = {"growth_rate": GROWTH, "block_config": CONFIG}


class LayerHalves(nn.Module):
    """The two halves of a dense layer; subclasses add the forward."""

    def __init__(self, channels: int, norm=nn.BatchNorm2d, **options) -> None:
        super().__init__()
        width, activation = 2 * GROWTH, options.get("activation", nn.ReLU(inplace=True))
        self.norm1, self.relu1 = norm(channels), copy.deepcopy(activation)
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.norm2, self.relu2 = norm(width), copy.deepcopy(activation)
        self.conv2 = nn.Conv2d(width, GROWTH, 3, padding=1, bias=False)
        self.drop_rate, self.efficient = options.get("drop_rate", 0.0), options.get("efficient", False)

    def first_half(self, *features: Tensor) -> Tensor:
        return self.conv1(self.relu1(self.norm1(torch.cat(features, 1))))

    def second_half(self, output: Tensor) -> Tensor:
        output = self.conv2(self.relu2(self.norm2(output)))
        return F.dropout(output, self.drop_rate, self.training) if self.drop_rate > 0 else output


class TakesFeatures(LayerHalves):
    """As in gpleiss/efficient_densenet_pytorch: all features are arguments, and torch's checkpointing is an option."""

    def forward(self, *features: Tensor) -> Tensor:
        if self.efficient and any(each.requires_grad for each in features):
            return self.second_half(torch.utils.checkpoint.checkpoint(self.first_half, *features, use_reentrant=True))
        return self.second_half(self.first_half(*features))


class FeaturesBlock(nn.Module):
    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        for i, layer in enumerate(layers, start=1):
            self.add_module(f"denselayer{i}", layer)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.children():
            features.append(layer(*features))
        return torch.cat(features, 1)


def features_block(layer=TakesFeatures, block=FeaturesBlock, depth: int = 2, **options) -> nn.Module:
    """A block of such layers in float64."""
    return block([layer(START + i * GROWTH, **options) for i in range(depth)]).double()


def block_batch() -> Tensor:
    """Three small images for a block."""
    return torch.randn(3, START, 6, 5, dtype=torch.double)


class NewestFirst(nn.Module):
    """As in kuangliu/pytorch-cifar: functional ReLUs, and the newest features come first."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(2 * GROWTH)
        self.conv1 = nn.Conv2d(channels, 2 * GROWTH, kernel_size=1, bias=False)
        self.conv2 = nn.Conv2d(2 * GROWTH, GROWTH, kernel_size=3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output = self.conv2(F.relu(self.bn2(self.conv1(F.relu(self.bn1(x))))))
        return torch.cat([output, x], 1)


class Tiramisu(nn.Module):
    """As in segmentation networks: no bottleneck, layers in a list, and the block concatenates."""

    def __init__(self, channels: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self._layer(channels + i * GROWTH) for i in range(num_layers))

    @staticmethod
    def _layer(channels: int) -> nn.Module:
        conv = nn.Conv2d(channels, GROWTH, 3, padding=1, bias=False)
        return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), conv, nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x)], 1)
        return x


class FunctionalTransition(nn.Module):
    def __init__(self, channels: int, compressed: int) -> None:
        super().__init__()
        self.bn, self.conv = nn.BatchNorm2d(channels), nn.Conv2d(channels, compressed, kernel_size=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(self.conv(F.relu(self.bn(x))), 2)


class Net(nn.Module):
    """A network of three dense blocks `block(channels, num_layers)` and their transitions."""

    def __init__(self, block: Callable[[int, int], nn.Module], functional: bool = False) -> None:
        super().__init__()
        self.features = nn.Sequential(OrderedDict(conv0=nn.Conv2d(3, START, 3, padding=1, bias=False)))
        channels = START
        for i, num_layers in enumerate(CONFIG, start=1):
            self.features.add_module(f"denseblock{i}", block(channels, num_layers))
            channels += num_layers * GROWTH
            if i < len(CONFIG):
                compressed = channels // 2
                transition = FunctionalTransition if functional else pooled_transition
                self.features.add_module(f"transition{i}", transition(channels, compressed))
                channels = compressed
        self.features.add_module("norm_final", nn.BatchNorm2d(channels))
        self.classifier = nn.Linear(channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(F.relu(self.features(x), inplace=True).mean((2, 3)))


def pooled_transition(channels: int, compressed: int) -> nn.Sequential:
    conv = nn.Conv2d(channels, compressed, kernel_size=1, bias=False)
    modules = OrderedDict(norm=nn.BatchNorm2d(channels), relu=nn.ReLU(inplace=True), conv=conv, pool=nn.AvgPool2d(2, 2))
    return nn.Sequential(modules)


def _features_net(layer: type[LayerHalves], **options) -> nn.Module:
    def block(channels: int, num_layers: int) -> nn.Module:
        return FeaturesBlock([layer(channels + i * GROWTH, **options) for i in range(num_layers)])

    return Net(block)


def _newest_first(channels: int, num_layers: int) -> nn.Module:
    return nn.Sequential(*(NewestFirst(channels + i * GROWTH) for i in range(num_layers)))


def _torchvision(**options) -> nn.Module:
    densenet = pytest.importorskip("torchvision.models.densenet")
    return densenet.DenseNet(**SHAPE, num_init_features=START, num_classes=CLASSES, bn_size=2, **options)


def _timm(blur: bool = False, **options) -> nn.Module:
    densenet = pytest.importorskip("timm.models.densenet")
    if blur:
        options |= {"aa_layer": pytest.importorskip("timm.layers").BlurPool2d, "aa_stem_only": False}
    return densenet.DenseNet(**SHAPE, num_classes=CLASSES, bn_size=2, **options)


def _monai(dims: int, **options) -> nn.Module:
    nets = pytest.importorskip("monai.networks.nets")
    return nets.DenseNet(dims, 3, CLASSES, init_features=START, bn_size=2, **SHAPE, **options)


def _torchxrayvision(**options) -> nn.Module:
    models = pytest.importorskip("torchxrayvision.models")
    shape = SHAPE | {"num_init_features": START, "num_classes": CLASSES, "bn_size": 2}
    return models.DenseNet(in_channels=3, **shape, **options)


def _smp() -> nn.Module:
    encoders = pytest.importorskip("segmentation_models_pytorch.encoders.densenet")
    channels, config = (3, START, 14, 19, 13, 10), (2, 3, 1, 1)
    shape = SHAPE | {"block_config": config, "num_init_features": START, "bn_size": 2}
    return encoders.DenseNetEncoder(channels, **shape)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "torchvision": functools.partial(_torchvision, drop_rate=0.2),
    "torchvision_efficient": functools.partial(_torchvision, memory_efficient=True),
    "timm": functools.partial(_timm, proj_drop_rate=0.2),
    "timm_efficient": functools.partial(_timm, memory_efficient=True),
    "timm_blur": functools.partial(_timm, blur=True, stem_type="deep"),
    "timm_deep": functools.partial(_timm, stem_type="deep"),
    "monai": functools.partial(_monai, 2, dropout_prob=0.2),
    "monai_1d": functools.partial(_monai, 1),
    "monai_3d": functools.partial(_monai, 3, dropout_prob=0.2),
    "torchxrayvision": functools.partial(_torchxrayvision, drop_rate=0.2),
    "smp": _smp,
    "gpleiss": functools.partial(_features_net, TakesFeatures, drop_rate=0.2),
    "gpleiss_efficient": functools.partial(_features_net, TakesFeatures, efficient=True),
    "kuangliu": functools.partial(Net, _newest_first, functional=True),
    "tiramisu": functools.partial(Net, Tiramisu),
}
SIDES = {"monai_1d": (65,), "monai_3d": (17, 19, 18)}


def build(name: str) -> nn.Module:
    """The model in float64, with random values in its norms and biases."""
    return randomized(MODELS[name]())


def randomized(model: nn.Module) -> nn.Module:
    """The model in float64, with random values in its vectors: norms and biases."""
    for parameter in model.double().parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=0.5, std=0.3)
    return model


def build_pair(name: str) -> tuple[Any, Any]:
    """The model, and its plain reference."""
    model = build(name)
    return model, plain_reference(name, model)


def convert_pair(model: nn.Module, engine: bool | str = True) -> tuple[Any, Any, Report]:
    """A model, converted; a copy that is not; and the report."""
    plain = copy.deepcopy(model)
    return model, plain, convert_and_report(model, engine)


def assert_restored(model: nn.Module, plain: nn.Module) -> None:
    """The model has the classes of the plain one again, in every module."""
    assert list(map(type, restore(model).modules())) == list(map(type, plain.modules()))


def plain_reference(name: str, model: nn.Module) -> nn.Module:
    """A copy of the model without its library's checkpointing, so that its norms update once."""
    model_copy = MODELS[name]().double()
    model_copy.load_state_dict(model.state_dict())
    for module in model_copy.modules():
        for flag in ("memory_efficient", "grad_checkpointing", "efficient"):
            if hasattr(module, flag):
                setattr(module, flag, False)
    return model_copy


def image_batch(name: str, batch: int = 3) -> Tensor:
    return torch.randn(batch, 3, *SIDES.get(name, (66, 70)), dtype=torch.double)


def loss_of(output: Tensor | Sequence[Tensor]) -> Tensor:
    outputs = [output] if isinstance(output, Tensor) else output
    return sum((each * torch.linspace(-1, 1, each.numel(), dtype=each.dtype).view_as(each)).sum() for each in outputs)


def train(model: nn.Module, x: Tensor, num_steps: int = 3) -> list[Tensor]:
    """The outputs of some training steps and the last gradient of the input; the last gradients stay on the model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    outputs = []
    for i in range(num_steps):
        torch.manual_seed(i)
        optimizer.zero_grad()
        leaf = x.clone().requires_grad_()
        output = model(leaf)
        loss_of(output).backward()
        outputs += [output] if isinstance(output, Tensor) else output
        if i < num_steps - 1:
            optimizer.step()
    return [output.detach() for output in outputs] + [leaf.grad]


def assert_same_training(ours: nn.Module, plain: nn.Module, x: Tensor, num_steps: int = 3) -> None:
    """The state of the random generator is the same too."""
    results = [[*train(each, x, num_steps), torch.get_rng_state()] for each in (ours, plain)]
    assert_all_close(*results)
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)
