"""Run forwards of a module on a few pixels, and tell what they compute as expressions.

Tensors are real ones on the CPU, zeros in the places of parameters: their values do not count. All that the forward's
functions name is put back afterwards. The module runs in the modes in which a forward may take another branch: training
or not, with or without gradients of the input and of the parameters, in half precision by autocast, with other sizes
and rates of dropout.
"""

import gc
import sys
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from .._torch_private import is_flattened_by_fsdp1
from ..engine.limits import HOOKS
from ..norms.sync_batch_norm import local_statistics
from .calls import AsksOfInput, Call, Calls
from .errors import NotRunError, SideEffectError, VerificationError
from .expressions import Expression, Table, place_of
from .guard import Guard, Snapshot, class_as_written, drop_rates, guard_of, is_of_a_library
from .structure import dimensions, first_conv

Forward = Callable[[Tensor], Any]
IMAGES = 2


class Sample(NamedTuple):
    """The input of a forward: its channels, the pixels a side, and the dtype of input and module."""

    channels: int
    size: int
    dtype: torch.dtype

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"one tensor of {self.channels} channels and {self.size} pixels a side in {dtype}"


def samples(module: nn.Module, channels: int, sizes: Sequence[int] = (3, 16)) -> list[Sample]:
    """The inputs on which a module may run, the usual one first; few pixels are not enough for padding by reflection,
    nor half precision for every operation on a CPU."""
    # Not conv.weight, which a parametrization would compute, and which FullyShardedDataParallel may hold elsewhere.
    own = next((each.dtype for each in first_conv(module).parameters()), torch.float32)
    dtypes = dict.fromkeys(each for each in (own, torch.float32) if each.is_floating_point)
    return [Sample(channels, size, dtype) for dtype in dtypes for size in sizes]


class Mode(NamedTuple):
    """The mode and the input of one run of a forward.

    Attributes:
        name: the name of the mode in messages.
        training: the training mode of the modules.
        grad_mode: the context in which the forward runs.
        input_requires_grad, parameters_require_grad: which gradients are computed.
        drop_rate: replaces the rates of dropout that are not 0, each by a slightly different rate, which shows where it
            is used; 0 replaces all.
        autocast: True for autocast.
        extra_size: the number added to the images, and to the pixels a side.
        in_other_mode: the class of the modules that are in the other training mode, as in Monte Carlo dropout.
    """

    name: str
    training: bool
    grad_mode: Callable[[], AbstractContextManager] = torch.enable_grad
    input_requires_grad: bool = True
    parameters_require_grad: bool = True
    drop_rate: float = 0.33
    autocast: bool = False
    extra_size: int = 0
    in_other_mode: type | tuple[()] = ()


MAIN_MODES = Mode("evaluation mode", False), Mode("training mode", True)
MODES = (
    *MAIN_MODES,
    Mode("training mode with an input that requires no gradient", True, input_requires_grad=False, drop_rate=0.97),
    Mode("training mode under autocast without gradients", True, torch.no_grad, True, False, 0.0, True, extra_size=1),
    Mode("inference mode with dropout", False, torch.inference_mode, False, extra_size=2, in_other_mode=_DropoutNd),
    Mode("training mode with frozen norms", True, torch.no_grad, in_other_mode=_NormBase),
)


class Trace(NamedTuple):
    """What one run computes.

    Attributes:
        mode: the mode of the run.
        input, output: their expressions; of several outputs a tuple.
        requires_grad: whether the output requires a gradient.
        gradients: the expressions of the gradients of the input and of each parameter; None for no gradient.
        state: the expressions of the input and the buffers afterwards, and the number of random numbers drawn.
        asks: what the author's code asked of tensors, as in `Calls`.
        asked: the tensors that were asked for their values. A recomputation must not ask others.
        recomputes: whether batch norms ran in the backward too, as in a library's own checkpointing.
        calls: as in `Calls`.
        rates: the place of each rate of dropout: a module's name and an attribute's.
        error: the type of the error that the forward raised.
    """

    mode: Mode
    input: Any = None
    output: Any = None
    requires_grad: bool = False
    gradients: tuple[Any, ...] = ()
    state: tuple[Any, ...] = ()
    asks: Counter[str] = Counter()  # noqa: RUF012
    asked: frozenset[Expression] = frozenset()
    recomputes: bool = False
    calls: Sequence[Call] = ()
    rates: Mapping[float, tuple[str, str]] = {}
    error: type | None = None


