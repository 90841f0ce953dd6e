"""The Numba kernels match the portable ones with any number of threads; fallbacks where they cannot run."""

import copy
import functools
import importlib.util
import math
import os
import statistics
import subprocess
import sys

import numpy as np
import pytest
import torch
from grids import grid
from helpers import assert_close, assert_same_step, kernel_modules, random_images, small_model, with_engine
from kernel_operations import (
    check,
    check_is_portable,
    check_non_finite,
    check_variance_far_from_zero,
    fill_scratch_with_nan,
)

from efficient_densenet import DenseBlock, kernels
from efficient_densenet.engine import choose
from efficient_densenet.kernels import activations, portable
from efficient_densenet.kernels.comparison import OPERATIONS, SETTINGS, Case, is_valid
from efficient_densenet.kernels.interface import Conv1x1, StatisticsOutput
from efficient_densenet.kernels.numba_cpu.host import openmp
from efficient_densenet.memory import tensor_peak

numba = pytest.importorskip("numba", reason="the kernels are compiled by Numba")
if not openmp.available():
    pytest.skip("this PyTorch has no GNU OpenMP threads", allow_module_level=True)
operations, compilation, compile_ahead, numba_kernels, gemm, micro_kernel, memory, vector_math = kernel_modules(
    "numba_cpu",
    "operations",
    "compilation",
    "compile_ahead",
    "kernels",
    "gemm",
    "micro_kernel",
    "memory",
    "vector_math",
)
check = functools.partial(check, operations)


TILES = [5, 256]


@pytest.fixture(params=TILES)
def tile(request, monkeypatch):
    monkeypatch.setattr(operations, "TILE", request.param)


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize(
    *grid(
        is_valid,
        operation=OPERATIONS,
        shape__channels__width=[
            *(((1, 1, 1), 1, 20), ((1, 1, 1), 300, 16), ((1, 1, 7), 2, 20), ((5, 2, 2), 5, 48)),
            *(((1, 9, 7), 1, 20), ((1, 9, 7), 5, 48), ((2, 5, 13), 2, 20), ((2, 5, 13), 300, 16)),
        ],
        setting=SETTINGS,
        tile=TILES,
    ),
    indirect=["tile"],
)
def test_operations_match_portable(operation, shape, channels, width, setting):
    case = Case(shape, channels, width, **SETTINGS[setting])
    check(operation, case)
    results, reference = (OPERATIONS[operation](each, case.in_float64()) for each in (operations, portable))
    for actual, expected in zip(results, reference, strict=True):
        assert_close(actual, expected, 1e-13)


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("setting", [{}, {"frozen": True}, {"centered": True, "overwrite": True}])
@pytest.mark.parametrize("activation", [name for name in activations.TABLE if name != "relu"])
def test_operations_with_other_activations_match_portable(activation, setting):
    for operation in (name for name in OPERATIONS if name.startswith(("conv", "pooled"))):
        for shape, channels, width in [((2, 5, 13), 5, 48), ((1, 9, 7), 300, 16)]:
            case = Case(shape, channels, width, activation=activation, **setting)
            check(operation, case)
            results, reference = (OPERATIONS[operation](each, case.in_float64()) for each in (operations, portable))
            for actual, expected in zip(results, reference, strict=True):
                assert_close(actual, expected, 1e-12)


