"""Weights of every known layout are loaded unchanged, also into other libraries; what does not fit changes no model."""

import copy
import os
import sys

import numpy as np
import pytest
import torch
import torchvision
from helpers import assert_close, assert_same_step, random_images, small_model
from keras_layout import as_keras
from torch import Tensor, nn

from efficient_densenet import DenseNet, create_model, load_weights, rename_keys
from efficient_densenet.weights.load import model_arguments


def _renamed(*pairs):
    def rename(state: dict[str, Tensor]) -> dict[str, Tensor]:
        renamed = {}
        for key, tensor in state.items():
            for old, new in pairs:
                key = key.replace(old, new)
            renamed[key] = tensor
        return renamed

    return rename


LAYOUTS = {
    "ours": dict,
    "old torchvision": _renamed(("norm1", "norm.1"), ("norm2", "norm.2"), ("conv1", "conv.1"), ("conv2", "conv.2")),
    "without counts": lambda state: {k: v for k, v in state.items() if "num_batches" not in k},
    "timm's features_only": _renamed(("features.", "features_")),
    "MONAI": _renamed(
        *((f".denselayer{i}.", f".denselayer{i}.layers.") for i in (1, 2)), ("classifier", "class_layers.out")
    ),
    "gpleiss": _renamed(("norm5", "norm_final")),
    "DataParallel": lambda state: {f"module.{k}": v for k, v in state.items()},
    "torch.compile of DataParallel": lambda state: {f"_orig_mod.module.{k}": v for k, v in state.items()},
    "a compiled block": _renamed(("denseblock1.", "denseblock1._orig_mod.")),
    "Lightning": lambda state: {"state_dict": {f"model.{k}": v for k, v in state.items()}, "epoch": 3},
    "state_dict": lambda state: {"state_dict": state, "loss": torch.ones(())},
    "a run of the demos": lambda state: {"model": {"depth": 3}, "state": {"model": state, "optimizer": {}}},
    "Keras": lambda state: as_keras(state, "/"),
    "Keras with dots and torch's tensors": lambda state: as_keras(state, ".", torch_s=True),
    "Keras 2": lambda state: {
        k.replace("conv1_conv/", "conv1/conv/").replace("conv1_bn/", "conv1/bn/").replace("predictions", "fc1000"): v
        for k, v in as_keras(state, "/", ":0").items()
    },
    "Keras's HDF5": lambda state: {f"{k.rpartition('/')[0]}/{k}": v for k, v in as_keras(state, "/", ":0").items()},
}
WITHOUT_COUNTS = {name for name in LAYOUTS if "Keras" in name} | {"without counts"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_loads_and_computes_the_same(layout):
    source, ours = _trained("imagenet"), small_model("imagenet")
    state = source.state_dict()
    foreign = LAYOUTS[layout](state)
    report = load_weights(ours, foreign)
    counts = {name for name in state if name.endswith("num_batches_tracked")}
    expected_kept = counts if layout in WITHOUT_COUNTS else set()
    for name, tensor in ours.state_dict().items():
        if name not in expected_kept:
            assert torch.equal(tensor, state[name]), name
    assert (len(report.used), set(report.kept)) == (len(state) - len(expected_kept), expected_kept)
    assert set(report.renamed) == set(report.used) - set(state)
    assert str(report).startswith(f"{len(report.used)} tensors used, {len(report.renamed)} of them by another name")


def _trained(family: str, **overrides) -> DenseNet:
    """A model after one forward, whose running statistics differ from a new model's."""
    model = small_model(family, efficient=False, **overrides)
    with torch.no_grad():
        model(random_images(family, batch=2))
    return model


WORDS = {"growth_rate": 4, "block_config": (1, 2, 1, 1), "num_classes": 5}


def _monai() -> nn.Module:
    nets = pytest.importorskip("monai.networks.nets")
    words = {"growth_rate": 4, "block_config": (1, 2, 1, 1)}
    return nets.DenseNet(spatial_dims=2, in_channels=3, out_channels=5, init_features=8, **words)


THEIR_MODELS = {
    "torchvision": lambda: torchvision.models.DenseNet(num_init_features=8, **WORDS),
    "timm": lambda: pytest.importorskip("timm").create_model("densenet121", pretrained=False, **WORDS),
    "MONAI": _monai,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("library", THEIR_MODELS)
def test_weights_of_other_libraries_models_both_ways(library):
    theirs = THEIR_MODELS[library]().double()
    for norm in (m for m in theirs.modules() if isinstance(m, nn.BatchNorm2d)):
        for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
            nn.init.uniform_(tensor, 0.5, 1.5)
    ours = create_model("densenet121", num_init_features=8, **WORDS).double()
    load_weights(ours, theirs.state_dict())
    x = random_images("imagenet", batch=2)
    expected = theirs.eval()(x)
    assert_close(ours.eval()(x), expected)
    for tensor in theirs.state_dict().values():
        tensor.zero_()
    report = load_weights(theirs, ours.state_dict())
    assert_close(theirs(x), expected)
    assert set(report.renamed.values()) == set(theirs.state_dict()) - set(ours.state_dict())


# Files


def test_files_of_torch_save_and_safetensors(tmp_path, monkeypatch):
    save_file = pytest.importorskip("safetensors.torch").save_file
    source = _trained("bc").state_dict()
    torch.save({"state_dict": source}, tmp_path / "weights.pth")
    torch.save(source, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    save_file(source, tmp_path / "weights.safetensors")
    for path in (tmp_path / "weights.pth", str(tmp_path / "old.pth"), tmp_path / "weights.safetensors"):
        ours = small_model("bc")
        load_weights(ours, path)
        assert all(torch.equal(tensor, source[key]) for key, tensor in ours.state_dict().items())
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ModuleNotFoundError, match=r"safetensors is not.*pip install -e '\.\[weights\]'"):
        load_weights(small_model("bc"), tmp_path / "weights.safetensors")


class _Code:
    def __reduce__(self):
        return os.system, ("exit 1",)


def _truncated(path) -> None:
    torch.save(small_model("bc").state_dict(), path)
    path.write_bytes(path.read_bytes()[:5000])


NO_TENSORS = r"weights.pth holds no tensors by name.*give a model's state dict"
DAMAGED = r"weights.pth is truncated, damaged or contains more than tensors"
BAD_FILES = {
    "nothing": (lambda path: None, r"weights.pth is no file"),
    "a page": (lambda path: path.write_text("<html>Not found</html>"), DAMAGED),
    "truncated": (_truncated, DAMAGED),
    "code": (lambda path: torch.save({"weight": _Code()}, path), DAMAGED),
    "code in an old file": (
        lambda path: torch.save({"weight": _Code()}, path, _use_new_zipfile_serialization=False),
        DAMAGED,
    ),
    "a dict of numbers": (lambda path: torch.save({"state_dict": {"a": 1}}, path), NO_TENSORS),
    "a tensor": (lambda path: torch.save(torch.ones(3), path), NO_TENSORS),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_bad_file_is_an_error_of_one_sentence(kind, tmp_path):
    make, message = BAD_FILES[kind]
    make(tmp_path / "weights.pth")
    _refuses(message, small_model("bc"), tmp_path / "weights.pth")


# Errors


def _unchanged(model: nn.Module, before: dict[str, Tensor]) -> None:
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key]), key


def _refuses(message: str, model: nn.Module, state: object, **options) -> str:
    """The message of the error that it raises; the model is unchanged."""
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message) as error:
        load_weights(model, state, **options)
    assert "\n" not in str(error.value)
    assert error.value.__cause__ is None or error.value.__suppress_context__
    _unchanged(model, before)
    return str(error.value)


