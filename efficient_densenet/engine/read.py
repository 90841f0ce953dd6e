"""What a stage or a stem is made of: read and checked when it is first seen, and kept for later forwards.

A forward looks once, before anything runs, at all that can change in the modules of a network: the modules inside and
their classes, hooks, attributes that were added (a new forward), every plain attribute (training flags, eps, drop
rates, …), and the type, dtype and shape of each tensor. Any change drops all plans of these modules. Modules with
values that may change in place are read in each forward.
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from .._tensors import autocast_enabled, compute_dtype, device_type, memory_format_of
from ..norms.sync_batch_norm import is_synchronized
from .changed_modules import HOOKS, why_not_global_changes
from .parts import BlockParts, is_norm
from .refuse import joined_consumer, separate_consumer, shared_parts
from .sharded import can_run_inside
from .stage.run import FORMATS_OF_X, StageFormats, StagePlan

_MOST_PLANS = 256
"""Of the same modules: for other dtypes, numbers of dimensions, memory formats and precisions."""


class StageRequest(NamedTuple):
    """What a stage is to return and to save.

    Attributes:
        formats: the memory formats of its outputs.
        return_features: whether it returns the block's output too.
        num_saved: how many of its layers, the last ones, save their bottlenecks if they leave it open; None where no
            layer saves any, since there is no backward.
    """

    formats: StageFormats
    return_features: bool = False
    num_saved: int | None = 0


USUAL = StageRequest(FORMATS_OF_X)


def read_stage(
    block: nn.Module | None, consumer: nn.Module | None, x: Tensor, request: StageRequest = USUAL
) -> StagePlan | str:
    """How the shared engine runs `block` on x, together with `consumer` where it can; or the reason why it cannot run
    the block. Without a block it is the plan of the consumer alone."""
    reason = why_not_global_changes()
    if reason is not None:
        return reason
    if torch.compiler.is_compiling():
        return make_plan(block, consumer, x, request)
    plans = plans_of([module for module in (block, consumer) if module is not None])
    key = (block is None, *request, *what_plans_read(x))
    if key not in plans:
        plans[key] = make_plan(block, consumer, x, request)
    return plans[key]


def what_plans_read(x: Tensor) -> tuple:
    """All of x that the plan of a stage depends on."""
    has_one_pixel = x.shape[0] * x.shape[2:].numel() == 1  # with which no norm can train
    precision = x.dtype, compute_dtype(x), autocast_enabled(x), device_type(x)
    return *precision, memory_format_of(x), x.dim(), x.shape[1], has_one_pixel


def make_plan(block: nn.Module | None, consumer: nn.Module | None, x: Tensor, request: StageRequest) -> StagePlan | str:
    """The plan that `read_stage` returns, made anew."""
    formats = request.formats
    if block is None:
        parts = separate_consumer(cast(nn.Module, consumer), x)
        if parts is None:
            return "found no consumer"
        plan = StagePlan(BlockParts(()), parts, x, False, formats)
        return plan.why_not_shapes(x) or plan
    read, reason = shared_parts(block, x)
    if read is None:
        return cast(str, reason)
    if request.num_saved != 0:
        read = _saving(read, request.num_saved)
    if consumer is not None:
        sharded = tuple(module for module in (block, consumer) if can_run_inside(module, x))
        joined = joined_consumer(read, consumer, sharded)
        if joined is not None:
            inside = replace(read, sharded=(*sharded, *read.sharded)) if sharded else read
            plan = StagePlan(inside, joined, x, request.return_features, formats)
            if plan.why_not_shapes(x) is None:
                return plan
    plan = StagePlan(read, None, x, False, formats)
    return plan.why_not_shapes(x) or plan


def _saving(block: BlockParts, num_saved: int | None) -> BlockParts:
    """The parts in which every layer says whether it saves its bottleneck."""
    first = len(block.layers) - (num_saved or 0)
    by_default = [i >= first for i in range(len(block.layers))]
    layers = (
        replace(layer, keep_bottleneck=num_saved is not None and (default if keep is None else keep))
        for layer, default in zip(block.layers, by_default, strict=True)
        for keep in (layer.keep_bottleneck,)
    )
    return replace(block, layers=tuple(layers))


class _KeptPlans:
    """The plans that begin with a module. `by_others` has them, and the state of all modules, by the modules after it.

    They are an attribute of the module, so that the garbage collector sees cycles through hooks inside. Copies and
    pickles of the module have an empty dict in its place, and a replica is not its owner.
    """

    ATTRIBUTE = "_engine_plans"

    def __init__(self, owner: nn.Module) -> None:
        self.owner = weakref.ref(owner)
        self.by_others: dict[tuple, tuple[ModulesState, dict[tuple, Any]]] = {}

    def __reduce__(self) -> tuple:
        return dict, ()


def plans_of(modules: Sequence[nn.Module]) -> dict[tuple, Any]:
    """The plans of these modules in the state that they are in, by all else that a plan depends on. A caller adds
    those that it makes; where no plan can be kept, the dict is a new one."""
    if torch.compiler.is_compiling() or any(hasattr(type(module), "lives_for_one_forward") for module in modules):
        return {}
    first, *others = modules
    attributes = vars(first)
    kept = attributes.get(_KeptPlans.ATTRIBUTE)
    if not isinstance(kept, _KeptPlans) or kept.owner() is not first:
        kept = attributes[_KeptPlans.ATTRIBUTE] = _KeptPlans(first)
    key = tuple(map(weakref.ref, others))
    state, plans = kept.by_others.get(key, (None, {}))
    if state is None or not state.is_current(modules):
        if any(map(_must_be_read, modules)):
            return {}
        state, plans = ModulesState(modules), {}
    elif len(plans) < _MOST_PLANS:
        return plans
    rest = {} if len(kept.by_others) >= _MOST_PLANS else kept.by_others
    kept.by_others = rest | {key: (state, plans := {})}  # a new dict: other threads may read the old one
    return plans


def forget(model: nn.Module) -> None:
    """Remove the kept plans of all modules of a model."""
    for module in model.modules():
        vars(module).pop(_KeptPlans.ATTRIBUTE, None)


def _must_be_read(root: nn.Module) -> bool:
    """Whether there is a module inside that depends on more than its attributes: on processes, compiled code, values
    that may change in place, the eps of a class, or what `fully_shard` gathers before a call."""
    return any(
        is_synchronized(module)
        or isinstance(module, (torch.jit.ScriptModule, LazyModuleMixin))
        or module._forward_pre_hooks
        or (is_norm(module) and "eps" not in vars(module))
        or any(_may_change_in_place(module, name, value) for name, value in vars(module).items())
        for module in root.modules()
    )


def _may_change_in_place(module: nn.Module, name: str, value: Any) -> bool:
    """Whether an attribute may be a setting that changes although it stays the same object."""
    if name in _INTERNAL:
        return False
    if isinstance(value, Tensor):
        return name not in ("weight", "bias")
    return isinstance(value, (list, dict, set)) and type(module).__module__.startswith("torch.nn.")


_INTERNAL = (frozenset(vars(nn.Module())) | {_KeptPlans.ATTRIBUTE}) - {"training"}
_PLAIN = bool, int, float, str, type(None), torch.dtype, torch.device
_hooks, _children, _tensors = itemgetter(*HOOKS), itemgetter("_modules"), itemgetter("_parameters", "_buffers")
_dtype, _shape = attrgetter("dtype"), attrgetter("shape")


class ModulesState:
    """The state of modules for which plans were made.

    It refers to no module of `roots`, so that these are freed at once where nothing else makes a cycle. Tensors are not
    kept either: a forward reads them anew.
    """

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        inside = [module for root in roots for module in root.modules()]
        self.inside = [module for module in inside if not any(module is root for root in roots)]
        modules = [*roots, *self.inside]
        attributes = list(map(vars, modules))
        self.settings_of = [itemgetter(*(k for k, v in each.items() if _is_setting(k, v))) for each in attributes]
        self.objects = [(i, k) for i, each in enumerate(attributes) for k, v in each.items() if _is_object(k, v)]
        self.children = list(chain.from_iterable(map(dict.values, map(_children, attributes))))
        self.dicts = list(chain.from_iterable(map(_tensors, attributes)))
        self.references = [_reference(attributes[i][name]) for i, name in self.objects]
        self.values = self._values(roots, attributes)

    def is_current(self, roots: Sequence[nn.Module]) -> bool:
        """Whether plans that were made now would be the same."""
        attributes = list(map(vars, [*roots, *self.inside]))
        try:
            return (
                _are_same(chain.from_iterable(map(dict.values, map(_children, attributes))), self.children)
                and _are_same(chain.from_iterable(map(_tensors, attributes)), self.dicts)
                and _are_same([_reference(attributes[i][name]) for i, name in self.objects], self.references)
                and self._values(roots, attributes) == self.values
            )
        except KeyError:  # of an attribute that was removed
            return False

    def _values(self, roots: Sequence[nn.Module], attributes: Sequence[dict[str, Any]]) -> tuple[list, ...]:
        """All that is compared by value."""
        tensors = list(chain.from_iterable(map(dict.values, self.dicts)))
        present = [tensor for tensor in tensors if tensor is not None]
        return (
            list(map(type, [*roots, *self.inside])),
            list(map(len, attributes)),
            list(map(tuple, filter(None, chain.from_iterable(map(_hooks, attributes))))),
            list(map(tuple, map(_children, attributes))),
            [settings_of(each) for settings_of, each in zip(self.settings_of, attributes, strict=True)],
            [cast(Any, root).read_state() for root in roots if hasattr(type(root), "read_state")],
            list(map(type, tensors)),
            list(map(_dtype, present)),
            list(map(_shape, present)),
        )


def _are_same(values: Iterable[Any], known: list[Any]) -> bool:
    """Whether these are the very same objects in the same order."""
    values = list(values)
    return len(values) == len(known) and all(map(is_, values, known))


def _is_setting(name: str, value: Any) -> bool:
    """Whether an attribute is compared by its value."""
    return name not in _INTERNAL and (
        isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(each, _PLAIN) for each in value))
    )


def _is_object(name: str, value: Any) -> bool:
    """Whether an attribute is compared by identity."""
    return name not in _INTERNAL and not _is_setting(name, value)


def _reference(value: Any) -> Any:
    """A weak reference, the same one as long as `value` lives, or `value` itself if it allows none."""
    try:
        return weakref.ref(value)
    except TypeError:
        return value
