"""Dense families whose layers are called whole: the same numbers as plain, the memory, and what the report says."""

import copy
import importlib.util
import sys
from pathlib import Path

import dense_families as families
import pytest
import torch
from dense_families import CHANNELS, DEPTH, GROWTH
from third_party_models import assert_same_training
from torch import Tensor, nn

from efficient_densenet import make_efficient, restore
from efficient_densenet.memory import saved_bytes, tensor_peak

pytestmark = pytest.mark.filterwarnings("ignore:falling back")

ALL = CHANNELS + (DEPTH - 1) * GROWTH
"""The channels that the last layer reads, all that is saved."""
CONCATENATIONS = sum(CHANNELS + i * GROWTH for i in range(DEPTH))
FAMILIES = {
    "takes a list": (families.DenseStage, 2, ALL),
    "selects channels": (families.pruned, 2, ALL),
    "reactivates": (families.condensed, 2, CONCATENATIONS),
    "volumes": (families.NormFirst, 3, ALL),
    "skips features": (families.SkipsFeatures, 2, 4 * CHANNELS + 5 * GROWTH),
    "modules by their names": (families.DilatedDense, 2, 4 * CHANNELS),
    "norm over rows": (families.RowsOfOneLength, 2, 4 * CHANNELS),
    "returns the last": (families.ReturnsTheLast, 2, 4 * CHANNELS),
    "ended by a convolution": (families.ended_by_a_convolution, 2, CHANNELS + DEPTH * GROWTH),
    "ended by a gate": (families.ended_by_a_gate, 2, CHANNELS + DEPTH * GROWTH),
    "dropout between": (lambda: families.ended_by_a_convolution(0.3), 2, CHANNELS + DEPTH * GROWTH),
}
"""Each: the block, its dimensions, and the values per pixel that it saves when each layer is recomputed."""
NUM_LAYERS = dict.fromkeys(("skips features", "modules by their names", "norm over rows", "returns the last"), 4)
RATIOS = {"reactivates": 0.25, "skips features": 0.45, "selects channels": 0.2, "modules by their names": 0.25}
RATIOS |= {"norm over rows": 0.25, "returns the last": 0.25}
"""What is saved, as a fraction of plain's at most; 0.15 for the others."""


def _batch(block: nn.Module, dims: int, side: int = 8) -> Tensor:
    length = block.LENGTH if isinstance(block, families.RowsOfOneLength) else side
    return torch.randn(3, CHANNELS, *[side] * (dims - 1), length, dtype=torch.double)


def _pair(build) -> tuple[nn.Module, nn.Module]:
    """A block with random values in its norms and biases, and a copy."""
    block = build().double()
    for name, parameter in block.named_parameters():
        if parameter.dim() == 1 and not name.endswith("mask.indexes"):
            nn.init.normal_(parameter, mean=0.5, std=0.3)
    return block, copy.deepcopy(block)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("engine", [True, pytest.param("official", marks=pytest.mark.exhaustive)])
def test_a_family_trains_as_plain_does(family, engine):
    build, dims, _ = FAMILIES[family]
    block, plain = _pair(build)
    report = make_efficient(block, engine)
    assert [change.layers for change in report.changed] == [NUM_LAYERS.get(family, DEPTH)], str(report)
    assert_same_training(block, plain, _batch(block, dims))
    assert_same_training(block.eval(), plain.eval(), _batch(block, dims))
    restore(block)
    assert list(map(type, block.modules())) == list(map(type, plain.modules()))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_saves_what_the_report_says(family):
    build, dims, expected = FAMILIES[family]
    block, plain = _pair(build)
    (changed,) = make_efficient(block).changed
    x = _batch(block, dims, side=72 if dims == 2 else 12)
    saved, saved_by_plain = (saved_bytes(lambda each=each: each(x)) / x[:, 0].nbytes for each in (block, plain))
    assert changed.kept == expected
    assert saved == pytest.approx(expected, rel=0.01)
    assert changed.kept_before == pytest.approx(saved_by_plain, rel=0.1)
    assert saved < RATIOS.get(family, 0.15) * saved_by_plain
    assert f"saves {expected} values per pixel for backward instead of {changed.kept_before}" in str(changed)
    assert "recomputes each layer whole" in str(changed)


def _peak(model: nn.Module, x: Tensor) -> int:
    def step() -> None:
        model(x).sum().backward()

    step()  # allocates the gradients
    return tensor_peak(step)