@pytest.mark.parametrize(("function", "units"), [("exp", 2), ("expm1", 3), ("erf", 4), ("sigmoid", 4)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_functions_of_activations(function, units, dtype):
    """Their errors in units of the last place, and their limits."""
    scalar = getattr(vector_math.functions_for(np.dtype(dtype)), function)
    values = np.concatenate(
        [np.linspace(-80, 80, 20001), np.linspace(-5, 5, 20001), np.logspace(-9, 0, 99), -np.logspace(-9, 0, 99)]
    )
    values = values.astype(dtype)
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


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("channels", "width"), [(9, 17), (16, 3)])
def test_nothing_is_read_from_scratch_that_was_not_written(operation, channels, width, monkeypatch):
    fill_scratch_with_nan(monkeypatch)
    check(operation, Case((2, 5, 7), channels, width))


@pytest.mark.parametrize("avx512", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gemm_of_any_size_with_and_without_avx512(avx512, dtype):
    gemm_function = gemm.make_gemm(avx512)
    product = numba.njit(lambda *arguments: gemm_function(*arguments))
    rng, panel = np.random.default_rng(0), memory.PANEL_BYTES // dtype().itemsize
    extra_rows = math.lcm(*micro_kernel.register_blocks(avx512).values())
    widths = [1, *(panels * panel + extra for panels in range(1, 8) for extra in (-3, 0))]
    for case, n in enumerate(widths * 2):
        m, k, transposed, packed, accumulate = (int(rng.integers(high)) for high in (110, 300, 2, 2, 2))
        m, k, panels = m + 1, k + 1, -(-n // panel)
        a = rng.standard_normal((m + extra_rows, k)).astype(dtype)
        b = rng.standard_normal((k, panels * panel)).astype(dtype)
        c = rng.standard_normal((m + extra_rows, n + 5)).astype(dtype)
        expected = c.astype(np.float64)
        expected[:m, :n] *= accumulate
        expected[:m, :n] += a[:m].astype(np.float64) @ b[:, :n].astype(np.float64)
        stored_a, stored_b = np.ascontiguousarray(a.T if transposed else a), b
        if packed:
            stored_b = np.ascontiguousarray(b.reshape(k, panels, panel).swapaxes(0, 1))
        a_strides = (1, len(a)) if transposed else (k, 1)
        b_row_stride = 0 if packed else b.shape[1]
        addresses = [each.ctypes.data for each in (stored_a, stored_b, c)]
        product(
            m,
            n,
            k,
            addresses[0],
            *a_strides,
            addresses[1],
            b_row_stride,
            bool(accumulate),
            addresses[2],
            n + 5,
            dtype(0),
        )
        bound = 4 * np.finfo(dtype).eps * (k + 1) ** 0.5
        assert np.abs(c - expected).max() <= bound * max(1, np.abs(expected).max()), (case, n)


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize(
    *grid(
        operation=["conv3x3_forward", "conv3x3_forward_with_statistics", "conv3x3_backward"],
        shape=[(2, 9), (3, 2), (2, 5, 13), (2, 4, 3, 5), (1, 7, 2, 3)],
        dilation=[1, 2, 3],
        tile=TILES,
    ),
    indirect=["tile"],
)
def test_convolutions_in_other_dimensions_and_with_dilation(operation, shape, dilation):
    check(operation, Case(shape, 9, 16, dilation=dilation))


@pytest.fixture
def many_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("many_threads", "tile")
@pytest.mark.parametrize(
    *grid(
        lambda operation, shape, **_: "conv3x3" in operation or shape in ((9, 24), (17, 6, 5)),  # others have no halo
        operation=OPERATIONS,
        shape__dilation=[((9, 24), 1), ((17, 6, 5), 1), ((23, 6, 5), 2), ((7, 6, 4, 5), 1), ((13, 5, 4, 5), 2)],
        tile=TILES,
    ),
    indirect=["tile"],
)
def test_more_threads_than_images_or_processors(operation, shape, dilation, monkeypatch):
    thread_counts = []
    run = openmp.run
    monkeypatch.setattr(
        openmp, "run", lambda kernel, threads, record: thread_counts.append(threads) or run(kernel, threads, record)
    )
    check(operation, Case(shape, 6, 8, dilation=dilation))
    if operations.TILE == 5 and "affine" not in operation and "pooled" not in operation:
        assert max(thread_counts) == 4


@pytest.mark.usefixtures("many_threads")
def test_halos_stay_small():
    """Fewer threads run where a thread's rows would hardly outnumber those of its halo."""
    case = Case((1, 16, 16, 16), 4, 8)
    columns = case.weight3x3.flatten(1).shape[1] // 4 * 8
    peak = tensor_peak(lambda: operations.conv3x3_forward(case.input, case.weight3x3, case.shape))
    halo = 16 * 16 + 16 + 1
    assert peak <= 4 * (4096 * 8 + 3 * (256 * (4 + columns) + 2 * halo * columns) + 2 * columns * 4)


FEWER_THREADS = """
import torch
from helpers import assert_same_step, random_images, small_model, with_engine
from efficient_densenet.kernels.numba_cpu.host import openmp
torch.set_num_threads(4)
requested, run = [], openmp.run
openmp.run = lambda kernel, threads, record: requested.append(threads) or run(kernel, threads, record)
plain = small_model("bc", efficient=False)
assert_same_step(with_engine(plain, "shared"), plain, random_images("bc", 32))
assert max(requested) == 4
"""


@pytest.mark.exhaustive
def test_fewer_threads_than_requested_may_run():
    paths = [os.path.dirname(__file__), *sys.path]
    environment = {**os.environ, "OMP_THREAD_LIMIT": "2", "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, "-c", FEWER_THREADS], env=environment, check=True)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_inputs_with_other_strides_are_copied(operation):
    case = Case((2, 5, 7), 9, 16)
    expected = OPERATIONS[operation](operations, case)
    for name, tensor in vars(case).items():
        if isinstance(tensor, torch.Tensor) and name != "grad_accum":  # which is written too
            strided = torch.stack([tensor, tensor], -1)[..., 0]
            setattr(case, name, strided)
    for actual, same in zip(OPERATIONS[operation](operations, case), expected, strict=True):
        assert torch.equal(actual, same)


def test_an_output_with_other_strides_is_an_error():
    case = Case((2, 5, 7), 9, 16)
    output = torch.empty(16, len(case.values)).t()
    with pytest.raises(AssertionError, match=r"cannot be written: its strides are \(1, 70\)"):
        operations.conv1x1_forward(Conv1x1(case.input, case.weight1x1, output))


def test_matrices_with_contiguous_columns_are_copied_once():
    values = torch.randn(64, 5000).t()
    statistics = StatisticsOutput(torch.empty(3, 64), 1e-5)
    peak = tensor_peak(lambda: operations.batch_statistics(values, statistics))
    assert values.nbytes <= peak <= 1.1 * values.nbytes


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if "statistics" in name])
def test_variance_of_values_far_from_zero(operation):
    check_variance_far_from_zero(operations, operation, (50, 9, 7))


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name != "batch_statistics"])
def test_non_finite_values_propagate_as_in_portable(operation):
    check_non_finite(operations, operation, Case((1, 8, 8), 6, 16))


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name.startswith("conv")])
@pytest.mark.parametrize("what", ["mixed precision", "float16", "a large weight"])
def test_what_they_do_not_support_runs_on_portable(operation, what, monkeypatch):
    case = Case((1, 8, 8), 6, 16, torch.float16 if what == "float16" else torch.float32)
    if what == "a large weight":
        monkeypatch.setattr(operations, "WEIGHT_BYTES", 5 * 16 * 4)
    if what == "mixed precision":
        names = "values", "grad_accum", "norm_weight", "norm_bias", "mean", "inv_std", "sums"
        vars(case).update({name: getattr(case, name).double() for name in names})
    check_is_portable(operations, operation, case)


