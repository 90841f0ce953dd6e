"""A DenseNet as a backbone: its maps, what is known of them, and that nothing else about the model changes."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from grids import grid
from helpers import (
    MEMORY_EFFICIENT,
    assert_close,
    assert_same_buffers,
    assert_same_gradients,
    random_images,
    small_model,
    with_engine,
)
from torch import Tensor, nn

from efficient_densenet import DenseNet, create_model, features
from efficient_densenet.memory import tensor_peak
from efficient_densenet.models.backbone import MAPS, FeatureInfo

INDICES = [None, (1, 2), (0, 3), (2,), (0,), 1, (-1, 1)]
NUM_MAPS = {"bc": 4, "basic": 4, "imagenet": 5}


def _by_hand(model: DenseNet, x: Tensor, maps: str) -> list[Tensor]:
    """Every map, from the modules one after the other."""
    found, parts = [], model.features
    last = max(int(name.removeprefix("denseblock")) for name in parts._modules if name.startswith("denseblock"))
    for name, module in parts.named_children():
        if name.startswith("transition"):
            rectified = F.relu(module.norm(x))
            x = module.pool(module.conv(rectified))
            if maps == "normalised_rectified":
                found.append(rectified)
            continue
        if name == "pool0" or (name == "denseblock1" and model.small_inputs):
            found.append(x)
        x = module(x)
        if name == "norm5" and maps != "raw":
            found.append(F.relu(x))
        elif name.startswith("denseblock") and (maps == "raw" or (maps == "timm" and name != f"denseblock{last}")):
            found.append(x)
    return found


def _step(run, model: nn.Module, x: Tensor, chosen=None) -> list[Tensor]:
    """Maps and the input's gradient; every map has a gradient of its own."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    found = run(x) if chosen is None else [run(x)[i] for i in chosen]
    sum(((i + 1) * y).sin().sum() for i, y in enumerate(found)).backward()
    return [*(y.detach() for y in found), x.grad]


@pytest.mark.parametrize(
    *grid(
        family=["bc", "imagenet"],
        engine=["plain", *MEMORY_EFFICIENT],
        maps=MAPS,
    )
)
def test_maps_and_gradients_of_every_level_are_plain_s(family, engine, maps):
    whole = small_model(family, efficient=False, drop_rate=0.1)
    ours = features(with_engine(whole, engine), maps=maps)
    x = random_images(family, batch=3)
    for _ in range(2):
        torch.manual_seed(1)
        found = _step(ours, ours, x)
        torch.manual_seed(1)
        expected = _step(partial(_by_hand, whole, maps=maps), whole, x)
        assert len(found) == len(expected) == NUM_MAPS[family] + 1
        for a, b in zip(found, expected, strict=True):
            assert_close(a, b)
        for name, parameter in ours.named_parameters():
            assert_close(parameter.grad, dict(whole.named_parameters())[name].grad)
    expected = dict(whole.named_buffers())
    for name, buffer in ours.named_buffers():
        assert_close(buffer, expected[name])


@pytest.mark.parametrize("maps", MAPS)
@pytest.mark.parametrize("out_indices", INDICES)
def test_any_choice_of_maps_leaves_no_parameter_unused(out_indices, maps):
    whole = small_model("bc", efficient=False)
    ours = features(with_engine(whole, "shared"), out_indices, maps=maps)
    chosen = ours.feature_info.out_indices
    x = random_images("bc", batch=3)
    found, expected = _step(ours, ours, x), _step(partial(_by_hand, whole, maps=maps), whole, x, chosen)
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b)
    grads = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    assert grads.keys() == dict(ours.named_parameters()).keys()  # what has no gradient is not there
    for name, parameter in ours.named_parameters():
        assert_close(parameter.grad, grads[name])


