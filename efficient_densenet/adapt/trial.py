"""Run forwards of a module on a few random pixels, and restore the state of the module and of PyTorch's generators.

The parameters and the tensors of norms are replaced by random values, so that no weight that happens to be zero or
small hides a difference. The module runs in the modes in which a forward may take another branch: training or not, with
or without gradients of the input and of the parameters, in the model's own dtype under autocast, with other sizes and
other rates of dropout.
"""

import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from .._torch_private import is_flattened_by_fsdp1
from ..engine.changed_modules import HOOKS
from ..norms.sync_batch_norm import local_statistics
from .code import Code
from .errors import NotRunError, SideEffectError, VerificationError
from .fingerprint import change_since, drop_rates, fingerprint
from .layer_parts import Call
from .operations import Recorder
from .random_tensors import random_tensors
from .randomness import random_states, seed
from .sample import IMAGES, Sample, dimensions
from .structure import first_conv

Forward = Callable[[Tensor], Tensor]


class Mode(NamedTuple):
    """The mode and the input of one run of a forward.

    Attributes:
        name: the name of the mode in messages.
        training: the training mode of the modules.
        grad_mode: the context in which the forward runs.
        input_requires_grad, parameters_require_grad: which gradients are computed.
        drop_rate: replaces the rates of dropout that are not 0, each by a slightly different rate; None keeps them.
        autocast: True for autocast, and the dtype of the module's own parameters.
        extra_size: the number added to the images, and to the pixels a side.
        in_other_mode: the class of the modules that are in the other training mode, as in Monte Carlo dropout.
    """

    name: str
    training: bool
    grad_mode: Callable[[], AbstractContextManager] = torch.enable_grad
    input_requires_grad: bool = True
    parameters_require_grad: bool = True
    drop_rate: float | None = None
    autocast: bool = False
    extra_size: int = 0
    in_other_mode: type | tuple[()] = ()


MAIN_MODES = Mode("evaluation mode", False), Mode("training mode", True)
MODES = (
    *MAIN_MODES,
    Mode("training mode with an input that requires no gradient", True, input_requires_grad=False, drop_rate=0.97),
    Mode("training mode under autocast without gradients", True, torch.no_grad, True, False, 0.0, True, extra_size=1),
    Mode("inference mode with dropout", False, torch.inference_mode, False, extra_size=2, in_other_mode=_DropoutNd),
    Mode("training mode with frozen norms", True, in_other_mode=_NormBase),
)


class Result(NamedTuple):
    """The results of one run.

    Attributes:
        mode: the mode of the run.
        values: the output, whether it requires a gradient, and the input after the run.
        gradients: the gradients of the input and of each parameter; None for no gradient.
        states: the states of random generators, and the buffers.
        operations: how often each operation ran in the forward.
        recomputes: whether batch norms that train ran in the backward too, as in a library's own checkpointing.
        calls, features: as in `Recorder`; None and empty if the forward raised an error.
    """

    mode: Mode
    values: list[Any]
    gradients: list[Tensor | None]
    states: list[Any]
    operations: Counter[str]
    recomputes: bool
    calls: Sequence[Call] | None = None
    features: Mapping[nn.Module, tuple[bool, bool]] = {}


class Trial:
    """Runs forwards in a module that `trial` has prepared."""

    def __init__(self, module: nn.Module, sample: Sample, own_dtype: torch.dtype) -> None:
        self.module, self.sample = module, sample
        self.own_dtype = torch.float32 if own_dtype == torch.float64 else own_dtype

    def run(self, forward: Forward, modes: Iterable[Mode] = MODES, is_authors: bool = True) -> Iterator[Result]:
        """The results of `forward` and its backward in each mode, one after another."""
        return (self.run_once(forward, mode, is_authors) for mode in modes)

    def run_once(self, forward: Forward, mode: Mode, is_authors: bool = True) -> Result:
        """Run `forward` and its backward. Of an author's forward, changes of the module's state are noticed."""
        try:
            with self.prepared(mode) as tensors:
                return self._result(forward, mode, tensors, is_authors)
        except VerificationError:
            raise
        except Exception as exc:
            if mode not in MAIN_MODES:  # if the author's forward fails, other forwards must fail too
                return Result(mode, [type(exc)], [], [], Counter(), False)
            raise NotRunError(self.sample, exc) from exc

    @contextmanager
    def prepared(self, mode: Mode) -> "Iterator[_TrialTensors]":
        """Put the modules into `mode`, and seed PyTorch's generators; undo changes of the modules afterwards."""
        before = [(module, dict(vars(module))) for module in self.module.modules()]
        seed()
        try:
            with mode.grad_mode():
                yield _TrialTensors(self.module, mode, self.own_dtype)
        finally:
            for module, values in before:
                vars(module).clear()
                vars(module).update(values)

    def _result(self, forward: Forward, mode: Mode, tensors: "_TrialTensors", is_authors: bool) -> Result:
        x = self.input(mode, self.sample)
        state = fingerprint(self.module) if is_authors else None
        autocast = torch.autocast(x.device.type, torch.bfloat16) if mode.autocast else ExitStack()
        with Recorder(self.module) as recorder, autocast:
            output = forward(x)
        if not isinstance(output, Tensor):
            raise VerificationError(f"returns a {type(output).__name__}, where a dense block returns a tensor")
        if x._backward_hooks:
            raise SideEffectError("registers a hook on its input, which would see another gradient")
        values, states = [output.detach(), output.requires_grad, x.detach()], random_states(x.device)
        recomputes = output.requires_grad and _run_backward(output, mode)
        change = None if state is None else change_since(state, self.module)
        if change is not None:
            raise SideEffectError(f"changes its own state in its forward, which an engine would not: {change}")
        states += random_states(x.device)
        states += [buffer for module in self.module.modules() for buffer in module._buffers.values()]
        gradients = [x.grad, *(parameter.grad for parameter in tensors.parameters.values())]
        return Result(mode, values, gradients, states, recorder.counts, recomputes, recorder.calls, recorder.features)

    def input(self, mode: Mode, sample: Sample) -> Tensor:
        parameter = next(self.module.parameters())
        x = torch.randn(sample.shape(IMAGES, dimensions(self.module), mode.extra_size), device="cpu")
        return x.to(parameter.device, parameter.dtype).requires_grad_(mode.input_requires_grad)


