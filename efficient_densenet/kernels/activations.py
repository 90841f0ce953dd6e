"""The activations between a norm and a convolution: the one table that all kernels read.

Each is a function y = f(z) without weights and its derivative, written once, as formulas of z and of up to two
constants a and b. Compiled kernels bind the formulas to functions of their own for `exp`, `expm1`, `erf`, `sigmoid` and
`where` (`bound`). `portable` and second derivatives use PyTorch's function and its backward.

The kernels have a ReLU of their own, which takes no derivative: its mask is y > 0.
"""

from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._compilers import cached_in_eager_mode, specialized

math: Any = torch
expm1: Any = torch.expm1
"""Where formulas find their functions; `bound` replaces them. Triton has no expm1."""


class ActivationSpec(NamedTuple):
    """An activation's settings as plain data: its name in the table and its constants."""

    name: str = "relu"
    a: float = 0.0
    b: float = 0.0

    @property
    def is_relu(self) -> bool:
        return self.name == "relu"

    def forward(self, z: Tensor) -> Tensor:
        """y = f(z), by PyTorch."""
        return TABLE[self.name].function(z, self.a, self.b)

    def backward(self, grad: Tensor, z: Tensor) -> Tensor:
        """grad · f'(z), by PyTorch."""
        if z.is_meta:  # where PyTorch composes some backwards of several operations
            return torch.empty_like(grad)
        return TABLE[self.name].backward(grad, z, self.a, self.b)


RELU_SPEC, IDENTITY = ActivationSpec(), ActivationSpec("identity")


def spec_of(module: nn.Module) -> ActivationSpec | None:
    """The settings of an activation module of exactly PyTorch's class, or of timm's classes that call PyTorch's
    functions; None for other modules."""
    cls = type(module)
    name = _OF_TIMM.get(cls.__name__, "") if cls.__module__.startswith("timm.") else NAMES.get(cls, "")
    if cls is nn.GELU and cast(nn.GELU, module).approximate == "tanh":
        name = "gelu_tanh"
    if not name:
        return None
    return ActivationSpec(name, *(specialized(float(each)) for each in TABLE[name].constants(module)))


@cached_in_eager_mode
def module_of(spec: ActivationSpec) -> nn.Module:
    """A module with these settings, for an activation that a forward applies by a function."""
    make: Any = TABLE[spec.name].module
    num_constants = len(TABLE[spec.name].constants(make()))
    return make("tanh") if spec.name == "gelu_tanh" else make(*spec[1:][:num_constants])


def spec_of_operation(name: str, *arguments: Any) -> ActivationSpec | None:
    """The settings of an activation that is PyTorch's operation of this name, with all arguments after its input."""
    match name, arguments:
        case "gelu", (approximate,):
            name, arguments = "gelu_tanh" if approximate == "tanh" else name, ()
        case "elu", (alpha, 1, 1):
            arguments = (alpha,)
        case "relu6", ():
            name, arguments = "hardtanh", (0, 6)
    is_known = name in TABLE and len(arguments) < len(ActivationSpec._fields)
    return ActivationSpec(name, *map(float, arguments)) if is_known else None


class Definition(NamedTuple):
    """One activation.

    Attributes:
        formula, derivative: f(z) and f'(z), of (z, a, b).
        function, backward: PyTorch's function of (z, a, b), and its backward of (grad, z, a, b).
        module: PyTorch's class.
        constants: a and b, from a module.
    """

    formula: Callable[..., Any]
    derivative: Callable[..., Any]
    function: Callable[..., Tensor]
    backward: Callable[..., Tensor]
    module: type[nn.Module]
    constants: Callable[[Any], tuple[float, ...]] = lambda module: ()


def bound(formula: Callable[..., Any], functions: Any, expm1: Callable[..., Any]) -> Callable[..., Any]:
    """The formula with the functions of this module, such as Triton's language, and with this `expm1`."""
    assert isinstance(formula, FunctionType)
    names = {"math": functions, "expm1": expm1}
    return FunctionType(formula.__code__, formula.__globals__ | names, formula.__name__)


def _identity(z, a, b):
    return z


def _identity_derivative(z, a, b):
    return math.where(z == z, 1.0, 1.0)  # of any z, NaN too


def _relu(z, a, b):
    return math.where(z <= 0.0, 0.0, z)  # NaN stays NaN


def _relu_derivative(z, a, b):
    return math.where(z <= 0.0, 0.0, 1.0)


def _leaky_relu(z, a, b):
    return math.where(z > 0.0, z, z * a)


