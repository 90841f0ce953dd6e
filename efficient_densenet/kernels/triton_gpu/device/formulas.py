"""The activations in Triton: the formulas of the table in `kernels.activations`, chosen when a kernel is compiled.

A kernel has a name of the table as ACTIVATION and its constants as A and B.
"""

# ruff: noqa: N803 (compile-time constants are in capitals, as in Triton's own kernels)

from typing import Any

import triton
import triton.language as tl

from ...activations import TABLE, bound


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
elu, elu_derivative = _compiled("elu")
silu, silu_derivative = _compiled("silu")
gelu, gelu_derivative = _compiled("gelu")
gelu_tanh, gelu_tanh_derivative = _compiled("gelu_tanh")
hardtanh, hardtanh_derivative = _compiled("hardtanh")
mish, mish_derivative = _compiled("mish")


@triton.jit
def relu(x):
    return tl.where(x < 0, 0.0, x)  # propagates NaN, unlike `maximum`


@triton.jit
def activate(z, ACTIVATION: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """y = f(z)"""
    if ACTIVATION == "relu":
        y = relu(z)
    elif ACTIVATION == "leaky_relu":
        y = leaky_relu(z, A, B)
    elif ACTIVATION == "elu":
        y = elu(z, A, B)
    elif ACTIVATION == "silu":
        y = silu(z, A, B)
    elif ACTIVATION == "gelu":
        y = gelu(z, A, B)
    elif ACTIVATION == "gelu_tanh":
        y = gelu_tanh(z, A, B)
    elif ACTIVATION == "hardtanh":
        y = hardtanh(z, A, B)
    elif ACTIVATION == "mish":
        y = mish(z, A, B)
    else:
        tl.static_assert(ACTIVATION == "identity")
        y = z
    return y


@triton.jit
def grad_before_activation(grad, y, z, ACTIVATION: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """The gradient of z, grad · f'(z), from the gradient of y = f(z); y is read by a ReLU alone."""
    if ACTIVATION == "relu":
        grad = tl.where(y <= 0, 0.0, grad)
    elif ACTIVATION == "leaky_relu":
        grad *= leaky_relu_derivative(z, A, B)
    elif ACTIVATION == "elu":
        grad *= elu_derivative(z, A, B)
    elif ACTIVATION == "silu":
        grad *= silu_derivative(z, A, B)
    elif ACTIVATION == "gelu":
        grad *= gelu_derivative(z, A, B)
    elif ACTIVATION == "gelu_tanh":
        grad *= gelu_tanh_derivative(z, A, B)
    elif ACTIVATION == "hardtanh":
        grad *= hardtanh_derivative(z, A, B)
    elif ACTIVATION == "mish":
        grad *= mish_derivative(z, A, B)
    else:
        tl.static_assert(ACTIVATION == "identity")
    return grad
