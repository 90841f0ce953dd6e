"""A DenseNet as a backbone: its maps, their feature_info, the model that it is taken from, and detection."""

import copy
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from grids import grid
from helpers import (
    FAMILIES,
    assert_all_close,
    assert_close,
    assert_same_buffers,
    assert_same_gradients,
    random_images,
    small_model,
    with_engine,
)
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FasterRCNN, FastRCNNPredictor
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign

from efficient_densenet import DenseNet, create_model, features
from efficient_densenet.memory import tensor_peak
from efficient_densenet.models.backbone import MAPS

INDICES = [None, (1, 2), (0, 3), (2,), (0,), 1, (-1, 1)]


def _reference_maps(model: DenseNet, x: Tensor, maps: str) -> list[Tensor]:
    """All maps, computed by calling one module after the other."""
    outputs, parts = [], model.features
    last = max(int(name.removeprefix("denseblock")) for name in parts._modules if name.startswith("denseblock"))
    for name, module in parts.named_children():
        if name.startswith("transition"):
            rectified = F.relu(module.norm(x))
            x = module.pool(module.conv(rectified))
            if maps == "normalised_rectified":
                outputs.append(rectified)
            continue
        if name == "pool0" or (name == "denseblock1" and model.small_inputs):
            outputs.append(x)
        x = module(x)
        if name == "norm5" and maps != "raw":
            outputs.append(F.relu(x))
        elif name.startswith("denseblock") and (maps == "raw" or (maps == "timm" and name != f"denseblock{last}")):
            outputs.append(x)
    return outputs


def _step(run, x: Tensor) -> list[Tensor]:
    """The maps and the input's gradient, where each map contributes a different gradient."""
    torch.manual_seed(1)
    x = x.detach().requires_grad_()
    outputs = run(x)
    sum(((i + 1) * y).sin().sum() for i, y in enumerate(outputs)).backward()
    return [*(y.detach() for y in outputs), x.grad]


@pytest.mark.parametrize(
    *grid(
        lambda family, out_indices, **_: family == "bc" or out_indices in (None, (2,)),
        family=["bc", "imagenet"],
        maps=MAPS,
        out_indices=INDICES,
    )
)
def test_chosen_maps_and_gradients_match_plain(family, maps, out_indices):
    full_model = small_model(family, efficient=False, drop_rate=0.1)
    backbone = features(with_engine(full_model, "shared"), out_indices, maps=maps)
    chosen, count = backbone.feature_info.out_indices, len(FAMILIES[family]["block_config"]) + 1
    if out_indices is None or out_indices == 1:  # the last one
        assert list(chosen) == list(range(count) if out_indices is None else [count - 1])
    x = random_images(family, batch=3)

    def reference(x: Tensor) -> list[Tensor]:
        maps_of_all_stages = _reference_maps(full_model, x, maps)
        return [maps_of_all_stages[i] for i in chosen]

    assert_all_close(_step(backbone, x), _step(reference, x))
    assert_same_gradients(backbone, full_model)
    for name, buffer in backbone.named_buffers():
        assert_close(buffer, full_model.get_buffer(name))
    with_grad = {name for name, p in full_model.named_parameters() if p.grad is not None}
    assert with_grad == dict(backbone.named_parameters()).keys()  # parameters without a gradient are removed


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("pool", nn.MaxPool2d(2)),
        ("pool", nn.AvgPool1d(2)),
        ("conv", nn.Conv2d(14, 7, 3, padding=1, bias=False)),
        ("conv", nn.Conv2d(14, 7, 1, stride=2, bias=False)),
        ("conv", nn.Sequential(nn.Conv2d(14, 7, 1, bias=False), nn.Tanh())),
    ],
    ids=["max", "of signals", "3×3", "stride", "tanh"],
)
@pytest.mark.parametrize("is_joined", [True, False])
def test_maps_of_a_transition_whose_pooling_does_not_commute_with_its_convolution(name, module, is_joined):
    full_model = DenseNet(4, (2, 1), num_init_features=6, compression=0.5, small_inputs=True, num_classes=3).double()
    setattr(full_model.features.transition1, name, copy.deepcopy(module).double())
    full_model.features.transition1.norm.eps = full_model.features.denseblock1.denselayer1.norm1.eps * (
        1 if is_joined else 100
    )
    plain, x = with_engine(full_model, "plain"), torch.randn(3, 3, 9, 8, dtype=torch.double)
    if isinstance(module, nn.AvgPool1d):
        for model in (full_model, plain):
            with pytest.raises(RuntimeError):
                model(x)
        return
    for run in (full_model, features(full_model, maps="normalised_rectified")):
        compared = plain if run is full_model else features(plain, maps="normalised_rectified")
        assert_all_close(as_tuple(run(x)), as_tuple(compared(x)))


