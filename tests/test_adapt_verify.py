"""Which modules are dense blocks, how that is verified, and what the report says of it: found, needed, what to do."""

import copy
import pickle
import re
from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from dense_families import Block, ResidualDense, TwoDropouts, tiramisu
from helpers import convert_and_report
from third_party_models import (
    GROWTH,
    START,
    LayerHalves,
    TakesFeatures,
    assert_restored,
    assert_same_training,
    block_batch,
    build_pair,
    convert_pair,
    features_block,
    image_batch,
)
from torch import Tensor, nn

from efficient_densenet import conversion_report, densenet121, make_efficient, register_block, restore
from efficient_densenet.adapt import BlockParts, LayerParts
from efficient_densenet.checkpoint import checkpoint_wrapper


@pytest.mark.filterwarnings("ignore:falling back")
def test_a_block_altered_after_conversion():
    """The altered layers run, and another call reports them."""
    model, plain = build_pair("torchvision_efficient")
    make_efficient(model)
    for each in (model, plain):
        layer = each.features.denseblock2.denselayer1
        layer.conv2 = nn.Sequential(layer.conv2, nn.Tanh())
        del each.features.denseblock1.denselayer2
        each.features.transition1 = nn.Sequential(nn.Conv2d(START + GROWTH, 7, 1), nn.AvgPool2d(2)).double()
    plain.features.transition1.load_state_dict(model.features.transition1.state_dict())
    report = convert_and_report(model)
    assert [(change.layers, change.engine[:17]) for change in report.changed] == [
        (1, "shared"),
        (3, "checkpoint (found"),
        (1, "shared"),
    ]
    assert_same_training(model, plain, image_batch("torchvision_efficient"))
    assert_restored(model, plain)


class AlmostDense(nn.Module):
    """A block whose layers are those of a dense block, and whose forward differs from a dense block's."""

    def __init__(self, difference: str) -> None:
        super().__init__()
        self.difference = difference
        for i in range(3):
            self.add_module(f"layer{i}", TakesFeatures(START + i * GROWTH))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.children():
            output = layer(*(reversed(features) if self.difference == "order" and len(features) == 2 else features))
            if self.difference == "scaled":
                output = output * 0.9
            elif self.difference == "detached":
                features[-1] = features[-1].detach() if len(features) == 3 else features[-1]
            elif self.difference == "stochastic depth" and self.training:
                output = output * float(torch.rand(()) > 0.01)
            features.append(output)
        if self.difference == "two outputs":
            return features[0], torch.cat(features, 1)
        if self.difference == "fails":
            raise RuntimeError("no\nmore")
        if self.difference == "without the first output":
            del features[1]
        return torch.cat(features, 1)


