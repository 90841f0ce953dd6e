"""What is saved by default: bottlenecks that leave a step's peak as it is, or are small; and stages that run plain."""

import copy
import random
from collections.abc import Callable

import pytest
import torch
import torchvision
from grids import grid
from helpers import assert_same_step
from torch import nn
from torch.utils.checkpoint import checkpoint

from efficient_densenet import DenseNet, densenet121, make_efficient
from efficient_densenet.engine.recording import programs
from efficient_densenet.memory import predict, saved_bytes, set_memory_budget, tensor_peak
from efficient_densenet.memory.step import MetaModel

SIZE = 4, 3, 64, 64


def _ours(**settings) -> nn.Module:
    return DenseNet(8, (6, 8, 8), 0.5, 16, num_classes=5, small_inputs=False, **settings)


def _converted() -> nn.Module:
    model = torchvision.models.DenseNet(8, (6, 8, 8), 16, num_classes=5)
    make_efficient(model)
    return model


def _recomputing(model: nn.Module) -> nn.Module:
    """A copy that saves no bottleneck."""
    model = copy.deepcopy(model)
    for name, module in model.named_modules():
        if name.endswith(("denseblock1", "denseblock2", "denseblock3")):
            module.keep_bottlenecks(())
    return model


@pytest.mark.parametrize(*grid(kernels=["", "portable"], make=[_ours, _converted], strength=1))
def test_the_peak_is_that_of_recomputing_and_steps_are_plain_s(make, kernels, monkeypatch):
    if kernels:
        monkeypatch.setattr("efficient_densenet.kernels.numba_supports", lambda values: False)
    model, x = make(), torch.randn(SIZE)
    plain = copy.deepcopy(model).double()
    plain.set_engine(False) if make is _ours else make_efficient(plain, "plain")
    assert_same_step(copy.deepcopy(model).double(), plain, x.double())
    recomputing = _recomputing(model)
    for each in (model, recomputing):
        for parameter in each.parameters():
            parameter.grad = torch.zeros_like(parameter)
    assert saved_bytes(lambda: model(x)) > saved_bytes(lambda: recomputing(x))
    peaks = [tensor_peak(lambda each=each: each(x).sum().backward()) for each in (model, recomputing)]
    assert peaks[0] <= peaks[1] * 1.001
    if not kernels:  # a prediction is of the kernels that this processor has
        assert _predicted(model, SIZE, "cpu") == _predicted(recomputing, SIZE, "cpu")


def _predicted(model: nn.Module, shape: tuple[int, ...], device: str) -> int:
    return MetaModel(model, device=device).training_step(shape).tensor_peak


@pytest.mark.parametrize(
    *grid(
        device=["cpu", "cuda"],
        settings__shape=[
            ((12, (16, 16, 16), 0.5, 24), (64, 3, 32, 32)),
            ((12, (4, 10, 20), 0.9, 24), (8, 3, 32, 32)),
            ((4, (2, 30), 1.0, 60), (2, 3, 30, 20)),
        ],
        strength=1,
    )
)
def test_no_predicted_peak_grows(settings, shape, device):
    by_default, none = (DenseNet(*settings, keep_bottleneck=keep) for keep in (None, False))
    assert _predicted(by_default, shape, device) <= _predicted(none, shape, device)


def _saves_none(model: nn.Module, x: torch.Tensor) -> bool:
    return saved_bytes(lambda: model(x)) == saved_bytes(lambda: _recomputing(model)(x))


def test_where_none_is_saved():
    x = torch.randn(SIZE)
    assert not _saves_none(_ours(), x)
    assert _saves_none(_ours(keep_bottleneck=False), x)
    assert _saves_none(_ours(efficient="shared"), x)
    assert _saves_none(_ours(features_only=True), x)
    frozen = _ours()
    for module in frozen.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    assert _saves_none(frozen, x)
    budgeted = _ours()
    set_memory_budget(budgeted, predict(_ours(keep_bottleneck=False), SIZE).total, SIZE)
    assert all(layer.keep_bottleneck is not None for layer in budgeted.features.denseblock3.children())


