"""Names that stand for the same in every forward: of torch, of its tensors and modules, and of Python."""

import builtins
import collections
import functools
import itertools
import math
import operator
import typing
from abc import ABC
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Generic

import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from .._mixins import author_class
from ..norms.batch_norm import TORCH_CLASSES


def class_as_written(module: nn.Module) -> type[nn.Module]:
    """The class of `module` as its author wrote it: torch's class for a norm under the exactly-once rule."""
    cls = author_class(module)
    return TORCH_CLASSES.get(cls, cls)


def is_known(cls: type) -> bool:
    """Whether this is a class of torch or Python, not of an author. An author's class may have no `__module__`."""
    return cls in (object, ABC, Generic) or (cls.__module__ or "").startswith(_LIBRARIES_OF_MODULES)


def is_of_a_library(value: Any) -> bool:
    """Whether this is a module, a function or a class of a library that holds no state of an author."""
    owner = value.__name__ if isinstance(value, ModuleType) else value.__module__
    if owner is None and isinstance(value, BuiltinFunctionType):  # of torch, or a method of some object
        owner = getattr(value.__self__, "__module__", None)
    if isinstance(value, FunctionType) and not f"{value.__globals__.get('__name__')}.".startswith(_LIBRARIES):
        return False  # `functools.wraps` gives an author's function another module
    return f"{owner}.".startswith(_LIBRARIES)


_LIBRARIES_OF_MODULES = ("torch.nn.", "torchvision.ops.", f"{__name__.partition('.')[0]}.")
_LIBRARIES = (f"{__name__.partition('.')[0]}.", "torch.", "torchvision.ops.", "torchvision.utils.", "math.", "typing.")
_LIBRARIES += ("einops.", "itertools.", "operator.", "__future__.")
BUILTINS = {abs, all, any, bool, dict, divmod, enumerate, filter, float, frozenset, getattr, hasattr, int, isinstance}
BUILTINS |= {issubclass, iter, len, list, map, max, min, next, object, pow, range, repr, reversed, round, set, slice}
BUILTINS |= {callable, sorted, str, sum, super, tuple, type, zip, property, staticmethod, classmethod}
BUILTINS |= {each for each in vars(builtins).values() if isinstance(each, type) and issubclass(each, Exception)}
WHERE_MADE = {"__init__", "__new__", "__post_init__", "__repr__", "__init_subclass__", "__getstate__", "__setstate__"}
WHERE_MADE |= {"__deepcopy__", "__copy__", "__reduce__", "__reduce_ex__", "__annotate_func__", "__annotate__"}
WHERE_MADE |= {"__str__", "__setattr__", "__delattr__", "__dir__", "__hash__", "__class_getitem__", "__class__"}
MODES_RESTORED = {name for name in dir(torch) if "autocast" in name and name.startswith(("get_", "is_"))}
"""The modes in which a recomputation runs as the forward did."""
MODES = {name for name in dir(torch) if name.startswith(("get_", "is_", "are_", "set_")) and not hasattr(Tensor, name)}
MODES -= {"is_tensor", "is_storage"}
MODES |= {"manual_seed", "seed", "initial_seed", "load", "save", "use_deterministic_algorithms"}
OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {
    "_conversion",  # added by the conversion itself
    "_conversion_report",
    "_engine_plans",  # kept by engine/read.py
    "keep_bottleneck",  # read at every forward
    "_is_replica",  # set by nn.DataParallel
}
_SOURCES = (torch, nn, nn.functional, torch.jit, torch.compiler, torch.onnx, torch.utils, torch.utils.checkpoint)
_SOURCES += (torch.amp, torch.fft, torch.linalg, torch.special, torch.cuda.amp, torch.autograd, math, typing)
_SOURCES += (functools, itertools, operator, collections, Tensor, str, list, tuple, dict, set, int, float, torch.Size)
ATTRIBUTES = {name for each in _SOURCES for name in dir(each) if not name.startswith("_")}
ATTRIBUTES -= {"grad", "backward", "retain_grad", "requires_grad_", "set_", "share_memory_", "data_ptr"}
ATTRIBUTES |= {"_assert", "_modules", "training", "children", "named_children", "modules", "named_modules"}
ATTRIBUTES |= {"get_submodule", "forward", "__class__", "__name__", "__qualname__", "_get_name"}
ATTRIBUTES |= {"save_for_backward", "saved_tensors", "needs_input_grad", "apply", "mark_non_differentiable"}
"""Attributes that stand for the same in any forward: of torch's functions and tensors, of modules and collections."""
