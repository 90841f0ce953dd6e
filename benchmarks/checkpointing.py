"""How this package's recomputation behaves beside torch.utils.checkpoint's and fairscale's.

    python benchmarks/checkpointing.py behaviours     each probe compares with the plain call: yes or no
    python benchmarks/checkpointing.py costs          Python time on tiny layers, memory on large ones, beside torch's

Both write a CSV to benchmarks/results; `behaviours` prints the README's table.
"""

import copy
import csv
import datetime
import gc
import pickle
import statistics
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from efficient_densenet._extras import need
from efficient_densenet.checkpoint import checkpoint, checkpoint_wrapper
from efficient_densenet.memory import tensor_peak
from efficient_densenet.training.command_line import command

RESULTS = Path(__file__).parent / "results"


class _Called(nn.Module):
    """A module that runs another through a checkpointing function: how torch's is used."""

    def __init__(self, module: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.module, self.use_reentrant = module, use_reentrant

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return torch_checkpoint(self.module, *args, use_reentrant=self.use_reentrant, **kwargs)


def _fairscale_wrapper(module: nn.Module) -> nn.Module:
    return need("fairscale.nn.checkpoint", extra="bench").checkpoint_wrapper(module)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ours": checkpoint_wrapper,
    "torch": lambda module: _Called(module, use_reentrant=False),
    "torch, reentrant": lambda module: _Called(module, use_reentrant=True),
    "fairscale": _fairscale_wrapper,
}

Wrap = Callable[[nn.Module], nn.Module]


