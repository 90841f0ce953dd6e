"""`checkpoint`, `checkpoint_sequential` and `CheckpointFunction`: what they take, what they find, what they return."""

import contextlib
import functools
import logging
import threading
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from checkpoint_outcomes import (
    RUNS,
    Fickle,
    assert_like_plain,
    assert_network_like_plain,
    assert_same_outcome,
    network,
    networks,
    outcome,
    plain_call,
    tensor,
)
from grids import grid
from helpers import assert_close, assert_same_buffers, assert_same_gradients
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from efficient_densenet import checkpoint as cp
from efficient_densenet.checkpoint import (
    CheckpointFunction,
    call,
    checkpoint,
    checkpoint_sequential,
    checkpoint_wrapper,
    disable_checkpointing,
    is_checkpointing,
    is_recomputing,
)
from efficient_densenet.memory import saved_bytes


@pytest.mark.parametrize(*grid(run=RUNS, needs_grad=[True, False], strength=1))
def test_every_way_to_call_it_trains_as_plain(run, needs_grad):
    """Outputs, gradients, buffers and random states, of a network with a batch norm and a dropout."""
    assert_network_like_plain(RUNS[run], needs_grad)


def test_use_reentrant_gives_a_sentence_and_the_same_gradients():
    run = functools.partial(checkpoint, use_reentrant=True)
    with pytest.warns(
        UserWarning, match="found use_reentrant=True, which this checkpoint does not have: it recomputes"
    ):
        assert_network_like_plain(run, needs_grad=False)


def test_determinism_check_and_debug_are_torch_s(monkeypatch):
    monkeypatch.setattr(logging.getLogger("LoggingTensor"), "propagate", False)
    assert_network_like_plain(functools.partial(checkpoint, debug=True))
    for options, message in (({}, "different metadata"), ({"debug": True}, "Operations executed during recomputation")):
        with pytest.raises(RuntimeError, match=message):
            checkpoint(
                Fickle(torch.sin, lambda x: x[:2].sin()), tensor(3).requires_grad_() * 1, **options
            ).sum().backward()
    changed = Fickle(torch.sin, lambda x: x.sin().double())
    checkpoint(changed, torch.ones(3, requires_grad=True) * 1, determinism_check="none").sum().backward()
    with pytest.raises(ValueError, match="determinism_check should be one of"):
        checkpoint(torch.sin, tensor(3).requires_grad_(), determinism_check="all")


class Holder:
    """An object that is no module, with methods that call a module."""

    def __init__(self, net):
        self.inner = [{"net": net}]

    def method(self, x):
        return self.inner[0]["net"](x)

    __call__ = method


def _called(holder, x):
    return holder.method(x)


REACHED = {
    "an attribute": lambda holder, x: checkpoint(lambda x: holder.inner[0]["net"](x), x),
    "another function": lambda holder, x: checkpoint(lambda x: _called(holder, x), x),
    "an argument": lambda holder, x: checkpoint(lambda n, x: n(x), holder.inner[0]["net"], x),
    "a callable object": lambda holder, x: checkpoint(holder, x),
    "a sequence": lambda holder, x: checkpoint_sequential([holder, torch.tanh], 2, x),
}


@pytest.mark.parametrize("how", REACHED)
def test_indirectly_referenced_norms_update_once(how):
    net = network()
    REACHED[how](Holder(net), tensor(5, 4).requires_grad_()).sum().backward()
    assert net[1].num_batches_tracked == 1


def test_modules_in_arguments_of_any_structure_and_in_keyword_only_defaults_update_once():
    norms = [nn.BatchNorm1d(4) for _ in range(3)]

    def function(x, first, *, named, last=norms[2]):
        return last(named["norm"](first[0](x)))

    checkpoint(function, torch.randn(5, 4, requires_grad=True), [norms[0]], named={"norm": norms[1]}).sum().backward()
    assert [norm.num_batches_tracked.item() for norm in norms] == [1, 1, 1]


def test_what_only_a_list_of_parameters_names_updates_once():
    net, hidden = network(), iter([])

    def function(x):
        return next(hidden)(x)

    hidden = iter([net, net])
    checkpoint(function, tensor(5, 4).requires_grad_(), parameters=[net]).sum().backward()
    assert net[1].num_batches_tracked == 1
    with pytest.raises(TypeError, match="found a str in parameters"):
        checkpoint(torch.sin, tensor(2).requires_grad_(), parameters=["weight"])


