"""The Numba kernels match the portable ones in float32, float64 and bfloat16, by each product, with any number of
threads; where they cannot run, the portable ones do."""

import functools
import importlib.util
import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from grids import sampled
from helpers import kernel_modules
from kernel_operations import (
    SIZES,
    check,
    check_is_portable,
    check_non_finite,
    check_variance_far_from_zero,
    is_case,
)

from efficient_densenet import kernels
from efficient_densenet.kernels import portable
from efficient_densenet.kernels.activations import TABLE
from efficient_densenet.kernels.comparison import OPERATIONS, SETTINGS, Case
from efficient_densenet.kernels.numba_cpu.host import openmp
from efficient_densenet.memory import tensor_peak

numba = pytest.importorskip("numba", reason="the kernels are compiled by Numba")
if not openmp.available():
    pytest.skip("this PyTorch has no GNU OpenMP threads", allow_module_level=True)
operations, launch, tiling, memory, vector_math, gemm, gemm_amx, processor, compilation, numba_kernels = kernel_modules(
    "numba_cpu",
    *("operations", "launch", "tiling", "memory", "vector_math"),
    *("gemm", "gemm_amx", "processor", "compilation", "kernels"),
)
import amx_model  # noqa: E402  (it needs Numba)

PRODUCTS = {
    "widened": launch.Product(torch.float32, gemm.gemm),
    "avx512_bf16": launch.Product(torch.bfloat16, gemm.gemm_bfloat16),
    "amx": launch.Product(torch.bfloat16, gemm_amx.gemm_amx),
}
IN_PORTABLE = "center", "affine_forward"
"""Operations that portable computes for this set too."""

ARITHMETIC = ["float32", "float64", *PRODUCTS]
"""The dtype of matrices, which are bfloat16 with each of the products."""


@pytest.fixture
def arithmetic(request, monkeypatch):
    """The dtype of matrices. Kernels for bfloat16 multiply by the product of the parameter; where there is no AMX, by
    a model of its registers."""
    name = request.param
    if name not in PRODUCTS:
        yield getattr(torch, name)
        return
    if name == "avx512_bf16" and not processor.has(name):
        pytest.skip(f"this processor has no {name}")
    for module in (tiling, launch):
        monkeypatch.setattr(module, "product_of", lambda dtype: PRODUCTS[name])
    cached = launch.gemm_address_for, launch.address
    for each in cached:
        each.cache_clear()
    if name == "amx" and not (processor.has("amx") and launch.permits_amx()):
        monkeypatch.setattr(launch, "gemm_address_for", lambda dtype: _amx_model().address)
        torch.set_num_threads(1)
    yield torch.bfloat16
    for each in cached:
        each.cache_clear()


@functools.cache
def _amx_model():
    """Not by `compile_kernel`, which would keep the model's address on disk."""
    model = gemm_amx.make_gemm(amx_model.TILES)

    @numba.cfunc(numba.types.void(*[numba.types.intp] * 11, numba.types.float32))
    def product(m, n, k, a, a_row, a_column, b, b_row, accumulate, c, c_row, zero):
        model(m, n, k, a, a_row, a_column, b, b_row, accumulate != 0, c, c_row, zero)

    return product


def _case(size, dtype, **options) -> Case:
    if dtype is torch.float64:
        return Case(*size, **options).in_float64()
    return Case(*size, dtype, **options)


def _fill_scratch_with_nan(monkeypatch):
    """A kernel must have written whatever it reads in its scratch memory."""
    new_scratch = operations.new_scratch
    monkeypatch.setattr(operations, "new_scratch", lambda *arguments: new_scratch(*arguments).fill_(math.nan))


@pytest.mark.parametrize(
    *sampled(
        lambda operation, arithmetic, **case: (
            is_case(operation, **case) and (operation in IN_PORTABLE) <= (arithmetic == "float32")
        ),
        count=1500,
        operation=list(OPERATIONS),
        arithmetic=ARITHMETIC[:-1],
        size=[*SIZES, ((1, 9, 7), 300, 16), ((2, 3, 5), 17, 401), ((17, 6, 5), 6, 8), ((9, 24), 6, 8)],
        setting=list(SETTINGS),
        activation=list(TABLE),
        dilation=[1, 2, 3],
        padding=[0, 3],
        tile=[5, 256],
        threads=[1, 4],
    ),
    indirect=["arithmetic"],
)
def test_every_operation(
    operation, arithmetic, size, setting, activation, dilation, padding, tile, threads, monkeypatch
):
    torch.set_num_threads(threads)
    monkeypatch.setattr(tiling, "TILE", tile)
    _fill_scratch_with_nan(monkeypatch)
    options = {"activation": activation, "dilation": dilation, "padding": padding, **SETTINGS[setting]}
    check(operations, operation, _case(size, arithmetic, **options))