class Function(nn.Module):
    """A function as a module, so that every wrapper can take it."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


@dataclass
class Pair:
    left: Tensor
    right: Tensor


def _x(*shape: int, needs_grad: bool = True) -> Tensor:
    return torch.randn(*(shape or (4, 3)), dtype=torch.double, requires_grad=needs_grad)


def _net(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 3), *layers, nn.Linear(3, 3)).double()


def gradient_of_an_input_in_a_list(wrap: Wrap) -> bool:
    x = _x()
    wrap(Function(lambda tensors: tensors[0].sin()))([x]).sum().backward()
    return torch.equal(x.grad, x.detach().cos())


def gradient_of_an_input_in_a_dict_or_dataclass(wrap: Wrap) -> bool:
    x, y, z = _x(), _x(), _x()
    module = wrap(Function(lambda tensors, pair: tensors["x"].sin() + pair.left * pair.right))
    module({"x": x}, Pair(y, z)).sum().backward()
    return torch.equal(x.grad, x.detach().cos()) and torch.equal(y.grad, z) and torch.equal(z.grad, y)


def parameters_learn_when_the_input_needs_no_gradient(wrap: Wrap) -> bool:
    net = _net()
    wrap(net)(_x(needs_grad=False)).sum().backward()
    return all(p.grad is not None for p in net.parameters())


def batch_norm_updates_once_a_step(wrap: Wrap) -> bool:
    net = _net(nn.BatchNorm1d(3))
    wrap(net)(_x()).sum().backward()
    return net[1].num_batches_tracked.item() == 1


def batch_norm_updates_without_a_backward(wrap: Wrap) -> bool:
    net = _net(nn.BatchNorm1d(3))
    wrapped = wrap(net)
    wrapped(_x())
    with torch.no_grad():
        wrapped(_x())
    return net[1].num_batches_tracked.item() == 2


def forward_hooks_inside_fire_once(wrap: Wrap) -> bool:
    net, fired = _net(), []
    net[0].register_forward_hook(lambda *_: fired.append(1))
    wrap(net)(_x()).sum().backward()
    return len(fired) == 1


def parameter_hooks_fire_once(wrap: Wrap) -> bool:
    net, fired = _net(), []
    net[0].weight.register_hook(lambda grad: fired.append(1))
    wrap(net)(_x()).sum().backward()
    return len(fired) == 1


def a_deep_copy_computes_with_its_own_weights(wrap: Wrap) -> bool:
    wrapped = wrap(_net())
    copied = copy.deepcopy(wrapped)
    x = _x()
    expected = copied(x).detach()
    with torch.no_grad():
        for parameter in wrapped.parameters():
            parameter.zero_()
    output = copied(x)
    output.sum().backward()
    return torch.equal(output, expected) and all(p.grad is not None for p in copied.parameters())


def pickling_works(wrap: Wrap) -> bool:
    wrapped, x = wrap(_net()), _x()
    return torch.equal(pickle.loads(pickle.dumps(wrapped))(x), wrapped(x))


def state_dict_keys_stay_and_isinstance_holds(wrap: Wrap) -> bool:
    net = _net()
    keys = list(net.state_dict())
    wrapped = wrap(net)
    return list(wrapped.state_dict()) == keys and isinstance(wrapped, nn.Sequential)


def memory_is_freed_without_the_collector(wrap: Wrap) -> bool:
    gc.collect()
    gc.disable()
    try:
        wrapped = wrap(_net())
        output = wrapped(_x())
        output.sum().backward()
        watched = [weakref.ref(next(iter(wrapped.parameters()))), weakref.ref(output)]
        del wrapped, output
        return all(ref() is None for ref in watched)
    finally:
        gc.enable()


def second_derivatives(wrap: Wrap) -> bool:
    x = _x()
    (grad,) = torch.autograd.grad(wrap(Function(torch.sin))(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.sum(), x)
    return torch.allclose(second, -x.detach().sin())


def autograd_grad_for_chosen_tensors(wrap: Wrap) -> bool:
    net, x = _net(), _x()
    found = torch.autograd.grad(wrap(net)(x).sum(), [x, net[0].weight])
    return all(grad is not None for grad in found) and net[0].weight.grad is None


def a_gradient_taken_inside(wrap: Wrap) -> bool:
    x = _x()
    force = Function(lambda x: torch.autograd.grad(x.sin().sum(), x, create_graph=True)[0])
    wrap(force)(x).sum().backward()
    return torch.allclose(x.grad, -x.detach().sin())


def one_output_at_a_time_with_a_retained_graph(wrap: Wrap) -> bool:
    x = _x()
    sine, cosine = wrap(Function(lambda x: (x.sin(), x.cos())))(x)
    sine.sum().backward(retain_graph=True)
    cosine.sum().backward(retain_graph=True)
    sine.sum().backward()
    return torch.allclose(x.grad, 2 * x.detach().cos() - x.detach().sin())


def an_output_that_is_a_view_can_be_written_into(wrap: Wrap) -> bool:
    x = _x()
    output = wrap(Function(lambda x: x.sin().t()))(x)
    output.mul_(2)
    output.sum().backward()
    return torch.allclose(x.grad, 2 * x.detach().cos())


def outputs_without_gradient_need_none(wrap: Wrap) -> bool:
    sine, fixed = wrap(Function(lambda x: (x.sin(), x.detach() * 2)))(_x())
    return sine.requires_grad and not fixed.requires_grad


def dropout_repeats_its_mask(wrap: Wrap) -> bool:
    x = torch.ones(200, dtype=torch.double, requires_grad=True)
    output = wrap(Function(F.dropout))(x)
    output.sum().backward()
    return torch.equal(x.grad, output.detach())


def the_random_stream_goes_on_as_in_the_plain_call(wrap: Wrap) -> bool:
    states = []
    for module in (Function(F.dropout), wrap(Function(F.dropout))):
        torch.manual_seed(0)
        module(_x()).sum().backward()
        states.append(torch.get_rng_state())
    return torch.equal(*states)


def autocast_is_restored(wrap: Wrap) -> bool:
    net, grads = nn.Linear(3, 3), []
    for module in (copy.deepcopy(net), net):
        run = wrap(module) if module is net else module
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = run(torch.ones(2, 3, requires_grad=True)).sum()
        loss.backward()
        grads.append(module.weight.grad)
    return torch.equal(*grads)


def eval_mode_set_before_the_backward_changes_nothing(wrap: Wrap) -> bool:
    net = _net(nn.BatchNorm1d(3))
    plain, x = copy.deepcopy(net), _x()
    for module, run in ((plain, plain), (net, wrap(net))):
        loss = run(x).square().sum()
        module.eval()
        loss.backward()
    return torch.allclose(net[0].weight.grad, plain[0].weight.grad)


def a_second_run_that_differs_is_an_error(wrap: Wrap) -> bool:
    turns = [lambda x: x.sin() * x, lambda x: (x.sin() * x)[:1]]
    output = wrap(Function(lambda x: turns.pop(0)(x)))(_x())
    return _raises(output.sum().backward)


def an_input_overwritten_before_the_backward_is_an_error(wrap: Wrap) -> bool:
    x = _x() * 1
    output = wrap(Function(torch.sin))(x)
    with torch.no_grad():
        x.add_(1)
    return _raises(output.sum().backward)


PROBES = (
    gradient_of_an_input_in_a_list,
    gradient_of_an_input_in_a_dict_or_dataclass,
    parameters_learn_when_the_input_needs_no_gradient,
    batch_norm_updates_once_a_step,
    batch_norm_updates_without_a_backward,
    forward_hooks_inside_fire_once,
    parameter_hooks_fire_once,
    a_deep_copy_computes_with_its_own_weights,
    pickling_works,
    state_dict_keys_stay_and_isinstance_holds,
    memory_is_freed_without_the_collector,
    second_derivatives,
    autograd_grad_for_chosen_tensors,
    a_gradient_taken_inside,
    one_output_at_a_time_with_a_retained_graph,
    an_output_that_is_a_view_can_be_written_into,
    outputs_without_gradient_need_none,
    dropout_repeats_its_mask,
    the_random_stream_goes_on_as_in_the_plain_call,
    autocast_is_restored,
    eval_mode_set_before_the_backward_changes_nothing,
    a_second_run_that_differs_is_an_error,
    an_input_overwritten_before_the_backward_is_an_error,
)


# torch has a function and no wrapper: what stands in for one here is ours to blame.
NOT_ASKED = {(state_dict_keys_stay_and_isinstance_holds, name) for name in ("torch", "torch, reentrant")}


def answer(probe: Callable[[Wrap], bool], name: str) -> str:
    if (probe, name) in NOT_ASKED:
        return "–"
    return "yes" if behaves(probe, WRAPPERS[name]) else "no"


def behaves(probe: Callable[[Wrap], bool], wrap: Wrap) -> bool:
    """Whether the probe finds the plain call's behaviour; an error where it expects none is a no."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return probe(wrap)
        except ModuleNotFoundError:
            raise
        except Exception:
            return False


