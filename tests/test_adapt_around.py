"""Converted DenseNets inside wrappers, detectors and other tools that are built around them."""

import copy

import pytest
import torch
from grids import grid
from helpers import assert_close, assert_same_buffers, assert_same_gradients, convert_and_report
from test_distributed import ThreadedReplicas
from third_party_models import CLASSES, assert_same_training, build, image_batch, loss_of, plain_reference
from torch import Tensor, nn

from efficient_densenet import make_efficient, restore


def _pair(name: str) -> tuple[nn.Module, nn.Module]:
    model = build(name)
    return model, plain_reference(name, model)


def _assert_same_state(ours: nn.Module, plain: nn.Module) -> None:
    assert_same_buffers(ours, plain)
    for actual, expected in zip(ours.parameters(), plain.parameters(), strict=True):
        assert_close(actual.detach(), expected.detach())


@pytest.mark.parametrize("name", ["torchvision", pytest.param("timm", marks=pytest.mark.exhaustive), "monai"])
def test_replicas_in_threads(name):
    """As in nn.DataParallel: each replica has batch statistics of its own."""
    (model, plain), x = _pair(name), image_batch(name, batch=4)
    for each in (model, plain):
        for module in each.modules():
            module.drop_rate = 0.0  # dropout masks would depend on the order of the threads
            if isinstance(module, nn.Dropout2d):
                module.p = 0.0
    make_efficient(model)
    loss_of(ThreadedReplicas(model, 2)(x)).backward()
    loss_of(torch.cat([plain(part) for part in x.tensor_split(2)])).backward()
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("wrap", [nn.DataParallel, nn.Sequential, torch.compile])
def test_a_model_inside_a_wrapper_is_converted(wrap):
    model, plain = _pair("torchvision")
    wrapped = wrap(model)
    report = convert_and_report(wrapped)
    assert len(report) == 3
    assert [change.name.endswith(".features.denseblock1") for change in report.changed] == [True, False, False]
    if wrap is not torch.compile:
        assert_same_training(wrapped, wrap(plain), image_batch("torchvision"))
    restore(wrapped)
    assert list(map(type, model.modules())) == list(map(type, plain.modules()))


def test_torch_checkpoint_around_a_converted_model():
    ours, plain = _pair("torchvision_efficient")
    make_efficient(ours)
    x = image_batch("torchvision_efficient")
    out = torch.utils.checkpoint.checkpoint(ours.features[4:], ours.features[:4](x), use_reentrant=False)
    expected = plain.features(x)
    for each in (out, expected):
        each.square().sum().backward()
    assert_same_gradients(ours, plain)
    for i in range(1, 4):
        assert_same_buffers(
            ours.features.get_submodule(f"denseblock{i}"), plain.features.get_submodule(f"denseblock{i}")
        )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    *grid(
        name=["torchvision", "timm", "torchxrayvision"],
        target=["features.denseblock3", "features.norm5", "features.transition2.conv"],
        strength=1,
    )
)
def test_grad_cam(name, target):
    cams = pytest.importorskip("pytorch_grad_cam")
    ours, plain = _pair(name)
    x, maps = image_batch(name), []
    for model in (ours, plain):
        model.eval()
        if model is ours:
            make_efficient(model)
        with cams.GradCAM(model=model, target_layers=[model.get_submodule(target)]) as cam:
            maps.append(torch.as_tensor(cam(x, [Tensor.sum, lambda output: -output.sum(), Tensor.sum])))
    assert maps[1].std() > 0
    torch.testing.assert_close(maps[0], maps[1], rtol=0, atol=1e-6)  # Grad-CAM returns float32


def test_features_only_models_of_timm():
    timm = pytest.importorskip("timm")
    shape = {"growth_rate": 4, "block_config": (2, 2, 1, 1)}
    for options in ({}, {"feature_cls": "getter"}):
        options |= {"features_only": True, "out_indices": (0, 1, 2, 3, 4)}
        model = _tiny_timm(timm, shape, **options).double()
        plain = copy.deepcopy(model)
        assert len(convert_and_report(model)) == 4
        x = torch.randn(2, 3, 66, 70, dtype=torch.double)
        outputs = [each(x) for each in (model, plain)]
        for actual, expected in zip(*outputs, strict=True):
            assert_close(actual.detach(), expected.detach())
        for maps in outputs:
            sum(each.square().sum() for each in maps).backward()
        assert_same_gradients(model, plain)
        assert_same_buffers(model, plain)


def _tiny_timm(timm, shape: dict, **options) -> nn.Module:
    densenet = pytest.importorskip("timm.models.densenet")
    builder = pytest.importorskip("timm.models._builder")
    config = {"flatten_sequential": True}
    return builder.build_model_with_cfg(densenet.DenseNet, "densenet121", False, feature_cfg=config, **shape, **options)


