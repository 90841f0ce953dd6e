"""Dense blocks of other kinds of layers, which are recomputed: each layer whole, or else the block whole."""

import copy
from functools import partial
from typing import Any

import dense_families as families
import pytest
import torch
from dense_families import CHANNELS, GROWTH, Block, Concatenating, ResidualDense, ResidualInResidual
from grids import grid
from helpers import assert_same_gradients, convert_and_report
from third_party_models import assert_restored, assert_same_training, convert_pair, features_block, randomized
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from efficient_densenet import convert_batchnorm
from efficient_densenet.adapt import Report
from efficient_densenet.memory import saved_bytes, tensor_peak

pytestmark = pytest.mark.filterwarnings("ignore:falling back from engine 'shared' to 'checkpoint'")

LAYERS = {
    "squeeze and excite": families.SqueezeAndExcite,
    "two dropouts": families.TwoDropouts,
    "convolution first": families.conv_norm_relu,
    "separable": families.separable,
    "of volumes, norm first": families.norm_first_of_volumes,
    "of volumes, an author's convolution": families.axial,
    "no norms, padded by reflection": families.padded_by_reflection(nn.ReLU),
    "no norms, PReLU": families.padded_by_reflection(nn.PReLU),
}


def _pair(block: nn.Module, engine: bool | str = True) -> tuple[Any, Any, Report]:
    return convert_pair(randomized(block), engine)


def _batch(dims: int = 2) -> Tensor:
    return torch.randn(3, CHANNELS, *(8, 6, 7)[:dims], dtype=torch.double)


def _values_per_pixel(model: nn.Module, x: Tensor) -> float:
    return saved_bytes(lambda: copy.deepcopy(model)(x)) / x[:, 0].nbytes


@pytest.mark.parametrize(
    *grid(
        layer=LAYERS,
        newest_first=[False, True],
        kind=["all", "new features only", "concatenating layers"],
        engine=[True, "checkpoint", "official"],
    )
)
def test_layers_of_any_kind_are_recomputed_whole_and_save_their_outputs_alone(layer, newest_first, kind, engine):
    if kind == "concatenating layers":
        layers = (Concatenating(LAYERS[layer](CHANNELS + i * GROWTH), newest_first) for i in range(3))
        block: nn.Module = nn.Sequential(*layers)
    else:
        block = Block(LAYERS[layer], newest_first, returns_input=kind == "all")
    x = _batch(3 if "volumes" in layer else 2)
    block, plain, report = _pair(block, engine)
    (changed,) = report.changed
    assert changed.engine.startswith("checkpoint (found" if engine is True else engine)
    assert (changed.layers, changed.recomputes) == (3, "each layer whole")
    assert_same_training(block, plain, x, 1)
    assert _values_per_pixel(block, x) == CHANNELS + 2 * GROWTH
    assert_same_training(block.eval(), plain.eval(), x, 1)
    assert_restored(block, plain)


CELU_BLOCK = partial(features_block, depth=5, activation=nn.CELU())
# Each: the block, its dimensions, what is recomputed, and the values per pixel that it saves.
FAMILIES = {
    "CELU": (CELU_BLOCK, 2, "each layer whole", CHANNELS + 4 * GROWTH),
    "RDB": (ResidualDense, 2, "the block whole", CHANNELS),
    "RRDB": (ResidualInResidual, 2, "the block whole", CHANNELS),
    "dropout": (families.WithDropoutAndBuffer, 2, "the block whole", CHANNELS),
    "signals": (partial(ResidualDense, 1), 1, "the block whole", CHANNELS),
    "padded by replication": (partial(ResidualDense, padding_mode="replicate"), 2, "the block whole", CHANNELS),
}


@pytest.mark.parametrize(*grid(family=FAMILIES, engine=[True, "checkpoint", "official"], strength=1))
def test_a_family_trains_as_plain_does_and_saves_features_alone(family, engine):
    build, dims, recomputes, kept = FAMILIES[family]
    block, plain, report = _pair(build(), engine)
    x = _batch(dims)
    for training in (True, False):
        assert_same_training(block.train(training), plain.train(training), x, 1)
    assert report
    assert not report.unchanged
    for changed in report.changed:
        assert changed.engine.startswith("checkpoint (found" if engine is True else engine)
        assert changed.recomputes == recomputes
        converted, original = (each.get_submodule(changed.name) for each in (block, plain))
        assert _values_per_pixel(converted, x) == pytest.approx(kept, rel=0.01)
        assert kept < 0.5 * _values_per_pixel(original, x)
    assert_restored(block, plain)


def _peak(model: nn.Module, x: Tensor) -> int:
    def step() -> None:
        model(x).square().mean().backward()

    step()  # allocates the gradients
    return tensor_peak(step)


def test_nine_residual_dense_blocks_take_a_quarter_of_plain_s_memory():
    groups = (ResidualInResidual(16, 8) for _ in range(3))
    best, plain, report = convert_pair(nn.Sequential(families.conv(3, 16), *groups, families.conv(16, 3)))
    assert [change.name for change in report.changed] == [f"{i}.blocks.{j}" for i in (1, 2, 3) for j in range(3)]
    x = torch.randn(1, 3, 32, 32)
    assert _peak(best, x) <= 0.27 * _peak(plain, x)