def test_kernels_for_selects_them_for_their_dtypes():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert kernels.kernels_for(torch.empty(2, 2, dtype=dtype)) is operations
    for other in (torch.empty(2, 2, dtype=torch.float16), torch.empty(2, 2, device="meta"), _subclass()):
        assert kernels.kernels_for(other) is portable


def _subclass():
    class Wrapped(torch.Tensor):
        pass

    return torch.empty(2, 2).as_subclass(Wrapped)


def test_without_numba_portable_is_used_without_a_warning(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not kernels._numba_compiles.__wrapped__(torch.float32)


def test_without_gnu_openmp_portable_is_used_without_a_warning(monkeypatch):
    monkeypatch.setattr(openmp, "available", openmp.available.__wrapped__)
    monkeypatch.setattr(openmp, "functions", lambda: openmp._library().no_such_function)
    assert not kernels._numba_compiles.__wrapped__(torch.float32)


def test_numba_that_compiles_no_bfloat16_runs_the_other_dtypes(monkeypatch):
    def requests(dtype):
        if dtype is torch.bfloat16:
            raise TypeError("no such argument")
        return {}

    monkeypatch.setattr(compile_ahead, "_requests", requests)
    monkeypatch.setattr(kernels, "_numba_compiles", functools.cache(kernels._numba_compiles.__wrapped__))
    with pytest.warns(UserWarning, match="the kernels for bfloat16 here .no such argument.*slower"):
        assert kernels.kernels_for(torch.empty(4, 4, dtype=torch.bfloat16)) is portable
    assert not kernels.numba_multiplies(torch.bfloat16)
    assert kernels.kernels_for(torch.empty(4, 4)) is operations


def _gradients(block, x):
    block(x).double().square().sum().backward()
    return torch.cat([parameter.grad.double().flatten() for parameter in block.parameters()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_features_in_float32_and_convolutions_in_a_lower_precision(dtype):
    """Under autocast a block's input is float32. The gradients' error is that of plain's."""
    ratios = []
    for seed in range(5):
        torch.manual_seed(seed)
        plain, x = DenseBlock(3, 8, 4, efficient=False), torch.randn(4, 8, 9, 7)
        efficient, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
        efficient.engine = choose.parse("shared")
        assert kernels.kernels_for(x) is operations
        expected = _gradients(exact, x.double())
        with torch.autocast("cpu", dtype):
            error, plain_error = ((_gradients(block, x) - expected).norm() for block in (efficient, plain))
        ratios.append(error / plain_error)
    assert statistics.median(ratios) <= 1.5


def test_saved_tensors_may_be_unpacked_with_contiguous_columns():
    plain = small_model("bc", efficient=False)
    efficient = with_engine(plain, "shared")

    def pack(tensor):
        return tensor.t().contiguous() if tensor.dim() == 2 else tensor

    def unpack(tensor):
        return tensor.t() if tensor.dim() == 2 else tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert_same_step(efficient, plain, random_images("bc"))