class Tracer:
    """Runs forwards in a module that `tracing` has prepared. Equal expressions of its runs are equal functions.

    Attributes:
        ran: the code of authors that has run, by identity.
    """

    def __init__(self, module: nn.Module, sample: Sample) -> None:
        self.module, self.sample, self.table = module, sample, Table()
        self.ran: dict[int, CodeType] = {}
        self._named, self._dims = list[tuple[str, nn.Module]](), dimensions(module)
        self._zeros: dict[tuple[int, torch.dtype], Tensor] = {}
        self._guard: tuple[frozenset[int] | None, Guard | None] = None, None

    def runs_of_author(self, forward: Forward) -> Iterator[Trace]:
        """The author's forward in each mode; `SideEffectError` if it does what a recomputation would do again."""
        yield from (self.run(forward, mode, is_authors=True) for mode in MODES)
        self._guard = None, self.guard  # once more, after all runs
        if self.guard.unknown is not None:
            raise SideEffectError(f"found that it {self.guard.unknown}")

    @property
    def guard(self) -> Guard:
        """What the author's functions name, with those that have run."""
        ran = frozenset(self.ran)
        known, guard = self._guard
        if guard is None or known != ran:
            guard = guard_of(self.module, self.ran.values(), () if guard is None else guard.names)
            self._guard = ran, guard
        return guard

    def run(self, forward: Forward, mode: Mode, is_authors: bool = False) -> Trace:
        """Run `forward` and its backward. Of an author's forward, changes of anything that it names are noticed."""
        imported, ran, failure = len(sys.modules), dict(self.ran), None
        try:
            trace = self._run(forward, mode, is_authors)
        except VerificationError as exc:
            trace, failure = Trace(mode), exc
        if len(sys.modules) > imported:  # such as PyTorch's compiler, which runs functions when it is imported
            self.ran = ran
            return self._run(forward, mode, is_authors)
        if failure is not None:
            raise failure
        return trace

    def _run(self, forward: Forward, mode: Mode, is_authors: bool) -> Trace:
        try:
            with self.prepared(mode) as (tensors, rates):
                return self._trace(forward, mode, tensors, is_authors)._replace(rates=rates)
        except VerificationError:
            raise
        except Exception as exc:
            if mode not in MAIN_MODES:  # if the author's forward fails, other forwards must fail too
                return Trace(mode, error=type(exc))
            raise NotRunError(self.sample, exc) from exc

    @contextmanager
    def prepared(self, mode: Mode) -> Iterator[tuple[dict[str, Tensor], dict[float, tuple[str, str]]]]:
        """Put the modules into `mode`, with tensors by name and rates of dropout; put everything back afterwards."""
        self._named = list(self.module.named_modules())
        before = [(module, dict(vars(module))) for _, module in self._named]
        torch.default_generator.manual_seed(0)
        try:
            with mode.grad_mode():
                yield self._prepare(mode)
        finally:
            for module, values in before:
                vars(module).clear()
                vars(module).update(values)

    def _prepare(self, mode: Mode) -> tuple[dict[str, Tensor], dict[float, tuple[str, str]]]:
        """Replace the rates of dropout, and the tensors of the modules, those with several names by one."""
        rates = [(name, each, key) for name, each in self._named for key in drop_rates(each)]
        named_rates = dict[float, tuple[str, str]]()
        for i, (name, each, key) in enumerate(rates):
            vars(each)[key] = mode.drop_rate and mode.drop_rate + 0.3 * (0.5 - mode.drop_rate) * i / len(rates)
            named_rates[vars(each)[key]] = name, key
        made, named = dict[int, Tensor](), dict[str, Tensor]()
        for prefix, module in self._named:
            module.training = mode.training != isinstance(module, mode.in_other_mode)
            for kind in ("_parameters", "_buffers"):
                tensors = vars(module)[kind]
                for key, value in tensors.items():
                    if value is not None and id(value) not in made:
                        replacement = self._replacement(value, kind == "_parameters", mode)
                        made[id(value)] = named[f"{prefix}.{key}".removeprefix(".")] = replacement
                vars(module)[kind] = {k: None if value is None else made[id(value)] for k, value in tensors.items()}
        return named, named_rates

    def _replacement(self, tensor: Tensor, is_parameter: bool, mode: Mode) -> Tensor:
        """Zeros for a parameter; a buffer keeps its values, which a forward may read."""
        is_floating = tensor.is_floating_point()
        dtype = self.sample.dtype if is_floating else tensor.dtype
        if is_parameter:
            key = id(tensor), dtype
            if key not in self._zeros:  # a forward that writes to them is refused
                self._zeros[key] = torch.zeros(tensor.shape, dtype=dtype, device="cpu")
            return nn.Parameter(self._zeros[key], mode.parameters_require_grad and is_floating)
        return torch.zeros(tensor.shape, dtype=dtype) if tensor.is_meta else tensor.detach().to("cpu", dtype, copy=True)

    def input(self, mode: Mode, size: int) -> Tensor:
        shape = IMAGES + mode.extra_size, self.sample.channels, *[size + mode.extra_size] * self._dims
        zeros = torch.zeros(shape, dtype=self.sample.dtype, device="cpu").as_subclass(AsksOfInput)
        return zeros.requires_grad_(mode.input_requires_grad)

    def _trace(self, forward: Forward, mode: Mode, tensors: dict[str, Tensor], is_authors: bool) -> Trace:
        x, modules = self.input(mode, self.sample.size), self._named
        watch = Calls({each: name for name, each in modules}, self.table, self.ran if is_authors else None)
        snapshot = Snapshot(self.module, self.guard.names) if is_authors else None
        attributes = [(each, dict(vars(each))) for _, each in modules] if is_authors else []
        expressions, written = watch.expressions, None
        absent = vars(x)["asks"] = list[str]()
        entered = expressions.leaf(x, "input")
        leaves = {name: expressions.leaf(each, name) for name, each in tensors.items()}
        try:
            with expressions:
                with watch, torch.autocast("cpu", torch.bfloat16, enabled=mode.autocast):
                    output = forward(x)
                outputs = output if isinstance(output, (list, tuple)) else (output,)
                if not all(isinstance(each, Tensor) for each in outputs):
                    raise VerificationError(f"returns a {type(output).__name__}, where a dense block returns a tensor")
                if x._backward_hooks:
                    raise SideEffectError("registers a hook on its input, which would see another gradient")
                draws, computed = torch.default_generator.initial_seed(), expressions.of(output)
                asks, forwards = watch.asks, expressions.forwards_of_norms
                if any(each.grad is not None for each in tensors.values() if each.requires_grad):
                    raise SideEffectError("computes gradients in its forward")
                differentiated = [each for each in outputs if each.requires_grad]
                grads = [torch.empty_like(each) for each in differentiated]
                for i, each in enumerate(grads):
                    expressions.leaf(each, "gradient", i)
                with watch.profile():
                    torch.autograd.backward(differentiated, grads) if grads else None
                recomputes = mode.training and expressions.forwards_of_norms > forwards
                buffers = [each for _, module in modules for each in module._buffers.values()]
                after = draws, torch.default_generator.initial_seed(), *map(expressions.of, (x, *buffers))
                parameters = [each for each in tensors.values() if isinstance(each, nn.Parameter)]
                gradients = tuple(expressions.of(each.grad) for each in (x, *parameters))
            written = snapshot.change() if snapshot is not None else None
        finally:
            if snapshot is not None:
                snapshot.put_back()
        for name, each in tensors.items() if is_authors else ():
            if expressions.of(each) != leaves[name]:
                owner = self.module.get_submodule(name.rpartition(".")[0])
                if isinstance(owner, _NormBase) and place_of(each) in expressions.read:
                    raise SideEffectError(f"reads {name}, which a norm updates")
                is_statistic = isinstance(owner, _NormBase) or is_of_a_library(type(owner))
                is_written = isinstance(each, nn.Parameter) or not is_statistic
                written = written or (f"{name} has changed" if is_written else None)
        for each, before in attributes:
            names = {**before, **vars(each)}
            changed = (name for name in names if before.get(name, self) is not vars(each).get(name, self))
            where = f"of a {class_as_written(type(each)).__name__} has changed"
            written = next((f"{name} {where}" for name in changed), written)
        if expressions.asked and snapshot is not None and snapshot.collection is not None:
            raise SideEffectError(f"decides by values of tensors, and may write to {snapshot.collection}")
        if absent:
            raise SideEffectError(f"asks its input for its {absent[0]}, which no other tensor has")
        if written is not None:
            raise SideEffectError(f"writes where an engine would not, or twice: after its forward {written}")
        return Trace(
            *(mode, entered, computed, bool(grads), gradients, after, asks, frozenset(expressions.asked), recomputes),
            calls=[] if mode.autocast else watch.calls,
        )


