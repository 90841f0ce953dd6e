"""Dense blocks of other kinds of layers, which are recomputed: each layer whole, or else the block whole."""

import copy
from functools import partial
from typing import Any

import dense_families as families
import pytest
import torch
import torch.nn.functional as F
from dense_families import CHANNELS, DEPTH, GROWTH, Block, Concatenating, ResidualDense, ResidualInResidual
from grids import grid
from helpers import assert_all_close, assert_close, assert_same_gradients, convert_and_report
from third_party_models import assert_same_training
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from efficient_densenet import convert_batchnorm, restore
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


def _pair(block: nn.Module, engine: bool | str = True) -> tuple[nn.Module, nn.Module, Any]:
    """A converted block in float64, with random values in its norms and biases; a plain copy; and the report."""
    for parameter in block.double().parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=0.5, std=0.3)
    plain = copy.deepcopy(block)
    return block, plain, convert_and_report(block, engine)


def _batch(dims: int = 2, side: int = 6) -> Tensor:
    return torch.randn(3, CHANNELS, *(side + 2, side, side + 1)[:dims], dtype=torch.double)


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
        layers = (Concatenating(LAYERS[layer], CHANNELS + i * GROWTH, newest_first) for i in range(3))
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
    restore(block)
    assert list(map(type, block.modules())) == list(map(type, plain.modules()))


class WithDropoutAndCounter(ResidualDense):
    """Dropout between the layers, and a buffer that the forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout2d(0.3)
        self.register_buffer("temperature", torch.full((1,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        y1 = self.dropout(F.elu(self.conv1(x)))
        y2 = F.dropout(F.elu(self.conv2(torch.cat((x, y1), 1))), 0.2, self.training)
        y3 = self.lrelu(self.conv3(torch.cat((x, y1, y2), 1)) + y1)
        y4 = self.lrelu(self.conv4(torch.cat((x, y1, y2, y3), 1)))
        return self.conv5(torch.cat((x, y1, y2, y3, y4), 1)) * self.temperature + x


# Each: the block, its dimensions, what is recomputed, and the values per pixel that it saves.
FAMILIES = {
    "takes a list": (families.DenseStage, 2, "each layer whole", CHANNELS + (DEPTH - 1) * GROWTH),
    "CELU": (partial(families.BottleneckBlock, nn.CELU), 2, "each layer whole", CHANNELS + (DEPTH - 1) * GROWTH),
    "RDB": (ResidualDense, 2, "the block whole", CHANNELS),
    "RRDB": (ResidualInResidual, 2, "the block whole", CHANNELS),
    "PWC-Net": (families.FlowEstimator, 2, "the block whole", CHANNELS),
    "dropout": (WithDropoutAndCounter, 2, "the block whole", CHANNELS),
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
    restore(block)
    assert list(map(type, block.modules())) == list(map(type, plain.modules()))


def _peak(model: nn.Module, x: Tensor) -> int:
    def step() -> None:
        model(x).square().mean().backward()

    step()  # allocates the gradients
    return tensor_peak(step)


def test_nine_residual_dense_blocks_take_a_quarter_of_plain_s_memory():
    groups = (ResidualInResidual(16, 8) for _ in range(3))
    plain, x = nn.Sequential(families.conv(3, 16), *groups, families.conv(16, 3)), torch.randn(1, 3, 32, 32)
    best = copy.deepcopy(plain)
    changed = convert_and_report(best).changed
    assert [change.name for change in changed] == [f"{i}.blocks.{j}" for i in (1, 2, 3) for j in range(3)]
    assert _peak(best, x) <= 0.27 * _peak(plain, x)


@pytest.mark.parametrize("drop_rate", [0.0, 0.3])
@pytest.mark.parametrize("activation", [nn.Mish, nn.ReLU])
def test_layers_that_the_shared_engine_knows_are_recomputed_whole_by_another(activation, drop_rate):
    block, plain, report = _pair(families.BottleneckBlock(activation, drop_rate), "checkpoint")
    (changed,) = report.changed
    kept = CHANNELS + (DEPTH - 1) * GROWTH
    assert (changed.engine, changed.recomputes) == ("checkpoint", "each layer whole")
    x = _batch(side=16)
    assert _values_per_pixel(block, x) == kept < 0.1 * _values_per_pixel(plain, x)
    calls: list[str] = []
    for name, each in (("ours", block), ("plain", plain)):
        each["denselayer2"].conv2.register_forward_hook(lambda *_, name=name: calls.append(name))
    assert_same_training(block, plain, _batch())
    assert calls == ["ours"] * 3 + ["plain"] * 3


def test_the_innermost_module_that_looks_like_a_block_is_converted():
    report = convert_and_report(nn.Sequential(families.conv(3, CHANNELS, 1), ResidualDense()))
    assert [change.name for change in report.changed] == ["1"]


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
    convert_and_report(block)
    assert _values_per_pixel(block, _batch()) < 0.5 * _values_per_pixel(plain, _batch())
    assert_same_training(block, plain, _batch(), 1)


@pytest.mark.parametrize(
    ("build", "engine"),
    [(ResidualDense, True), (families.BottleneckBlock, True), (partial(Block, families.tiramisu), "checkpoint")],
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


class UnequalGrowth(Block):
    def __init__(self) -> None:
        super().__init__(families.tiramisu)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(c), nn.ReLU(), families.conv(c, k)) for c, k in ((6, 4), (10, 8))
        )


def test_unequal_growth_is_named():
    block, plain, report = _pair(UnequalGrowth())
    (changed,) = report.changed
    assert changed.engine == "checkpoint (found layers that add 4, 8 channels, where all must add the same)"
    assert_same_training(block, plain, _batch(), 1)


@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("returns_input", [True, False])
def test_blocks_of_a_tiramisu_run_by_the_shared_engine(newest_first, returns_input):
    block, plain, report = _pair(Block(families.tiramisu, newest_first, returns_input))
    assert [change.engine for change in report.changed] == ["shared"]
    assert_same_training(block, plain, _batch())


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
    for _ in range(2):
        x = _batch()
        for model in (plain, ours):
            model(x).square().sum().backward()
    for actual, expected in zip(ours.parameters(), plain.parameters(), strict=True):
        assert_close(actual.grad, expected.grad)
    assert_all_close(ours.buffers(), plain.buffers())


def test_the_stages_of_timm_s_rdnet():
    rdnet = pytest.importorskip("timm.models.rdnet")
    shape = {"growth_rates": (16, 16, 24), "num_blocks_list": (3, 3, 3), "block_type": ("Block", "Block", "BlockESE")}
    options = {"is_downsample_block": (None, True, False), "num_init_features": 24, "num_classes": 5}
    model = rdnet.RDNet(**shape, **options, drop_path_rate=0.2, ls_init_value=0.5).double()
    plain = copy.deepcopy(model)
    report = convert_and_report(model)
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
