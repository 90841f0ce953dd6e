"""The base class of all models of this package: an engine for the dense blocks, and a check of the input."""

from typing import TypeVar

from torch import Tensor, nn

from .._compilers import records_sizes
from ..engine import choose
from .dimensions import modules_for
from .layers import DenseBlock

Model = TypeVar("Model", bound="DenseModel")


class DenseModel(nn.Module):
    """The base of the models, which set these attributes."""

    in_channels: int
    dims: int

    @property
    def smallest_input(self) -> int:
        """The smallest height and width whose last feature map has a pixel."""
        raise NotImplementedError

    def set_engine(self: Model, efficient: bool | str) -> Model:
        """Run every dense block by this engine from now on; nothing else about the model changes."""
        engine = choose.parse(efficient)
        for module in self.modules():
            if isinstance(module, DenseBlock):
                module.engine = engine
        return self

    @property
    def engine(self) -> str:
        """The engine's name, or "best" if no engine was requested."""
        return choose.describe(next(m.engine for m in self.modules() if isinstance(m, DenseBlock)))

    def _check_input(self, x: Tensor) -> None:
        if records_sizes(x):  # a tracer would record the sizes of its example as the only ones allowed
            return
        modules = modules_for(self.dims)
        if x.dim() != self.dims + 2 or x.shape[1] != self.in_channels:
            sides = ", ".join(modules.sides)
            raise ValueError(
                f"found an input of shape {tuple(x.shape)}, but this model needs (N, {self.in_channels}, {sides})"
            )
        if not x.is_floating_point():
            raise TypeError(
                f"found an input of {x.dtype}, but this model needs floating-point numbers: convert and normalize it, "
                "as by x.float() / 255"
            )
        if min(x.shape[2:]) < self.smallest_input:
            size, smallest = ("×".join(map(str, sizes)) for sizes in (x.shape[2:], [self.smallest_input] * self.dims))
            raise ValueError(
                f"found {modules.inputs} of {size}, but this model's poolings need at least {smallest}: "
                "enlarge them, or use fewer blocks"
            )
