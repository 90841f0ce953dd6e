"""Other libraries' weights: files and state dicts, under whatever names, into a model."""

from .key_names import rename_keys
from .load import WeightsReport, load_weights, weights_transforms

__all__ = ["WeightsReport", "load_weights", "rename_keys", "weights_transforms"]
