"""Dense blocks without norms, as networks for super-resolution, fusion and optical flow have them, converted."""

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_all_close, assert_same_buffers, assert_same_gradients
from torch import Tensor, nn

from efficient_densenet import make_efficient, restore
from efficient_densenet.memory import saved_bytes, tensor_peak

CHANNELS, GROWTH = 6, 4
pytestmark = pytest.mark.filterwarnings("ignore:falling back from engine 'shared' to 'checkpoint'")


def conv(in_channels: int, out_channels: int, size: int = 3, dims: int = 2, **options: Any) -> nn.Module:
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    return convolution(in_channels, out_channels, size, padding=size // 2, **options)


class ResidualDense(nn.Module):
    """As in ESRGAN: five convolutions with one activation module between them; the last one's output is scaled."""

    def __init__(self, dims: int = 2, channels: int = CHANNELS, growth: int = GROWTH, **options: Any) -> None:
        super().__init__()
        for i in range(4):
            self.add_module(f"conv{i + 1}", conv(channels + i * growth, growth, dims=dims, **options))
        self.conv5 = conv(channels + 4 * growth, channels, dims=dims, **options)
        self.lrelu = nn.LeakyReLU(0.2, inplace=True)
        self.scale = 0.2

    def forward(self, x: Tensor) -> Tensor:
        features = x
        for layer in (self.conv1, self.conv2, self.conv3, self.conv4):
            features = torch.cat((features, self.lrelu(layer(features))), 1)
        return self.conv5(features) * self.scale + x


class UnusedConcatenation(nn.Module):
    """As in PyTorch-GAN: the last output is concatenated too, which nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.b1, self.b2, self.b3 = (self._layer(i) for i in range(3))
        self.b4 = nn.Sequential(conv(CHANNELS * 4, CHANNELS))

    @staticmethod
    def _layer(i: int) -> nn.Module:
        return nn.Sequential(conv(CHANNELS * (i + 1), CHANNELS), nn.LeakyReLU())

    def forward(self, x: Tensor) -> Tensor:
        inputs = x
        for block in (self.b1, self.b2, self.b3, self.b4):
            out = block(inputs)
            inputs = torch.cat([inputs, out], 1)
        return out.mul(0.2) + x


class ResidualInResidual(nn.Module):
    """As in ESRGAN: RRDB."""

    def __init__(self, channels: int = CHANNELS, growth: int = GROWTH) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(ResidualDense(2, channels, growth) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x) * 0.2 + x


class Concatenating(nn.Module):
    """As in RDN: a layer that returns its input and its output."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(conv(channels, GROWTH), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(x)], 1)


class LocalFusion(nn.Module):
    """As in RDN: layers that concatenate themselves, and a 1×1 convolution of all features."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Concatenating(CHANNELS + i * GROWTH) for i in range(4)))
        self.fusion = conv(CHANNELS + 4 * GROWTH, CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fusion(self.layers(x)) + x


class FirstLayerApart(nn.Module):
    """As in SRDenseNet: the layers after the first one do not read the block's input, with which they are returned."""

    def __init__(self) -> None:
        super().__init__()
        first = nn.Sequential(conv(CHANNELS, GROWTH), nn.ReLU(inplace=True))
        self.layers = nn.Sequential(first, *(Concatenating(i * GROWTH) for i in range(1, 5)))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.layers(x)], 1)


class Fusion(nn.Module):
    """As in DenseFuse: layers that pad by reflection; their concatenation is returned."""

    def __init__(self, activation: Callable[[], nn.Module] = nn.ReLU, dims: int = 2) -> None:
        super().__init__()
        options = {"dims": dims, "padding_mode": "reflect"}
        widths = (CHANNELS + i * GROWTH for i in range(4))
        self.layers = nn.ModuleList(nn.Sequential(conv(width, GROWTH, **options), activation()) for width in widths)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return torch.cat(features, 1)