def _small_network(seed: int) -> tuple[Callable[[bool | str], nn.Module], torch.Tensor]:
    """A random small network, made with an engine, and its input."""
    rng = random.Random(seed)
    dims, blocks = rng.choice([1, 2, 2, 2, 3]), tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 3)))
    settings = rng.choice([4, 8, 12, 16, 24, 32]), blocks, rng.choice([0.5, 0.7, 1.0]), rng.choice([8, 16, 24, 64])
    bn_size, drop_rate, small_inputs = rng.choice([0, 1, 2, 4, 4]), rng.choice([0.0, 0.0, 0.2]), rng.random() < 0.7
    activation = rng.choice(["relu", "silu", "gelu", "leaky_relu", "elu", "mish"])
    half = torch.bfloat16 if dims < 3 else torch.float32  # PyTorch pools no volumes in bfloat16
    dtype = rng.choice([torch.float32, torch.float64, half])
    side = rng.choice({1: (16, 33, 64, 256), 2: (8, 9, 16, 21, 32, 48), 3: (8, 9, 12)}[dims])
    side = max(side, 2 ** len(blocks) * (1 if small_inputs else 4))
    options = {"activation": activation, "dims": dims, "small_inputs": small_inputs}

    def make(engine: bool | str) -> nn.Module:
        torch.manual_seed(seed)
        return DenseNet(*settings, bn_size, drop_rate, efficient=engine, **options).to(dtype)

    return make, torch.randn(rng.randint(1, 4), 3, *[side] * dims, dtype=dtype)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seeds", [range(i, i + 10) for i in range(0, 200, 10)])
def test_the_best_engine_holds_no_more_than_shared_or_plain(seeds):
    """But for a tenth, and half of what the gradients of weights take in float32, or 128 KiB."""
    for seed in seeds:
        make, x = _small_network(seed)
        peaks = []
        for engine in ("plain", "shared", True):
            model = make(engine)
            for _ in range(2):
                model(x).float().sum().backward()
            peaks.append(tensor_peak(lambda model=model, x=x: model(x).float().sum().backward()))
        plain, shared, best = peaks
        assert best <= 1.35 * plain, (seed, peaks)
        gradients = sum(parameter.numel() * max(4, parameter.itemsize) for parameter in model.parameters())
        assert best <= 1.1 * min(plain, shared) + max(gradients // 2, 1 << 17), (seed, peaks)


def test_a_replayed_step_holds_little_more_than_a_direct_one():
    programs.forget()
    model, x = DenseNet(16, (4, 4), 0.5, 24, small_inputs=False).bfloat16(), torch.randn(4, 3, 21, 21).bfloat16()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    direct, _, replayed = (tensor_peak(lambda: model(x).sum().backward()) for _ in range(3))
    assert replayed <= 1.5 * direct


def test_plain_modules_run_where_the_gradients_of_a_stage_s_weights_are_more_than_all_that_they_save():
    model, plain = (DenseNet(32, (4, 4), 0.5, 64, num_classes=5, efficient=each) for each in (True, False))
    for side, runs_plain in ((4, True), (24, False)):
        x = torch.randn(2, 3, side, side)
        assert (saved_bytes(lambda x=x: model(x)) == saved_bytes(lambda x=x: plain(x))) == runs_plain
    plain.load_state_dict(model.state_dict())
    assert_same_step(model.double(), plain.double(), torch.randn(2, 3, 4, 4).double())


def test_all_are_saved_where_they_are_small_beside_the_gradients_of_the_weights():
    model = densenet121().to("meta")
    saving, shared = (densenet121(keep_bottleneck=keep, efficient="shared").to("meta") for keep in (True, None))
    for side, saves_all in ((64, True), (96, False)):
        x = torch.empty(2, 3, side, side, device="meta")
        saved, all_saved, none = (saved_bytes(lambda each=each, x=x: each(x)) for each in (model, saving, shared))
        assert none < all_saved
        assert none <= saved <= all_saved
        assert (saved == all_saved) == saves_all


def test_a_forward_without_gradients_keeps_none():
    model, x = _ours(keep_bottleneck=True), torch.randn(SIZE)
    recomputing = _recomputing(model)
    with torch.no_grad():
        peaks = [tensor_peak(lambda each=each: each(x)) for each in (model, recomputing)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01)


@pytest.mark.parametrize("make", [_ours, _converted])
def test_what_is_saved_follows_the_modules_and_their_modes(make):
    model, x = make(), torch.randn(SIZE)
    first = saved_bytes(lambda: model(x))
    model.eval()
    with torch.no_grad():
        model(x)
    model.train()
    assert saved_bytes(lambda: model(x)) == first
    for _ in range(2):
        checkpoint(model, x, use_reentrant=False).sum().backward()  # raises where a recomputation saves something else
        model.features.denseblock2.eval()
