"""A backbone in torchvision's Faster R-CNN with a feature pyramid trains with plain's numbers."""

from collections import OrderedDict

import pytest
import torch
from helpers import assert_close, assert_same_buffers, assert_same_gradients, small_model, with_engine
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign

from efficient_densenet import DenseNet, features

CHANNELS = 8


class Pyramid(nn.Module):
    """A dict of feature maps with the same number of channels, as torchvision's detectors take them."""

    def __init__(self, backbone: DenseNet) -> None:
        super().__init__()
        self.backbone, self.out_channels = backbone, CHANNELS
        self.pyramid = FeaturePyramidNetwork(backbone.feature_info.channels(), CHANNELS)

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        return self.pyramid(OrderedDict((str(i), y) for i, y in enumerate(self.backbone(images))))


def _detector(backbone: nn.Module, levels: int) -> FasterRCNN:
    names = [str(i) for i in range(levels)]
    anchors = AnchorGenerator(tuple((8 * 2**i,) for i in range(levels)), ((0.5, 1.0, 2.0),) * levels)
    pooling = MultiScaleRoIAlign(names, output_size=3, sampling_ratio=2)
    options = {"rpn_post_nms_top_n_train": 20, "rpn_batch_size_per_image": 16, "box_batch_size_per_image": 16}
    options |= {"rpn_pre_nms_top_n_train": 40, "box_head": nn.Sequential(nn.Flatten(), nn.Linear(CHANNELS * 9, 12))}
    options |= {"box_predictor": _Predictor(), "min_size": 72, "max_size": 96, "num_classes": None}
    return FasterRCNN(backbone, rpn_anchor_generator=anchors, box_roi_pool=pooling, **options).double()


class _Predictor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score, self.boxes = nn.Linear(12, 3), nn.Linear(12, 12)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.score(x), self.boxes(x)


def _pyramid_of_maps(model: DenseNet, maps: str) -> nn.Module:
    return Pyramid(features(model, (1, 2, 3, 4), maps=maps))


def _pyramid_of_modules(model: DenseNet) -> nn.Module:
    """torchvision's pyramid, which calls the modules of a backbone one by one."""
    backbone = features(model, (1, 2, 3, 4))
    layers = {f"denseblock{i}": str(i - 1) for i in (1, 2, 3, 4)}
    return BackboneWithFPN(backbone.features, layers, backbone.feature_info.channels(), CHANNELS)


BUILDS = {
    "normalised_rectified": lambda model: _pyramid_of_maps(model, "normalised_rectified"),
    "torchvision": _pyramid_of_modules,
}


@pytest.mark.parametrize("build", BUILDS)
def test_faster_rcnn_training_step_matches_plain(build):
    plain = small_model("imagenet", efficient=False)
    models = []
    for model in (with_engine(plain, "shared"), plain):
        torch.manual_seed(3)
        pyramid = BUILDS[build](model)
        models.append(_detector(pyramid, levels=5 if build == "torchvision" else 4))
    images = [torch.rand(3, 72, 90, dtype=torch.double), torch.rand(3, 80, 72, dtype=torch.double)]
    boxes = torch.tensor([[5.0, 8.0, 40.0, 50.0], [20.0, 20.0, 60.0, 64.0]], dtype=torch.double)
    targets = [{"boxes": boxes, "labels": torch.tensor([1, 2])} for _ in images]
    all_losses = []
    for detector in models:
        torch.manual_seed(4)
        losses = detector(images, targets)
        sum(losses.values()).backward()
        all_losses.append(losses)
    losses, plain_losses = all_losses
    assert len(losses) == 4
    for name, plain_loss in plain_losses.items():
        assert plain_loss > 0
        assert_close(losses[name], plain_loss)
    assert_same_gradients(*models)
    assert_same_buffers(*models)
    with torch.no_grad():
        for a, b in zip(*(detector.eval()(images) for detector in models), strict=True):
            assert_close(a["boxes"], b["boxes"])
