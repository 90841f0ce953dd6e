"""The private PyTorch APIs still do what the package expects."""

import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from efficient_densenet._torch_private import (
    functorch_is_active,
    has_global_module_hooks,
    in_backward,
    is_accumulate_grad,
    leaf_of,
    parametrization_cache_enabled,
    queue_backward_callback,
    tensor_hooks,
    will_execute,
)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_in_backward_is_true_in_a_recomputation_only(use_reentrant):
    seen = []

    def function(x):
        seen.append(in_backward())
        return x.sin()

    torch_checkpoint(function, torch.ones(2, requires_grad=True), use_reentrant=use_reentrant).sum().backward()
    assert seen == [False, True]
    assert not in_backward()


def test_in_backward_concerns_one_thread():
    other = []

    def hook(grad):
        thread = threading.Thread(target=lambda: other.append(in_backward()))
        thread.start()
        thread.join()
        other.append(in_backward())

    x = torch.ones(2, requires_grad=True)
    x.register_hook(hook)
    x.sum().backward()
    assert other == [False, True]


def test_a_queued_callback_is_called_at_the_end_of_the_backward():
    calls = []
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: queue_backward_callback(lambda: calls.append((x.grad, y.grad))))
    (x * 2 + y).sum().backward()
    assert [[grad.tolist() for grad in grads] for grads in calls] == [[[2, 2], [1, 1]]]


def test_functorch_is_active():
    seen = [functorch_is_active()]
    torch.func.grad(lambda x: (seen.append(functorch_is_active()), x.sum())[1])(torch.ones(2))
    torch.func.vmap(lambda x: (seen.append(functorch_is_active()), x)[1])(torch.ones(2))
    assert seen == [False, True, True]


def test_clearing_the_hooks_of_a_tensor_disables_them():
    x = torch.ones(2, requires_grad=True)
    assert not tensor_hooks(x)
    x.register_hook(lambda grad: grad * 2)
    hooks = tensor_hooks(x)
    saved = dict(hooks)
    hooks.clear()
    x.sum().backward()
    assert x.grad.tolist() == [1, 1]
    hooks.update(saved)
    x.sum().backward()
    assert x.grad.tolist() == [3, 3]


def test_parametrization_cache_enabled():
    with torch.nn.utils.parametrize.cached():
        assert parametrization_cache_enabled()
    assert not parametrization_cache_enabled()


def test_accumulate_grad_nodes():
    x = torch.ones(2, requires_grad=True)
    node = (x * 2).grad_fn
    assert not is_accumulate_grad(node)
    assert is_accumulate_grad(node.next_functions[0][0])
    assert leaf_of(node.next_functions[0][0]) is x


@pytest.mark.parametrize("kind", ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"])
def test_has_global_module_hooks(kind):
    assert not has_global_module_hooks()
    handle = getattr(torch.nn.modules.module, f"register_module_{kind}")(lambda *_: None)
    assert has_global_module_hooks()
    handle.remove()
    assert not has_global_module_hooks()


def test_will_execute():
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    left, right, seen = x * 2, y * 2, []
    total = (left + right).sum()
    total.register_hook(lambda _: seen.append((will_execute(left.grad_fn), will_execute(right.grad_fn))))
    torch.autograd.grad(total, [x], retain_graph=True)
    total.backward()
    assert seen == [(True, False), (True, True)]
