"""Every set of kernels implements the whole interface, with its parameter names."""

import importlib
import inspect

import pytest

from efficient_densenet.kernels.interface import Kernels

MEMBERS = {name: member for name, member in vars(Kernels).items() if inspect.isfunction(member) and name[0] != "_"}
IMPLEMENTATIONS = {
    "portable": "torch",
    "few_rows": "torch",
    "numba_cpu.host.operations": "numba",
    "triton_gpu.host.operations": "triton",
}


def _parameters(function):
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values() if p.name != "self"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("member", MEMBERS)
def test_each_kernel_has_the_interface_s_parameters(member, implementation):
    pytest.importorskip(IMPLEMENTATIONS[implementation])
    kernels = importlib.import_module(f"efficient_densenet.kernels.{implementation}")
    assert _parameters(getattr(kernels, member)) == _parameters(MEMBERS[member])
