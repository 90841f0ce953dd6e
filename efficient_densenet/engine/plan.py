"""The plans of a network: what its stages and its stem are made of, and how many layers save their bottlenecks.

They are made when a network is first seen, and kept. A forward looks once, before anything runs, at all that can change
in the modules: the modules inside and their classes, hooks, attributes that were added (a new forward), every plain
attribute (training flags, eps, drop rates, …), and the type, dtype and shape of each tensor. Any change drops all plans
of these modules. Where values may change in place, plans are made anew in each forward.
"""

import weakref
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from .. import kernels
from .._tensors import autocast_device, autocast_enabled, compute_dtype, device_type, memory_format_of
from .._torch_private import parameters_of
from ..norms.sync_batch_norm import is_synchronized
from . import saving
from .limits import (
    HOOKS,
    can_share_stem,
    consumer_of,
    must_be_called,
    why_not_global_changes,
    why_not_layers,
    why_not_ordinary_autograd,
)
from .parts import BlockParts, EngineBlock, NoPartsError, is_engine_block, is_norm, parts_of
from .sharded import can_run_inside, casts_parameters
from .stage.run import USUAL_REQUEST, StagePlan, StageRequest
from .stem import STEM_LENGTH, StemPlan, output_dtype

_MOST_PLANS = 256
"""Of the same modules: for other dtypes, numbers of dimensions, memory formats and precisions."""

Plans = dict[tuple, Any]
"""The kept plans of modules, by all else that a plan depends on."""


def needs_grad(x: Tensor, *modules: nn.Module) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in parameters_of(*modules)))


def has_faster_forward(x: Tensor) -> bool:
    """Whether the shared engine's forward is faster on `x` than the plain modules.

    The Numba kernels were measured to be faster: they write no concatenation (docs/benchmarks.md).
    """
    if torch.compiler.is_compiling() or not kernels.numba_supports(x):
        return False
    return kernels.numba_multiplies(compute_dtype(x))


def plans_of_network(modules: Sequence[nn.Module]) -> Plans | None:
    """The kept plans of a network of these modules, the first block first; None if its modules are all to be called."""
    return plans_of(modules) if why_not_global_changes() is None else None


def plan_stage(
    plans: Plans, modules: Sequence[nn.Module], position: int, x: Tensor, request: StageRequest
) -> StagePlan | None:
    """The plan with which the shared engine runs the block at `position`, and the consumer after it, as one stage on x;
    None where both are to be called."""
    block, consumer = modules[position : position + 2]
    if why_not_ordinary_autograd(x) is not None:
        return None
    if not needs_grad(x, block):
        if not has_faster_forward(x):
            return None
        request = request._replace(num_saved=None)
    return _kept(plans, (position, *request), x, _joined, block, consumer, request)


def _joined(x: Tensor, block: EngineBlock, consumer: nn.Module, request: StageRequest) -> StagePlan | None:
    if must_be_called(block) and not can_run_inside(block, x):
        return None
    stage = make_plan(x, block, consumer, request)
    return None if isinstance(stage, str) or stage.spec.consumer is None else stage


def plan_alone(
    block: nn.Module | None, consumer: nn.Module | None, x: Tensor, request: StageRequest
) -> StagePlan | str:
    """How the shared engine runs a block or a consumer that is called on x, or the reason why it cannot."""
    reason = why_not_global_changes()
    if reason is not None:
        return reason
    plans = plans_of([module for module in (block, consumer) if module is not None])
    return _kept(plans, (block is None, *request), x, make_plan, block, consumer, request)


def plan_stem(plans: Plans, modules: Sequence[Any], first: int, x: Tensor) -> StemPlan | None:
    """The plan with which the first four of `modules` run as one node on x; None where they are to be called: they are
    no such stem, or another engine runs the first block, at position `first`."""
    if len(modules) < STEM_LENGTH:
        return None
    stem = modules[:STEM_LENGTH]
    plan = _kept(plans, ("stem", first, *x.shape), x, _stem_before, modules[first], stem)
    return plan if plan is not None and needs_grad(x, *stem) else None


