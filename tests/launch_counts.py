"""Launches of a GPU's kernels, counted on the CPU: those of Triton are recorded instead of launched."""

import importlib
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from efficient_densenet import kernels
from efficient_densenet.engine.stage import operator as shared
from efficient_densenet.engine.stage import running_statistics as running
from efficient_densenet.engine.stem import operator as stem

_ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach"}
_LAUNCHES = {"convolution_backward": 2}
"""Of an operation with more than one: grad_input and grad_weight are a kernel each."""


class CountingLaunches(TorchDispatchMode):
    """Counts launches by the name of the Triton kernel or of the ATen computation; views and allocations are none.

    A foreach operation counts as one launch. Within, every stage with features in less than float64 takes the Triton
    kernels, whose outputs stay uninitialized.
    """

    def __init__(self, monkeypatch):
        super().__init__()
        self.counts = Counter()
        launch = importlib.import_module("efficient_densenet.kernels.triton_gpu.host.launch")
        monkeypatch.setattr(launch, "launch", self._record)
        monkeypatch.setattr(kernels, "triton_supports", lambda values: values.dtype != torch.double)
        ops = torch.ops.efficient_densenet
        self._implementations = {
            ops.stage.default: shared._stage,
            ops.stage_backward.default: shared._stage_backward,
            ops.update_running_statistics.default: running._update,
            ops.stem.default: stem._stem,
            ops.stem_backward.default: stem._stem_backward,
        }

    def _record(self, kernel, grid, *arguments, **constants):
        self.counts[kernel.__name__] += 1

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:
            if operation in self._implementations:
                return self._implementations[operation](*args, **kwargs)
            # An operation such as `contiguous` is a composition of others: which, depends on its input.
            result = operation.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        name = operation.overloadpacket.__name__
        if not _is_view(operation) and name not in _ALLOCATIONS:
            self.counts[name] += _LAUNCHES.get(name, 1)
        return operation(*args, **kwargs)


def _is_view(operation):
    """Whether the operation returns only aliases of its inputs, and writes none of them."""
    aliases = [each.alias_info for each in operation._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
