"""`checkpoint`, its wrapper for modules, `checkpoint_sequential`, `CheckpointFunction`: what they take and return,
their gradients, and the state that a recomputation finds."""

import contextlib
import copy
import functools
import pickle
import threading
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from checkpoint_outcomes import (
    RUNS,
    CountingOperations,
    Fickle,
    assert_network_like_plain,
    assert_same_outcome,
    assert_same_tensors,
    network,
    networks,
    outcome,
    plain_call,
    tensor,
)
from grids import grid
from helpers import assert_close, assert_same_buffers, assert_same_gradients
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import create_selective_checkpoint_contexts, set_checkpoint_early_stop

from efficient_densenet import checkpoint as cp
from efficient_densenet import convert_batchnorm
from efficient_densenet.checkpoint import (
    CheckpointFunction,
    call,
    checkpoint,
    checkpoint_sequential,
    checkpoint_wrapper,
    disable_checkpointing,
    is_checkpointing,
    is_recomputing,
    unwrap,
)
from efficient_densenet.memory import saved_bytes


@pytest.mark.filterwarnings("ignore:use_reentrant=True is ignored")
@pytest.mark.parametrize(*grid(run=RUNS, needs_grad=[True, False], strength=1))
def test_every_way_to_call_it_trains_as_plain(run, needs_grad):
    """Outputs, gradients, buffers and random states, of a network with a batch norm and a dropout."""
    assert_network_like_plain(RUNS[run], needs_grad)


class Holder:
    """An object that is no module, with methods that call a module."""

    def __init__(self, net):
        self.inner = [{"net": net}]

    def method(self, x):
        return self.inner[0]["net"](x)

    __call__ = method


def _called(holder, x):
    return holder.method(x)


def _by_default(net):
    return lambda x, *, net=net: net(x)


def _hidden(net, x):
    hidden = iter([net, net])
    return checkpoint(lambda x: next(hidden)(x), x, parameters=[net])


REACHED = {
    "an attribute": lambda holder, net, x: checkpoint(lambda x: holder.inner[0]["net"](x), x),
    "another function": lambda holder, net, x: checkpoint(lambda x: _called(holder, x), x),
    "arguments": lambda holder, net, x: checkpoint(lambda nets, *, x: nets[0]["net"](x), holder.inner, x=x),
    "a callable object": lambda holder, net, x: checkpoint(holder, x),
    "a sequence": lambda holder, net, x: checkpoint_sequential([holder, torch.tanh], 2, x),
    "a keyword's default": lambda holder, net, x: checkpoint(_by_default(net), x),
    "a list of parameters alone": lambda holder, net, x: _hidden(net, x),
}


@pytest.mark.parametrize("how", REACHED)
def test_indirectly_referenced_norms_update_once(how):
    net = network()
    REACHED[how](Holder(net), net, tensor(5, 4).requires_grad_()).sum().backward()
    assert net[1].num_batches_tracked == 1


def test_a_bound_forward_of_a_norm_updates_once():
    """It was bound to torch's method before the norm was under the exactly-once rule."""
    norm = nn.BatchNorm1d(4).double()
    forward = norm.forward
    for _ in range(2):
        checkpoint(forward, tensor(5, 4).requires_grad_()).sum().backward()
    assert norm.num_batches_tracked == 2


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


# Arguments and results


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


def test_arguments_in_structures_get_gradients_and_results_keep_their_structure():
    a, b, c = (tensor(2, 3).requires_grad_() for _ in range(3))
    inner = a * 1

    def function(first, *, key, pair):
        return {"sum": [first[0] * first[1]["k"][0] + pair.left], "t": (key["z"][0].exp(), "x"), "pair": pair}

    result = checkpoint(function, [inner, {"k": (b, 3)}], key={"z": [c, None, "s"]}, pair=Pair(c, "kept"))
    assert (list(result), result["t"][1], result["pair"].right) == (["sum", "t", "pair"], "x", "kept")
    (result["sum"][0] + result["t"][0]).sum().backward()
    for actual, expected in ((a.grad, b), (b.grad, a), (c.grad, 1 + c.exp())):
        assert_close(actual, expected.detach())


CHANGED_IN_PLACE = {
    "inside": lambda y: checkpoint(lambda x: x.mul_(2).sin().exp(), y),
    "afterwards": lambda y: (checkpoint(lambda x: x.sin().exp(), y), y.add_(1))[0],
    "afterwards, in a list": lambda y: (checkpoint(lambda x: x[0].sin(), [y]), y.add_(1))[0],
}


