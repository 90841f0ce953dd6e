"""DenseNets of other libraries run by our engines, alone and in other tools: the same numbers, and reversible."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from grids import grid
from helpers import (
    assert_all_close,
    assert_close,
    assert_same_buffers,
    assert_same_gradients,
    convert_and_report,
    freeze_parameters,
)
from test_distributed import ThreadedReplicas
from third_party_models import (
    GROWTH,
    MODELS,
    START,
    NewestFirst,
    assert_restored,
    assert_same_training,
    block_batch,
    build,
    build_pair,
    convert_pair,
    features_block,
    image_batch,
    loss_of,
    train,
)
from torch import Tensor, nn

from efficient_densenet import DenseNet, convert_batchnorm, make_efficient, restore
from efficient_densenet.memory import saved_bytes
from efficient_densenet.norms.batch_norm import UpdatesOnce


def in_second_tier(*values):
    return pytest.param(*values, marks=pytest.mark.exhaustive)


OTHERS = [
    *(("torchvision", "checkpoint"), ("timm", "official"), ("kuangliu", "official"), ("tiramisu", "checkpoint")),
    *(in_second_tier(name, "checkpoint") for name in ("timm", "monai", "kuangliu")),
    *(in_second_tier(name, "official") for name in ("torchvision", "monai")),
]


@pytest.mark.parametrize(("name", "engine"), [*((name, True) for name in MODELS), *OTHERS])
def test_training_matches_plain_and_restore_undoes_the_conversion(name, engine):
    (model, plain), x = build_pair(name), image_batch(name)
    classes, tensors = list(map(type, model.modules())), [id(t) for t in model.state_dict(keep_vars=True).values()]
    keys, text = list(model.state_dict()), repr(model)
    report = convert_and_report(model, engine)
    num_blocks = 4 if name == "smp" else 3
    assert [change.name for change in report.changed] == [f"features.denseblock{i + 1}" for i in range(num_blocks)]
    assert not report.unchanged
    assert len(report) == num_blocks
    assert {change.engine for change in report.changed} == {"shared" if engine is True else engine}
    assert len(report.transitions) == (num_blocks - 1 if engine is True and name != "timm_blur" else 0)
    assert list(model.state_dict()) == keys
    assert [id(tensor) for tensor in model.state_dict(keep_vars=True).values()] == tensors
    assert all(isinstance(module, cls) for module, cls in zip(model.modules(), classes, strict=True))
    assert [type(module).__qualname__ for module in model.modules()] == [cls.__qualname__ for cls in classes]
    assert repr(model) == text
    assert_same_training(model, plain, x)
    if engine is True:  # frozen norms
        assert_same_training(model.eval(), plain.eval(), x)
    assert restore(model) is model
    assert_restored(model, plain)
    for ours, reference in zip(model.modules(), plain.modules(), strict=True):
        assert vars(ours).keys() == vars(reference).keys()
    assert_same_training(model.eval(), plain.eval(), x, 1)


@pytest.mark.parametrize("name", ["torchvision_efficient", in_second_tier("timm_efficient"), "gpleiss_efficient"])
def test_norms_that_update_twice_update_once_until_restored(name):
    model, counts = build(name), []
    layer = model.features.denseblock1.denselayer1
    for convert in (None, make_efficient, lambda model: make_efficient(model, "plain"), restore):
        if convert is not None:
            convert(model)
        before = int(layer.norm1.num_batches_tracked)
        loss_of(model(image_batch(name).requires_grad_())).backward()
        counts.append(int(layer.norm1.num_batches_tracked) - before)
    assert counts == [2, 1, 1, 2]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
@pytest.mark.parametrize(
    "name", ["torchvision_efficient", in_second_tier("timm_efficient"), "monai", in_second_tier("gpleiss_efficient")]
)
def test_in_tracing_the_author_s_forward_runs_and_without_gradients_the_values_are_its_own(name):
    model = build(name).eval()
    x = image_batch(name)
    with torch.no_grad():
        expected = model(x)
        make_efficient(model)
        assert_close(model(x), expected)
        assert torch.equal(torch.jit.trace(model, x)(x), expected)
    exported = torch.export.export(model, (x,), strict=False)
    assert_close(exported.module()(x).detach(), expected)


# Only timm has no in-place operation after its features, and so allows backward hooks on their last modules.
HOOKED = [
    ("torchvision", "denseblock1"),
    ("monai", "transition1"),
    ("timm", "norm5"),
    ("timm", ""),
    *(in_second_tier("timm", place) for place in ("denseblock1", "transition1")),
    in_second_tier("torchvision", "transition1"),
    in_second_tier("monai", "denseblock1"),
]


@pytest.mark.parametrize(("name", "place"), HOOKED)
def test_hooks_registered_before_and_after_conversion_fire_once_with_plain_s_values(name, place):
    (model, plain), x, all_calls = build_pair(name), image_batch(name), []
    for each in (model, plain):
        calls: list[list[Tensor]] = []
        all_calls.append(calls)
        hooked = each.features.get_submodule(place)

        def record(module, first, second=None, calls=calls):
            tensors = [t for value in (first, second) for t in (value if isinstance(value, tuple) else [value])]
            calls.append([t.detach().clone() for t in tensors if t is not None])

        hooked.register_forward_hook(record)
        hooked.register_full_backward_hook(record)
        if each is model:
            make_efficient(model)
        hooked.register_forward_pre_hook(record)
    assert not any(all_calls)  # the trace has called no hook
    assert_same_training(model, plain, x)
    assert [len(calls) for calls in all_calls] == [9, 9]
    for ours, reference in zip(*all_calls, strict=True):
        for actual, expected in zip(ours, reference, strict=True):
            assert_close(actual, expected)
    restore(model)
    assert len(model.features.get_submodule(place)._forward_hooks) == 1


class _BlockWithContainer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(NewestFirst(START), NewestFirst(START + GROWTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.filterwarnings("ignore:falling back")
@pytest.mark.parametrize("converts_first", [True, False])
@pytest.mark.parametrize("place", ["layer", "layer.1", "layer.1.bn1", "layer.1.conv2"])
def test_a_hook_inside_a_block_is_called(place, converts_first):
    block, calls = _BlockWithContainer().double(), []
    plain = copy.deepcopy(block)
    if converts_first:
        make_efficient(block)
    for each in (block, plain):
        each.get_submodule(place).register_forward_hook(lambda *_, each=each: calls.append(each is block))
    if not converts_first:
        make_efficient(block)
    assert_same_training(block, plain, block_batch())
    assert calls == [True] * 3 + [False] * 3
    make_efficient(block, "shared")
    with pytest.raises(RuntimeError, match="engine 'shared' cannot run here: found a hook"):
        block(block_batch())


def _pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize(*grid(copier=[copy.deepcopy, _pickled], name=["torchvision", "timm", "monai"], strength=1))
def test_a_copy_is_converted_and_independent(name, copier):
    model, plain = build_pair(name)
    make_efficient(model)
    copied = copier(model)
    assert_same_training(copied, plain, image_batch(name))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert_restored(copied, plain)
    assert list(map(type, copied.modules())) != list(map(type, model.modules()))


def test_dtype_and_weights_may_change_before_or_after_conversion():
    before, after = build("torchvision"), build("torchvision")
    make_efficient(before)
    after.load_state_dict(before.state_dict())
    before.float()
    make_efficient(after.float())
    x = image_batch("torchvision").float()
    for actual, expected in zip(train(before, x), train(after, x), strict=True):
        assert torch.equal(actual, expected)
    assert before.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16


def test_blocks_of_this_package_are_set_and_restored():
    model = DenseNet(4, (2, 1), num_init_features=4, efficient="plain")
    report = convert_and_report(nn.Sequential(model))
    assert [change.name for change in report.changed] == ["0.features.denseblock1", "0.features.denseblock2"]
    assert model.engine == "best"
    restore(model)
    assert model.engine == "plain"
    assert "_original_engine" not in vars(model.features.denseblock1)


def test_frozen_parameters_and_a_saved_bottleneck():
    model, plain, _ = convert_pair(build("kuangliu"))
    recomputed = saved_bytes(lambda: copy.deepcopy(model)(image_batch("kuangliu")))
    model.features.denseblock2[0].keep_bottleneck = True
    assert saved_bytes(lambda: copy.deepcopy(model)(image_batch("kuangliu"))) > recomputed
    for each in (model, plain):
        freeze_parameters(each, lambda name: "denseblock2" in name or "classifier" in name)
    assert_same_training(model, plain, image_batch("kuangliu"))


def test_a_second_call_changes_the_engine():
    model = build("kuangliu")
    make_efficient(model)
    classes = list(map(type, model.modules()))
    report = convert_and_report(model, "checkpoint")
    assert [change.engine for change in report.changed] == ["checkpoint"] * 3
    assert not report.transitions  # the shared engine alone runs them
    for engine, expected in ((False, "plain"), (True, "shared")):
        assert [change.engine for change in convert_and_report(model, engine).changed] == [expected] * 3
    assert list(map(type, model.modules())) == classes
    with pytest.raises(ValueError, match="unknown engine 'fast'"):
        make_efficient(model, "fast")


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
def test_scripting_raises_and_names_the_remedy():
    block = features_block()
    make_efficient(block)
    with pytest.raises(NotImplementedError, match=r"restore\(model\) first"):
        torch.jit.script(block)


@pytest.mark.parametrize("engine", ["shared", "checkpoint"])
def test_norms_under_the_exactly_once_rule_stay_under_it(engine):
    block = convert_batchnorm(features_block())
    make_efficient(block, engine)
    loss_of(block(block_batch())).backward()
    restore(block)
    assert all(isinstance(m, UpdatesOnce) for m in block.modules() if isinstance(m, nn.BatchNorm2d))


def test_saved_memory_is_that_of_our_densenet():
    densenet = pytest.importorskip("torchvision.models.densenet")
    model, x = densenet.DenseNet(8, (6, 8, 6), 16).double(), torch.randn(2, 3, 64, 64, dtype=torch.double)
    plain = saved_bytes(lambda: model(x))
    make_efficient(model)
    ours = DenseNet(8, (6, 8, 6), num_init_features=16, num_classes=1000, small_inputs=False).double()
    assert saved_bytes(lambda: model(x)) <= 1.01 * saved_bytes(lambda: ours(x)) < 0.45 * plain


def _assert_same_steps(ours: nn.Module, plain: nn.Module, loss: Callable[[nn.Module], Tensor]) -> None:
    """Losses, gradients, weights and statistics after two steps."""
    losses = []
    for each in (ours, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.01)
        for step in range(2):
            torch.manual_seed(step)
            optimizer.zero_grad()
            losses.append(loss(each))
            losses[-1].backward()
            optimizer.step()
    assert_all_close(losses[:2], losses[2:])
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)
    assert_all_close(ours.parameters(), plain.parameters())


@pytest.mark.parametrize("name", ["torchvision", pytest.param("timm", marks=pytest.mark.exhaustive), "monai"])
def test_replicas_in_threads(name):
    """As in nn.DataParallel: each replica has batch statistics of its own."""
    (model, plain), x = build_pair(name), image_batch(name, batch=4)
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
    model, plain = build_pair("torchvision")
    wrapped = wrap(model)
    report = convert_and_report(wrapped)
    assert len(report) == 3
    assert [change.name.endswith(".features.denseblock1") for change in report.changed] == [True, False, False]
    if wrap is not torch.compile:
        assert_same_training(wrapped, wrap(plain), image_batch("torchvision"))
    restore(wrapped)
    assert_restored(model, plain)


def test_torch_checkpoint_around_a_converted_model():
    ours, plain = build_pair("torchvision_efficient")
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
    ours, plain = build_pair(name)
    x, maps = image_batch(name), []
    for model in (ours, plain):
        model.eval()
        if model is ours:
            make_efficient(model)
        with cams.GradCAM(model=model, target_layers=[model.get_submodule(target)]) as cam:
            maps.append(torch.as_tensor(cam(x, [Tensor.sum, lambda output: -output.sum(), Tensor.sum])))
    assert maps[1].std() > 0
    torch.testing.assert_close(maps[0], maps[1], rtol=0, atol=1e-6)  # Grad-CAM returns float32


@pytest.mark.parametrize("options", [{}, {"feature_cls": "getter"}])
def test_features_only_models_of_timm(options):
    densenet = pytest.importorskip("timm.models.densenet").DenseNet
    build_model = pytest.importorskip("timm.models._builder").build_model_with_cfg
    options |= {"growth_rate": 4, "block_config": (2, 2, 1, 1), "out_indices": (0, 1, 2, 3, 4)}
    config = {"flatten_sequential": True}
    model = build_model(densenet, "densenet121", False, feature_cfg=config, features_only=True, **options).double()
    model, plain, report = convert_pair(model)
    assert len(report) == 4
    x = torch.randn(2, 3, 66, 70, dtype=torch.double)
    _assert_same_steps(model, plain, lambda model: sum(each.square().mean() for each in model(x)))


def test_faster_r_cnn_with_a_feature_pyramid():
    detection = pytest.importorskip("torchvision.models.detection")
    BackboneWithFPN = pytest.importorskip("torchvision.models.detection.backbone_utils").BackboneWithFPN  # noqa: N806
    ops = pytest.importorskip("torchvision.ops")
    rpn = pytest.importorskip("torchvision.models.detection.rpn")
    ours, plain = build_pair("torchvision_efficient")
    images = [torch.rand(3, 60, 64, dtype=torch.double) for _ in range(2)]
    boxes = torch.tensor([[5.0, 6, 40, 50], [20, 8, 60, 30]], dtype=torch.double)
    targets = [{"boxes": boxes, "labels": torch.tensor([1, 2])} for _ in images]
    detectors = []
    for model in (ours, plain):
        torch.manual_seed(0)
        detector = detection.FasterRCNN(
            BackboneWithFPN(model.features, {"denseblock1": "0", "denseblock2": "1"}, [14, 19], 8),
            num_classes=3,
            rpn_anchor_generator=rpn.AnchorGenerator(((16,), (32,), (64,)), ((0.5, 1.0, 2.0),) * 3),
            box_roi_pool=ops.MultiScaleRoIAlign(["0", "1", "2"], 3, 2),
            min_size=60,
            max_size=64,
            rpn_pre_nms_top_n_train=50,
            rpn_post_nms_top_n_train=20,
        )
        detectors.append(detector.double())
    assert len(convert_and_report(detectors[0])) == 2
    _assert_same_steps(*detectors, lambda model: sum(model(images, targets).values()))


def test_a_u_net_of_segmentation_models():
    smp = pytest.importorskip("segmentation_models_pytorch")
    model = smp.Unet("densenet121", encoder_weights=None, decoder_channels=(16, 8, 8, 4, 4), classes=2)
    model.encoder = build("smp")
    with torch.no_grad():
        widths = [each.shape[1] for each in model.encoder(torch.zeros(1, 3, 64, 64, dtype=torch.double))]
    decoder = pytest.importorskip("segmentation_models_pytorch.decoders.unet.decoder").UnetDecoder
    model.decoder = decoder(widths, decoder_channels=(16, 8, 8, 4, 4), n_blocks=5)
    model, plain, report = convert_pair(model.double())
    assert [change.name for change in report.changed] == [f"encoder.features.denseblock{i}" for i in range(1, 5)]
    x = torch.randn(2, 3, 64, 96, dtype=torch.double)
    _assert_same_steps(model, plain, lambda model: model(x).square().mean())
    assert_restored(model, plain)