def _stem_before(x: Tensor, block: EngineBlock, stem: Sequence[nn.Module]) -> StemPlan | None:
    if not can_share_stem(stem, x):
        return None
    plan = StemPlan(stem, x)
    output_like = x.new_empty((), dtype=output_dtype(x)).expand(x.shape[0], plan.num_channels, *x.shape[2:])
    return None if isinstance(make_plan(output_like, block, None), str) else plan


def num_saved(plans: Plans, modules: Sequence[Any], x: Tensor) -> Sequence[int] | None:
    """How many layers of each block, the last ones, save their bottlenecks by default, as `saving` has it; None where
    plain modules hold less.

    `modules` are the first block and all that follows. Other networks than blocks, each with its consumer after it, may
    hold most at another moment, and save none; nor does one whose first block needs no gradient, an engine by name, or
    compiled code.
    """
    none = [0] * len(modules)
    if torch.compiler.is_compiling() or not (x.requires_grad and torch.is_grad_enabled()):
        return none  # without a gradient of x the first stage has all gradients, and so the peak
    key = "sizes", len(modules)
    if key not in plans:
        blocks, consumers, sizes = modules[::2], modules[1::2], [None]
        if len(blocks) == len(consumers) and all(is_engine_block(each) and each.engine is None for each in blocks):
            sizes = [saving.stage_sizes(*each) for each in zip(blocks, consumers, strict=True)]
        # Each process of a sync group has sizes of its own, but must take part in the same collective operations.
        cannot_be_plain = (must_be_called(block) or any(map(is_synchronized, block.modules())) for block in blocks)
        plans[key] = None if None in sizes else tuple(sizes), not any(cannot_be_plain)
    sizes, may_be_plain = plans[key]
    if sizes is None:
        return none
    counts = saving.num_saved(sizes, (x.shape[0], *x.shape[2:]), compute_dtype(x).itemsize)
    return none if counts is None and not may_be_plain else counts


def make_plan(
    x: Tensor, block: nn.Module | None, consumer: nn.Module | None, request: StageRequest = USUAL_REQUEST
) -> StagePlan | str:
    """How the shared engine runs `block` on x, together with `consumer` where it can; or the reason why it cannot run
    the block. Without a block it is the plan of the consumer alone."""
    parts, inside = BlockParts(()), []
    if block is not None:
        try:
            parts = parts_of(block)
        except NoPartsError as reason:
            return str(*reason.args)  # PyTorch 2.11 does not compile str(reason)
        layers = [layer.module for layer in parts.layers if layer.module is not block]
        inside = [layer for layer in layers if can_run_inside(layer, x)]
        reason = why_not_layers(parts.layers, x, inside, casts_parameters((block, *inside), x))
        if reason is not None:
            return reason
    if consumer is not None:
        around = [] if block is None else [each for each in (block, consumer) if can_run_inside(each, x)]
        joined = consumer_of(consumer, x, None if block is None else parts, around)
        plan = None if joined is None else StagePlan(parts, joined, x, request, [*around, *inside])
        if plan is not None and plan.why_not_shapes(x) is None:
            return plan
    if block is None:
        return "found no consumer"
    plan = StagePlan(parts, None, x, request, inside)
    return plan.why_not_shapes(x) or plan


def _kept(plans: Plans, key: tuple, x: Tensor, make: Callable[..., Any], *arguments: Any) -> Any:
    """`make(x, *arguments)`, made once. Compilers trace it each time: sizes of x may be symbolic."""
    if torch.compiler.is_compiling():
        return make(x, *arguments)
    has_one_pixel = x.shape[0] * x.shape[2:].numel() == 1  # with which no norm can train
    autocast_dtype = torch.get_autocast_dtype(autocast_device(x)) if autocast_enabled(x) else None
    precision = x.dtype, autocast_dtype, device_type(x)
    key = (*key, *precision, memory_format_of(x), x.dim(), x.shape[1], has_one_pixel)
    if key not in plans:
        plans[key] = make(x, *arguments)
    return plans[key]