def test_checkpoint_function_as_in_the_original_repository():
    """`import checkpoint as cp` becomes `from efficient_densenet import checkpoint as cp`."""
    norm, relu, conv = nn.BatchNorm2d(5).double(), nn.ReLU(inplace=True), nn.Conv2d(5, 2, 1).double()
    features = [tensor(2, 3, 4, 4).requires_grad_(), tensor(2, 2, 4, 4).requires_grad_()]

    def bn_function(*inputs):
        return conv(relu(norm(torch.cat(inputs, 1))))

    def ours(*inputs):
        args = inputs + tuple(norm.parameters()) + tuple(conv.parameters())
        return cp.CheckpointFunction.apply(bn_function, len(inputs), *args)

    assert_same_outcome(outcome(ours, features), outcome(bn_function, features))
    assert norm.num_batches_tracked == 2


def test_checkpoint_function_says_what_is_wrong_with_its_arguments():
    x = tensor(3).requires_grad_()
    with pytest.raises(TypeError, match=r"found a Tensor as the number of inputs of .*sin: CheckpointFunction.apply\("):
        CheckpointFunction.apply(torch.sin, x, x)
    with pytest.raises(ValueError, match=r"found 3 .* followed by 2 tensors: CheckpointFunction.apply\(function"):
        CheckpointFunction.apply(torch.add, 3, x, x)
    with pytest.raises(TypeError, match=r"found a NoneType among the inputs and parameters of .*add"):
        CheckpointFunction.apply(torch.add, 2, x, None)


@dataclass
class Pair:
    left: torch.Tensor
    right: Any


class Named(NamedTuple):
    a: torch.Tensor
    b: int


def _shared(x, y, rest):
    return x * y + rest[0] * rest[1]


def _structures(a, b, c):
    first, key, pair = [a, {"k": (b, 3)}], {"z": [c, None, "s"]}, Named(b, 4)
    return first[0] * first[1]["k"][0] + key["z"][0] * pair.b


CASES = {
    "structures": _structures,
    "a shared tensor": lambda a, b, c: _shared(a, a, [a, b]) + c,
    "a None among the results": lambda a, b, c: (None, a * b, [None, c.sin()]),
    "an input as a result": lambda a, b, c: (a, a * b, [c, b]),
    "results that are views": lambda a, b, c: (a.view(-1), (b * c)[0], a.t()),
    "in-place operations on its own tensors": lambda a, b, c: (a * b).add_(c).relu_(),
}