@contextmanager
def tracing(module: nn.Module, sample: Sample) -> Iterator[Tracer]:
    """Prepare `module` for runs on `sample`: without hooks, warnings, and the modes around; put everything back."""
    if any(map(_has_computed_weights, module.modules())):
        raise VerificationError(
            "holds weights that are no parameters, as after torch.nn.utils.weight_norm, spectral_norm or prune"
        )
    if any(map(is_flattened_by_fsdp1, module.modules())):
        raise VerificationError(
            "holds parameters that FullyShardedDataParallel has sharded: call make_efficient before sharding the model"
        )
    tracer = Tracer(module, sample)
    if tracer.guard.unknown is not None:
        raise SideEffectError(f"found that it {tracer.guard.unknown}")
    before = [(each, {name: vars(each)[name] for name in (*HOOKS, "training")}) for each in module.modules()]
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([]))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(local_statistics(module))
        stack.callback(gc.enable if gc.isenabled() else gc.disable)
        gc.disable()  # the finalizers of other objects are no functions of the block
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)  # a few pixels are no work for several
        try:
            for each, _ in before:
                vars(each).update({name: OrderedDict() for name in HOOKS})
            yield tracer
        finally:
            for each, values in before:
                vars(each).update(values)


def _has_computed_weights(module: nn.Module) -> bool:
    tensors = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
    return any(value.requires_grad or f"{name}_orig" in module._parameters for name, value in tensors.items())


