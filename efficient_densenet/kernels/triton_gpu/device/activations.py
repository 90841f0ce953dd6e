"""The activations in Triton: the formulas of the table in `kernels.activations`, chosen when a kernel is compiled.

A kernel has a name of the table as ACTIVATION and its constants as A and B. `weight` is a PReLU's, (1, channels).
"""

# ruff: noqa: N803 (compile-time constants are in capitals, as in Triton's own kernels)

from typing import Any

import triton
import triton.language as tl

from ...activations import TABLE, bound
from .device_functions import load_vector


@triton.jit
def expm1(x):
    """exp(x) − 1: near 0 by Taylor's polynomial, which loses no digits."""
    p = 1.0 / 120.0 + x * (1.0 / 720.0 + x * (1.0 / 5040.0 + x * (1.0 / 40320.0)))
    p = x * (1.0 + x * (0.5 + x * (1.0 / 6.0 + x * (1.0 / 24.0 + x * p))))
    return tl.where(tl.abs(x) < 0.35, p, tl.exp(x) - 1.0)


def _compiled(name: str) -> tuple[Any, Any]:
    """The formula of an activation and its derivative."""
    definition = TABLE[name]
    return triton.jit(bound(definition.formula, tl, expm1)), triton.jit(bound(definition.derivative, tl, expm1))


leaky_relu, leaky_relu_derivative = _compiled("leaky_relu")
prelu, prelu_derivative = _compiled("prelu")
elu, elu_derivative = _compiled("elu")
silu, silu_derivative = _compiled("silu")
gelu, gelu_derivative = _compiled("gelu")
gelu_tanh, gelu_tanh_derivative = _compiled("gelu_tanh")
hardtanh, hardtanh_derivative = _compiled("hardtanh")
mish, mish_derivative = _compiled("mish")

assert TABLE["prelu"].weight_derivative is not None
prelu_weight_derivative: Any = triton.jit(bound(TABLE["prelu"].weight_derivative, tl, expm1))


@triton.jit
def relu(x):
    return tl.where(x < 0, 0.0, x)  # propagates NaN, unlike `maximum`


@triton.jit
def load_activation_weight(pointer, channel, channel_mask, ACTIVATION: tl.constexpr):
    """(1, channels) in float32; without a weight, a number that is not read."""
    return load_vector(pointer, channel, channel_mask) if ACTIVATION == "prelu" else 0.0


@triton.jit
def activate(z, weight, ACTIVATION: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """y = f(z)"""
    if ACTIVATION == "relu":
        y = relu(z)
    elif ACTIVATION == "leaky_relu":
        y = leaky_relu(z, weight, A, B)
    elif ACTIVATION == "prelu":
        y = prelu(z, weight, A, B)
    elif ACTIVATION == "elu":
        y = elu(z, weight, A, B)
    elif ACTIVATION == "silu":
        y = silu(z, weight, A, B)
    elif ACTIVATION == "gelu":
        y = gelu(z, weight, A, B)
    elif ACTIVATION == "gelu_tanh":
        y = gelu_tanh(z, weight, A, B)
    elif ACTIVATION == "hardtanh":
        y = hardtanh(z, weight, A, B)
    elif ACTIVATION == "mish":
        y = mish(z, weight, A, B)
    else:
        tl.static_assert(ACTIVATION == "identity")
        y = z
    return y


@triton.jit
def grad_before_activation(grad, y, z, weight, ACTIVATION: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """The gradient of z, grad · f'(z), from the gradient of y = f(z); y is read by a ReLU alone."""
    if ACTIVATION == "relu":
        grad = tl.where(y <= 0, 0.0, grad)
    elif ACTIVATION == "leaky_relu":
        grad *= leaky_relu_derivative(z, weight, A, B)
    elif ACTIVATION == "prelu":
        grad *= prelu_derivative(z, weight, A, B)
    elif ACTIVATION == "elu":
        grad *= elu_derivative(z, weight, A, B)
    elif ACTIVATION == "silu":
        grad *= silu_derivative(z, weight, A, B)
    elif ACTIVATION == "gelu":
        grad *= gelu_derivative(z, weight, A, B)
    elif ACTIVATION == "gelu_tanh":
        grad *= gelu_tanh_derivative(z, weight, A, B)
    elif ACTIVATION == "hardtanh":
        grad *= hardtanh_derivative(z, weight, A, B)
    elif ACTIVATION == "mish":
        grad *= mish_derivative(z, weight, A, B)
    else:
        tl.static_assert(ACTIVATION == "identity")
    return grad


@triton.jit
def activation_weight_gradient(grad, z, weight, A: tl.constexpr, B: tl.constexpr):
    """The gradient of a PReLU's weight, from the gradient of y, before the sum over the rows."""
    return grad * prelu_weight_derivative(z, weight, A, B)
