"""FrozenBatchNorm2d of detection libraries in layers, consumers and the stem: statistics are constants in any mode."""

import copy

import pytest
import torch
import torchvision
from grids import grid
from helpers import (
    KERNELS,
    assert_same_step,
    nodes_of,
    random_images,
    relative_error,
    small_model,
    use_kernels,
    with_engine,
)
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d as TorchvisionNorm

from efficient_densenet import DenseNet, make_efficient
from efficient_densenet.engine import choose
from efficient_densenet.engine.parts import is_norm, parts_of
from efficient_densenet.engine.refuse import joined_consumer
from efficient_densenet.memory import tensor_peak
from efficient_densenet.norms.frozen import eps_of, is_frozen_batch_norm


class _Buffers(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        for name, value in {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0}.items():
            self.register_buffer(name, torch.full((channels,), value))

    def _affine(self, eps: float) -> tuple[Tensor, Tensor]:
        scale = self.weight * (self.running_var + eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return scale.view(1, -1, 1, 1), shift.view(1, -1, 1, 1)


class _ConstantInForward(_Buffers):
    """As DETR has it: eps is no attribute."""

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self._affine(1e-3)
        return x * scale + shift


class _WithoutEps(_Buffers):
    """As the first of its kind: the variance is taken as it is."""

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self._affine(0.0)
        return x * scale + shift


class _InTheInputsDtype(_Buffers):
    """As detectron2 has it: with settings of its own, and by F.batch_norm where no gradient is needed."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.num_features, self.eps = channels, 1e-5
        self.register_buffer("num_batches_tracked", None)

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            scale, shift = self._affine(self.eps)
            return x * scale.to(x.dtype) + shift.to(x.dtype)
        statistics = self.running_mean, self.running_var
        return nn.functional.batch_norm(x, *statistics, self.weight, self.bias, training=False, eps=self.eps)


class _Halved(_Buffers):
    """The name and the buffers, but another function."""

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self._affine(1e-5)
        return x * scale / 2 + shift


class _OfVectors(_Buffers):
    def forward(self, x: Tensor) -> Tensor:
        raise TypeError("expects vectors")


def _named(base: type[nn.Module]) -> type[nn.Module]:
    return type("FrozenBatchNorm2d", (base,), {})


CLASSES = {
    "torchvision": TorchvisionNorm,
    "constant in forward": _named(_ConstantInForward),
    "without eps": _named(_WithoutEps),
    "input's dtype": _named(_InTheInputsDtype),
    "subclass": type("OurNorm", (TorchvisionNorm,), {}),
}


def _replace_norms(model: nn.Module, cls: type[nn.Module], substring: str = "") -> nn.Module:
    """Replace norms by frozen ones of random values; the others become norms in eval mode."""
    for name, norm in list(model.named_modules()):
        if not isinstance(norm, nn.BatchNorm2d):
            continue
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
        if substring in name:
            frozen = cls(norm.num_features).to(norm.weight.dtype)
            for key in ("weight", "bias", "running_mean", "running_var"):
                getattr(frozen, key).copy_(getattr(norm, key).detach())
            parent, _, key = name.rpartition(".")
            setattr(model.get_submodule(parent), key, frozen)
        else:
            norm.eval()
    return model


@pytest.mark.parametrize(
    *grid(
        lambda family, where, **_: not (family == "basic" and where == "norm2"),
        cls=CLASSES,
        family=["basic", "bc", "imagenet"],
        where=["", "norm1", "norm2", "transition", "norm0"],
        kernels=[KERNELS[0], KERNELS[2], KERNELS[3]],
        training=[True, False],
    )
)
def test_outputs_and_gradients_match_plain_and_buffers_stay(cls, family, where, kernels, training, monkeypatch):
    use_kernels(monkeypatch, *kernels)
    plain = _replace_norms(small_model(family, efficient=False, drop_rate=0.2), CLASSES[cls], where)
    plain = plain.train(training) if where == "" else plain
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_("conv0" not in name)
    buffers = [buffer.clone() for buffer in plain.buffers()]
    efficient = with_engine(plain, "shared")
    assert_same_step(efficient, plain, random_images(family, 2))
    assert all(map(torch.equal, efficient.buffers(), buffers))


def test_the_whole_network_is_a_stem_and_stages():
    model = _replace_norms(small_model("imagenet", efficient="shared"), TorchvisionNorm)
    names = [name for name in nodes_of(model.features(random_images("imagenet"))) if "Accumulate" not in name]
    assert names[:5] == ["SharedStage"] * 4 + ["SharedStem"]


def test_norms_of_another_eps_are_told_apart():
    model = _replace_norms(small_model("bc", efficient="shared"), CLASSES["constant in forward"], "transition1")
    block, transition = model.features.denseblock1, model.features.transition1
    assert joined_consumer(parts_of(block), transition) is None
    mixed = _replace_norms(small_model("bc", efficient="shared"), CLASSES["constant in forward"], "denselayer2.norm1")
    reason = choose.why_not(choose.Engine.SHARED, mixed.features.denseblock1, torch.randn(1, 4, 3, 3).double())
    assert reason is not None
    assert "eps" in reason


def test_a_frozen_norm_among_norms_with_batch_statistics_is_told_apart():
    model = _replace_norms(small_model("bc", efficient="shared"), TorchvisionNorm, "denseblock1.denselayer1.norm1")
    model.train()
    reason = choose.why_not(choose.Engine.SHARED, model.features.denseblock1, torch.randn(2, 4, 3, 3).double())
    assert reason is not None
    assert "training mode" in reason


@pytest.mark.parametrize(
    *grid(
        family=["bc", "imagenet"],
        cls=["torchvision", "input's dtype"],
        autocast=[True, False],
        dtype=[torch.float32, torch.bfloat16],
    )
)
def test_low_precision(family, cls, autocast, dtype):
    """The output has plain's dtype, and its error is at most twice plain's."""
    exact = _replace_norms(small_model(family, efficient=False), CLASSES[cls])
    x = random_images(family, 4)
    plain = copy.deepcopy(exact).to(dtype)
    models, results = (exact, plain, with_engine(plain, "shared")), []
    for model in models:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and model is not exact):
            output = model.features(x.to(next(model.parameters()).dtype))
        output.double().square().sum().backward()
        results.append([output.detach(), *(p.grad for p in model.features.parameters())])
    expected, theirs, ours = results
    assert [each.dtype for each in ours] == [each.dtype for each in theirs]
    assert relative_error(ours, expected) <= 2 * relative_error(theirs, expected)


@pytest.mark.parametrize("cls", CLASSES)
def test_which_classes_are_frozen_norms(cls):
    norm = CLASSES[cls](3)
    assert is_frozen_batch_norm(norm)
    assert is_norm(norm)
    assert eps_of(norm) == {"constant in forward": 1e-3, "without eps": 0.0}.get(cls, 1e-5)


def test_which_classes_are_not():
    assert not is_frozen_batch_norm(nn.BatchNorm2d(3).eval())
    assert not is_frozen_batch_norm(_ConstantInForward(3))  # another name
    for base in (_Halved, _OfVectors):
        assert not is_frozen_batch_norm(_named(base)(3))
    trainable = _named(_ConstantInForward)(3)
    del trainable.weight
    trainable.weight = nn.Parameter(torch.ones(3))
    assert not is_frozen_batch_norm(trainable)
    missing = _named(_ConstantInForward)(3)
    missing.running_var = None
    assert not is_frozen_batch_norm(missing)


def test_the_weight_and_the_bias_may_change_between_steps():
    plain = _replace_norms(small_model("bc", efficient=False), TorchvisionNorm)
    efficient = with_engine(plain, "shared")
    for _ in range(2):
        assert_same_step(efficient, plain, random_images("bc", 2))
        for model in (plain, efficient):
            torch.manual_seed(5)
            for buffer in model.buffers():
                buffer.uniform_(0.5, 2)


def _torchvision_model() -> nn.Module:
    return _replace_norms(
        torchvision.models.DenseNet(8, (2, 3, 2), num_init_features=8, num_classes=5), TorchvisionNorm
    )


def test_torchvision_s_densenet_with_frozen_norms_is_converted():
    plain = _torchvision_model().double()
    model, x = copy.deepcopy(plain), torch.randn(2, 3, 64, 64, dtype=torch.double)
    report = make_efficient(model)
    assert [change.engine for change in report.changed] == ["shared"] * 3
    assert "SharedStage" in nodes_of(model.features(x))
    assert_same_step(model, plain, x)


def _peak(model: nn.Module) -> int:
    x = torch.randn(4, 3, 64, 64)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return tensor_peak(lambda: model(x).sum().backward())


def test_memory_with_frozen_norms_is_that_with_norms_in_eval_mode():
    model = DenseNet(8, (6, 6, 6), num_init_features=8)
    frozen = _replace_norms(copy.deepcopy(model), TorchvisionNorm)
    assert _peak(frozen) <= 1.02 * _peak(model.eval())
    assert _peak(frozen) < 0.5 * _peak(with_engine(frozen, "plain"))
