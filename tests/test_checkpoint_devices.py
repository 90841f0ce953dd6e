"""Where the recomputation creates tensors, and checkpoints of tensors that have no values."""

import functools

import pytest
import torch
from checkpoint_outcomes import Fickle, network, tensor
from helpers import assert_close
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from efficient_densenet.checkpoint import CheckpointFunction, checkpoint, checkpoint_wrapper

CALLS = [checkpoint, lambda function, x: CheckpointFunction.apply(function, 1, x)]


def _record_device(seen):
    def function(x):
        seen.append(torch.empty(1).device.type)
        return x.sin().exp()

    return function


@pytest.mark.parametrize("call", CALLS)
def test_a_device_context_of_the_forward_holds_in_the_recomputation(call):
    seen, x = [], tensor(3).requires_grad_()
    with torch.device("meta"):
        output = call(_record_device(seen), x)
    output.sum().backward()
    with torch.device("meta"), torch.device("cpu"):
        output = call(_record_device(seen), x)
    with torch.device("meta"):
        output.sum().backward()
        assert torch.empty(0).device.type == "meta"
    assert seen == ["meta", "meta", "cpu", "cpu"]
    assert torch.empty(0).device.type == "cpu"


@pytest.mark.parametrize("call", CALLS)
def test_the_default_device_of_the_forward_holds_in_the_recomputation(call):
    seen, x = [], tensor(3).requires_grad_()
    torch.set_default_device("meta")
    try:
        output = call(_record_device(seen), x)
        torch.set_default_device("cpu")
        output.sum().backward()
        output = call(_record_device(seen), x)
        torch.set_default_device("meta")
        output.sum().backward()
    finally:
        torch.set_default_device(None)
    assert seen == ["meta", "meta", "cpu", "cpu"]


@pytest.mark.parametrize("call", CALLS)
def test_a_result_on_another_device_in_the_recomputation_is_an_error(call):
    options = {"early_stop": False} if call is checkpoint else {}
    output = call(Fickle(torch.sin, lambda x: x.sin().to("meta")), tensor(3).requires_grad_(), **options)
    with pytest.raises(
        RuntimeError, match=r"Fickle returned 1 tensor \(\(3,\) float64 on meta\).*float64 on cpu\).*on the same device"
    ):
        output.sum().backward()


def test_a_saved_tensor_on_another_device_in_the_recomputation_is_an_error():
    output = checkpoint(Fickle(torch.sin, lambda x: x.to("meta").sin()), tensor(3).requires_grad_())
    with pytest.raises(RuntimeError, match=r"Fickle saved 1 tensor .* on meta\).*on cpu\) in the forward"):
        output.sum().backward()


@pytest.mark.parametrize(
    "run",
    [
        lambda net, x: checkpoint(net, x),
        lambda net, x: checkpoint_wrapper(net)(x),
        lambda net, x: CheckpointFunction.apply(net, 1, x, *net.parameters()),
        lambda net, x: checkpoint(lambda x: checkpoint(net, x).sin(), x, parameters=net),
    ],
)
def test_fake_tensors(run):
    """As tools use them that predict shapes and memory."""
    with FakeTensorMode():
        net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 4))
        net[2].register_forward_hook(lambda module, args, output: output * 2)
        x = torch.randn(5, 4, requires_grad=True)
        output = run(net, x)
        output.sum().backward()
        assert isinstance(x.grad, FakeTensor)
        assert x.grad.shape == x.shape
        assert all(p.grad.shape == p.shape for p in net.parameters())


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="PyTorch without CUDA aborts at such a tensor")
def test_fake_tensors_of_a_device_that_this_machine_lacks():
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(3, 4, device="cuda", requires_grad=True)
        y = checkpoint(nn.Dropout(), x * 2)
        assert y.device.type == "cuda"


def test_meta_tensors():
    net = network().to("meta")
    x = torch.empty(5, 4, device="meta", dtype=torch.double, requires_grad=True)
    checkpoint(net, x).sum().backward()
    assert x.grad.shape == x.shape


def test_fake_and_real_calls_in_turn_do_not_disturb_each_other():
    net = nn.Linear(4, 3).double()
    x = tensor(2, 4).requires_grad_()
    output = checkpoint(net, x)
    with FakeTensorMode() as mode:
        checkpoint(functools.partial(torch.sin), mode.from_tensor(x)).sum().backward()
    output.sum().backward()
    assert_close(x.grad, net.weight.detach().sum(0).expand(2, 4))