@pytest.mark.parametrize("maps", MAPS)
@pytest.mark.parametrize("family", ["bc", "basic", "imagenet"])
def test_what_is_known_of_the_maps_is_true(family, maps):
    model = small_model(family, features_only=True, maps=maps).eval()
    info, x = model.feature_info, random_images(family, batch=1)
    found, seen = model(x), {}
    for name in info.module_name():
        model.get_submodule(name).register_forward_hook(lambda *args, name=name: seen.update({name: args[2]}))
    for y, again, channels, reduction, name in zip(
        found, model(x), info.channels(), info.reduction(), info.module_name(), strict=True
    ):
        assert_close(y, again)
        assert torch.equal(again, F.relu(seen[name]) if name.endswith("norm5") else seen[name])
        assert y.shape[1] == channels
        sides = [-(-side // reduction) if family == "imagenet" else side // reduction for side in x.shape[2:]]
        assert all(abs(found - side) <= 1 for found, side in zip(y.shape[2:], sides, strict=True))
    assert model.num_features == info.channels()[-1]


@pytest.mark.parametrize("out_indices", [(0, 1, 2, 3, 4), (1, 3), (4,), (2,)])
def test_timm_s_maps_and_what_it_knows_of_them(out_indices):
    timm = pytest.importorskip("timm")
    words = {"growth_rate": 4, "block_config": (1, 2, 1, 1)}
    cfg = {"features_only": True, "out_indices": out_indices, **words}
    theirs = timm.create_model("densenet121", pretrained=False, **cfg).double().eval()
    ours = create_model("densenet121", num_init_features=8, **cfg).double().eval()
    ours.load_state_dict({k.replace("features_", "features.", 1): v for k, v in theirs.state_dict().items()})
    x = random_images("imagenet", batch=2)
    for a, b in zip(ours(x), theirs(x), strict=True):
        assert_close(a, b)
    assert ours.feature_info.channels() == theirs.feature_info.channels()
    assert ours.feature_info.reduction() == theirs.feature_info.reduction()
    names = [
        name.replace("relu0", "norm0") for name in ours.feature_info.module_name()
    ]  # theirs has a ReLU in the norm
    assert names == theirs.feature_info.module_name()
    assert ours.feature_info.channels(2) == theirs.feature_info.channels(2)
    assert ours.feature_info.get_dicts(["num_chs"], [0, 1]) == theirs.feature_info.get_dicts(["num_chs"], [0, 1])
    assert len(ours.feature_info) == len(theirs.feature_info)
    assert ours.feature_info[1]["num_chs"] == theirs.feature_info[1]["num_chs"]


@pytest.mark.parametrize("maps", MAPS)
def test_built_or_taken_a_backbone_is_the_same(maps):
    torch.manual_seed(2)
    whole = small_model("bc")
    torch.manual_seed(2)
    built = small_model("bc", features_only=True, out_indices=(0, 2), maps=maps)
    taken = features(whole, (0, 2), maps=maps)
    names = set(whole.state_dict())
    assert set(built.state_dict()) == set(taken.state_dict()) < names
    assert not any(name.startswith(("classifier", "features.norm5")) for name in built.state_dict())
    built.load_state_dict(taken.state_dict())
    built.eval(), taken.eval()
    x = random_images("bc")
    for a, b in zip(built(x), taken(x), strict=True):
        assert torch.equal(a, b)


def test_the_model_a_backbone_is_taken_from_stays_what_it_is():
    whole = small_model("bc").eval()
    whole.features.denseblock1.denselayer1.norm2.train()
    x, keys = random_images("bc"), list(whole.state_dict())
    before = copy.deepcopy(whole).eval()(x).detach()
    calls = []
    whole.register_forward_hook(lambda *_: calls.append(0))
    backbone = features(whole, (1, 2), maps="normalised_rectified")
    assert backbone.features.denseblock1 is whole.features.denseblock1
    assert backbone.features.transition2.norm is whole.features.transition2.norm
    training = [name for name, module in backbone.named_modules() if module.training]
    assert training == ["features.denseblock1.denselayer1.norm2"]
    backbone.eval()(random_images("bc"))
    assert not calls
    assert_close(whole(x).detach(), before)
    assert list(whole.state_dict()) == keys
    assert whole.feature_info.module_name()[-1] == "features.norm5"
    with torch.no_grad():
        backbone.features.conv0.weight.zero_()
    assert whole.features.conv0.weight.abs().sum() == 0


@pytest.mark.parametrize("engine", ["plain", "shared"])
@pytest.mark.parametrize("maps", MAPS)
def test_hooks_fire_once_with_plain_s_values(maps, engine):
    plain = small_model("bc", efficient=False, features_only=True, maps=maps)
    ours, seen = with_engine(plain, engine), ([], [])
    places = ["", "features", "features.transition1", "features.transition1.conv", "features.denseblock2"]
    for model, calls in zip((ours, plain), seen, strict=True):
        for place in places:
            hook = lambda _m, _i, output, calls=calls, place=place: calls.append((place, output))  # noqa: E731
            model.get_submodule(place).register_forward_hook(hook)
    x = random_images("bc", batch=3)
    for a, b in zip(_step(ours, ours, x), _step(plain, plain, x), strict=True):
        assert_close(a, b)
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)
    assert [place for place, _ in seen[0]] == [place for place, _ in seen[1]]
    assert sorted(place for place, _ in seen[0]) == sorted(places)
    for (_, a), (_, b) in zip(*seen, strict=True):
        for found, expected in zip(*((y,) if isinstance(y, Tensor) else y for y in (a, b)), strict=True):
            assert_close(found, expected)


@pytest.mark.parametrize("maps", MAPS)
def test_copies_and_replicas(maps):
    ours = features(small_model("bc"), maps=maps)
    replica, other = ours._replicate_for_data_parallel(), copy.deepcopy(ours)
    replica._modules = dict(ours._modules)
    x = random_images("bc", batch=3)
    expected = _step(ours, ours, x)
    for model in (other, replica):
        for a, b in zip(_step(model, ours, x), expected, strict=True):
            assert_close(a, b)
    assert_same_gradients(other, ours)


@pytest.mark.parametrize(("maps", "allowed"), [("raw", 0.02), ("timm", 0.02), ("normalised_rectified", 0.6)])
def test_maps_cost_what_they_hold(maps, allowed):
    """`allowed` is what comes on top, as a share of what is handed out.

    Rectified maps pay for the gradient that comes together from the caller and from the next stage.
    """

    def step(model, grads):
        torch.autograd.backward(model(x), grads)

    x = torch.randn(8, 3, 32, 32)
    model = create_model(
        "densenet_bc_100_12", efficient="shared", block_config=(8, 8, 8), features_only=True, maps=maps
    )
    alone = features(create_model("densenet_bc_100_12", efficient="shared", block_config=(8, 8, 8)), (3,), maps=maps)
    grads = [torch.randn_like(y) for y in model(x)]  # the caller's, and not counted
    held = sum(grad.numel() * grad.element_size() for grad in grads[:-1])
    peaks = []
    for backbone, given in ((alone, grads[-1:]), (model, grads)):
        step(backbone, given)
        peaks.append(tensor_peak(lambda backbone=backbone, given=given: step(backbone, given)))
    assert peaks[1] <= peaks[0] + (1 + allowed) * held


@pytest.mark.parametrize("given", [(), (4,), (0, 0), (1, -3), (-5,), (1.5,), 0, 9, -9])
def test_maps_that_there_are_not(given):
    with pytest.raises(ValueError, match=r"out_indices is .*, but must list some of 0 to 3, each once"):
        features(small_model("bc"), given)


def test_what_a_backbone_says_no_to():
    with pytest.raises(ValueError, match="maps is 'all', but must be one of 'timm', 'raw', 'normalised_rectified'"):
        features(small_model("bc"), maps="all")
    with pytest.raises(TypeError, match="found a Linear, but features takes a DenseNet of this package"):
        features(nn.Linear(2, 2))
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


def test_forward_is_its_two_halves_and_the_classifier_can_be_changed():
    timm = pytest.importorskip("timm")
    words = {"growth_rate": 4, "block_config": (1, 2, 1, 1)}
    theirs = timm.create_model("densenet121", num_classes=5, **words).double().eval()
    ours = create_model("densenet121", num_init_features=8, num_classes=5, **words).double().eval()
    ours.load_state_dict(theirs.state_dict())
    x = random_images("imagenet", batch=2)
    maps = ours.forward_features(x)
    assert_close(maps, theirs.forward_features(x))
    assert_close(ours.forward_head(maps), theirs(x))
    assert_close(ours.forward_head(maps, pre_logits=True), theirs.forward_head(maps, pre_logits=True))
    assert ours.num_features == theirs.num_features
    assert ours.get_classifier() is ours.classifier
    ours.reset_classifier(7)
    assert (ours.num_classes, ours(x).shape, ours.classifier.weight.dtype) == (7, (2, 7), torch.double)
    assert not ours.classifier.training
    ours.reset_classifier(0)
    assert torch.equal(ours(x), ours.forward_head(maps, pre_logits=True))
    with pytest.raises(ValueError, match="num_classes is -1"):
        ours.reset_classifier(-1)
    ours.set_grad_checkpointing(False)
    assert ours.engine == "plain"
    ours.set_grad_checkpointing()
    assert ours.engine == "best"


@pytest.mark.parametrize("stride", [8, 16, 32])
def test_dilation_in_the_place_of_stride(stride):
    torch.manual_seed(2)
    usual = small_model("imagenet", efficient=False)
    torch.manual_seed(2)
    dilated = small_model("imagenet", efficient=False, output_stride=stride)
    dilated.load_state_dict(usual.state_dict())
    x = random_images("imagenet", batch=2)
    maps = features(dilated)(x)
    assert dilated.feature_info.reduction() == [2, *(min(s, stride) for s in (4, 8, 16, 32))]
    for y, reduction in zip(maps, dilated.feature_info.reduction(), strict=True):
        assert all(abs(found - side / reduction) < 1 for found, side in zip(y.shape[2:], x.shape[2:], strict=True))
    dilations = [getattr(dilated.features, f"denseblock{i}").denselayer1.conv2.dilation[0] for i in (1, 2, 3, 4)]
    assert dilations == {8: [1, 1, 2, 4], 16: [1, 1, 1, 2], 32: [1, 1, 1, 1]}[stride]
    for engine in ("checkpoint", "shared"):
        ours = with_engine(dilated, engine)
        ours.zero_grad()
        found = _step(features(ours), ours, x)
        for a, b in zip(found, _step(features(dilated), dilated, x), strict=True):
            assert_close(a, b)
        assert_same_gradients(ours, dilated)


def test_dilation_reaches_the_pixels_that_stride_would_reach():
    """A layer after a pooling that is left out sees, of an even map, what it would see in the halved one."""
    usual = small_model("bc", efficient=False).eval()
    dilated = small_model("bc", efficient=False, output_stride=2).eval()
    dilated.load_state_dict(usual.state_dict())
    halved = torch.randn(2, usual.features.transition2.conv.out_channels, 5, 4, dtype=torch.double)
    spread = torch.zeros(2, halved.shape[1], 10, 8, dtype=torch.double)
    spread[:, :, ::2, ::2] = halved
    found = dilated.features.denseblock3(spread)[:, :, ::2, ::2]
    assert_close(found, usual.features.denseblock3(halved))


@pytest.mark.parametrize("maps", MAPS)
@pytest.mark.parametrize("dims", [1, 3])
def test_signals_and_volumes(dims, maps):
    words = {"growth_rate": 3, "block_config": (2, 1, 2), "num_init_features": 4, "output_stride": 2, "dims": dims}
    plain = DenseNet(**words, efficient=False, features_only=True, maps=maps).double()
    ours = with_engine(plain, "shared")
    x = torch.randn(3, 3, *(9, 6, 7)[:dims], dtype=torch.double)
    for a, b in zip(_step(ours, ours, x), _step(plain, plain, x), strict=True):
        assert_close(a, b)
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)


def test_an_output_stride_that_cannot_be():
    with pytest.raises(ValueError, match="output_stride is 3, but must be one of 4, 8, 16, 32"):
        small_model("imagenet", output_stride=3)


def test_information_stands_alone():
    info = FeatureInfo([{"num_chs": 8, "reduction": 2, "module": "a"}], [0])
    assert (info.channels(), info.reduction(0), info.module_name([0])) == ([8], 2, ["a"])