PEAKS = {
    "takes a list": (families.DenseStage, (64, 64, 256, 5), (2, 64, 32, 32), 0.36),
    "ELU": (families.BottleneckBlock, (64, 32, 128, 12), (2, 64, 28, 28), 0.26),
    "selects channels": (families.pruned, (24, 12, 0, 20), (4, 24, 32, 32), 0.32),
    "reactivates": (families.condensed, (32, 8, 32, 12), (4, 32, 28, 28), 0.5),
    "several sizes": (families.MultiScale, (32, 16, 64, 8), (4, 32, 32, 32), 0.58),
    "volumes": (families.NormFirst, (32, 16, 0, 4), (2, 32, 12, 12, 12), 0.68),
    "modules by their names": (families.DilatedDense, (32, 32, 0, 4), (2, 32, 64, 65), 0.74),
    "returns the last": (families.ReturnsTheLast, (32, 32, 0, 4), (2, 32, 64, 65), 0.77),
    "ended by a convolution": (families.ended_by_a_convolution, (32, 32, 0, 10), (4, 32, 32, 32), 0.52),
    "ended by a gate": (families.ended_by_a_gate, (32, 32, 0, 10), (4, 32, 32, 32), 0.4),
}
"""Each: the block, its widths (input, growth, bottleneck) and depth as in the model, an input, and the tensor peak of a
step in one thread as a fraction of plain's, with a tenth added to what was measured. In few layers, much of the peak is
one layer's backward."""


