"""State dicts of this package, torchvision and older layouts load strictly into each other."""

import copy

import pytest
import torch
import torch.nn.functional as F
import torchvision
from helpers import assert_close, assert_same_buffers, assert_same_gradients, small_model, with_engine

from efficient_densenet import DenseNet, create_model, rename_keys

NAMES = ["densenet121", "densenet161", "densenet169", "densenet201"]


@pytest.mark.parametrize("name", [NAMES[0], *(pytest.param(name, marks=pytest.mark.exhaustive) for name in NAMES[1:])])
def test_torchvision_and_ours_compute_the_same(name):
    whole = name != NAMES[0]
    settings = {} if whole else {"growth_rate": 8, "block_config": (2, 3, 2, 1), "num_init_features": 16}
    theirs = getattr(torchvision.models, name)() if whole else torchvision.models.DenseNet(**settings)
    theirs = theirs.double()
    with torch.no_grad():
        for norm in (m for m in theirs.modules() if isinstance(m, torch.nn.BatchNorm2d)):
            for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
                tensor.uniform_(0.5, 1.5)
    ours = create_model(name, num_classes=1000, efficient="shared", **settings).double()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = torch.randn(6, 3, 67, 70, dtype=torch.double)
    theirs.eval(), ours.eval()
    with torch.no_grad():
        assert_close(ours(x), theirs(x))
    theirs.train(), ours.train()
    losses = []
    for model in (ours, theirs):
        losses.append(F.cross_entropy(model(x), torch.arange(6) * 100))
        losses[-1].backward()
    assert_close(*losses)
    assert_same_gradients(ours, theirs)
    assert_same_buffers(ours, theirs)
    again = copy.deepcopy(theirs)
    again.load_state_dict(ours.state_dict(), strict=True)
    with torch.no_grad():
        assert_close(again.eval()(x), ours.eval()(x))


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.exhaustive) for name in NAMES[:-1]), NAMES[-1]]
)
def test_ours_loads_strictly_into_torchvision(name):
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


LAYOUTS = {
    "gpleiss": lambda key: key.replace("features.norm5.", "features.norm_final."),
    "old torchvision": lambda key: (
        key.replace("norm1", "norm.1").replace("norm2", "norm.2").replace("conv1", "conv.1").replace("conv2", "conv.2")
    ),
    "DataParallel": lambda key: f"module.{key}",
    "torch.compile of DataParallel": lambda key: f"_orig_mod.module.{key}",
    "ours": lambda key: key,
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_layouts_load_strictly(layout):
    source = small_model("bc")
    foreign = {LAYOUTS[layout](key): tensor for key, tensor in source.state_dict().items()}
    target = small_model("bc")
    target.load_state_dict(rename_keys(foreign), strict=True)
    for key, tensor in target.state_dict().items():
        assert torch.equal(tensor, source.state_dict()[key])


def test_gpleiss_s_constructor_call_and_weights():
    """Positional arguments, and the name of the final norm, as in that code."""
    ours = DenseNet(12, [2, 2, 2], 0.5, 24, 4, 0, 10, True, True)
    keys = {key.replace("norm5", "norm_final"): tensor for key, tensor in ours.state_dict().items()}
    assert "features.norm_final.weight" in keys
    copied = with_engine(ours, "plain")
    with torch.no_grad():
        for p in copied.parameters():
            p.zero_()
    copied.load_state_dict(rename_keys(keys))
    x = torch.randn(2, 3, 32, 32)
    assert_close(copied(x), ours(x), 1e-5)


def test_two_names_for_one_tensor_are_an_error():
    weight = torch.ones(3)
    with pytest.raises(ValueError, match=r"both 'features.norm5.weight' and 'features.norm_final.weight'.*drop one"):
        rename_keys({"features.norm5.weight": weight, "features.norm_final.weight": weight})