@pytest.mark.parametrize("computed", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_results_behave_as_in_the_plain_call(case, computed):
    """With arguments that are leaves of the graph, of which one requires no gradient, and with computed ones."""
    inputs = [tensor(2, 3).requires_grad_(needed) for needed in (True, computed, True)]
    if not computed:
        assert_like_plain(CASES[case], *inputs)
        return
    runs = (checkpoint, plain_call)
    actual, expected = (outcome(lambda a, b, c, run=run: run(CASES[case], a * 1, b * 1, c * 1), inputs) for run in runs)
    assert_same_outcome(actual, expected)


def test_arguments_in_structures_get_gradients_and_results_keep_their_structure():
    a, b, c = (tensor(2, 3).requires_grad_() for _ in range(3))
    inner = a * 1

    def function(first, *, key, pair):
        return {"sum": [first[0] * first[1]["k"][0] + pair.left], "n": 7, "t": (key["z"][0].exp(), "x"), "pair": pair}

    result = checkpoint(function, [inner, {"k": (b, 3)}], key={"z": [c, None, "s"]}, pair=Pair(c, "kept"))
    assert list(result) == ["sum", "n", "t", "pair"]
    assert (result["n"], result["t"][1], result["pair"].right) == (7, "x", "kept")
    (result["sum"][0] + result["t"][0]).sum().backward()
    for actual, expected in ((a.grad, b), (b.grad, a), (c.grad, 1 + c.exp())):
        assert_close(actual, expected.detach())
    result = checkpoint(lambda tensors: tensors[0].sin(), [inner])
    inner.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


@pytest.mark.parametrize("change_inside", [True, False])
def test_an_input_changed_in_place_is_an_error(change_inside):
    y = tensor(3).requires_grad_() * 1
    output = checkpoint(lambda x: (x.mul_(2) if change_inside else x).sin().exp(), y)
    if not change_inside:
        y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("computed", [False, True])
def test_a_hook_that_the_function_registers_on_its_argument_fires_once(computed):
    fired, x = [], tensor(3).requires_grad_()

    def function(a):
        a.register_hook(lambda grad: fired.append(1))
        return a.sin().exp()

    checkpoint(function, x * 1 if computed else x).sum().backward()
    assert fired == [1]


@pytest.mark.parametrize("offload", [True, False])
def test_offloaded_inputs_are_copies_and_the_originals_are_freed(offload, monkeypatch):
    """All tensors are treated as tensors of a GPU: their memory is freed, and the gradients are right."""
    monkeypatch.setattr(call, "is_on_device", lambda leaf: True)
    copies = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda copied: copied)
    monkeypatch.setattr(call, "save_on_cpu", lambda pin_memory: copies)
    net = network()
    y = tensor(5, 4).requires_grad_() * 2
    held = weakref.ref(y.untyped_storage())
    loss = checkpoint(net, y, offload=offload).square().sum()
    del y
    assert (held() is None) == offload
    loss.backward()
    net.zero_grad()
    assert_network_like_plain(functools.partial(checkpoint, offload=offload))


def test_more_segments_save_less_up_to_a_point():
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(9)))
    x = torch.randn(512, 64, requires_grad=True)
    saved = [saved_bytes(lambda s=s: checkpoint_sequential(net, s, x)) for s in (1, 2, 3)]
    assert saved[0] > saved[1] > saved[2]
    assert saved[0] == saved_bytes(lambda: net(x))
    assert saved_bytes(lambda: RUNS["nested"](net, x)) < 0.5 * saved[0]
    for segments in (0, 10, -1):
        with pytest.raises(ValueError, match=f"segments is {segments}, but must be from 1 to the number of modules, 9"):
            checkpoint_sequential(net, segments, x)


class _Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls, self.seen = 0, []

    def forward(self, x):
        self.calls += not is_recomputing()
        self.seen.append((is_checkpointing(), is_recomputing()))
        return x.sin().exp()


NOTHING, FORWARD, RECOMPUTATION = (False, False), (True, False), (False, True)