def _run_backward(output: Tensor, mode: Mode) -> bool:
    """Run a backward, and return whether it ran the forward of a batch norm in training mode."""
    grad_output = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device)
    with Recorder() if mode is MAIN_MODES[1] else nullcontext() as recorder:
        output.backward(grad_output.view_as(output))
    return recorder is not None and recorder.forwards_of_norms > 0


class _TrialTensors:
    """The parameters of a module, and copies of its buffers, with which a forward runs."""

    def __init__(self, module: nn.Module, mode: Mode, own_dtype: torch.dtype) -> None:
        self.module, self.dtype = module, own_dtype if mode.autocast else None
        self.requires_grad = mode.parameters_require_grad
        self.parameters: dict[int, nn.Parameter] = {}
        self.buffers: dict[int, Tensor] = {}
        modules = list(module.modules())
        rates = [(each, name) for each in modules for name in drop_rates(each)]
        for i, (each, name) in enumerate(rates):
            if mode.drop_rate is not None:
                vars(each)[name] = mode.drop_rate and mode.drop_rate + 0.3 * (0.5 - mode.drop_rate) * i / len(rates)
        for each in modules:
            vars(each)["_parameters"] = {name: self._parameter(value) for name, value in each._parameters.items()}
            vars(each)["_buffers"] = {name: self._buffer(value) for name, value in each._buffers.items()}
            each.training = mode.training != isinstance(each, mode.in_other_mode)

    def _parameter(self, tensor: Tensor | None) -> nn.Parameter | None:
        if tensor is None:
            return None
        if id(tensor) not in self.parameters:
            requires_grad = self.requires_grad and tensor.is_floating_point()
            self.parameters[id(tensor)] = nn.Parameter(tensor.detach().to(self._dtype_of(tensor)), requires_grad)
        return self.parameters[id(tensor)]

    def _buffer(self, tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        if id(tensor) not in self.buffers:
            self.buffers[id(tensor)] = tensor.to(self._dtype_of(tensor), copy=True)
        return self.buffers[id(tensor)]

    def _dtype_of(self, tensor: Tensor) -> torch.dtype:
        return self.dtype if self.dtype is not None and tensor.is_floating_point() else tensor.dtype


@contextmanager
def trial(module: nn.Module, sample: Sample) -> Iterator[Trial]:
    """Prepare `module` for a trial on `sample`."""
    if any(map(_has_computed_weights, module.modules())):
        raise VerificationError(
            "holds weights that are no parameters, as after torch.nn.utils.weight_norm, spectral_norm or prune"
        )
    if any(map(is_flattened_by_fsdp1, module.modules())):
        raise VerificationError(
            "holds parameters that FullyShardedDataParallel has sharded: call make_efficient before sharding the model"
        )
    unknown = Code([*module.modules()]).unknown
    if unknown is not None:
        raise SideEffectError(unknown)
    own_dtype = next(first_conv(module).parameters()).dtype  # not conv.weight, which a parametrization would compute
    with _isolated(module), random_tensors(module, sample.dtype), local_statistics(module):
        yield Trial(module, sample, own_dtype)


def _has_computed_weights(module: nn.Module) -> bool:
    tensors = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
    return any(value.requires_grad or f"{name}_orig" in module._parameters for name, value in tensors.items())


@contextmanager
def _isolated(block: nn.Module) -> Iterator[None]:
    """Disable hooks, warnings and autocast, and enable autograd; restore hooks, modes and random states afterwards."""
    modules = list(block.modules())
    before = [{name: vars(module)[name] for name in (*HOOKS, "training")} for module in modules]
    devices = {parameter.device for parameter in block.parameters() if parameter.device.type == "cuda"}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for device in {"cpu", *(device.type for device in devices)}:
            stack.enter_context(torch.autocast(device, enabled=False))
        try:
            for module in modules:
                vars(module).update({name: OrderedDict() for name in HOOKS})
            yield
        finally:
            for module, values in zip(modules, before, strict=True):
                vars(module).update(values)
