"""Models that Hugging Face's `PyTorchModelHubMixin` saves and loads; huggingface_hub is imported where it is used."""

from functools import cache
from typing import Any

from torch import nn

from .._extras import need


@cache
def hub_class(cls: type[nn.Module]) -> Any:
    """The class of a model, with the mixin."""
    need("safetensors", extra="hub")
    mixin = need("huggingface_hub", extra="hub").PyTorchModelHubMixin
    return type(cls.__name__, (mixin, cls), {"__module__": cls.__module__}, library_name="efficient_densenet")


def as_hub_model(model: nn.Module) -> Any:
    """A model of the same modules, with the mixin."""
    cls = hub_class(type(model))
    twin = cls.__new__(cls)
    vars(twin).update(vars(model))
    return twin
