"""Dense blocks without norms: the engine's numbers, what make_efficient converts, and what they save."""

import copy
import itertools

import pytest
import torch
from conv_families import SuperResolution
from helpers import assert_close
from torch import Tensor, nn

from efficient_densenet import kernels, make_efficient, memory
from efficient_densenet.engine import conv_block
from efficient_densenet.engine.conv_block.parts import ConvBlock, ConvLayer
from efficient_densenet.engine.conv_block.spec import decode
from efficient_densenet.kernels.activations import spec_of

ACTIVATIONS = {
    "none": None,
    "relu": nn.ReLU,
    "leaky_relu": lambda: nn.LeakyReLU(0.2),
    "negative slope": lambda: nn.LeakyReLU(-0.2),
    "elu": nn.ELU,
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "mish": nn.Mish,
    "relu6": nn.ReLU6,
}
ORDERS = list(itertools.product([False, True], [None, 1, 3], [False, True]))[1:]
"""newest_first, the kernel size of a last convolution, returns_features."""
ORDERS = [each for each in ORDERS if each[1] is not None or each[2]]


def random_block(activation, newest_first=False, last=3, returns_features=False, dims=2) -> ConvBlock:
    conv_class, layers, channels = getattr(nn, f"Conv{dims}d"), [], 3
    make = ACTIVATIONS[activation]
    for width, kernel_size, dilation in [(4, 3, 1), (3, 1, 1), (5, 3, 2)]:
        padding = kernel_size // 2 * dilation
        conv = conv_class(channels, width, kernel_size, padding=padding, dilation=dilation, bias=width != 5)
        layers.append(ConvLayer(conv.double(), None if make is None else make().double()))
        channels += width
    last = None if last is None else conv_class(channels, 6, last, padding=last // 2).double()
    last = None if last is None else ConvLayer(last)
    return ConvBlock(tuple(layers), last, newest_first, returns_features)


def parameters_of(block: ConvBlock) -> list[Tensor]:
    activations = [layer.activation for layer in block.layers if layer.activation is not None]
    return [parameter for module in (*block.convolutions, *activations) for parameter in module.parameters()]


def run_plain(block: ConvBlock, x: Tensor) -> list[Tensor]:
    features = x
    for conv, activation, _ in block.layers:
        new = conv(features) if activation is None else activation(conv(features))
        features = torch.cat([new, features] if block.newest_first else [features, new], 1)
    last = [] if block.last is None else [block.last.conv(features)]
    return [*last, features] if block.returns_features else last


def results(outputs, inputs, second=False) -> list[Tensor]:
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    weights = [torch.arange(output.numel(), dtype=output.dtype).view_as(output).sin() for output in outputs]
    loss = sum((output * weight + 0.1 * output**2).sum() for output, weight in zip(outputs, weights, strict=True))
    grads = torch.autograd.grad(loss, inputs, create_graph=second)
    if second:
        grads += torch.autograd.grad(sum(grad.square().sum() for grad in grads), inputs)
    return [*outputs, *grads]


def assert_all_relatively_close(actual, expected, tolerance=1e-10) -> None:
    for one, other in zip(actual, expected, strict=True):
        assert_close(one, other, tolerance * max(1.0, other.detach().abs().max().item()))


@pytest.mark.parametrize("kernel_set", ["chosen", "portable"])
@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_outputs_and_gradients_are_plains(activation, second, kernel_set, monkeypatch):
    if kernel_set == "portable":
        monkeypatch.setattr(kernels, "numba_supports", lambda values: False)
    for order, dims in zip(ORDERS * 2, itertools.cycle([2, 1, 3])):
        block = random_block(activation, *order, dims=dims)
        x = torch.randn(2, 3, *(5, 7, 6)[:dims], dtype=torch.double, requires_grad=True)
        inputs = [x, *parameters_of(block)]
        expected, actual = run_plain(block, x), conv_block.run(block, x)
        assert [each.stride() for each in actual] == [each.stride() for each in expected]
        assert_all_relatively_close(results(actual, inputs, second), results(expected, inputs, second))


def test_images_in_channels_last():
    block = random_block("relu", returns_features=True)
    x = torch.randn(2, 3, 5, 7, dtype=torch.double).to(memory_format=torch.channels_last).requires_grad_()
    expected, actual = run_plain(block, x), conv_block.run(block, x)
    assert [each.stride() for each in actual] == [each.stride() for each in expected]
    assert_all_relatively_close(results(actual, [x]), results(expected, [x]))


def test_a_graph_may_be_run_twice_and_a_changed_weight_raises():
    block = random_block("relu")
    x = torch.randn(1, 3, 4, 5, dtype=torch.double, requires_grad=True)
    (output,) = conv_block.run(block, x)
    first, second = (torch.autograd.grad(output.sum(), x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)
    with torch.no_grad():
        block.layers[1].conv.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not")
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_the_operators_pass_opcheck(activation):
    block = random_block(activation, newest_first=True, returns_features=True)
    x = torch.randn(2, 3, 4, 5, dtype=torch.double, requires_grad=True)
    conv = '[{}, {}, {}, ["SPEC", 0.0, 0.0], "zeros"]'
    layers, last = ", ".join((conv.format(4, 3, 1), conv.format(3, 1, 1), conv.format(5, 3, 2))), conv.format(6, 3, 1)
    text = f'["float64", false, false, 3, true, true, false, [{layers}], {last.replace("SPEC", "identity")}]'
    spec = decode(text.replace("SPEC", activation))
    assert decode(spec.encoded) == spec
    tensors = [tensor for layer in block.all_layers for tensor in (layer.conv.weight, layer.conv.bias)]
    torch.library.opcheck(torch.ops.efficient_densenet.conv_block.default, (x, tensors, spec.encoded))


def test_a_compiled_model_and_one_under_autocast():
    plain = SuperResolution()
    model, x = copy.deepcopy(plain), torch.randn(2, 3, 12, 12)
    make_efficient(model)
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    both = [results(each(x), list(each.parameters())) for each in (compiled, plain)]
    assert_all_relatively_close(*both, tolerance=1e-4)
    exact = copy.deepcopy(plain).double()
    truth, errors = results(exact(x.double()), list(exact.parameters())), []
    for each in (plain, model):
        with torch.autocast("cpu", torch.bfloat16):
            output = each(x)
        values = results(output.double(), list(each.parameters()))
        pairs = zip(values, truth, strict=True)
        errors.append(sum((value.double() - exact).square().sum() / exact.square().sum() for value, exact in pairs))
    assert errors[1] <= 4 * errors[0]


def test_the_memory_of_a_step_is_predicted():
    model = SuperResolution(2, 32, 16)
    make_efficient(model)
    x = torch.randn(2, 3, 24, 24)
    model(x).sum().backward()
    peak = memory.tensor_peak(lambda: model(x).sum().backward())
    predicted = memory.predict(model, x.shape, loss=Tensor.sum)
    assert predicted.tensor_peak == pytest.approx(peak, rel=0.08)  # most of it is of convolutions outside of blocks


def test_settings_of_functions_are_read_from_the_trace():
    assert spec_of(nn.LeakyReLU(0.2)).is_known_from_output
    assert not spec_of(nn.LeakyReLU(-0.2)).is_known_from_output
    assert not spec_of(nn.SiLU()).is_known_from_output