@pytest.mark.filterwarnings("ignore:torch.fx traces into a")
def test_torchvision_s_feature_extractors():
    """`IntermediateLayerGetter` calls the children one by one, and `create_feature_extractor` traces."""
    utils = pytest.importorskip("torchvision.models._utils")
    extraction = pytest.importorskip("torchvision.models.feature_extraction")
    ours, plain = _pair("timm_deep")
    make_efficient(ours)
    names = {"denseblock1": "a", "transition2": "b", "norm5": "c"}
    x = image_batch("timm_deep")
    actual, expected = (utils.IntermediateLayerGetter(model.features, names)(x) for model in (ours, plain))
    assert list(actual) == list("abc")
    for name, value in actual.items():
        assert_close(value.detach(), expected[name].detach())
    for maps in (actual, expected):
        sum(each.square().sum() for each in maps.values()).backward()
    assert_same_gradients(ours, plain)
    nodes = ["features.denseblock1", "features.denseblock2.denselayer1.norm1", "features.norm5"]
    actual, expected = (extraction.create_feature_extractor(model.eval(), nodes)(x) for model in (ours, plain))
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert_close(value.detach(), expected[name].detach())


class _Backbone(nn.Module):
    """A feature pyramid on the feature maps of torchvision's DenseNet."""

    def __init__(self, densenet: nn.Module, widths: list[int], names: list[str]) -> None:
        super().__init__()
        utils = pytest.importorskip("torchvision.models._utils")
        ops = pytest.importorskip("torchvision.ops")
        self.body = utils.IntermediateLayerGetter(densenet.features, {name: str(i) for i, name in enumerate(names)})
        self.fpn = ops.FeaturePyramidNetwork(widths, 8)
        self.out_channels = 8

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.fpn(self.body(x))


def test_faster_r_cnn_with_a_feature_pyramid():
    detection = pytest.importorskip("torchvision.models.detection")
    ops = pytest.importorskip("torchvision.ops")
    rpn = pytest.importorskip("torchvision.models.detection.rpn")
    ours, plain = _pair("torchvision_efficient")
    widths, names = [14, 19, 13], ["denseblock1", "denseblock2", "norm5"]
    images = [torch.rand(3, 60, 64, dtype=torch.double) for _ in range(2)]
    boxes = torch.tensor([[5.0, 6, 40, 50], [20, 8, 60, 30]], dtype=torch.double)
    targets = [{"boxes": boxes, "labels": torch.tensor([1, 2])} for _ in images]
    results = []
    for model in (ours, plain):
        torch.manual_seed(0)
        detector = detection.FasterRCNN(
            _Backbone(model, widths, names),
            num_classes=3,
            rpn_anchor_generator=rpn.AnchorGenerator(((16,), (32,), (64,)), ((0.5, 1.0, 2.0),) * 3),
            box_roi_pool=ops.MultiScaleRoIAlign(["0", "1", "2"], 3, 2),
            min_size=60,
            max_size=64,
            rpn_pre_nms_top_n_train=50,
            rpn_post_nms_top_n_train=20,
        ).double()
        if model is ours:
            assert len(convert_and_report(detector)) == 3
        torch.manual_seed(1)
        losses = detector(images, targets)
        sum(losses.values()).backward()
        results.append((detector, losses))
    (detector, losses), (plain_detector, plain_losses) = results
    for name, loss in losses.items():
        assert_close(loss.detach(), plain_losses[name].detach())
    assert_same_gradients(detector, plain_detector)
    assert_same_buffers(detector, plain_detector)


def test_a_u_net_of_segmentation_models():
    smp = pytest.importorskip("segmentation_models_pytorch")
    model = smp.Unet("densenet121", encoder_weights=None, decoder_channels=(16, 8, 8, 4, 4), classes=2)
    model.encoder = build("smp")
    with torch.no_grad():
        widths = [each.shape[1] for each in model.encoder(torch.zeros(1, 3, 64, 64, dtype=torch.double))]
    decoder = pytest.importorskip("segmentation_models_pytorch.decoders.unet.decoder").UnetDecoder
    model.decoder = decoder(widths, decoder_channels=(16, 8, 8, 4, 4), n_blocks=5)
    model = model.double()
    plain, x = copy.deepcopy(model), torch.randn(2, 3, 64, 96, dtype=torch.double)
    report = convert_and_report(model)
    assert [change.name for change in report.changed] == [f"encoder.features.denseblock{i}" for i in range(1, 5)]
    for each in (model, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            each(x).square().mean().backward()
            optimizer.step()
    assert_same_gradients(model, plain)
    _assert_same_state(model, plain)
    restore(model)
    assert list(map(type, model.modules())) == list(map(type, plain.modules()))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["densenet121", "densenetblur121d", "densenet264d"])
def test_every_densenet_of_timm(name):
    timm = pytest.importorskip("timm")
    model = timm.create_model(name, num_classes=CLASSES).double()
    plain = copy.deepcopy(model)
    report = convert_and_report(model)
    assert [change.engine for change in report.changed] == ["shared"] * 4
    x = torch.randn(2, 3, 64, 64, dtype=torch.double)
    for each in (model, plain):
        for _ in range(2):
            each(x).square().mean().backward()
    assert_same_gradients(model, plain, 1e-9)
    assert_same_buffers(model, plain, 1e-9)