def describe_difference(traces: Iterable[Trace], tracer: Tracer, forward: Forward) -> str | None:
    """The difference between the block, whose traces these are, and the dense block that `forward` computes, or None if
    their expressions are equal: then they compute the same for any values."""
    try:
        actual = (tracer.run(forward, each.mode) for each in traces)
        differences = (_difference(tracer.table, *each) for each in zip(actual, traces, strict=True))
        return next(filter(None, differences), None)
    except VerificationError as failure:
        return (
            "has layers that cannot run as norm, activation and convolution in turn on a growing concatenation "
            f"({failure.error if isinstance(failure, NotRunError) else failure})"
        )


def _difference(table: Table, actual: Trace, expected: Trace) -> str | None:
    shape, dense_shape = (
        table.shapes[each.output][1:] if isinstance(each.output, Expression) else () for each in (expected, actual)
    )
    if isinstance(expected.output, tuple) and dense_shape:
        return f"returns a {expected.output[0]}, where a dense block returns a tensor"
    if shape != dense_shape and () not in (shape, dense_shape):
        return f"returns {shape} of a small image, where a dense block with these layers returns {dense_shape}"
    kinds = {"values": ("output", "requires_grad", "error"), "gradients": ("gradients",)}
    for what, names in (kinds | {"random numbers or running statistics": ("state",)}).items():
        if any(getattr(actual, name) != getattr(expected, name) for name in names):
            of = [table.operations(*(getattr(each, name) for name in names)) for each in (expected, actual)]
            others = f" ({', '.join(sorted(of[0] ^ of[1]))})" if of[0] != of[1] else ""
            found = f"has other {what}{others} in"
            break
    else:
        asks = sorted({*(expected.asks - actual.asks), *(actual.asks - expected.asks)})
        asks += ["values"] if expected.asked != actual.asked else []
        if not asks:
            return None
        found = f"asks a tensor for its {', '.join(asks)} in"
    return (
        f"{found} {expected.mode.name} than the dense block that its layers suggest: norm, activation, convolution "
        "(and dropout) on a growing concatenation"
    )