class _KeptPlans:
    """The plans that begin with a module. `by_others` has them, and the state of all modules, by the modules after it.

    They are an attribute of the module, so that the garbage collector sees cycles through hooks inside. Copies and
    pickles of the module have an empty dict in its place, and a replica is not its owner.
    """

    ATTRIBUTE = "_engine_plans"

    def __init__(self, owner: nn.Module) -> None:
        self.owner = weakref.ref(owner)
        self.by_others: dict[tuple, tuple[ModulesState, Plans]] = {}

    def __reduce__(self) -> tuple:
        return dict, ()


def plans_of(modules: Sequence[nn.Module]) -> Plans:
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
    """Whether plans cannot be kept, since a module inside depends on more than its attributes: on processes, compiled
    code, values that may change in place, the eps of a class, or what `fully_shard` gathers before a call."""
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
    return isinstance(value, (list, dict, set)) and f"{type(module).__module__}.".startswith("torch.nn.")


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
        names = [[name for name, value in each.items() if _is_setting(name, value)] for each in attributes]
        self.settings_of = [itemgetter("training", *each) for each in names]  # of two or more names a tuple
        self.objects = [
            (i, name)
            for i, each in enumerate(attributes)
            for name, value in each.items()
            if name not in _INTERNAL and not _is_setting(name, value)  # compared by identity
        ]
        self.dicts = list(chain.from_iterable(map(_tensors, attributes)))
        self.references = [_reference(attributes[i][name]) for i, name in self.objects]
        self.values = self._values(roots, attributes)
        self.read = [each.read_state() for each in _readable(roots)]

    def is_current(self, roots: Sequence[nn.Module]) -> bool:
        """Whether plans that were made now would be the same."""
        attributes = list(map(vars, [*roots, *self.inside]))
        try:
            objects = [attributes[i][name] for i, name in self.objects]
            are_same = all(each is known() is not None for each, known in zip(objects, self.references, strict=True))
            if not are_same or self._values(roots, attributes) != self.values:
                return False
        except KeyError:  # of an attribute that was removed
            return False
        return all(each.read_state(before) == before for each, before in zip(_readable(roots), self.read, strict=True))

    def _values(self, roots: Sequence[nn.Module], attributes: Sequence[dict[str, Any]]) -> tuple[list, ...]:
        """All that is compared by value, or by the ids of objects, which live as long as this state."""
        children = list(map(_children, attributes))
        tensors = list(chain.from_iterable(map(dict.values, filter(None, self.dicts))))
        present = [tensor for tensor in tensors if tensor is not None]
        settings = [each for of, held in zip(self.settings_of, attributes, strict=True) for each in of(held)]
        return (
            list(map(type, [*roots, *self.inside])),
            list(map(len, attributes)),
            list(map(tuple, filter(None, chain.from_iterable(map(_hooks, attributes))))),
            list(map(len, children)),
            list(chain.from_iterable(children)),
            list(map(id, chain.from_iterable(map(dict.values, filter(None, children))))),
            list(map(id, chain.from_iterable(map(_tensors, attributes)))),
            settings,
            list(map(type, settings)),  # True equals 1
            list(map(type, tensors)),
            list(map(_dtype, present)),
            list(map(_shape, present)),
        )


def _readable(roots: Sequence[nn.Module]) -> list[Any]:
    """The modules whose parts depend on more than the modules inside."""
    return [root for root in roots if hasattr(type(root), "read_state")]


def _is_setting(name: str, value: Any) -> bool:
    """Whether an attribute is compared by its value."""
    return name not in _INTERNAL and (
        isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(each, _PLAIN) for each in value))
    )


def _reference(value: Any) -> Callable[[], Any]:
    """A weak reference, or a strong one where `value` allows none."""
    try:
        return weakref.ref(value)
    except TypeError:
        return lambda: value