def as_tuple(outputs):
    return outputs if isinstance(outputs, tuple) else (outputs,)


@pytest.mark.parametrize("maps", MAPS)
@pytest.mark.parametrize("family", ["bc", "basic", "imagenet"])
def test_feature_info_describes_the_maps(family, maps):
    model = small_model(family, features_only=True, maps=maps).eval()
    info, x, seen = model.feature_info, random_images(family, batch=1), {}
    for name in info.module_name():
        model.get_submodule(name).register_forward_hook(lambda *args, name=name: seen.update({name: args[2]}))
    described = zip(info.channels(), info.reduction(), info.module_name(), strict=True)
    for y, (channels, reduction, name) in zip(model(x), described, strict=True):
        assert torch.equal(y, F.relu(seen[name]) if name.endswith("norm5") else seen[name])
        assert y.shape[1] == channels
        assert all(abs(actual - side / reduction) <= 1 for actual, side in zip(y.shape[2:], x.shape[2:], strict=True))
    assert model.num_features == info.channels()[-1]


@pytest.mark.parametrize("out_indices", [(0, 1, 2, 3, 4), (1, 3), (4,), (2,)])
def test_maps_and_feature_info_match_timm(out_indices):
    timm = pytest.importorskip("timm")
    config = {"growth_rate": 4, "block_config": (1, 2, 1, 1)}
    cfg = {"features_only": True, "out_indices": out_indices, **config}
    reference = timm.create_model("densenet121", pretrained=False, **cfg).double().eval()
    backbone = create_model("densenet121", num_init_features=8, **cfg).double().eval()
    backbone.load_state_dict({k.replace("features_", "features.", 1): v for k, v in reference.state_dict().items()})
    x = random_images("imagenet", batch=2)
    assert_all_close(backbone(x), reference(x))
    assert backbone.feature_info.channels() == reference.feature_info.channels()
    assert backbone.feature_info.reduction() == reference.feature_info.reduction()
    names = [name.replace("relu0", "norm0") for name in backbone.feature_info.module_name()]
    assert names == reference.feature_info.module_name()  # timm's norm0 contains the ReLU
    assert backbone.feature_info.channels(2) == reference.feature_info.channels(2)
    assert backbone.feature_info.get_dicts(["num_chs"], [0, 1]) == reference.feature_info.get_dicts(["num_chs"], [0, 1])
    assert len(backbone.feature_info) == len(reference.feature_info)
    assert backbone.feature_info[1]["num_chs"] == reference.feature_info[1]["num_chs"]


def test_features_does_not_change_the_model():
    full_model = small_model("bc").eval()
    full_model.features.denseblock1.denselayer1.norm2.train()
    x, keys = random_images("bc"), list(full_model.state_dict())
    before = copy.deepcopy(full_model).eval()(x).detach()
    calls = []
    full_model.register_forward_hook(lambda *_: calls.append(0))
    backbone = features(full_model, (1, 2), maps="normalised_rectified")
    assert backbone.features.denseblock1 is full_model.features.denseblock1
    assert backbone.features.transition2.norm is full_model.features.transition2.norm
    in_training = [name for name, module in backbone.named_modules() if module.training]
    assert in_training == ["features.denseblock1.denselayer1.norm2"]
    backbone.eval()(x)
    assert not calls
    assert_close(full_model(x).detach(), before)
    assert list(full_model.state_dict()) == keys
    assert full_model.feature_info.module_name()[-1] == "features.norm5"
    with torch.no_grad():
        backbone.features.conv0.weight.zero_()
    assert full_model.features.conv0.weight.abs().sum() == 0