class FlowEstimator(nn.Module):
    """As in PWC-Net: the newest features first, layers of several widths, and the features returned with the flow."""

    def __init__(self) -> None:
        super().__init__()
        channels = CHANNELS
        for i, width in enumerate((8, 8, 6, 4, 2)):
            self.add_module(f"conv{i + 1}", nn.Sequential(conv(channels, width), nn.LeakyReLU(0.1, inplace=True)))
            channels += width
        self.last = conv(channels, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for i in range(5):
            x = torch.cat([self.get_submodule(f"conv{i + 1}")(x), x], dim=1)
        return x, self.last(x)


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


WHOLE: dict[str, Callable[[], nn.Module]] = {
    "RDB": ResidualDense,
    "RRDB": ResidualInResidual,
    "RDN": LocalFusion,
    "SRDenseNet": FirstLayerApart,
    "PWC-Net": FlowEstimator,
    "PyTorch-GAN": UnusedConcatenation,
    "dropout": WithDropoutAndCounter,
    "signals": partial(ResidualDense, 1),
    "padded by replication": partial(ResidualDense, padding_mode="replicate"),
}
BY_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "DenseFuse": Fusion,
    "PReLU": partial(Fusion, nn.PReLU),
    "SiLU of volumes": partial(Fusion, nn.SiLU, 3),
}
DIMS = {"signals": 1, "SiLU of volumes": 3}


def _pair(build: Callable[[], nn.Module], engine: bool | str = True) -> tuple[nn.Module, nn.Module]:
    """A converted block in float64, and a plain copy."""
    block = build().double()
    plain = copy.deepcopy(block)
    assert make_efficient(block, engine)
    return block, plain


def _batch(family: str = "") -> Tensor:
    return torch.randn(3, CHANNELS, *(9, 7, 5)[: DIMS.get(family, 2)], dtype=torch.double)


def _tensors(output: Any) -> list[Tensor]:
    return list(output) if isinstance(output, (tuple, list)) else [output]


def _train(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The outputs, the input's gradient, and the state of the random generator."""
    torch.manual_seed(7)
    x = x.detach().requires_grad_()
    model.zero_grad()
    outputs = _tensors(model(x * 1))
    sum(output.sin().sum() for output in outputs).backward()
    return [*(output.detach() for output in outputs), x.grad, torch.get_rng_state()]


def _assert_same_training(ours: nn.Module, plain: nn.Module, x: Tensor) -> None:
    assert_all_close(_train(ours, x), _train(plain, x))
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)


@pytest.mark.parametrize("engine", [True, "checkpoint", "official"])
@pytest.mark.parametrize("family", WHOLE | BY_LAYERS)
def test_a_family_trains_as_plain_does_and_saves_what_the_report_says(family, engine):
    block, plain = _pair((WHOLE | BY_LAYERS)[family], engine)
    report = make_efficient(block, engine)
    x = _batch(family)
    for training in (True, False):
        _assert_same_training(block.train(training), plain.train(training), x)
    for changed in report.changed:
        assert changed.engine.startswith("checkpoint (found" if engine is True else engine)
        whole = family in WHOLE
        assert changed.recomputes == ("the block whole, which has no norms" if whole else "each layer whole")
        converted, original = block.get_submodule(changed.name), plain.get_submodule(changed.name)
        saved, saved_by_plain = (saved_bytes(lambda each=each: each(x)) for each in (converted, original))
        assert saved < 0.5 * saved_by_plain
        if whole:
            assert changed.kept == CHANNELS < changed.kept_before


def test_nine_residual_dense_blocks_take_a_quarter_of_plain_s_memory():
    groups = (ResidualInResidual(64, 32) for _ in range(3))
    plain, x = nn.Sequential(conv(3, 64), *groups, conv(64, 3)), torch.randn(1, 3, 48, 48)
    best, checkpoint = copy.deepcopy(plain), copy.deepcopy(plain)
    for report in (make_efficient(best), make_efficient(checkpoint, "checkpoint")):
        assert [change.name for change in report.changed] == [f"{i}.blocks.{j}" for i in (1, 2, 3) for j in range(3)]
    peaks = []
    for each in (plain, best, checkpoint):

        def step(each: nn.Module = each) -> None:
            each(x).square().mean().backward()

        step()  # allocates the gradients
        peaks.append(tensor_peak(step))
    assert max(peaks[1:]) <= 0.27 * peaks[0]