@pytest.fixture
def one_thread():
    """Under two threads, oneDNN's own copies make the peak 0.38 of plain's where layers take a list, and 0.52 where a
    convolution ends them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", PEAKS)
def test_the_peak_of_a_step_at_widths_as_in_the_model(family, monkeypatch):
    build, widths, shape, ratio = PEAKS[family]
    for name, value in zip(("CHANNELS", "GROWTH", "WIDTH", "DEPTH"), widths, strict=True):
        monkeypatch.setattr(families, name, value)
    block, x = build(), torch.randn(shape)
    plain = copy.deepcopy(block)
    make_efficient(block)
    assert _peak(block, x) < ratio * _peak(plain, x)


@pytest.mark.parametrize("drop_rate", [0.0, 0.3])
@pytest.mark.parametrize("activation", [nn.ELU, nn.Mish, nn.ReLU])
def test_whole_layers_are_recomputed_rather_than_first_halves(activation, drop_rate):
    block, plain = _pair(lambda: families.BottleneckBlock(activation, drop_rate))
    (changed,) = make_efficient(block, "checkpoint").changed
    assert (changed.engine, changed.recomputes, changed.kept) == ("checkpoint", "each layer whole", ALL)
    x = _batch(block, 2, 16)
    saved, saved_by_plain = (saved_bytes(lambda each=each: each(x)) for each in (block, copy.deepcopy(plain)))
    assert saved == ALL * x[:, 0].nbytes < 0.1 * saved_by_plain
    assert changed.kept_before == pytest.approx(saved_by_plain / x[:, 0].nbytes, rel=0.1)
    block, plain = _pair(lambda: families.BottleneckBlock(activation, drop_rate))
    make_efficient(block, "checkpoint")
    assert_same_training(block, plain, _batch(block, 2))


@pytest.mark.parametrize("drop_rate", [0.0, 0.3])
def test_what_the_shared_engine_saves_is_true_masks_included(drop_rate):
    block, plain = _pair(lambda: families.BottleneckBlock(nn.ReLU, drop_rate))
    (changed,) = make_efficient(block).changed
    assert changed.engine == "shared"
    x = _batch(block, 2, 32)
    for model, said in ((block, changed.kept), (plain, changed.kept_before)):
        assert said == pytest.approx(saved_bytes(lambda model=model: model(x)) / x[:, 0].nbytes, rel=0.1)


def test_layers_that_are_modules_of_the_block_itself_run_by_the_shared_engine():
    block, plain = _pair(families.Numbered)
    (changed,) = make_efficient(block).changed
    assert (changed.layers, changed.engine) == (DEPTH, "shared")
    assert_same_training(block, plain, _batch(block, 2))
    assert_same_training(block.eval(), plain.eval(), _batch(block, 2))
    counts = [0, 0]
    for i, each in enumerate((block.train(), plain.train())):
        each.conv2.register_forward_hook(lambda *_, i=i: counts.__setitem__(i, counts[i] + 1))
    assert_same_training(block, plain, _batch(block, 2))
    assert counts == [3, 3]


def test_a_hook_in_a_layer_that_is_recomputed_whole_is_called_once():
    block, plain = _pair(families.BottleneckBlock)
    make_efficient(block, "checkpoint")
    counts = [0, 0]
    for i, each in enumerate((block, plain)):
        layer = each["denselayer2"]
        layer.conv2.register_forward_hook(lambda *_, i=i: counts.__setitem__(i, counts[i] + 1))
    assert_same_training(block, plain, _batch(block, 2))
    assert counts == [3, 3]


def test_layers_for_images_of_several_sizes_are_recomputed_where_they_are_called():
    model, plain = _pair(families.MultiScale)
    (changed,) = make_efficient(model).changed
    assert (changed.name, changed.layers, changed.kept) == ("blocks", DEPTH, 0)
    assert "our trial calls it with one tensor of 8 channels" in changed.engine
    assert_same_training(model, plain, _batch(model, 2))
    x = _batch(model, 2, 16)
    assert saved_bytes(lambda: model(x)) < 0.45 * saved_bytes(lambda: plain(x))
    restore(model)
    assert list(map(type, model.modules())) == list(map(type, plain.modules()))


def test_layers_that_take_two_tensors_are_recomputed_where_they_are_called():
    model, plain = _pair(families.Edges)
    (changed,) = make_efficient(model).changed
    assert (changed.name, changed.layers) == ("dense", 2)
    assert_same_training(model, plain, _batch(model, 2))
    assert_same_training(model.eval(), plain.eval(), _batch(model, 2))
    model.train(), plain.train()
    x = _batch(model, 2, 16)
    assert saved_bytes(lambda: copy.deepcopy(model)(x)) < 0.6 * saved_bytes(lambda: copy.deepcopy(plain)(x))
    make_efficient(model, "official")
    assert_same_training(model, plain, _batch(model, 2))
    restore(model)
    assert list(map(type, model.modules())) == list(map(type, plain.modules()))


@pytest.mark.parametrize(
    "build", [families.SkipsFeatures, pytest.param(families.condensed, marks=pytest.mark.exhaustive)]
)
def test_layers_recomputed_where_they_are_called_take_another_engine_and_are_found_again(build):
    block, plain = _pair(build)
    first = str(make_efficient(block))
    assert str(make_efficient(block)) == first
    assert not make_efficient(block, "shared")
    assert list(map(type, block.modules())) == list(map(type, plain.modules()))
    (changed,) = make_efficient(block, "checkpoint").changed
    assert changed.engine.startswith("checkpoint")
    assert_same_training(copy.deepcopy(block), plain, _batch(block, 2))


def test_the_stages_of_timm_s_rdnet():
    rdnet = pytest.importorskip("timm.models.rdnet")
    shape = {"growth_rates": (16, 16, 24), "num_blocks_list": (3, 3, 3), "block_type": ("Block", "Block", "BlockESE")}
    options = {"is_downsample_block": (None, True, False), "num_init_features": 24, "num_classes": 5}
    model = rdnet.RDNet(**shape, **options, drop_path_rate=0.2, ls_init_value=0.5).double()
    plain = copy.deepcopy(model)
    report = make_efficient(model)
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


def test_libauc_s_densenet():
    found = importlib.util.find_spec("libauc")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs libauc")
    path = Path(found.submodule_search_locations[0]) / "models" / "densenet.py"  # others in it need more libraries
    spec = importlib.util.spec_from_file_location("libauc_densenet", path)
    densenet = sys.modules["libauc_densenet"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(densenet)
    densenet.DenseNet121(activations="elu", pretrained=False)  # sets the activation
    shape = {"growth_rate": 8, "block_config": (6, 8), "num_init_features": 16, "drop_rate": 0.2}
    _check_whole_layers(densenet.DenseNet(**shape), torch.randn(2, 3, 64, 64), 2, 0.3)


def test_torch_ecg_s_densenet():
    densenet = pytest.importorskip("torch_ecg.models.cnn.densenet", exc_type=ImportError)
    configs = pytest.importorskip("torch_ecg.model_configs.cnn.densenet")
    config = copy.deepcopy(configs.densenet_vanilla)
    config.num_layers, config.init_num_filters, config.growth_rates = [6, 8], 16, 8
    config.block.update(building_block="bottleneck", activation="mish")
    _check_whole_layers(densenet.DenseNet(12, **config), torch.randn(2, 12, 1000), 2, 0.45)


def _check_whole_layers(model: nn.Module, x: Tensor, num_blocks: int, ratio: float) -> None:
    plain = copy.deepcopy(model)
    report = make_efficient(model, "checkpoint")
    assert [change.recomputes for change in report.changed] == ["each layer whole"] * num_blocks, str(report)
    assert saved_bytes(lambda: copy.deepcopy(model)(x)) < ratio * saved_bytes(lambda: copy.deepcopy(plain)(x))
    assert _peak(copy.deepcopy(model), x) < 2 * ratio * _peak(copy.deepcopy(plain), x)
    assert_same_training(model.double(), plain.double(), x.double())
