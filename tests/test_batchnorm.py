"""Running statistics are updated exactly once per forward, whatever recomputes it."""

import copy
import pickle

import pytest
import torch
import torchvision
from grids import grid
from helpers import assert_same_buffers, assert_same_gradients, small_model, with_engine
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from efficient_densenet import (
    CpBatchNorm1d,
    CpBatchNorm2d,
    CpBatchNorm3d,
    CpSyncBatchNorm,
    convert_batchnorm,
    cp_BatchNorm2d,
    restore_batchnorm,
)


def _steps(model, forward, optimizer):
    for i in range(4):
        optimizer.zero_grad()
        forward(model, i).square().sum().backward()
        optimizer.step()


def _accumulated(model, forward, optimizer):
    for i in range(4):
        forward(model, i).square().sum().backward()
    optimizer.step()


def _retained(model, forward, optimizer):
    loss = forward(model, 0).square().sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()


def _grad_of_several(model, forward, optimizer):
    outputs = [forward(model, i).square().sum() for i in range(3)]
    for output in reversed(outputs):
        torch.autograd.grad(output, list(model.parameters()), retain_graph=True, allow_unused=True)


def _no_grad(model, forward, optimizer):
    with torch.no_grad():
        forward(model, 0)
        forward(model, 1)


def _frozen(model, forward, optimizer):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    _steps(model, forward, optimizer)


def _mixed(model, forward, optimizer):
    """Also a forward that is followed by no backward."""
    _no_grad(model, forward, optimizer)
    _steps(model, forward, optimizer)
    model.eval()
    _steps(model, forward, optimizer)
    model.train()
    forward(model, 0)
    _accumulated(model, forward, optimizer)


AROUND = "around, reentrant", "around"


def _network(around: bool) -> nn.Module:
    if not around:
        return small_model("bc", efficient=False)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)).double()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize(
    *grid(
        engine=["plain", "official", "checkpoint", "shared", *AROUND],
        use=[_steps, _accumulated, _retained, _grad_of_several, _no_grad, _frozen, _mixed],
        momentum=[0.1, 0.7, None],
    )
)
def test_every_engine_and_torch_s_checkpoint_around_our_norms(engine, use, momentum):
    """The reference uses torch's norms."""
    around = engine in AROUND
    plain = _network(around)
    for module in plain.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = momentum
    ours = convert_batchnorm(copy.deepcopy(plain)) if around else with_engine(plain, engine)
    restore_batchnorm(plain)
    assert not any(isinstance(module, CpBatchNorm2d) for module in plain.modules())

    def run(model: nn.Module, i: int) -> torch.Tensor:
        x = torch.randn(4, 3, 9, 7, generator=torch.Generator().manual_seed(i), dtype=torch.double)
        if model is ours and around:
            return torch_checkpoint(model, x.requires_grad_(), use_reentrant="reentrant" in engine)
        return model(x)

    for model in (ours, plain):
        use(model, run, torch.optim.SGD(model.parameters(), lr=1e-3))
    assert_same_buffers(ours, plain)
    assert_same_gradients(ours, plain, 1e-9)


@pytest.mark.parametrize("engine", ["official", "checkpoint"])
def test_restored_norms_of_recomputed_layers_update_once(engine):
    plain, x = small_model("bc", efficient=False), torch.randn(4, 3, 9, 7, dtype=torch.double)
    ours = restore_batchnorm(with_engine(plain, engine))
    for model in (ours, plain):
        for _ in range(2):
            model(x).square().sum().backward()
    assert_same_buffers(ours, plain)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_torchvision_updates_checkpointed_norms_twice_and_this_package_once():
    arguments = {"growth_rate": 4, "block_config": (2, 2), "num_init_features": 8}
    reference = torchvision.models.DenseNet(**arguments, memory_efficient=True)
    ours = small_model("imagenet", **arguments, num_classes=1000, efficient="official").float()
    ours.load_state_dict(reference.state_dict())
    x, counts = torch.randn(2, 3, 32, 32, requires_grad=True), []
    for model in (reference, ours):
        model(x).sum().backward()
        named = [(name, int(count)) for name, count in model.named_buffers() if name.endswith("num_batches_tracked")]
        counts.append({count for name, count in named if ".norm1." in name})
        assert {count for name, count in named if ".norm1." not in name} == {1}
    assert counts == [{2}, {1}]


