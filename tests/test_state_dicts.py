"""State dicts of this package, torchvision and older layouts load strictly into each other."""

import pytest
import torch
import torchvision
from helpers import assert_same_step

from efficient_densenet import create_model, rename_keys


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
