"""`checkpoint` nested, in threads, in replicas and compiled; and the functions that say where a call is."""

import functools
import threading

import pytest
import torch
from checkpoint_outcomes import Fickle, assert_same_outcome, network, networks, outcome, tensor
from helpers import assert_close, assert_same_buffers, assert_same_gradients
from torch import nn

from efficient_densenet.checkpoint import (
    checkpoint,
    checkpoint_wrapper,
    disable_checkpointing,
    is_checkpointing,
    is_recomputing,
)


def test_nested_checkpoints():
    (plain, ours), runs = networks(), []

    def inner(x):
        runs.append((is_checkpointing(), is_recomputing()))
        return ours[:3](x)

    def outer(x):
        return ours[3:](checkpoint(inner, x, parameters=ours[:3]).sin())

    x = tensor(5, 4).requires_grad_()
    actual = outcome(lambda x: checkpoint(outer, x, parameters=ours), [x])
    assert_same_outcome(actual, outcome(lambda x: plain[3:](plain[:3](x).sin()), [x]))
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)
    assert runs == [(True, False), (False, True), (False, True)]


def test_is_checkpointing_and_is_recomputing_in_a_module_that_counts_its_calls():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls, self.seen = 0, []

        def forward(self, x):
            self.calls += not is_recomputing()
            self.seen.append((is_checkpointing(), is_recomputing()))
            return x.sin()

    module = Counting()
    x = tensor(3).requires_grad_()
    module(x).sum().backward()
    checkpoint(module, x).sum().backward()
    with disable_checkpointing():
        checkpoint(module, x).sum().backward()
        checkpoint_wrapper(module)(x).sum().backward()
    assert module.calls == 4
    nothing = (False, False)
    assert module.seen == [nothing, (True, False), (False, True), nothing, nothing]
    assert (is_checkpointing(), is_recomputing()) == nothing


def test_is_checkpointing_and_is_recomputing_after_an_error():
    with pytest.raises(ZeroDivisionError):
        checkpoint(lambda x: x / (1 // 0), tensor(2).requires_grad_())
    output = checkpoint(Fickle(torch.sin, lambda x: x / (1 // 0)), tensor(2).requires_grad_())
    with pytest.raises(ZeroDivisionError):
        output.sum().backward()
    assert (is_checkpointing(), is_recomputing()) == (False, False)


def test_disable_checkpointing_concerns_one_thread():
    seen = []

    def sine(x):
        seen.append(is_checkpointing())
        return x.sin()

    with disable_checkpointing():
        _run_in_threads(lambda: checkpoint(sine, tensor(2).requires_grad_()))
    assert seen == [True]


def _run_in_threads(*targets):
    threads = [threading.Thread(target=target) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_two_threads_compute_what_one_thread_computes():
    """200 rounds of forward and backward of two networks and of a shared one in two threads, as in nn.DataParallel."""
    nets = [nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).double() for _ in range(3)]
    for net in nets[:2]:
        checkpoint_wrapper(net)
    nets[2].eval()
    inputs = [tensor(6, 4), tensor(6, 4)]
    queries = [[], []]

    def work(i: int, results: list) -> None:
        x = inputs[i].clone().requires_grad_()
        y = nets[i](x)
        z = checkpoint(lambda y: (queries[i].append(is_recomputing()), nets[2](y))[1], y, parameters=nets[2])
        results[i] = torch.autograd.grad(z.square().sum(), [x, *nets[i].parameters(), *nets[2].parameters()])

    expected = [None, None]
    for i in range(2):
        work(i, expected)
    for _ in range(200):
        results = [None, None]
        _run_in_threads(*(functools.partial(work, i, results) for i in range(2)))
        for actual, right in zip(results, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(actual, right, strict=True))
    assert queries == [[False, True] * 201] * 2
    assert nets[0][1].num_batches_tracked == nets[1][1].num_batches_tracked == 201


def test_inside_data_parallel_replicas():
    plain, ours = networks()
    plain.eval(), checkpoint_wrapper(ours.eval())
    replica = _replica(ours)
    assert list(replica.parameters()) == []
    x = tensor(5, 4)
    for net in (replica, plain):
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
@pytest.mark.parametrize("run", [checkpoint, lambda net, x: checkpoint_wrapper(net)(x)])
def test_under_torch_compile(run):
    plain, ours = networks()
    plain[3].p = ours[3].p = 0.0
    x = tensor(5, 4)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: run(ours, x), backend="aot_eager")
    for _ in range(2):
        compiled(x).square().sum().backward()
        plain(x).square().sum().backward()
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)


def test_a_backward_inside_disable_checkpointing_recomputes_as_usual():
    net = network()

    def outer(x):
        return checkpoint(net[:3], x).sin()

    output = checkpoint(outer, tensor(5, 4).requires_grad_(), parameters=net)
    with disable_checkpointing():
        output.sum().backward()
    assert net[0].weight.grad is not None


@pytest.mark.filterwarnings("ignore")
def test_a_wrapped_module_compiles_as_one_graph_and_exports():
    net = checkpoint_wrapper(network().eval())
    x = tensor(5, 4)
    with torch.no_grad():
        expected = net(x)
    assert_close(torch.export.export(net, (x,)).module()(x), expected)
    assert_close(torch.jit.trace(net, x)(x), expected)
    if torch.__version__ >= "2.11":
        torch._dynamo.reset()
        assert_close(torch.compile(net, backend="aot_eager", fullgraph=True)(x), expected)