class TakesMask(Block):
    """Its forward takes more than one tensor."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x) * mask], 1)
        return x


class _DenseBlock(nn.Sequential):
    """A block by its name."""


class DropoutBetween(TwoDropouts):
    def forward(self, x: Tensor) -> Tensor:
        return self.second_half(self.dropout1(self.first_half(x)))


class ScalesTheLayers(Block):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer(x) * 0.5], 1)
        return x


def conv2(size: int = 3, **options) -> nn.Module:
    return nn.Conv2d(2 * GROWTH, GROWTH, size, **options)


def changed(change: str, build: Callable[[], nn.Module] = features_block) -> Callable[[], nn.Module]:
    """A block, of which, or of whose layer `s`, something is changed."""

    def build_and_change() -> nn.Module:
        block = build()
        exec(change, globals(), {"block": block, "s": getattr(block, "denselayer2", None)})
        return block

    return build_and_change


SHARED = {
    "LeakyReLU": partial(F.leaky_relu, negative_slope=0.1),
    "ELU": F.elu,
    "ELU, a module": nn.ELU(),
    "SiLU": F.silu,
    "GELU": partial(F.gelu, approximate="tanh"),
    "ReLU6": F.relu6,
    "Mish": F.mish,
}
OTHERS = {
    "clamp": partial(torch.clamp, min=0, max=6),
    "tanh": torch.tanh,
    "selu": F.selu,
    "Tanh": nn.Tanh(),
    "PReLU": nn.PReLU(),
}
A_LAYER = "where a dense layer has norm, activation and conv"
TIRAMISU = partial(Block, tiramisu)
ALMOST_DENSE = {
    "order": "layer 2 reads other features than all before it, in their order.*, recomputes each layer whole",
    "scaled": f"found the output of mul, {A_LAYER}.*, recomputes the block whole",
    "detached": "by the parts of its layers it has other gradients in evaluation mode",
    "stochastic depth": "found the output of mul, where a dense layer has",
    "two outputs": "it returns a tuple, where a dense block returns a tensor.*, recomputes the block whole",
    "without the first output": r"found a Conv2d \(layer0.conv2\) inside layer 1, .*, recomputes the block whole",
    "fails": r"the model: could not be tried: our trace calls it with one tensor of 6 .* raises RuntimeError: no\)",
}
# Each: a model, and what its report says.
REPORTED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    **{kind: (partial(features_block, activation=SHARED[kind]), "shared$") for kind in SHARED},
    **{kind: (partial(features_block, activation=OTHERS[kind]), "checkpoint") for kind in OTHERS},
    "GroupNorm": (partial(features_block, norm=partial(nn.GroupNorm, 2)), r"\(found a GroupNorm inside a layer"),
    "InstanceNorm": (partial(features_block, norm=nn.InstanceNorm2d), r"\(found a InstanceNorm2d inside a layer"),
    "groups": (changed("s.conv2 = conv2(padding=1, groups=2)"), r"checkpoint \(found .*groups=2 in a Conv2d"),
    "a large kernel": (changed("s.conv2 = conv2(5, padding=2)"), r"checkpoint \(.*kernel_size=\(5, 5\) in a Conv2d"),
    "reflection": (changed("s.conv2 = conv2(padding=1, padding_mode='reflect')"), r"checkpoint \(.*padding_mode="),
    "padding by name": (changed("s.conv2 = conv2(padding='same')"), "shared$"),
    "no affine norm": (
        changed("s.norm2 = nn.BatchNorm2d(2 * GROWTH, affine=False)"),
        r"checkpoint \(found a BatchNorm2d without weight and bias",
    ),
    "dropout between": (
        lambda: Block(DropoutBetween),
        rf"found a Dropout \(layers.0.dropout1\) inside layer 1, {A_LAYER}",
    ),
    "two dropouts": (lambda: Block(TwoDropouts), "and perhaps dropout after the last one"),
    "two dropouts thrice": (
        lambda: nn.ModuleList(Block(TwoDropouts) for _ in range(3)),
        r"found a Dropout \(.*(\n.*, checkpoint \(for the same reason\).*){2}$",
    ),
    "two arguments": (
        lambda: nn.ModuleList(TakesMask(tiramisu) for _ in range(6)),
        r"\n  0, 1, 2 and 3 more: could not be tried: our trace calls it with one tensor of 6 channels.*"
        r"its forward seems to take something else \(it raises TypeError: .*$",
    ),
    "a residual block": (
        ResidualDense,
        rf"the model: 5 layers.*found the output of add, {A_LAYER}.*, recomputes the block whole",
    ),
    "a list of layers": (
        lambda: nn.ModuleList(tiramisu(START + i * GROWTH) for i in range(3)),
        "found a ModuleList, whose layers the author's forward calls one by one; a module is needed",
    ),
    "no layers": (
        lambda: _DenseBlock(nn.Conv2d(3, 4, 1), nn.PReLU()),
        rf"nothing was changed\nnot changed\n  the model: found a PReLU \(1\), {A_LAYER}",
    ),
    "a container like a block": (
        changed("block.layers = nn.Sequential(*block.layers)", partial(ScalesTheLayers, tiramisu)),
        r"^1 dense block changed\n  the model: 3 layers, checkpoint .*$",
    ),
    "a second name": (changed("block.activation = block.layers[-1][1]", TIRAMISU), "the model: 3 layers, shared"),
    "a second name, parametrized": (
        changed(
            "block.activation = block.layers[-1][1]; nn.utils.parametrizations.weight_norm(block.layers[0][2])",
            TIRAMISU,
        ),
        "the model: 3 layers, checkpoint",
    ),
    "a forward of its own": (
        changed("block.forward = block.forward"),
        "found a forward that is compiled or was set on",
    ),
    "spectral norm": (changed("nn.utils.parametrizations.spectral_norm(s.conv1)"), r"plain \(found a parametrization"),
    "spectral norm in evaluation": (
        changed("block.eval(); nn.utils.parametrizations.spectral_norm(s.conv1)"),
        r"checkpoint \(found a parametrization",
    ),
    "weights that are computed": (
        changed("nn.utils.weight_norm(s.conv2)"),
        "not changed\n  the model: holds weights that are no parameters",
    ),
    "unequal growth": (
        changed(
            "block.layers[2] = nn.Sequential(nn.BatchNorm2d(14), nn.ReLU(), nn.Conv2d(14, 8, 3, padding=1))", TIRAMISU
        ),
        r"checkpoint \(found layers that add 4, 8 channels, where all must add the same\)",
    ),
    **{
        f"tiramisu {order}": (partial(Block, tiramisu, *order), "shared$") for order in product([True, False], repeat=2)
    },
    **{kind: (partial(AlmostDense, kind), ALMOST_DENSE[kind]) for kind in ALMOST_DENSE},
}


@pytest.mark.filterwarnings("ignore:falling back", "ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("kind", REPORTED)
def test_a_report_says_what_was_found_and_nothing_else_has_changed(kind):
    build, text = REPORTED[kind]
    plain = build().double()
    torch.manual_seed(0)
    model, random = build().double(), torch.get_rng_state()
    report = convert_and_report(model)
    assert re.search(text, str(report)), str(report)
    assert torch.equal(torch.get_rng_state(), random)
    for name, value in model.state_dict().items():
        assert torch.equal(value, plain.state_dict()[name])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [each.training for each in model.modules()] == [each.training for each in plain.modules()]
    if report and not isinstance(model, nn.ModuleList):
        assert_same_training(model, plain, block_batch())
    if not report:
        assert list(map(type, model.modules())) == list(map(type, plain.modules()))


class _CustomBlock(nn.Module):
    """A block whose structure shows no layers: one module holds all norms, and another all convolutions."""

    def __init__(self) -> None:
        super().__init__()
        channels = [START + i * GROWTH for i in range(3)]
        self.norms = nn.ModuleList(map(nn.BatchNorm2d, channels))
        self.convolutions = nn.ModuleList(nn.Conv2d(c, GROWTH, 3, padding=1, bias=False) for c in channels)

    def forward(self, x: Tensor) -> Tensor:
        for norm, conv in zip(self.norms, self.convolutions, strict=True):
            x = torch.cat([x, conv(F.relu(norm(x)))], 1)
        return x


class _Misread(_CustomBlock):
    """A block for which the registered reader is wrong."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def _custom_parts(block: _CustomBlock) -> BlockParts:
    pairs = zip(block.norms, block.convolutions, strict=True)
    return BlockParts(tuple(LayerParts(norm, norm, conv) for norm, conv in pairs))