@pytest.mark.exhaustive
@pytest.mark.parametrize("arithmetic", ["amx"], indirect=True)
@pytest.mark.parametrize("operation", [name for name in OPERATIONS if "conv" in name])
@pytest.mark.parametrize("size", SIZES)
def test_every_operation_by_amx(operation, size, arithmetic, monkeypatch):
    _fill_scratch_with_nan(monkeypatch)
    if is_case(operation, size):
        check(operations, operation, _case(size, arithmetic))


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name not in IN_PORTABLE])
@pytest.mark.parametrize("norm_dtype", [torch.float32, torch.bfloat16])
def test_nothing_in_bfloat16_falls_back_to_portable(operation, norm_dtype, monkeypatch):
    """Neither under autocast nor in a model in bfloat16, whose norms have parameters in bfloat16."""
    case = Case((1, 5, 9), 9, 16, torch.bfloat16)  # an odd number of rows
    case.norm_weight, case.norm_bias = case.norm_weight.to(norm_dtype), case.norm_bias.to(norm_dtype)
    check(operations, operation, case)
    for name in dir(kernels.interface.Kernels):
        if not name.startswith("_"):
            monkeypatch.setattr(portable, name, None)
    OPERATIONS[operation](operations, case)


@pytest.mark.parametrize("arithmetic", ["float32", "widened", "avx512_bf16"], indirect=True)
@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name != "batch_statistics"])
def test_non_finite_values_propagate_as_in_portable(operation, arithmetic):
    check_non_finite(operations, operation, Case((1, 8, 8), 6, 16, arithmetic))


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if "statistics" in name])
def test_variance_of_values_far_from_zero(operation):
    check_variance_far_from_zero(operations, operation, (50, 9, 7))


@pytest.mark.parametrize(("function", "units"), [("exp", 2), ("expm1", 3), ("erf", 4), ("sigmoid", 4)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_functions_of_activations(function, units, dtype):
    """Their errors in units of the last place, and their limits."""
    scalar = getattr(vector_math.functions_for(np.dtype(dtype)), function)
    small = np.logspace(-9, 0, 99)
    values = np.concatenate([np.linspace(-80, 80, 20001), np.linspace(-5, 5, 20001), small, -small]).astype(dtype)
    vectorized = numba.vectorize(lambda x: scalar(x))

    def apply(x):
        with np.errstate(all="ignore"):
            return vectorized(x)

    exact = getattr(torch, function)(torch.from_numpy(values).double()).numpy()
    assert apply(values).dtype == dtype
    assert (np.abs(apply(values) - exact) <= units * np.finfo(dtype).eps * np.abs(exact) + np.finfo(dtype).tiny).all()
    assert np.isnan(apply(dtype(math.nan)))
    lowest, highest = {"exp": (0, math.inf), "expm1": (-1, math.inf), "erf": (-1, 1), "sigmoid": (0, 1)}[function]
    assert (apply(dtype(-math.inf)), apply(dtype(math.inf))) == (lowest, highest)


def _converter(source: type, destination: type):
    """`memory.convert` between two dtypes, uint16 being bfloat16's."""
    source_element, destination_element, convert = source(0), destination(0), memory.convert

    @numba.njit
    def function(source, target, count):
        convert(source, source_element, target, destination_element, count)

    return function


def test_bfloat16_is_widened_exactly_and_rounded_to_the_nearest_even():
    halves = np.arange(1 << 16, dtype=np.uint32) << 16
    tails = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    numbers = (halves[:, None] | tails).ravel().view(np.float32)
    rounded, widened = np.empty(len(numbers), np.uint16), np.empty(len(numbers), np.float32)
    _converter(np.float32, np.uint16)(numbers.ctypes.data, rounded.ctypes.data, len(numbers))
    _converter(np.uint16, np.float32)(rounded.ctypes.data, widened.ctypes.data, len(numbers))
    expected = torch.from_numpy(numbers).bfloat16()
    assert np.array_equal(widened.view(np.uint32), rounded.astype(np.uint32) << 16)
    actual, is_nan = torch.from_numpy(rounded).view(torch.bfloat16), expected.isnan()
    assert torch.equal(actual.isnan(), is_nan)
    assert torch.equal(actual[~is_nan].view(torch.int16), expected[~is_nan].view(torch.int16))


@pytest.mark.parametrize("left_out", ["", pytest.param("amx,avx512_bf16", marks=pytest.mark.exhaustive)])
def test_tensors_are_not_accessed_out_of_bounds(left_out):
    """Protected pages lie beside each tensor that a kernel reads or writes, and each part of the scratch memory."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), processor.VARIABLE: left_out}
    command = [sys.executable, str(Path(__file__).with_name("guarded_memory.py"))]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, env=environment)
    assert completed.returncode == 0, (completed.stdout.splitlines()[-1:], completed.stderr)
    assert completed.stdout.endswith("all\n")


def test_halos_stay_small():
    """Fewer threads run where a thread's rows would hardly outnumber those of its halo."""
    torch.set_num_threads(4)
    case = Case((1, 16, 16, 16), 4, 8)
    columns = case.weight3x3.flatten(1).shape[1] // 4 * 8
    peak = tensor_peak(lambda: operations.conv3x3_forward(case.conv3x3))
    halo = 16 * 16 + 16 + 1
    assert peak <= 4 * (4096 * 8 + 3 * (256 * (4 + columns) + 3 * halo * columns) + 2 * columns * 4)


@pytest.mark.parametrize("operation", ["conv3x3_forward_with_statistics", "conv3x3_backward"])
def test_fewer_threads_than_requested_may_run(operation, monkeypatch):
    torch.set_num_threads(4)
    run = openmp.run
    monkeypatch.setattr(tiling, "TILE", 5)
    monkeypatch.setattr(openmp, "run", lambda kernel, threads, record: run(kernel, threads - 1, record))
    check(operations, operation, Case((2, 5, 13), 9, 17))


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name not in IN_PORTABLE])
def test_inputs_with_other_strides_are_copied(operation):
    case = Case((2, 5, 7), 9, 16)
    expected = OPERATIONS[operation](operations, case)
    for name, tensor in vars(case).items():
        if isinstance(tensor, torch.Tensor) and name != "grad_accum":  # which is written too
            strided = torch.stack([tensor, tensor], -1)[..., 0]
            setattr(case, name, strided)
    for actual, same in zip(OPERATIONS[operation](operations, case), expected, strict=True):
        assert torch.equal(actual, same)


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name.startswith("conv")])
@pytest.mark.parametrize("what", ["mixed precision", "float16", "a large weight"])
def test_what_they_do_not_support_runs_on_portable(operation, what, monkeypatch):
    dtypes = {"mixed precision": torch.bfloat16, "float16": torch.float16}
    case = Case((1, 8, 8), 6, 16, dtypes.get(what, torch.float32))
    if what == "a large weight":
        monkeypatch.setattr(operations, "WEIGHT_BYTES", 5 * 16 * 4)
    if what == "mixed precision":
        case.values, case.grad_accum = case.values.float(), case.grad_accum.float()
    check_is_portable(operations, operation, case)