def test_the_innermost_module_with_all_convolutions_of_a_block_is_converted():
    model = nn.Sequential(conv(3, CHANNELS, 1), ResidualDense())
    report = make_efficient(model)
    assert [change.name for change in report.changed] == ["1"]
    assert not report.lines
    assert [change.name for change in make_efficient(FirstLayerApart()).changed] == ["layers"]


def test_an_engine_that_cannot_run_it_leaves_it_alone_and_says_so():
    model = nn.Sequential(ResidualDense())
    report = make_efficient(model, "shared")
    assert list(report.unchanged) == ["0"]
    assert report.unchanged["0"].startswith("found a Conv2d, where a dense layer is norm, activation and convolution")
    make_efficient(model)
    make_efficient(model, "plain")
    assert type(model[0]) is ResidualDense


def test_hooks_inside_and_on_the_block_are_called_as_plain_calls_them():
    block, plain = _pair(ResidualDense)
    calls = []
    for name, each in (("ours", block), ("plain", plain)):
        for module in (each, each.conv5):
            module.register_forward_hook(lambda module, args, output, name=name: calls.append(name))
            module.register_full_backward_hook(lambda module, *grads, name=name: calls.append(name))
    _assert_same_training(block, plain, _batch())
    assert calls == ["ours"] * 4 + ["plain"] * 4


def test_a_changed_scale_is_noticed():
    block, plain = _pair(ResidualDense)
    block.scale = plain.scale = 0.7
    with pytest.warns(UserWarning, match="scale of a ResidualDense was 0.2 and is 0.7"):
        _assert_same_training(block, plain, _batch())
    make_efficient(block)
    assert saved_bytes(lambda: block(_batch())) < 0.5 * saved_bytes(lambda: plain(_batch()))
    _assert_same_training(block, plain, _batch())


def test_outputs_and_inputs_may_be_changed_in_place():
    for build in (ResidualDense, LocalFusion):
        block, plain = _pair(build)
        for model in (block, plain):
            torch.manual_seed(3)
            x = torch.randn(2, CHANNELS, 5, 4, dtype=torch.double, requires_grad=True)
            output = model(x * 1)
            output.mul_(3)
            output.sin().sum().backward()
        assert_same_gradients(block, plain)
        x = _batch()
        expected = _train(plain, x)
        output = block(changed := x.clone())
        changed.zero_()
        output.sin().sum().backward()
        assert_all_close(output.detach(), expected[0])


@pytest.mark.skipif(torch.__version__ < "2.11", reason="earlier compilers run the author's forward")
def test_a_compiled_block():
    block, plain = _pair(ResidualInResidual)
    compiled, x = torch.compile(block, backend="aot_eager", fullgraph=True), _batch()
    for model in (compiled, plain):
        model(x).sin().sum().backward()
    assert_same_gradients(block, plain)


def test_copies_pickles_and_what_is_restored():
    model, plain = _pair(ResidualInResidual)
    assert list(model.state_dict()) == list(plain.state_dict())
    x = _batch()
    saved = saved_bytes(lambda: model(x))
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        _assert_same_training(again, plain, x)
        assert saved_bytes(lambda again=again: again(x)) == saved
    restore(model)
    assert list(map(type, model.modules())) == list(map(type, plain.modules()))
    assert not any("_conversion" in vars(module) for module in model.modules())


class _Counts(ResidualDense):
    count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x)


def test_a_block_with_side_effects_is_left_alone():
    block = _Counts().double()
    plain = copy.deepcopy(block)
    assert not make_efficient(block, "checkpoint")
    _assert_same_training(block, plain, _batch())
    assert block.count == plain.count == 1
