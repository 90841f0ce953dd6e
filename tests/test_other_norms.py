"""Norms that the shared engine does not support run by recomputation, with plain's numbers and one warning."""

import copy
import warnings

import pytest
import torch
from grids import grid
from helpers import assert_same_buffers, assert_same_step, random_images, small_model
from torch import Tensor, nn

from efficient_densenet import DenseNet
from efficient_densenet.engine import choose


class ChannelNorm(nn.Module):
    """A norm without any attribute of batch norms."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.square().mean(1, keepdim=True) + 1).sqrt()


NORMS = {
    "GroupNorm": lambda channels: nn.GroupNorm(1, channels),
    "GroupNorm without affine": lambda channels: nn.GroupNorm(1, channels, affine=False),
    "InstanceNorm2d": nn.InstanceNorm2d,
    "InstanceNorm2d with affine": lambda channels: nn.InstanceNorm2d(channels, affine=True, track_running_stats=True),
    "BatchNorm2d without affine": lambda channels: nn.BatchNorm2d(channels, affine=False),
    "BatchNorm2d without bias": lambda channels: _without_bias(nn.BatchNorm2d(channels)),
    "BatchNorm2d without statistics": lambda channels: nn.BatchNorm2d(channels, track_running_stats=False).eval(),
    "ChannelNorm": lambda channels: ChannelNorm(),
    "Identity": lambda channels: nn.Identity(),
}


def _without_bias(norm: nn.Module) -> nn.Module:
    norm.bias = None
    return norm


def _model_with_norms(name: str, path_part: str, **overrides) -> DenseNet:
    model = small_model("bc", efficient=False, **overrides)
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.BatchNorm2d) and path_part in path:
            parent, _, attribute = path.rpartition(".")
            setattr(model.get_submodule(parent), attribute, NORMS[name](module.num_features).double())
    return model


def _compare_training(plain: DenseNet) -> list[str]:
    """Compare three training steps with plain's; return the warnings about falling back."""
    ours = copy.deepcopy(plain).set_engine(True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in (3, 2, 4):
            assert_same_step(ours, plain, random_images("bc", batch))
    assert_same_buffers(ours, plain)
    return [str(warning.message) for warning in caught if "falling back" in str(warning.message)]


@pytest.mark.parametrize(
    *grid(
        name=NORMS,
        where=["norm", "norm1", "norm2"],
        strength=1,
    )
)
def test_inside_layers_they_run_by_recomputation_with_one_warning(name, where, monkeypatch):
    monkeypatch.setattr(choose, "_warned", set())
    (message,) = _compare_training(_model_with_norms(name, where, drop_rate=0.2))
    assert message.startswith("falling back from engine 'shared' to 'checkpoint': found a ")
    if not name.startswith("BatchNorm2d"):
        assert f"found a {name.split()[0]} inside a layer, where the shared engine takes BatchNorm2d" in message


@pytest.mark.parametrize(
    *grid(
        name=NORMS,
        where=["transition", "norm5"],
        strength=1,
    )
)
def test_after_a_block_they_run_alone_without_a_warning(name, where, monkeypatch):
    monkeypatch.setattr(choose, "_warned", set())
    assert _compare_training(_model_with_norms(name, where)) == []


@pytest.mark.parametrize("name", ["GroupNorm", "InstanceNorm2d with affine"])
def test_engine_shared_by_name_raises(name):
    model = _model_with_norms(name, "norm1").set_engine("shared")
    with pytest.raises(RuntimeError, match=r"engine 'shared' cannot run here: found a .*use another engine"):
        model(random_images("bc"))


@pytest.mark.parametrize("name", NORMS)
def test_in_eval_mode_without_gradients_there_is_no_warning(name):
    plain = _model_with_norms(name, "norm").eval()
    ours = copy.deepcopy(plain).set_engine(True)
    x = random_images("bc")
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        assert torch.equal(ours(x), plain(x))


@pytest.mark.parametrize("dims", [1, 3])
def test_group_norms_of_other_dimensions(dims, monkeypatch):
    monkeypatch.setattr(choose, "_warned", set())
    plain = small_model("bc", efficient=False, dims=dims)
    for layer in (m for block in (1, 3) for m in plain.get_submodule(f"features.denseblock{block}").children()):
        layer.norm1 = nn.GroupNorm(1, layer.norm1.num_features).double()
    ours = copy.deepcopy(plain).set_engine(True)
    with pytest.warns(UserWarning, match=f"found a GroupNorm inside a layer, .*BatchNorm{dims}d"):
        assert_same_step(ours, plain, torch.randn(2, 3, *[9] * dims, dtype=torch.double))
    assert_same_buffers(ours, plain)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("absent", [["num_batches_tracked"], ["running_mean", "running_var"]])
def test_norms_without_some_buffers(absent, momentum):
    plain = small_model("bc", efficient=False)
    for name, module in plain.named_modules():
        if name.endswith("norm2"):
            module.momentum = momentum
            vars(module)["_buffers"].update(dict.fromkeys(absent))
    ours = copy.deepcopy(plain).set_engine("shared")
    assert_same_step(ours, plain, random_images("bc"))
    assert_same_buffers(ours, plain)


def test_norms_of_two_precisions_update_each_their_own():
    plain = small_model("bc", efficient=False).bfloat16()
    for name, module in plain.named_modules():
        if name.endswith("norm1"):
            module.float()
    ours = copy.deepcopy(plain).set_engine("shared")
    x = random_images("bc").bfloat16()
    for model in (ours, plain):
        model(x).sum().backward()
    assert_same_buffers(ours, plain, tolerance=2e-2)
