"""A backbone in torchvision's Faster R-CNN with a feature pyramid trains with plain's numbers."""

from collections import OrderedDict

import pytest
import torch
from helpers import assert_close, assert_same_buffers, assert_same_gradients, small_model, with_engine
from torch import Tensor, nn
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FasterRCNN, FastRCNNPredictor
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign

from efficient_densenet import DenseNet, features

CHANNELS = 8


class Pyramid(nn.Module):
    """A dict of feature maps with the same number of channels, as torchvision's detectors take them."""

    def __init__(self, model: DenseNet) -> None:
        super().__init__()
        self.backbone, self.out_channels = features(model, (1, 2, 3, 4), maps="normalised_rectified"), CHANNELS
        self.pyramid = FeaturePyramidNetwork(self.backbone.feature_info.channels(), CHANNELS)

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        return self.pyramid(OrderedDict((str(i), y) for i, y in enumerate(self.backbone(images))))


def _pyramid_of_modules(model: DenseNet) -> nn.Module:
    """torchvision's pyramid, which calls the modules of a backbone one by one."""
    backbone = features(model, (1, 2, 3, 4))
    layers = {f"denseblock{i}": str(i - 1) for i in (1, 2, 3, 4)}
    return BackboneWithFPN(backbone.features, layers, backbone.feature_info.channels(), CHANNELS)


def _detector(backbone: nn.Module, levels: int) -> FasterRCNN:
    anchors = AnchorGenerator(tuple((8 * 2**i,) for i in range(levels)), ((0.5, 1.0, 2.0),) * levels)
    pooling = MultiScaleRoIAlign([str(i) for i in range(levels)], output_size=3, sampling_ratio=2)
    options = {"rpn_post_nms_top_n_train": 20, "rpn_batch_size_per_image": 16, "box_batch_size_per_image": 16}
    options |= {"rpn_pre_nms_top_n_train": 40, "box_head": nn.Sequential(nn.Flatten(), nn.Linear(CHANNELS * 9, 12))}
    options |= {"box_predictor": FastRCNNPredictor(12, 3), "min_size": 72, "max_size": 96}
    return FasterRCNN(backbone, rpn_anchor_generator=anchors, box_roi_pool=pooling, **options).double()


@pytest.mark.parametrize(("build", "levels"), [(Pyramid, 4), (_pyramid_of_modules, 5)])
def test_faster_rcnn_training_step_matches_plain(build, levels):
    plain = small_model("imagenet", efficient=False)
    images = [torch.rand(3, 72, 90, dtype=torch.double), torch.rand(3, 80, 72, dtype=torch.double)]
    boxes = torch.tensor([[5.0, 8.0, 40.0, 50.0], [20.0, 20.0, 60.0, 64.0]], dtype=torch.double)
    targets = [{"boxes": boxes, "labels": torch.tensor([1, 2])} for _ in images]
    detectors, results = [], []
    for model in (with_engine(plain, "shared"), plain):
        torch.manual_seed(3)
        detectors.append(_detector(build(model), levels))
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