def test_a_custom_block_with_a_registered_reader():
    assert not convert_and_report(_CustomBlock())
    register_block(_CustomBlock, _custom_parts)
    block, plain, report = convert_pair(_CustomBlock().double())
    assert [change.engine for change in report.changed] == ["shared"]
    assert_same_training(pickle.loads(pickle.dumps(block)), plain, block_batch())
    assert_restored(block, plain)
    report = convert_and_report(_Misread())
    assert not report
    assert "has other values" in report.unchanged[""]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_conversion_inside_gradient_and_autocast_modes(mode):
    block = features_block()
    plain = copy.deepcopy(block)
    with mode():
        assert [change.engine for change in convert_and_report(block).changed] == ["shared"]
    assert_same_training(block, plain, block_batch())


def test_a_model_on_the_meta_device_is_verified_on_the_cpu():
    densenet = pytest.importorskip("torchvision.models.densenet")
    with torch.device("meta"):
        model = densenet.DenseNet(4, (2, 1), 6)
    assert len(convert_and_report(model)) == 2
    assert all(parameter.is_meta for parameter in model.parameters())


class _InSinglePrecision(LayerHalves):
    """Makes a constant in the default dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(self.second_half(self.first_half(x)), torch.ones(GROWTH, GROWTH, 1, 1))


def pads_by_reflection(channels: int) -> nn.Module:
    """A layer that needs more pixels than the trace's first input has."""
    conv = nn.Conv2d(channels, GROWTH, 9, padding=4, padding_mode="reflect")
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), conv)