@pytest.mark.parametrize("change", CHANGED_IN_PLACE)
def test_an_input_changed_in_place_is_an_error(change):
    output = CHANGED_IN_PLACE[change](tensor(3).requires_grad_() * 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("offload", [True, False])
def test_offloaded_inputs_are_copies_and_the_originals_are_freed(offload, monkeypatch):
    """The memory of the originals is freed, and the gradients are right."""
    copies = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda copied: copied)
    monkeypatch.setattr(call, "save_on_cpu", lambda pin_memory: copies)
    monkeypatch.setattr(call, "ALREADY_OFFLOADED", ())
    net = network()
    y = tensor(5, 4).requires_grad_() * 2
    held = weakref.ref(y.untyped_storage())
    loss = checkpoint(net, y, offload=offload).square().sum()
    del y
    assert (held() is None) == offload
    loss.backward()
    net.zero_grad()
    assert_network_like_plain(functools.partial(checkpoint, offload=offload))


def _set_forward():
    module = network()
    module.forward = lambda x: x
    checkpoint_wrapper(module)


def _reparametrized():
    module = checkpoint_wrapper(nn.Linear(4, 3))
    nn.utils.parametrizations.weight_norm(module)
    unwrap(module)


X = torch.ones(3, requires_grad=True)
MISTAKES = {
    r"determinism_check should be one of": lambda: checkpoint(torch.sin, X, determinism_check="all"),
    r"segments is 0, but must be from 1 to the number of modules, 5": lambda: checkpoint_sequential(network(), 0, X),
    r"segments is 6, but must be from 1 to the number of modules, 5": lambda: checkpoint_sequential(network(), 6, X),
    r"found a Tensor as the number of inputs": lambda: CheckpointFunction.apply(torch.sin, X, X),
    r"found a int as .*, and 2 inputs and parameters: CheckpointFunction.apply\(": lambda: CheckpointFunction.apply(
        torch.add, 3, X, X
    ),
    r"found a Sequential whose forward .* was set on the instance": _set_forward,
    r"changed again since .* undo that first": _reparametrized,
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes_are_one_sentence(message):
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        MISTAKES[message]()


def test_less_is_saved_in_more_segments_and_in_a_wrapped_module_until_it_is_unwrapped():
    net = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(9)))
    x = torch.randn(512, 64, requires_grad=True)
    saved = [saved_bytes(lambda s=s: checkpoint_sequential(net, s, x)) for s in (1, 2, 3)]
    plain = saved_bytes(lambda: net(x))
    assert plain == saved[0] > saved[1] > saved[2]
    assert saved_bytes(lambda: RUNS["nested"](net, x)) < 0.5 * plain
    wrapped = checkpoint_wrapper(net)
    assert saved_bytes(lambda: wrapped(x)) < 0.3 * plain
    output = wrapped(x)
    assert saved_bytes(lambda: unwrap(net)(x)) == plain
    output.sum().backward()
    assert net[0][0].weight.grad is not None


# Forward, recomputation, threads


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