@pytest.mark.parametrize("drop_rate", [0.0, 0.3])
@pytest.mark.parametrize("activation", [nn.Mish(), nn.ReLU()])
def test_layers_that_the_shared_engine_knows_are_recomputed_whole_by_another(activation, drop_rate):
    block = features_block(activation=activation, drop_rate=drop_rate)
    block, plain, report = _pair(block, "checkpoint")
    (changed,) = report.changed
    assert (changed.engine, changed.recomputes) == ("checkpoint", "each layer whole")
    assert _values_per_pixel(block, _batch()) == CHANNELS + GROWTH
    calls: list[str] = []
    for name, each in (("ours", block), ("plain", plain)):
        each.denselayer2.conv2.register_forward_hook(lambda *_, name=name: calls.append(name))
    assert_same_training(block, plain, _batch())
    assert calls == ["ours"] * 3 + ["plain"] * 3


def test_a_block_that_is_recomputed_whole_takes_another_engine_and_is_found_again():
    block, plain, report = _pair(ResidualDense())
    assert str(convert_and_report(block)) == str(report)
    assert not convert_and_report(block, "shared")
    assert list(map(type, block.modules())) == list(map(type, plain.modules()))
    (changed,) = convert_and_report(block, "checkpoint").changed
    assert changed.engine == "checkpoint"
    assert_same_training(block, plain, _batch(), 1)


def test_a_changed_scale_is_noticed():
    block, plain, _ = _pair(ResidualDense())
    block.scale = plain.scale = 0.7
    with pytest.warns(UserWarning, match="scale of a ResidualDense was 0.2 and is 0.7"):
        assert_same_training(block, plain, _batch(), 1)


@pytest.mark.parametrize(
    ("build", "engine"),
    [(ResidualDense, True), (CELU_BLOCK, True), (partial(Block, families.tiramisu), "checkpoint")],
)
def test_outputs_and_inputs_may_be_changed_in_place(build, engine):
    block, plain, _ = _pair(build(), engine)
    for model in (block, plain):
        torch.manual_seed(3)
        x = torch.randn(2, CHANNELS, 5, 4, dtype=torch.double, requires_grad=True)
        changed = x * 1
        output = model(changed)
        if model is block:  # plain has saved it
            changed.zero_()
        output.mul_(3)
        output.sin().sum().backward()
    assert_same_gradients(block, plain)


@pytest.mark.exhaustive
@pytest.mark.skipif(torch.__version__ < "2.11", reason="earlier compilers run the author's forward")
def test_a_compiled_block():
    block, plain, _ = _pair(ResidualInResidual())
    compiled, x = torch.compile(block, backend="aot_eager", fullgraph=True), _batch()
    for model in (compiled, plain):
        model(x).sin().sum().backward()
    assert_same_gradients(block, plain)


class ReentrantLayer(families.SqueezeAndExcite):
    """As CAM++ and SE-DenseNets have it: a bottleneck in PyTorch's reentrant checkpoint."""

    def first_half(self, *features: Tensor) -> Tensor:
        if self.training and features[0].requires_grad:
            return torch_checkpoint(super().first_half, *features, use_reentrant=True)
        return super().first_half(*features)


@pytest.mark.parametrize("engine", ["official", "checkpoint", True])
def test_layers_with_reentrant_checkpoints_inside_train(engine):
    plain = nn.Sequential(families.conv(CHANNELS, CHANNELS), Block(ReentrantLayer)).double()
    ours = copy.deepcopy(plain)
    convert_batchnorm(plain)  # the author's checkpoints would update the running statistics twice
    assert [changed.name for changed in convert_and_report(ours, engine).changed] == ["1"]
    assert_same_training(ours, plain, _batch())


def test_the_stages_of_timm_s_rdnet():
    rdnet = pytest.importorskip("timm.models.rdnet")
    shape = {"growth_rates": (16, 16, 24), "num_blocks_list": (3, 3, 3), "block_type": ("Block", "Block", "BlockESE")}
    options = {"is_downsample_block": (None, True, False), "num_init_features": 24, "num_classes": 5}
    model = rdnet.RDNet(**shape, **options, drop_path_rate=0.2, ls_init_value=0.5)
    model, plain, report = convert_pair(model.double())
    assert [(change.name, change.layers) for change in report.changed] == [
        (f"dense_stages.{name}", 3) for name in ("0", "1.2", "2.2")
    ]
    assert {change.recomputes for change in report.changed} == {"each layer whole"}
    assert not report.unchanged
    assert_same_training(model, plain, torch.randn(2, 3, 32, 32, dtype=torch.double))
    own, x = copy.deepcopy(plain).float(), torch.randn(4, 3, 128, 128)
    own.set_grad_checkpointing()
    peaks = [_peak(each, x) for each in (model.float(), own, plain.float())]
    assert peaks[0] < peaks[1]
    assert peaks[0] < 0.4 * peaks[2]