@pytest.mark.parametrize("layer", [_InSinglePrecision, pads_by_reflection])
@pytest.mark.filterwarnings("ignore:falling back")
def test_a_block_that_needs_another_trace_input_gets_it(layer):
    block, plain, report = convert_pair(Block(layer))
    x = block_batch().float().repeat(1, 1, 2, 2)
    assert report.changed[0].recomputes == "each layer whole"
    block(x).sum().backward()
    plain(x).sum().backward()
    for actual, expected in zip(block.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-3, atol=1e-3)


def test_batched_gradients_are_refused_with_the_remedy():
    block, x = features_block().eval(), torch.randn(1, START, 4, 4, dtype=torch.double)
    make_efficient(block)
    with pytest.raises(RuntimeError, match=r"several gradients at once.*make_efficient\(model, 'checkpoint'\)"):
        torch.autograd.functional.jacobian(block, x, vectorize=True)
    make_efficient(block, "checkpoint")
    assert torch.autograd.functional.jacobian(block, x, vectorize=True).isfinite().all()


def test_a_conversion_is_logged_in_a_line_and_its_report_is_kept_until_restore(caplog):
    model = nn.Sequential(features_block(), Block(TwoDropouts), ResidualDense())
    caplog.set_level("INFO", "efficient_densenet")
    assert make_efficient(model, "shared") is model
    (line,) = (record.getMessage() for record in caplog.records if "make_efficient" in record.getMessage())
    assert line.startswith(
        "make_efficient: 2 of 3 dense blocks run by shared, 1 is left as it is: found the output of "
    )
    report = conversion_report(model)
    assert [change.name for change in report.changed] == ["0", "1"]
    assert str(conversion_report(copy.deepcopy(model))) == str(report)
    with pytest.raises(ValueError, match=r"found a Sequential without a report: call make_efficient\(model\)"):
        conversion_report(restore(model))


def test_a_model_without_a_dense_block_is_warned_of():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())
    with pytest.warns(UserWarning, match="make_efficient has converted nothing: found no dense block"):
        assert make_efficient(model) is model
    assert not conversion_report(model)


@pytest.mark.parametrize("function", [make_efficient, conversion_report, restore, checkpoint_wrapper])
@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("densenet121", ""),
        (None, ""),
        ({}, ""),
        (nn.ReLU, r", as in \w+\(ReLU\(\)\)"),
        (densenet121, r", as in \w+\(densenet121"),
    ],
)
def test_anything_but_a_module_is_refused(function, value, hint):
    with pytest.raises(TypeError, match=rf"^{function.__name__} needs a module, found .*: give the model itself{hint}"):
        function(value)