@pytest.mark.parametrize(("maps", "allowed"), [("raw", 0.02), ("timm", 0.02), ("normalised_rectified", 0.6)])
def test_memory_of_returned_maps(maps, allowed):
    """`allowed` is the overhead relative to the size of the returned maps.

    Rectified maps need a buffer for the sum of the gradients from the caller and from the next stage.
    """

    def step(model, grads):
        torch.autograd.backward(model(x), grads)

    x = torch.randn(4, 3, 32, 32)
    settings = {"efficient": "shared", "block_config": (8, 8, 8), "features_only": True, "maps": maps}
    model, last_map_only = (create_model("densenet_bc_100_12", **settings, out_indices=each) for each in (None, (3,)))
    grads = [torch.randn_like(y) for y in model(x)]  # allocated by the caller, not counted
    map_bytes = sum(grad.numel() * grad.element_size() for grad in grads[:-1])
    peaks = []
    for backbone, map_grads in ((last_map_only, grads[-1:]), (model, grads)):
        step(backbone, map_grads)
        peaks.append(tensor_peak(lambda backbone=backbone, map_grads=map_grads: step(backbone, map_grads)))
    assert peaks[1] <= peaks[0] + (1 + allowed) * map_bytes


@pytest.mark.parametrize("out_indices", [(), (4,), (0, 0), (1, -3), (-5,), (1.5,), 0, 9, -9])
def test_invalid_out_indices_raise(out_indices):
    with pytest.raises(ValueError, match=r"out_indices is .*, but must list some of 0 to 3, each once"):
        features(small_model("bc"), out_indices)


def test_invalid_arguments_and_whole_model_methods_raise():
    with pytest.raises(ValueError, match="maps is 'all', but must be one of 'timm', 'raw', 'normalised_rectified'"):
        features(small_model("bc"), maps="all")
    with pytest.raises(TypeError, match="found a Linear, but features takes a DenseNet of this package"):
        features(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="output_stride is 3, but must be one of 4, 8, 16, 32"):
        small_model("imagenet", output_stride=3)
    with pytest.raises(ValueError, match="only a model with features_only=True returns maps"):
        small_model("bc", out_indices=(1,))
    backbone = small_model("bc", features_only=True)
    for call in (
        lambda: features(backbone),
        lambda: backbone.forward_features(random_images("bc")),
        lambda: backbone.reset_classifier(3),
        lambda: backbone.get_classifier(),
    ):
        with pytest.raises(RuntimeError, match="needs a whole model, but this one has features_only"):
            call()
    assert small_model("bc", features_only=True, out_indices=(0,)).smallest_input == 1


def test_forward_features_forward_head_and_reset_classifier():
    timm = pytest.importorskip("timm")
    config = {"growth_rate": 4, "block_config": (1, 2, 1, 1)}
    reference = timm.create_model("densenet121", num_classes=5, **config).double().eval()
    model = create_model("densenet121", num_init_features=8, num_classes=5, **config).double().eval()
    model.load_state_dict(reference.state_dict())
    x = random_images("imagenet", batch=2)
    maps = model.forward_features(x)
    assert_close(maps, reference.forward_features(x))
    assert_close(model.forward_head(maps), reference(x))
    assert_close(model.forward_head(maps, pre_logits=True), reference.forward_head(maps, pre_logits=True))
    assert model.num_features == reference.num_features
    assert model.get_classifier() is model.classifier
    model.reset_classifier(7)
    assert (model.num_classes, model(x).shape, model.classifier.weight.dtype) == (7, (2, 7), torch.double)
    assert not model.classifier.training
    model.reset_classifier(0)
    assert torch.equal(model(x), model.forward_head(maps, pre_logits=True))
    with pytest.raises(ValueError, match="num_classes is -1"):
        model.reset_classifier(-1)
    model.set_grad_checkpointing(False)
    assert model.engine == "plain"
    model.set_grad_checkpointing()
    assert model.engine == "best"


