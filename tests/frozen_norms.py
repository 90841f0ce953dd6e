"""FrozenBatchNorm2d as detection libraries have it, and models whose norms are replaced by them."""

import torch
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d as TorchvisionNorm


class Buffers(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        for name, value in {"weight": 1.0, "bias": 0.0, "running_mean": 0.0, "running_var": 1.0}.items():
            self.register_buffer(name, torch.full((channels,), value))

    def _affine(self, eps: float) -> tuple[Tensor, Tensor]:
        scale = self.weight * (self.running_var + eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return scale.view(1, -1, 1, 1), shift.view(1, -1, 1, 1)


class ConstantInForward(Buffers):
    """DETR's: eps is no attribute."""

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self._affine(1e-3)
        return x * scale + shift


class WithoutEps(Buffers):
    """The first of its kind: the variance is taken as it is."""

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self._affine(0.0)
        return x * scale + shift


class InTheInputsDtype(Buffers):
    """detectron2's: it has further settings, and calls F.batch_norm where no gradient is needed."""

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


def named(base: type[nn.Module]) -> type[nn.Module]:
    """A class of the name by which the engines recognize such norms."""
    return type("FrozenBatchNorm2d", (base,), {})


CLASSES = {
    "torchvision": TorchvisionNorm,
    "constant in forward": named(ConstantInForward),
    "without eps": named(WithoutEps),
    "input's dtype": named(InTheInputsDtype),
    "subclass": type("OurNorm", (TorchvisionNorm,), {}),
}


def replace_norms(
    model: nn.Module, cls: type[nn.Module], substring: str = "", others_in_training: bool = False
) -> nn.Module:
    """Replace the norms with `substring` in their names by frozen ones of random values; the others are put in eval
    mode, or stay in training."""
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
        elif not others_in_training:
            norm.eval()
    return model