def test_is_checkpointing_and_is_recomputing():
    module, x = _Counting(), tensor(3).requires_grad_()
    module(x).sum().backward()
    checkpoint(module, x).sum().backward()
    with disable_checkpointing():
        checkpoint(module, x).sum().backward()
        checkpoint_wrapper(module)(x).sum().backward()
    assert module.calls == 4
    assert module.seen == [NOTHING, FORWARD, RECOMPUTATION, NOTHING, NOTHING]
    module.seen.clear()
    output = checkpoint(lambda x: checkpoint(lambda y: module(y).cos(), x.exp()).sin(), x)
    with disable_checkpointing():  # the recomputation checkpoints what the forward did
        (grad,) = torch.autograd.grad(output.sum(), x)
    assert module.seen[0] == FORWARD
    assert set(module.seen[1:]) == {RECOMPUTATION}
    assert_close(grad, torch.autograd.grad(module(x.exp()).cos().sin().sum(), x)[0])
    with pytest.raises(ZeroDivisionError) as kept:  # with the frames of the forward
        checkpoint(lambda x: checkpoint(lambda x: x / (1 // 0), x), x)
    assert torch.equal(x.exp().grad_fn._saved_result, x.exp()), kept
    output = checkpoint(Fickle(lambda x: x.sin().exp(), lambda x: x / (1 // 0)), x)
    with pytest.raises(ZeroDivisionError):
        output.sum().backward()
    assert (is_checkpointing(), is_recomputing()) == NOTHING


def test_an_error_of_the_forward_holds_no_tensors():
    held = []

    def function(x):
        y = x.exp()
        held.append(weakref.ref(y))
        raise ValueError

    with contextlib.suppress(ValueError):
        checkpoint(function, tensor(3).requires_grad_())
    assert held[0]() is None


def _run_in_threads(*targets):
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_two_threads_compute_what_one_thread_computes():
    """Rounds of forward and backward of two networks and of a shared one in two threads, as in nn.DataParallel."""
    nets = [nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).double() for _ in range(3)]
    for net in nets[:2]:
        checkpoint_wrapper(net)
    nets[2].eval()
    inputs, queries = [tensor(6, 4), tensor(6, 4)], [[], []]

    def work(i: int, results: list) -> None:
        x = inputs[i].clone().requires_grad_()
        z = checkpoint(lambda y: (queries[i].append(is_recomputing()), nets[2](y))[1], nets[i](x))
        results[i] = torch.autograd.grad(z.square().sum(), [x, *nets[i].parameters(), *nets[2].parameters()])

    expected = [None, None]
    for i in range(2):
        work(i, expected)
    with disable_checkpointing():  # concerns this thread alone
        for _ in range(50):
            results = [None, None]
            _run_in_threads(*(functools.partial(work, i, results) for i in range(2)))
            for actual, right in zip(results, expected, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(actual, right, strict=True))
    assert queries == [[False, True] * 51] * 2
    assert nets[0][1].num_batches_tracked == nets[1][1].num_batches_tracked == 51


def test_inside_data_parallel_replicas():
    plain, ours = networks()
    plain.eval(), checkpoint_wrapper(ours.eval())
    x = tensor(5, 4)
    for net in (_replica(ours), plain):
        results = []
        _run_in_threads(lambda net=net, results=results: results.append(net(x)))
        results[0].square().sum().backward()
    assert_same_gradients(ours, plain)


def _replica(module: nn.Module) -> nn.Module:
    replica = module._replicate_for_data_parallel()
    replica._modules = {name: _replica(child) for name, child in module._modules.items()}
    replica._former_parameters = {name: p.view_as(p) for name, p in module._parameters.items()}
    for name, parameter in replica._former_parameters.items():
        object.__setattr__(replica, name, parameter)
    return replica


@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("wrap", [lambda net: functools.partial(checkpoint, net), checkpoint_wrapper])
def test_under_torch_compile(wrap):
    plain, ours = networks()
    plain[3].p = ours[3].p = 0.0
    x, run = tensor(5, 4), wrap(ours)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: run(x), backend="aot_eager", fullgraph=torch.__version__ >= "2.11")
    for _ in range(2):
        compiled(x).square().sum().backward()
        plain(x).square().sum().backward()
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)


@pytest.mark.filterwarnings("ignore")
def test_a_wrapped_module_exports():
    net, x = checkpoint_wrapper(network().eval()), tensor(5, 4)
    with torch.no_grad():
        expected = net(x)
    assert_close(torch.export.export(net, (x,)).module()(x), expected)
    assert_close(torch.jit.trace(net, x)(x), expected)


def test_a_functorch_transform_and_disabled_hooks_call_straight_through():
    net, x = nn.Linear(4, 3).double(), tensor(5, 4).requires_grad_()
    expected = torch.autograd.grad(net(x).square().sum(), x)[0]
    assert_close(torch.func.grad(lambda x: checkpoint(net, x).square().sum())(x.detach()), expected)
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("not here"),
        pytest.warns(UserWarning, match="Linear is not checkpointed, for lack of saved-tensor hooks"),
    ):
        assert_close(torch.autograd.grad(checkpoint(net, x).square().sum(), x)[0], expected)


@pytest.mark.parametrize("run", ["a module", "nested"])
@pytest.mark.parametrize("kind", ["fake", "meta"])
def test_fake_and_meta_tensors(run, kind):
    """As tools use them that predict shapes and memory."""
    with FakeTensorMode() if kind == "fake" else torch.device("meta"):
        net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 4))
        net[2].register_forward_hook(lambda module, args, output: output * 2)
        x = torch.randn(5, 4, requires_grad=True)
        RUNS[run](net, x).sum().backward()
        assert isinstance(x.grad, FakeTensor) == (kind == "fake")
        assert x.grad.shape == x.shape
        assert all(p.grad.shape == p.shape for p in net.parameters())
