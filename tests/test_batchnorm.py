"""Running statistics are updated exactly once per forward, and gradients are plain's, in every use of a network."""

import copy
import pickle

import pytest
import torch
from grids import grid
from helpers import assert_close, assert_same_buffers, assert_same_gradients, assert_same_step, small_model, with_engine
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
        forward(i).square().sum().backward()
        optimizer.step()


def _mixed(model, forward, optimizer):
    """Forwards without gradients, in evaluation mode or without a backward, and gradients that accumulate."""
    with torch.no_grad():
        forward(0), forward(1)
    _steps(model, forward, optimizer)
    model.eval()
    _steps(model, forward, optimizer)
    model.train()
    forward(0)
    for i in range(3):
        forward(i).square().sum().backward()


def _called_twice(model, forward, optimizer):
    output = forward(0)
    (forward(1, output.mean()) * output).square().sum().backward()


def _forward_between(model, forward, optimizer):
    loss = forward(0).square().sum()
    forward(1)
    loss.backward()


def _several_backwards(model, forward, optimizer):
    losses = [forward(i).square().sum() for i in range(3)]
    torch.stack(losses).sum().backward(retain_graph=True)
    losses[0].backward(retain_graph=True)
    losses[0].backward()
    for loss in reversed(losses[1:]):
        torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)


def _eval_before_the_backward(model, forward, optimizer):
    loss = forward(0).square().sum()
    model.eval()
    loss.backward()


def _frozen(model, forward, optimizer):
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    _steps(model, forward, optimizer)


USES = [_steps, _mixed, _called_twice, _forward_between, _several_backwards, _eval_before_the_backward, _frozen]
AROUND = "around, reentrant", "around"


