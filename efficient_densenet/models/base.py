"""The base class of all models of this package: an engine for the dense blocks, and a check of the input."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .._checks import check, integer
from .._compilers import records_sizes
from .._extras import need
from ..engine import choose
from ..engine.choose import EngineName
from ..norms.batch_norm import torch_class
from ..weights.load import WeightsReport
from .dimensions import NORMS, modules_for
from .layers import DenseBlock

Model = TypeVar("Model", bound="DenseModel")


class DenseModel(nn.Module):
    """The base of the models, which set these attributes."""

    in_channels: int
    dims: int
    weights_report: WeightsReport  # from `create_model` with weights
    __call__: Callable[[Tensor], Tensor]  # for type checkers: nn.Module's returns Any

    arguments: Mapping[str, Any] = MappingProxyType({})
    """What the model was built with, of plain values."""

    def _keep_arguments(self, given: Mapping[str, Any]) -> None:
        plain = bool, int, float, str, list, tuple, NoneType
        self.arguments = {name: value for name, value in given.items() if isinstance(value, plain)}

    def save_pretrained(self, folder: str | Path, **options: Any) -> None:
        """Write weights, arguments and a model card to a folder, from which `from_pretrained` builds the model again.

        `options` are those of Hugging Face's `PyTorchModelHubMixin`, such as `push_to_hub=True`.
        """
        run = [name for name in ("model.pt", "last.pt") if Path(folder, name).exists()]
        if run:
            raise ValueError(
                f"{folder} has a {run[0]} of a training run, whose config.json would go: take another folder"
            )
        missing = inspect.signature(type(self)).parameters.keys() - self.arguments.keys()
        if missing:
            raise ValueError(
                f"found a model whose {sorted(missing)[0]} cannot be written: save its state_dict(), or build it with "
                "plain values, such as the name of an activation"
            )
        try:
            json.dumps(dict(self.arguments))
        except TypeError as error:
            raise ValueError(
                f"found an argument that cannot be written ({error}): build the model with plain values"
            ) from error
        with torch.device("meta"):
            built = type(self)(**self.arguments)
        ours, theirs = _described(self), _described(built)
        changed = [name for name in ours | theirs if ours.get(name) != theirs.get(name)]
        if changed:
            raise ValueError(
                f"found that {changed[0]} has changed since the model was built ({ours.get(changed[0])}, where its "
                f"arguments make {theirs.get(changed[0])}): save its state_dict(), or build it with other arguments"
            )
        twin = _hub_class(type(self)).__new__(_hub_class(type(self)))  # of the same modules
        vars(twin).update(vars(self))
        twin.save_pretrained(folder, config=self.arguments, **options)

    @classmethod
    def from_pretrained(cls: type[Model], name: str | Path, **options: Any) -> Model:
        """The model in a folder or in a repository of Hugging Face, in eval mode.

        `options` are those of Hugging Face's `PyTorchModelHubMixin`, such as `revision`, and arguments of the class
        that replace the saved ones, such as `efficient`.
        """
        if Path(name).is_dir() and not Path(name, "config.json").is_file():
            raise FileNotFoundError(f"{name} has no config.json, which says how to build the model: save it again")
        model = _hub_class(cls).from_pretrained(name, **{"strict": True} | options)
        model.__class__ = cls
        return model

    @property
    def smallest_input(self) -> int:
        """The smallest height and width whose smallest feature map has a pixel."""
        return self._smallest_input(1)

    def _smallest_input(self, pixels: int) -> int:
        """The smallest height and width whose smallest feature map has so many."""
        raise NotImplementedError

    def _last_block(self) -> nn.Module:
        """The dense block whose feature map is the smallest."""
        raise NotImplementedError

    def set_engine(self: Model, efficient: bool | EngineName) -> Model:
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
        if not isinstance(x, Tensor):
            raise TypeError(f"found a {type(x).__name__}, but this model needs a tensor: torch.as_tensor(x).float()")
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
        if x.dtype is torch.float64 and (dtype := next(self.parameters(), x).dtype) is not x.dtype:
            raise TypeError(f"found an input of {x.dtype}, but weights of {dtype}: give x.float(), or a model.double()")
        if min(x.shape[2:]) < self.smallest_input:
            size, smallest = ("×".join(map(str, sizes)) for sizes in (x.shape[2:], [self.smallest_input] * self.dims))
            raise ValueError(
                f"found {modules.inputs} of {size}, but this model's poolings need at least {smallest}: "
                "enlarge them, or use fewer blocks"
            )
        enough = self._smallest_input(2)
        if len(x) != 1 or max(x.shape[2:]) >= enough:
            return
        if any(isinstance(module, NORMS[self.dims]) and module.training for module in self._last_block().modules()):
            size, larger = ("×".join(map(str, sizes)) for sizes in (x.shape[2:], [enough] * self.dims))
            raise ValueError(
                f"found a batch of one of {size}, whose smallest feature map is one pixel, but batch norm in training "
                f"needs more than 1 value per channel: give two {modules.inputs} or more, or one of at least {larger}, "
                "or call model.eval()"
            )


def _described(model: nn.Module) -> dict[str, str]:
    """What each module and tensor is, without values."""
    modules = {name: f"{torch_class(each).__name__}({each.extra_repr()})" for name, each in model.named_modules()}
    return modules | {name: str(tuple(each.shape)) for name, each in model.state_dict().items()}


@cache
def _hub_class(cls: type[nn.Module]) -> Any:
    """The class of a model, with the mixin of Hugging Face that saves and loads."""
    need("safetensors", extra="hub")
    mixin = need("huggingface_hub", extra="hub").PyTorchModelHubMixin
    return type(cls.__name__, (mixin, cls), {"__module__": cls.__module__}, library_name="efficient_densenet")


def check_architecture(growth_rate: Any, block_config: Any, num_init_features: Any, *, in_pairs: bool = False) -> None:
    """Raise ValueError for what no network has; with `in_pairs` blocks stand on both sides of a middle one."""
    check("growth_rate", growth_rate, integer(1))
    is_list = isinstance(block_config, Sequence) and not isinstance(block_config, str)
    if not is_list or not block_config or (in_pairs and (len(block_config) % 2 == 0 or len(block_config) < 3)):
        needed = "an odd number of blocks, such as (4, 5, 4)" if in_pairs else "each block, such as (16, 16, 16)"
        raise ValueError(f"block_config is {block_config!r}, but must list the layers of {needed}")
    for layers in block_config:
        check("a number of layers in block_config", layers, integer(1))
    check("num_init_features", num_init_features, integer(1))