@pytest.mark.parametrize(
    ("norm_class", "torch_class", "shape"),
    [
        (CpBatchNorm1d, nn.BatchNorm1d, (4, 3, 5)),
        (CpBatchNorm2d, nn.BatchNorm2d, (4, 3, 5, 2)),
        (CpBatchNorm3d, nn.BatchNorm3d, (4, 3, 5, 2, 2)),
    ],
)
@pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}])
def test_norms_compute_as_torch_s_with_the_same_state(norm_class, torch_class, shape, options):
    reference, norm = torch_class(3, **options), norm_class(3, **options)
    assert isinstance(norm, torch_class)
    assert cp_BatchNorm2d is CpBatchNorm2d
    norm.load_state_dict(reference.state_dict())
    for _ in range(3):
        x = torch.randn(shape)
        assert torch.equal(torch_checkpoint(norm, x.requires_grad_(), use_reentrant=False), reference(x))
    for a, b in zip(norm.state_dict().values(), reference.state_dict().values(), strict=True):
        assert torch.equal(a, b)


class CustomNorm(nn.BatchNorm2d):
    """A subclass with a forward of its own, which reads and writes its buffers."""

    def forward(self, input):
        if self.training:
            self.num_batches_tracked.add_(1)
        return nn.functional.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, self.eps
        )


def test_conversion_changes_only_the_class():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ModuleList([nn.SyncBatchNorm(4), CustomNorm(4)]), nn.GroupNorm(2, 4)
    )
    model[1].eval()
    hook_calls = []
    model[1].register_forward_hook(lambda *_: hook_calls.append(1))
    before = {name: id(t) for name, t in model.state_dict(keep_vars=True).items()}
    classes = [type(module) for module in model.modules()]
    norms = [model[1], model[2][0], model[2][1]]
    assert convert_batchnorm(model) is model
    assert norms == [model[1], model[2][0], model[2][1]]
    assert {name: id(t) for name, t in model.state_dict(keep_vars=True).items()} == before
    assert [type(n) for n in norms[:2]] == [CpBatchNorm2d, CpSyncBatchNorm]
    assert isinstance(norms[2], CustomNorm)
    assert [n.training for n in norms] == [False, True, True]
    model[1](torch.randn(2, 4, 3, 3))
    assert hook_calls == [1]
    types = [type(m) for m in model.modules()]
    assert [type(m) for m in convert_batchnorm(model).modules()] == types
    assert [type(m) for m in restore_batchnorm(model).modules()] == classes


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.SyncBatchNorm(4), CustomNorm(4)])
@pytest.mark.parametrize("copier", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_every_converted_norm_updates_once(norm, copier):
    norm = copier(convert_batchnorm(copy.deepcopy(norm)))
    for _ in range(2):
        torch_checkpoint(norm, torch.randn(2, 4, 3, 3, requires_grad=True), use_reentrant=True).sum().backward()
    assert norm.num_batches_tracked == 2


def test_a_lazy_norm_raises_and_nothing_is_converted():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.LazyBatchNorm2d())
    with pytest.raises(ValueError, match=r"LazyBatchNorm2d.*has not seen data.*run the model once"):
        convert_batchnorm(model)
    assert type(model[0]) is nn.BatchNorm2d


def test_a_recomputation_sets_no_attribute_of_the_norm(monkeypatch):
    """Another thread could see even a temporary change."""
    norm, changes = CpBatchNorm2d(3), []
    original = CpBatchNorm2d.__setattr__

    def recorded(self, name, value):
        changes.extend([name] if self is norm else [])
        original(self, name, value)

    monkeypatch.setattr(CpBatchNorm2d, "__setattr__", recorded)
    torch_checkpoint(norm, torch.randn(2, 3, 4, 4, requires_grad=True), use_reentrant=True).sum().backward()
    assert changes == []
    assert norm.num_batches_tracked == 1
