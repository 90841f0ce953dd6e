"""Measuring what autograd keeps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def saved_bytes(function: Callable[[], Any]) -> int:
    """The bytes that autograd holds for the backward of what `function` computes.

    Counted by saved-tensor hooks, each storage once, parameters and inputs that are saved included. Works on the meta
    device, where a model of any size costs nothing to count.
    """
    storages: dict[int, torch.UntypedStorage] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage  # kept alive, so that no later storage takes its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        function()
    return sum(storage.nbytes() for storage in storages.values())