@pytest.mark.parametrize("stride", [8, 16, 32])
def test_output_stride_replaces_stride_by_dilation(stride):
    torch.manual_seed(2)
    usual = small_model("imagenet", efficient=False)
    torch.manual_seed(2)
    dilated = small_model("imagenet", efficient=False, output_stride=stride)
    dilated.load_state_dict(usual.state_dict())
    x = random_images("imagenet", batch=2)
    maps = features(dilated)(x)
    assert dilated.feature_info.reduction() == [2, *(min(s, stride) for s in (4, 8, 16, 32))]
    for y, reduction in zip(maps, dilated.feature_info.reduction(), strict=True):
        assert all(abs(actual - side / reduction) < 1 for actual, side in zip(y.shape[2:], x.shape[2:], strict=True))
    dilations = [getattr(dilated.features, f"denseblock{i}").denselayer1.conv2.dilation[0] for i in (1, 2, 3, 4)]
    assert dilations == {8: [1, 1, 2, 4], 16: [1, 1, 1, 2], 32: [1, 1, 1, 1]}[stride]


# Detection

CHANNELS = 8


class Pyramid(nn.Module):
    """A dict of feature maps with the same number of channels, as torchvision's detectors take them."""

    def __init__(self, model: DenseNet) -> None:
        super().__init__()
        self.backbone, self.out_channels = features(model, (1, 2, 3, 4), maps="normalised_rectified"), CHANNELS
        self.pyramid = FeaturePyramidNetwork(self.backbone.feature_info.channels(), CHANNELS)

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        return self.pyramid(OrderedDict((str(i), y) for i, y in enumerate(self.backbone(images))))


def _detector(backbone: nn.Module, levels: int = 4) -> FasterRCNN:
    anchors = AnchorGenerator(tuple((8 * 2**i,) for i in range(levels)), ((0.5, 1.0, 2.0),) * levels)
    pooling = MultiScaleRoIAlign([str(i) for i in range(levels)], output_size=3, sampling_ratio=2)
    options = {"rpn_post_nms_top_n_train": 20, "rpn_batch_size_per_image": 16, "box_batch_size_per_image": 16}
    options |= {"rpn_pre_nms_top_n_train": 40, "box_head": nn.Sequential(nn.Flatten(), nn.Linear(CHANNELS * 9, 12))}
    options |= {"box_predictor": FastRCNNPredictor(12, 3), "min_size": 72, "max_size": 96}
    return FasterRCNN(backbone, rpn_anchor_generator=anchors, box_roi_pool=pooling, **options).double()


def test_faster_rcnn_training_step_matches_plain():
    plain = small_model("imagenet", efficient=False)
    images = [torch.rand(3, 72, 90, dtype=torch.double), torch.rand(3, 80, 72, dtype=torch.double)]
    boxes = torch.tensor([[5.0, 8.0, 40.0, 50.0], [20.0, 20.0, 60.0, 64.0]], dtype=torch.double)
    targets = [{"boxes": boxes, "labels": torch.tensor([1, 2])} for _ in images]
    detectors, results = [], []
    for model in (with_engine(plain, "shared"), plain):
        torch.manual_seed(3)
        detectors.append(_detector(Pyramid(model)))
        torch.manual_seed(4)
        losses = detectors[-1](images, targets)
        sum(losses.values()).backward()
        results.append(losses)
    assert len(results[1]) == 4
    for name, plain_loss in results[1].items():
        assert plain_loss > 0
        assert_close(results[0][name], plain_loss)
    assert_same_gradients(*detectors)
    assert_same_buffers(*detectors)