def test_kernels_for_selects_them_for_their_dtypes():
    class Wrapped(torch.Tensor):
        pass

    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert kernels.kernels_for(torch.empty(2, 2, dtype=dtype)) is operations
    others = (
        torch.empty(2, 2, dtype=torch.float16),
        torch.empty(2, 2, device="meta"),
        torch.empty(2).as_subclass(Wrapped),
    )
    for other in others:
        assert kernels.kernels_for(other) is portable


@pytest.mark.parametrize("missing", ["Numba", "GNU OpenMP"])
def test_without_a_part_portable_is_used_without_a_warning(missing, monkeypatch):
    if missing == "Numba":
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    else:
        monkeypatch.setattr(openmp, "available", openmp.available.__wrapped__)
        monkeypatch.setattr(openmp, "functions", lambda: openmp._library().no_such_function)
    assert not kernels._numba_compiles.__wrapped__(torch.float32)


def test_numba_that_compiles_no_bfloat16_runs_the_other_dtypes(monkeypatch):
    def is_stored(kernel, dtype, operand):
        if dtype is torch.bfloat16:
            raise TypeError("no such argument")
        return True

    monkeypatch.setattr(launch, "is_stored", is_stored)
    monkeypatch.setattr(kernels, "_numba_compiles", functools.cache(kernels._numba_compiles.__wrapped__))
    with pytest.warns(UserWarning, match="the kernels for bfloat16 here .no such argument.*slower"):
        assert kernels.kernels_for(torch.empty(4, 4, dtype=torch.bfloat16)) is portable
    assert not kernels.numba_multiplies(torch.bfloat16)
    assert kernels.kernels_for(torch.empty(4, 4)) is operations


def test_all_kernels_for_a_dtype_are_compiled_at_its_first_use_with_a_line_that_says_so(monkeypatch, caplog, tmp_path):
    defined = {each for each in vars(numba_kernels).values() if getattr(each, "pack", None)}
    assert {*numba_kernels.ALL} == defined
    smallest = (numba_kernels.batch_norm_grad_input,)
    compiled, compile_kernel = [], compilation.load_or_compile.__wrapped__
    monkeypatch.setattr(numba_kernels, "ALL", smallest)
    monkeypatch.setattr(launch, "product_of", lambda dtype: launch.Product(dtype, numba_kernels.batch_statistics))
    monkeypatch.setattr(launch, "compile_kernel", lambda *each: compiled.append(each[0]) or compile_kernel(*each))
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    for _ in range(2):
        assert kernels._numba_compiles.__wrapped__(torch.float32)
        assert compiled == [numba_kernels.batch_statistics, *smallest]
    (record,) = caplog.records
    assert record.getMessage().startswith("compiling kernels for float32")
    assert (record.name, record.levelno) == ("efficient_densenet", logging.WARNING)  # shown without any configuration
