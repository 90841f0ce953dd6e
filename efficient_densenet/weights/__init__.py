"""Loading weights of this and other libraries, from files and state dicts of any known layout."""

from .key_names import rename_keys
from .load import WeightsReport, load_weights
from .named import weights_classes, weights_transforms

__all__ = ["WeightsReport", "load_weights", "rename_keys", "weights_classes", "weights_transforms"]
