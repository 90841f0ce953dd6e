"""The private calls still mean what the package takes them to mean."""

import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from efficient_densenet._torch_private import (
    caches_parametrizations,
    functorch_is_active,
    hooks_watch_all_modules,
    in_backward,
    is_leaf_node,
    tensor_hooks,
)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_in_backward_tells_a_recomputation_from_a_first_run(use_reentrant):
    seen = []

    def function(x):
        seen.append(in_backward())
        return x.sin()

    torch_checkpoint(function, torch.ones(2, requires_grad=True), use_reentrant=use_reentrant).sum().backward()
    assert seen == [False, True]
    assert not in_backward()


def test_in_backward_is_a_thread_s_own():
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


def test_functorch_is_active():
    seen = [functorch_is_active()]
    torch.func.grad(lambda x: (seen.append(functorch_is_active()), x.sum())[1])(torch.ones(2))
    torch.func.vmap(lambda x: (seen.append(functorch_is_active()), x)[1])(torch.ones(2))
    assert seen == [False, True, True]


def test_emptying_a_tensor_s_hooks_silences_them():
    x = torch.ones(2, requires_grad=True)
    assert not tensor_hooks(x)
    x.register_hook(lambda grad: grad * 2)
    hooks = tensor_hooks(x)
    kept = dict(hooks)
    hooks.clear()
    x.sum().backward()
    assert x.grad.tolist() == [1, 1]
    hooks.update(kept)
    x.sum().backward()
    assert x.grad.tolist() == [3, 3]


def test_caches_parametrizations():
    with torch.nn.utils.parametrize.cached():
        assert caches_parametrizations()
    assert not caches_parametrizations()


def test_is_leaf_node():
    x = torch.ones(2, requires_grad=True)
    node = (x * 2).grad_fn
    assert not is_leaf_node(node)
    assert is_leaf_node(node.next_functions[0][0])
    assert node.next_functions[0][0].variable is x


@pytest.mark.parametrize("kind", ["forward_pre_hook", "forward_hook", "full_backward_pre_hook", "full_backward_hook"])
def test_hooks_watch_all_modules(kind):
    assert not hooks_watch_all_modules()
    handle = getattr(torch.nn.modules.module, f"register_module_{kind}")(lambda *_: None)
    assert hooks_watch_all_modules()
    handle.remove()
    assert not hooks_watch_all_modules()