def _leaky_relu_derivative(z, a, b):
    return math.where(z > 0.0, 1.0, a)


def _elu(z, a, b):
    return math.where(z > 0.0, z, a * expm1(z))


def _elu_derivative(z, a, b):
    return math.where(z > 0.0, 1.0, a * math.exp(z))


def _silu(z, a, b):
    return z * math.sigmoid(z)


def _silu_derivative(z, a, b):
    s = math.sigmoid(z)
    return s * (1.0 + z * (1.0 - s))


def _gelu(z, a, b):
    return 0.5 * z * (1.0 + math.erf(z * 0.7071067811865476))


def _gelu_derivative(z, a, b):
    return 0.5 * (1.0 + math.erf(z * 0.7071067811865476)) + z * 0.3989422804014327 * math.exp(-0.5 * z * z)


def _gelu_tanh(z, a, b):
    return z * math.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))  # tanh(u) = 2 · sigmoid(2u) − 1


def _gelu_tanh_derivative(z, a, b):
    s = math.sigmoid(1.5957691216057308 * (z + 0.044715 * z * z * z))
    return s + z * s * (1.0 - s) * (1.5957691216057308 * (1.0 + 0.134145 * z * z))


def _hardtanh(z, a, b):
    return math.where(z < a, a, math.where(z > b, b, z))


def _hardtanh_derivative(z, a, b):
    return math.where((z <= a) | (z >= b), 0.0, 1.0)


def _mish(z, a, b):
    e = math.exp(math.where(z < 20.0, z, 20.0))  # tanh(softplus(z)) = n / (n + 2) with n = e · (e + 2)
    n = e * (e + 2.0)
    return z * (n / (n + 2.0))


def _mish_derivative(z, a, b):
    e = math.exp(math.where(z < 20.0, z, 20.0))
    n = e * (e + 2.0)
    t = n / (n + 2.0)
    return t + z * (1.0 - t) * (1.0 + t) * (e / (e + 1.0))


_aten = torch.ops.aten

TABLE = {
    "identity": Definition(
        _identity,
        _identity_derivative,
        lambda z, a, b: z,
        lambda g, z, a, b: g,
        nn.Identity,
    ),
    "relu": Definition(
        _relu,
        _relu_derivative,
        lambda z, a, b: F.relu(z),
        lambda g, z, a, b: _aten.threshold_backward(g, z, 0),
        nn.ReLU,
    ),
    "leaky_relu": Definition(
        _leaky_relu,
        _leaky_relu_derivative,
        lambda z, a, b: F.leaky_relu(z, a),
        lambda g, z, a, b: _aten.leaky_relu_backward(g, z, a, False),
        nn.LeakyReLU,
        lambda module: (module.negative_slope,),
    ),
    "elu": Definition(
        _elu,
        _elu_derivative,
        lambda z, a, b: F.elu(z, a),
        lambda g, z, a, b: _aten.elu_backward(g, a, 1, 1, False, z),
        nn.ELU,
        lambda module: (module.alpha,),
    ),
    "silu": Definition(
        _silu,
        _silu_derivative,
        lambda z, a, b: F.silu(z),
        lambda g, z, a, b: _aten.silu_backward(g, z),
        nn.SiLU,
    ),
    "gelu": Definition(
        _gelu,
        _gelu_derivative,
        lambda z, a, b: F.gelu(z),
        lambda g, z, a, b: _aten.gelu_backward(g, z),
        nn.GELU,  # with approximate="none"
    ),
    "gelu_tanh": Definition(
        _gelu_tanh,
        _gelu_tanh_derivative,
        lambda z, a, b: F.gelu(z, approximate="tanh"),
        lambda g, z, a, b: _aten.gelu_backward(g, z, approximate="tanh"),
        nn.GELU,
    ),
    "hardtanh": Definition(
        _hardtanh,
        _hardtanh_derivative,
        lambda z, a, b: F.hardtanh(z, a, b),
        lambda g, z, a, b: _aten.hardtanh_backward(g, z, a, b),
        nn.Hardtanh,
        lambda module: (module.min_val, module.max_val),
    ),
    "mish": Definition(
        _mish,
        _mish_derivative,
        lambda z, a, b: F.mish(z),
        lambda g, z, a, b: _aten.mish_backward(g, z),
        nn.Mish,
    ),
}

NAMES = {definition.module: name for name, definition in reversed(TABLE.items())} | {nn.ReLU6: "hardtanh"}
"""The name of the activation of each class: "gelu" for nn.GELU, whatever it approximates."""

_OF_TIMM = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "Swish": "silu", "Mish": "mish"}
