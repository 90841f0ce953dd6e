"""What a stage or a stem is made of: read and checked when it is first seen, and kept for later forwards.

A forward with a kept plan looks only at what can change: the modules inside and their classes, hooks, attributes that
were added (a new forward), every plain attribute (training flags, eps, drop rates, …), and the type, dtype and size of
each tensor. Any change reads and checks again. Modules with values that may change in place are read in each forward.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from .._tensors import autocast_enabled, compute_dtype, device_type, memory_format_of
from ..norms.sync_batch_norm import is_synchronized
from .changed_modules import HOOKS, why_not_global_changes
from .parts import BlockParts, is_norm
from .refuse import joined_consumer, separate_consumer, shared_parts
from .saving import StageSizes, stage_sizes
from .sharded import can_run_inside
from .stage.run import FORMATS_OF_X, StageFormats, StagePlan
from .stem import StemPlan, stem_at_the_start

Plan = TypeVar("Plan", StagePlan, StemPlan, StageSizes)

_MOST_PLANS = 32
"""Of one module: for other dtypes, numbers of dimensions, memory formats, precisions and consumers."""


class _Plans:
    """The plans that begin with a module, by all that a plan depends on besides the state of the modules.

    They are an attribute of the module, so that the garbage collector sees cycles through hooks inside. Copies and
    pickles of the module have an empty dict in its place, and a replica is not its owner.
    """

    ATTRIBUTE = "_engine_plans"

    def __init__(self, owner: nn.Module) -> None:
        self.owner = weakref.ref(owner)
        self.by_key: dict[tuple, Kept] = {}

    def __reduce__(self) -> tuple:
        return dict, ()

    @classmethod
    def of(cls, module: nn.Module) -> "_Plans":
        attributes = vars(module)
        plans = attributes.get(cls.ATTRIBUTE)
        if not isinstance(plans, cls) or plans.owner() is not module:
            plans = attributes[cls.ATTRIBUTE] = cls(module)
        return plans


class StageRequest(NamedTuple):
    """What a stage is to return and to save.

    Attributes:
        formats: the memory formats of its outputs.
        return_features: whether it returns the block's output too.
        num_saved: how many of its layers, the last ones, save their bottlenecks if they leave it open; None where no
            layer saves any, since there is no backward.
        compared: what was kept of the same modules, if this forward has compared them and called none since.
    """

    formats: StageFormats
    return_features: bool = False
    num_saved: int | None = 0
    compared: "Kept | None" = None


USUAL = StageRequest(FORMATS_OF_X)


def read_stage(
    block: nn.Module | None, consumer: nn.Module | None, x: Tensor, request: StageRequest = USUAL
) -> StagePlan | str:
    """How the shared engine runs `block` on x, together with `consumer` where it can; or the reason why it cannot run
    the block. Without a block it is the plan of the consumer alone."""
    reason = why_not_global_changes()
    if reason is not None:
        return reason
    read = partial(_read, block, consumer, x, request)
    if block is not None and block._forward_pre_hooks:  # of fully_shard, which may gather and cast parameters
        return read()
    roots = [module for module in (block, consumer) if module is not None]
    *settings, compared = request
    return _keep(roots, (block is None, *settings), x, read, compared)[0]


def read_stem(modules: Sequence[nn.Module], x: Tensor) -> StemPlan | None:
    """How the shared engine runs the first four of `modules` on x as one node, or None where it cannot."""
    if len(modules) < 4:
        return None
    settings = "stem", len(x) == 1, tuple(x.shape[2:])
    plan, _ = _keep(modules[:4], settings, x, lambda: stem_at_the_start(modules, x) or "")
    return None if isinstance(plan, str) else plan


def read_sizes(block: nn.Module, consumer: nn.Module, x: Tensor) -> "tuple[StageSizes | None, Kept | None]":
    """The sizes of a stage, or None where its parts are not known; and what is kept of its modules."""
    sizes, kept = _keep([block, consumer], ("sizes",), x, lambda: stage_sizes(block, consumer) or "")
    return None if isinstance(sizes, str) else sizes, kept


def _read(block: nn.Module | None, consumer: nn.Module | None, x: Tensor, request: StageRequest) -> StagePlan | str:
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


def _keep(
    roots: Sequence[nn.Module],
    request: tuple,
    x: Tensor,
    read: Callable[[], Plan | str],
    compared: "Kept | None" = None,
) -> "tuple[Plan | str, Kept | None]":
    """The plan of the modules `roots` on x: a kept one, or what `read` returns, which is kept if it is a plan. And what
    is kept with it."""
    if torch.compiler.is_compiling() or any(hasattr(type(root), "lives_for_one_forward") for root in roots):
        return read(), None
    first, *others = roots
    states = _states(roots) if compared is None else compared.states
    precision = x.dtype, compute_dtype(x), autocast_enabled(x), device_type(x), memory_format_of(x)
    has_one_pixel = x.shape[0] * x.shape[2:].numel() == 1  # with which no norm can train
    key = (*map(weakref.ref, others), *request, *states, *precision, x.dim(), x.shape[1], has_one_pixel)
    plans = _Plans.of(first)
    kept = plans.by_key.get(key)
    if kept is not None and kept.is_current(roots, compared):
        return cast(Any, kept.plan), kept
    plan = read()
    if isinstance(plan, str) or any(map(_must_be_read, roots)):
        return plan, None
    kept = Kept(roots, states, plan, first_may_have_hooks=request[0] is False)
    if not kept.is_current(roots, compared):  # with hooks inside
        return plan, None
    rest = {} if len(plans.by_key) >= _MOST_PLANS else plans.by_key
    plans.by_key = rest | {key: kept}  # a new dict: other threads may read the old one
    return plan, kept


def _states(roots: Sequence[nn.Module]) -> list[tuple[Any, ...]]:
    """What the parts of converted modules depend on besides their attributes."""
    return [cast(Any, root).read_state() for root in roots if hasattr(type(root), "read_state")]


def forget(model: nn.Module) -> None:
    """Remove the kept plans of all modules of a model."""
    for module in model.modules():
        vars(module).pop(_Plans.ATTRIBUTE, None)


def _must_be_read(root: nn.Module) -> bool:
    """Whether there is a module inside that depends on more than its attributes: on processes, compiled code, values
    that may change in place, or the eps of a class."""
    return any(
        is_synchronized(module)
        or isinstance(module, torch.jit.ScriptModule)
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


_INTERNAL = (frozenset(vars(nn.Module())) | {_Plans.ATTRIBUTE}) - {"training"}
_PLAIN = bool, int, float, str, type(None), torch.dtype, torch.device
_hooks, _children, _tensors = itemgetter(*HOOKS), itemgetter("_modules"), itemgetter("_parameters", "_buffers")


class Kept:
    """A plan, and the state of the modules for which it was made; `states` are those of converted modules.

    It refers to no module of `roots`, so that these are freed at once where nothing else makes a cycle. Tensors are not
    kept either: a forward reads them anew.
    """

    def __init__(
        self,
        roots: Sequence[nn.Module],
        states: Sequence[tuple[Any, ...]],
        plan: StagePlan | StemPlan | StageSizes,
        first_may_have_hooks: bool,
    ) -> None:
        self.equal: Kept | None = None
        self.states, self.plan, self.first_checked = states, plan, int(first_may_have_hooks)
        inside = [module for root in roots for module in root.modules()]
        self.inside = [module for module in inside if not any(module is root for root in roots)]
        modules = [*roots, *self.inside]
        attributes = list(map(vars, modules))
        self.classes, self.sizes = list(map(type, modules)), list(map(len, attributes))
        self.children = list(chain.from_iterable(map(dict.values, map(_children, attributes))))
        self.names = list(map(tuple, map(_children, attributes)))
        self.dicts = list(chain.from_iterable(map(_tensors, attributes)))
        self.settings_of = [itemgetter(*(k for k, v in each.items() if _is_setting(k, v))) for each in attributes]
        self.settings = self._settings(attributes)
        self.objects = [(i, k) for i, each in enumerate(attributes) for k, v in each.items() if _is_object(k, v)]
        self.references = [_reference(attributes[i][name]) for i, name in self.objects]
        self.tensors = _kinds(plan)

    def is_current(self, roots: Sequence[nn.Module], compared: "Kept | None" = None) -> bool:
        """Whether a plan that was made now would be the same.

        `compared` is current: if it was so too when the modules were compared with this plan, they are not compared
        again.
        """
        try:
            if compared is None or compared is not self.equal:
                if not self._has_state_of(roots):
                    return False
                self.equal = compared
            return _kinds(self.plan) == self.tensors
        except KeyError:  # of an attribute or a tensor that was removed
            return False

    def _has_state_of(self, roots: Sequence[nn.Module]) -> bool:
        modules = [*roots, *self.inside]
        attributes = list(map(vars, modules))
        called = attributes[self.first_checked :]
        return (
            list(map(type, modules)) == self.classes
            and list(map(len, attributes)) == self.sizes
            and not any(chain.from_iterable(map(_hooks, called)))
            and _are_same(chain.from_iterable(map(dict.values, map(_children, attributes))), self.children)
            and list(map(tuple, map(_children, attributes))) == self.names
            and _are_same(chain.from_iterable(map(_tensors, attributes)), self.dicts)
            and self._settings(attributes) == self.settings
            and _are_same([_reference(attributes[i][name]) for i, name in self.objects], self.references)
        )

    def _settings(self, attributes: Sequence[dict[str, Any]]) -> list[Any]:
        return [settings_of(each) for settings_of, each in zip(self.settings_of, attributes, strict=True)]


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


def _kinds(plan: StagePlan | StemPlan | StageSizes) -> tuple[list, list, list]:
    """What a plan takes for granted about its tensors, which may be others in each forward."""
    tensors = [values[name] for values, name in plan.places]
    present = [tensor for tensor in tensors if tensor is not None]
    return list(map(type, tensors)), list(map(_dtype, present)), list(map(_shape, present))


_dtype, _shape = attrgetter("dtype"), attrgetter("shape")