def test_errors_leave_nothing_behind():
    """Neither hooks of saved tensors, nor a state of the thread, nor tensors of the forward."""
    held, x = [], tensor(3).requires_grad_()

    def function(x):
        y = x.exp()
        held.append(weakref.ref(y))
        raise ValueError

    with contextlib.suppress(ValueError):
        checkpoint(lambda x: checkpoint(function, x), x)
    assert held[0]() is None
    with pytest.raises(ZeroDivisionError) as kept:  # with the frames of the forward
        checkpoint(lambda x: checkpoint(lambda x: x / (1 // 0), x), x)
    if torch.__version__ >= "2.14":  # before, torch's function leaves its hooks active while the frames live
        assert torch.equal(x.exp().grad_fn._saved_result, x.exp()), kept
    del kept
    output = checkpoint(Fickle(lambda x: x.sin().exp(), lambda x: x / (1 // 0)), x)
    with pytest.raises(ZeroDivisionError):
        output.sum().backward()
    assert (is_checkpointing(), is_recomputing()) == NOTHING


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
        for _ in range(30):
            results = [None, None]
            threads = [threading.Thread(target=work, args=(i, results)) for i in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for actual, right in zip(results, expected, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(actual, right, strict=True))
    assert queries == [[False, True] * 31] * 2
    assert nets[0][1].num_batches_tracked == nets[1][1].num_batches_tracked == 31


# Wrapped modules


def test_the_wrapper_changes_nothing_visible():
    module = network()
    module.note, fired = "mine", []
    ids, names, types = [id(p) for p in module.parameters()], list(module.state_dict()), [*map(type, module.modules())]
    module.register_forward_hook(lambda *_: fired.append(1))
    wrapped = checkpoint_wrapper(module)
    assert wrapped is module is checkpoint_wrapper(module)
    assert (type(wrapped).__name__, wrapped.note, len(wrapped)) == ("Sequential", "mine", 5)
    assert list(wrapped.state_dict()) == names
    assert [id(p) for p in wrapped.parameters()] == ids
    wrapped(tensor(5, 4)).sum().backward()
    assert fired == [1]
    restored = unwrap(wrapped)
    assert [*map(type, restored.modules())] == types
    assert vars(restored).keys() - vars(network()).keys() == {"note"}
    assert unwrap(restored) is restored


class Keyworded(nn.Linear):
    def forward(self, x, *, offload=False, parameters=None, use_reentrant=None, scale: float = 1.0):
        """The keyword arguments have the names of those of `checkpoint`."""
        return {"y": super().forward(x) * scale, "rest": (offload, parameters, use_reentrant), "text": "t"}


def test_keyword_arguments_and_results_that_are_no_tensors():
    module = checkpoint_wrapper(Keyworded(4, 4).double())
    result = module(tensor(2, 4), offload="o", parameters=[1], use_reentrant=3, scale=2.0)
    assert (result["rest"], result["text"]) == (("o", [1], 3), "t")
    result["y"].sum().backward()
    assert_close(module.bias.grad, torch.full((4,), 4.0, dtype=torch.double))


@pytest.mark.parametrize(
    "prepare",
    [
        lambda norm: convert_batchnorm(checkpoint_wrapper(norm)),
        lambda norm: checkpoint_wrapper(convert_batchnorm(norm)),
        lambda norm: copy.deepcopy(checkpoint_wrapper(norm)),
        lambda norm: pickle.loads(pickle.dumps(checkpoint_wrapper(norm))),
    ],
)
def test_a_norm_can_be_wrapped_converted_and_copied(prepare):
    norm = prepare(nn.BatchNorm1d(4).double())
    norm(tensor(3, 4)).sum().backward()
    assert norm.num_batches_tracked == 1


def test_a_module_without_sizes_gets_them_in_a_plain_call():
    net = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.Tanh())
    for _ in range(2):
        checkpoint(net, torch.randn(5, 3)).square().sum().backward()
    assert net[1].num_batches_tracked == 2
    assert net[0].weight.grad is not None


# Compilers, transforms, tensors without data


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
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert_close(torch.autograd.grad(checkpoint(net, x).square().sum(), x)[0], expected)


def test_offloading_what_is_on_the_cpu_still_notices_a_change_in_place():
    x = tensor(5, 4).requires_grad_() * 2
    loss = checkpoint(network(), x, offload=True).square().sum()
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# Second derivatives, early stops, selective checkpointing beside hooks

aten = torch.ops.aten


@pytest.mark.parametrize("run", [RUNS[name] for name in ("a module", "nested", "CheckpointFunction")])
def test_gradient_penalty(run):
    """The loss contains a gradient, which needs create_graph=True."""
    plain, ours = networks()
    plain[3].p = ours[3].p = 0.0
    x = tensor(5, 4)
    grads = []
    for net, run_net in ((plain, plain_call), (ours, run)):
        leaf = x.clone().requires_grad_()
        output = run_net(net, leaf.exp())
        (grad,) = torch.autograd.grad(output.sum(), leaf, create_graph=True)
        (output.square().sum() + (grad.norm() - 1).square()).backward()
        grads.append(leaf.grad)
    assert_close(grads[1], grads[0])
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)


def _saving(*operations):
    """A context_fn that saves the results of these operations."""
    return functools.partial(create_selective_checkpoint_contexts, list(operations))


def test_what_follows_the_last_saved_tensor_is_not_recomputed_unless_torch_s_switch_says_so():
    net, products = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3)).double(), []
    for switched_on, options in ((True, {}), (True, {"early_stop": False}), (False, {})):
        with set_checkpoint_early_stop(switched_on):
            output = checkpoint(net, tensor(2, 4), **options)
        with CountingOperations() as operations:
            output.sum().backward()
        products.append(operations.counts[aten.addmm.default])
    assert products == [1, 2, 2]


def test_reading_a_saved_tensor_outside_a_backward_updates_nothing():
    net = network()
    output = checkpoint(net, tensor(5, 4).requires_grad_())
    assert output.grad_fn._saved_mat1 is not None
    assert net[1].num_batches_tracked == 1


# Selective checkpointing


CHOICES = {"nothing": [], "several": [aten.addmm.default, aten.tanh.default]}


@pytest.mark.parametrize(*grid(choice=CHOICES, early_stop=[True, False], nested=[False, True]))
def test_selective_checkpointing_changes_no_number(choice, early_stop, nested):
    """The network has a batch norm, a dropout and hooks, which fire as they do without selection, and whose operations
    are not taken for those of the network."""
    fired = []

    def add_hooks(net):
        net[2].register_forward_hook(lambda module, args, output: fired.append(output.tanh().mean().item()))
        net[0].register_forward_hook(lambda module, args, output: output * 3 + output.tanh().mean())
        net[4].register_forward_pre_hook(lambda module, args: (args[0] + args[0].mean(),))

    options = {"context_fn": _saving(*CHOICES[choice]), "early_stop": early_stop}

    def run(net, x):
        if nested:
            return checkpoint(lambda x: net[3:](checkpoint(net[:3], x, **options)), x, **options)
        return checkpoint(net, x, **options)

    assert_network_like_plain(run, prepare=add_hooks)
    assert len(fired) == 2


# Random numbers, running statistics, modes, hooks, attributes and buffers in a recomputation

CHOSEN = {name: RUNS[name] for name in ("a module", "a closure", "CheckpointFunction")}


@pytest.mark.parametrize("run", CHOSEN)
def test_running_statistics_are_updated_once_with_or_without_a_backward(run):
    plain, ours = networks()
    call = functools.partial(RUNS[run], ours)
    for _ in range(2):
        x = tensor(5, 4).requires_grad_()
        call(x), plain(x)
        outcome(call, [x]), outcome(plain, [x])
    with torch.no_grad():
        call(x), plain(x)
    assert ours[1].num_batches_tracked == 5
    assert_same_buffers(ours, plain)


def test_forward_hooks_fire_once_and_what_they_compute_for_a_loss_is_saved():
    results, fired = [], []
    for run in (plain_call, *CHOSEN.values()):
        torch.manual_seed(0)
        net, x, penalties = network(), tensor(5, 4).requires_grad_(), []
        for i, module in enumerate(net.modules()):
            module.register_forward_pre_hook(lambda m, a, i=i: fired.append(f"before {i}"))
            module.register_forward_hook(lambda m, a, kw, o, i=i: fired.append(f"after {i}"), with_kwargs=True)
        net[2].register_forward_hook(lambda m, a, o, seen=penalties: seen.append(o.square().exp().mean()))
        (run(net, x).square().sum() + penalties[0]).backward()
        assert len(penalties) == 1
        assert len(fired) == len(set(fired)) == 12
        fired.clear()
        results.append([x.grad, *(p.grad for p in net.parameters())])
    for each in results[1:]:
        assert_same_tensors(each, results[0])


def _none(_: Any) -> None:
    return None


# Each is put on the first layer.
HOOKS = {
    "returns another output that saves": lambda m: m.register_forward_hook(lambda m, a, o: o * o.exp()),
    "returns other arguments": lambda m: m.register_forward_pre_hook(lambda m, a: (a[0] * 3,)),
    "changes the output in place": lambda m: m.register_forward_hook(lambda m, a, o: _none(o.mul_(3))),
    "sets a weight": nn.utils.weight_norm,
    "prunes a weight": lambda m: prune.l1_unstructured(m, "weight", 0.5),
    "draws and does nothing": lambda m: m.register_forward_pre_hook(lambda m, a: _none(torch.rand(()))),
    "draws from PyTorch": lambda m: m.register_forward_hook(lambda m, a, o: o * torch.rand(())),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated")
@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_that_affect_the_computation_fire_again(hook):
    assert_network_like_plain(checkpoint, prepare=lambda net: HOOKS[hook](net[0]))


MODES = {"evaluation mode": (True, False), "training mode": (False, True), "a frozen norm": (False, False)}


@pytest.mark.parametrize(*grid(modes=MODES, run=CHOSEN, strength=1))
def test_modules_are_recomputed_in_the_modes_of_the_forward(modes, run):
    """Two calls before the backward, after which each module has the mode that it had before it."""
    before, after = MODES[modes]
    results = []
    for each in (plain_call, RUNS[run]):
        torch.manual_seed(0)
        net = network().train(before)
        net[3].train()
        x, y = tensor(5, 4).requires_grad_(), tensor(5, 4).requires_grad_()
        loss = each(net, x).square().sum() + 2 * each(net, y).square().sum()
        net.train(after)
        loss.backward()
        assert {module.training for module in net.modules()} == {after}
        results.append([x.grad, y.grad, *(parameter.grad for parameter in net.parameters()), *net.buffers()])
    assert_same_tensors(*results)