def _raises(function: Callable[[], Any]) -> bool:
    try:
        function()
    except RuntimeError:
        return True
    return False


def behaviours() -> None:
    """Probe every implementation, write the CSV and print the table."""
    rows = []
    for probe in PROBES:
        answers = {name: answer(probe, name) for name in WRAPPERS}
        rows.append({"behaviour": probe.__name__.replace("_", " "), **answers})
    print("| | " + " | ".join(WRAPPERS) + " |\n|---|" + ":---:|" * len(WRAPPERS))
    for row in rows:
        print("| " + " | ".join(row.values()) + " |")
    _write("behaviours", rows)


def costs(rounds: int) -> None:
    """Time a chain of 40 tiny layers, and the tensor peak of a chain of 8 large ones, relative to torch's."""
    tiny = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(40)]
    large = [nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh()) for _ in range(8)]
    runs = {
        "plain": lambda module, x: module(x),
        "ours": checkpoint,
        "torch": lambda module, x: torch_checkpoint(module, x, use_reentrant=False),
        "torch, reentrant": lambda module, x: torch_checkpoint(module, x, use_reentrant=True),
    }
    times = _alternating({name: _chain(tiny, run, torch.randn(4, 8)) for name, run in runs.items()}, rounds)
    peaks = {name: _peak(_chain(large, run, torch.randn(2048, 512))) for name, run in runs.items()}
    rows = []
    for name in runs:
        ratios = [ours / theirs for ours, theirs in zip(times[name], times["torch"], strict=True)]
        rows.append(
            {
                "implementation": name,
                "tiny_layers_ms": round(statistics.median(times[name]) * 1000, 2),
                "time_over_torch": round(statistics.median(ratios), 3),
                "large_layers_peak_mib": round(peaks[name] / 2**20, 2),
                "peak_over_torch": round(peaks[name] / peaks["torch"], 4),
                "rounds": rounds,
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
                "date": datetime.date.today().isoformat(),
            }
        )
        print(rows[-1])
    _write("costs", rows)


def _chain(modules: list[nn.Module], run: Callable, x: Tensor) -> Callable[[], None]:
    def step() -> None:
        y = x.requires_grad_()
        for module in modules:
            y = run(module, y)
        y.sum().backward()

    return step


def _alternating(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 5):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if turn >= 5:
                times[name].append(time.perf_counter() - start)
    return times


def _peak(step: Callable[[], None]) -> int:
    step()  # gradients are allocated now, and belong to every run alike
    return tensor_peak(step)


def _write(name: str, rows: list[dict]) -> None:
    path = RESULTS / f"checkpointing_{name}_torch{torch.__version__.split('+')[0]}.csv"
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, fieldnames=list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    print(f"wrote {path}")


def measure(*files: str, rounds: int = 60) -> None:
    """Write the files that are named.

    Args:
        files: behaviours, costs or both.
        rounds: of the timing of costs.
    """
    if not files or {*files} - {"behaviours", "costs"}:
        raise ValueError(f"found {' '.join(files) or 'nothing to measure'}: give behaviours or costs")
    if "behaviours" in files:
        behaviours()
    if "costs" in files:
        costs(rounds)


if __name__ == "__main__":
    command(measure)