def _spoiled(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """One is missing, one is unknown, one has another shape, two are of another kind."""
    del state["features.transition1.conv.weight"]
    state["features.denseblock9.weight"] = torch.ones(2)
    state["module.classifier.bias"] = torch.ones(8)
    del state["classifier.bias"]
    state["classifier.weight"] = state["classifier.weight"].to_sparse()
    state["features.norm5.bias"] = state["features.norm5.bias"].to("meta")
    return state


def test_all_that_does_not_fit_is_listed_together():
    message = _refuses(
        r"the dict does not fit the model, which is unchanged: missing: features.transition1.conv.weight; "
        r"not in the model: features.denseblock9.weight; "
        r"of another shape: module.classifier.bias \(8, and the model's is 5\); not dense real tensors with data: ",
        small_model("bc"),
        _spoiled(_trained("bc").state_dict()),
    )
    assert all(name in message.partition("with data: ")[2] for name in ("classifier.weight", "features.norm5.bias"))


@pytest.mark.parametrize(("num_classes", "skip"), [(0, "classifier"), (7, ("classifier.weight", "classifier.bias"))])
def test_another_number_of_classes(num_classes, skip):
    model, source = small_model("bc", num_classes=num_classes), _trained("bc")
    before = copy.deepcopy(model.classifier.state_dict())
    report = load_weights(model, LAYOUTS["MONAI"](source.state_dict()), skip=skip)
    assert report.skipped == ["class_layers.out.weight", "class_layers.out.bias"]
    assert report.kept == [f"classifier.{name}" for name in before]
    assert "skipped: class_layers.out.weight, class_layers.out.bias" in str(report)
    _unchanged(model.classifier, before)
    x = random_images("bc", batch=2)
    assert_close(model.eval().features(x), source.eval().features(x))


def test_skip_takes_prefixes_and_names_of_the_source():
    model, state = small_model("bc"), _trained("bc").state_dict()
    del state["features.norm5.weight"]
    state["op_threshs"] = torch.ones(18)
    wrong = r"skip has 'clasifier', with which no name begins: did you mean 'classifier'\?"
    _refuses(wrong, model, state, skip="clasifier")
    _refuses(r"missing: features.norm5.weight\. To load", model, state, skip="op_threshs")
    _refuses(r"not in the model: op_threshs\. To load", model, state, skip="features.norm5")
    report = load_weights(model, state, skip=("op_threshs", "features.norm5"))
    assert report.skipped == [n for n in state if n.startswith("features.norm5")] + ["op_threshs"]
    assert len(report.kept) == 5


def test_dtype_and_wrapper_of_the_model_stay():
    source = _trained("bc")
    model = nn.DataParallel(small_model("bc").half())
    report = load_weights(model, source.state_dict())
    assert all(name.startswith("module.") for name in report.renamed.values())
    for key, tensor in model.module.state_dict().items():
        assert torch.equal(tensor, source.state_dict()[key].to(tensor.dtype))


# Input channels


@pytest.mark.parametrize(("channels", "how"), [(1, "sum"), (2, "sum"), (1, "repeat"), (4, "repeat"), (6, "repeat")])
def test_other_input_channels(channels, how):
    source, model = _trained("imagenet"), small_model("imagenet", in_channels=channels)
    state = LAYOUTS["Keras"](source.state_dict())
    _refuses(r"of another shape: .* \(6×3×7×7, and the model's is .*adapt_input", model, state)
    report = load_weights(model, state, adapt_input=how)
    assert report.adapted == ["features.conv0.weight"]
    gray = torch.randn(2, 1, 69, 75, dtype=torch.double)
    actual, expected = (m.eval()(gray.expand(-1, n, -1, -1)) for m, n in ((model, channels), (source, 3)))
    if how == "sum" or channels % 3 == 0:
        assert_close(actual, expected)
    old, new = source.features.conv0.weight, model.features.conv0.weight
    for i in range(channels) if how == "repeat" else ():
        assert_close(new[:, i], old[:, i % 3] * 3 / channels)


def test_three_channels_are_not_adapted():
    source, model = _trained("bc"), small_model("bc")
    assert load_weights(model, source.state_dict(), adapt_input="sum").adapted == []
    assert torch.equal(model.features.conv0.weight, source.features.conv0.weight)
    message = r"adapt_input is 'mean', but must be one of 'sum', 'repeat'"
    _refuses(message, model, source.state_dict(), adapt_input="mean")


@pytest.mark.parametrize("value", [torch.ones(3), None, "x", np.array(["a"])])
def test_a_classifier_s_weight_that_is_no_matrix_is_refused_with_a_sentence(value):
    state = small_model("bc").state_dict() | {"classifier.weight": value}
    with pytest.raises(ValueError, match=r"classifier\.weight"):
        load_weights(small_model("bc"), state)
    assert "num_classes" not in model_arguments(state)


# State dicts of torchvision


def test_torchvision_and_ours_compute_the_same():
    settings = {"growth_rate": 7, "block_config": (2, 3, 2, 1), "num_init_features": 15}
    theirs = torchvision.models.DenseNet(**settings).double()
    with torch.no_grad():
        for norm in (m for m in theirs.modules() if isinstance(m, torch.nn.BatchNorm2d)):
            for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
                tensor.uniform_(0.5, 1.5)
    ours = create_model("densenet121", num_classes=1000, efficient="shared", **settings).double()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(6, 3, 67, 70, dtype=torch.double)
    for training in (False, True):
        assert_same_step(ours.train(training), theirs.train(training), x)


def test_torchvision_s_models_and_ours_have_the_same_keys_and_sizes():
    for name in ("densenet121", "densenet161", "densenet169", "densenet201"):
        with torch.device("meta"):
            theirs, ours = getattr(torchvision.models, name)(), create_model(name)
        theirs.load_state_dict(ours.state_dict(), strict=True, assign=True)
        assert list(theirs.state_dict()) == list(ours.state_dict())


def test_the_same_seed_draws_torchvision_s_weights():
    settings = {"growth_rate": 4, "block_config": (2, 1, 2, 1), "num_init_features": 8, "num_classes": 7}
    torch.manual_seed(3)
    theirs = torchvision.models.DenseNet(**settings)
    torch.manual_seed(3)
    ours = create_model("densenet121", **settings)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def test_two_names_for_one_tensor_are_an_error():
    weight = torch.ones(3)
    with pytest.raises(ValueError, match=r"both 'features.norm5.weight' and 'features.norm_final.weight'.*drop one"):
        rename_keys({"features.norm5.weight": weight, "features.norm_final.weight": weight})