def _network(around: bool, tied: bool) -> nn.Module:
    if around:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)).double()
    model = small_model("bc", efficient=False, drop_rate=0.2)
    if tied:
        first, second = model.features.denseblock1.children()
        second.norm2, second.conv2 = first.norm2, first.conv2
    return model


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize(
    *grid(
        # torch.utils.checkpoint recomputes in the mode of the backward.
        lambda use, engine, momentum, tied: (
            not (use is _eval_before_the_backward and engine in ("official", *AROUND))
            and not (tied and engine in AROUND)
            and not (use is _several_backwards and engine == AROUND[0])
        ),
        engine=["plain", "official", "checkpoint", "shared", *AROUND],
        use=USES,
        momentum=[0.1, 0.7, None],
        tied=[False, True],
    )
)
def test_uses_of_every_engine_and_of_torch_s_checkpoint_around_our_norms(engine, use, momentum, tied):
    """The reference uses torch's norms."""
    around = engine in AROUND
    plain = _network(around, tied)
    for module in plain.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = momentum
    ours = convert_batchnorm(copy.deepcopy(plain)) if around else with_engine(plain, engine)
    restore_batchnorm(plain)
    assert not any(isinstance(module, CpBatchNorm2d) for module in plain.modules())

    def run(model: nn.Module, i: int, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
        x = torch.randn(4, 3, 9, 7, generator=torch.Generator().manual_seed(i), dtype=torch.double) * scale
        if model is ours and around:
            x = x if x.requires_grad else x.requires_grad_()
            return torch_checkpoint(model, x, use_reentrant="reentrant" in engine)
        return model(x)

    for model in (ours, plain):
        torch.manual_seed(5)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        use(model, lambda *arguments, model=model: run(model, *arguments), optimizer)
    assert_same_buffers(ours, plain)
    assert_same_gradients(ours, plain, 1e-9)


def _share_statistics(first: nn.Module, second: nn.Module) -> None:
    second.running_mean, second.running_var = first.running_mean, first.running_var


def _share_count(first: nn.Module, second: nn.Module) -> None:
    second.num_batches_tracked = first.num_batches_tracked


def _share_memory_of_the_mean(first: nn.Module, second: nn.Module) -> None:
    second.running_mean.data = first.running_mean.data


@pytest.mark.parametrize(
    *grid(
        share=[_share_statistics, _share_count, _share_memory_of_the_mean],
        momenta=[(0.1, 0.1), (None, None), (0.3, 0.1), (None, 0.1)],
    )
)
def test_norms_that_share_tensors_update_them_in_the_order_of_plain(share, momenta):
    plain = small_model("bc", efficient=False)
    models = plain, with_engine(plain, "shared")
    for model in models:
        first, second = model.features.denseblock1.children()
        share(first.norm2, second.norm2)
        first.norm2.momentum, second.norm2.momentum = momenta
        for i in range(3):
            model(torch.randn(4, 3, 9, 7, generator=torch.Generator().manual_seed(i), dtype=torch.double)).sum()
    assert_same_buffers(*models)


def _hold_as_parameters(norm: nn.Module) -> None:
    for name in ("running_mean", "running_var"):
        setattr(norm, name, nn.Parameter(norm._buffers.pop(name), requires_grad=False))


def _hold_as_attributes(norm: nn.Module) -> None:
    for name in list(norm._buffers):
        vars(norm)[name] = norm._buffers.pop(name)


@pytest.mark.parametrize(
    *grid(engine=["official", "checkpoint", "shared"], hold=[_hold_as_parameters, _hold_as_attributes], first=[0, 2])
)
def test_statistics_that_are_no_buffers_update_once(engine, hold, first):
    plain = small_model("bc", efficient=False)
    models = plain, with_engine(plain, engine)
    for i in range(4):
        norms = [[each for each in model.modules() if isinstance(each, nn.BatchNorm2d)] for model in models]
        for norm in (*norms[0], *norms[1]) if i == first else ():
            hold(norm)
        x = torch.randn(4, 3, 9, 7, dtype=torch.double)
        for model in models:
            model(x).sum().backward()
    for expected, actual in zip(*norms, strict=True):
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            assert_close(getattr(actual, name), getattr(expected, name))


@pytest.mark.parametrize("engine", ["official", "checkpoint"])
def test_restored_norms_of_recomputed_layers_update_once(engine):
    plain, x = small_model("bc", efficient=False), torch.randn(4, 3, 9, 7, dtype=torch.double)
    ours = restore_batchnorm(with_engine(plain, engine))
    for _ in range(2):
        assert_same_step(ours, plain, x)


class CustomNorm(nn.BatchNorm2d):
    """A subclass with a forward of its own, which reads and writes its buffers."""

    def forward(self, input):
        if self.training:
            self.num_batches_tracked.add_(1)
        return nn.functional.batch_norm(
            input, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1, self.eps
        )


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


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.SyncBatchNorm(4), CustomNorm(4)])
@pytest.mark.parametrize("copier", [lambda m: m, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_every_converted_norm_updates_once(norm, copier):
    norm = copier(convert_batchnorm(copy.deepcopy(norm)))
    for _ in range(2):
        torch_checkpoint(norm, torch.randn(2, 4, 3, 3, requires_grad=True), use_reentrant=True).sum().backward()
    assert norm.num_batches_tracked == 2


def test_conversion_changes_only_the_class():
    """Modules, parameters, modes and hooks stay; a second conversion changes nothing, and the first can be undone."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ModuleList([nn.SyncBatchNorm(4), CustomNorm(4)]), nn.GroupNorm(2, 4)
    )
    model[1].eval()
    hook_calls = []
    model[1].register_forward_hook(lambda *_: hook_calls.append(1))
    state = [(name, id(tensor)) for name, tensor in model.state_dict(keep_vars=True).items()]
    modules, classes = list(model.modules()), [type(module) for module in model.modules()]
    for _ in range(2):
        assert convert_batchnorm(model) is model
        assert list(model.modules()) == modules
        assert [(name, id(tensor)) for name, tensor in model.state_dict(keep_vars=True).items()] == state
        assert [type(each) for each in (model[1], model[2][0])] == [CpBatchNorm2d, CpSyncBatchNorm]
        assert isinstance(model[2][1], CustomNorm)
    assert [model[1].training, model[2][0].training] == [False, True]
    model[1](torch.randn(2, 4, 3, 3))
    assert hook_calls == [1]
    forward, x = model[1].forward, torch.randn(2, 4, 3, 3)
    assert [type(m) for m in restore_batchnorm(model).modules()] == classes
    assert torch.equal(forward(x), model[1](x))


def test_a_lazy_norm_raises_and_nothing_is_converted():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.LazyBatchNorm2d())
    with pytest.raises(ValueError, match=r"LazyBatchNorm2d.*has not seen data.*run the model once"):
        convert_batchnorm(model)
    assert type(model[0]) is nn.BatchNorm2d
