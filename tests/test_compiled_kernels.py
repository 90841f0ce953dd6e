"""The compiled kernels: portable's numbers, by as many threads as there are, and what happens where they cannot run."""

import copy
import functools
import importlib
import importlib.util
import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import assert_close, assert_same_step, picture, small_model, with_engine
from kernel_operations import OPERATIONS, Case, check

from efficient_densenet import DenseBlock
from efficient_densenet.engines import dispatch as engines
from efficient_densenet.engines import kernels
from efficient_densenet.engines.kernels import portable
from efficient_densenet.engines.kernels.numba_cpu import openmp as native
from efficient_densenet.memory import tensor_peak

numba = pytest.importorskip("numba", reason="the compiled kernels are made by Numba")
if not native.available():
    pytest.skip("this PyTorch came without what the compiled kernels call", allow_module_level=True)
compiled = importlib.import_module("efficient_densenet.engines.kernels.numba_cpu.operations")
loops = importlib.import_module("efficient_densenet.engines.kernels.numba_cpu.loops")
check = functools.partial(check, compiled)


@pytest.fixture(params=[5, 256])
def tile(request, monkeypatch):
    monkeypatch.setattr(compiled, "TILE", request.param)


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("channels", "width"), [(1, 20), (2, 20), (5, 48), (300, 16)])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 1, 7), (1, 9, 7), (2, 5, 13), (5, 2, 2)])
def test_every_operation(operation, shape, channels, width, dtype):
    if "pooled" in operation and 1 in shape[1:]:
        return  # too small to pool
    case = Case(shape, channels, width)
    if dtype == torch.float32:
        check(operation, case)
        return
    ours, theirs = (OPERATIONS[operation](each, case.truth()) for each in (compiled, portable))
    for found, expected in zip(ours, theirs, strict=True):
        assert_close(found, expected, 1e-13)


@pytest.mark.parametrize("avx512f", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_products_of_any_size_with_few_registers_and_many(monkeypatch, avx512f, dtype):
    with monkeypatch.context() as patched:
        patched.setattr("llvmlite.binding.get_host_cpu_features", lambda: {"avx512f": avx512f})
        spec = importlib.util.spec_from_file_location(loops.__name__, loops.__file__)
        fresh = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(fresh)
    product, chance, width = fresh._product, np.random.default_rng(0), fresh.PANEL_BYTES // dtype().itemsize
    made = numba.njit(lambda *given: product(*given))
    breadths = [1, *(panels * width + some for panels in range(1, 8) for some in (-3, 0))]
    for case, breadth in enumerate(breadths * 2):
        height, count, turned, packed, add = (int(chance.integers(most)) for most in (110, 300, 2, 2, 2))
        height, count, panels = height + 1, count + 1, -(-breadth // width)
        a = chance.standard_normal((height + fresh.ROWS, count)).astype(dtype)
        b = chance.standard_normal((count, panels * width)).astype(dtype)
        c = chance.standard_normal((height + fresh.ROWS, breadth + 5)).astype(dtype)
        expected = c.astype(np.float64)
        expected[:height, :breadth] *= add
        expected[:height, :breadth] += a[:height].astype(np.float64) @ b[:, :breadth].astype(np.float64)
        given = np.ascontiguousarray(a.T if turned else a), c, b
        if packed:
            given = *given[:2], np.ascontiguousarray(b.reshape(count, panels, width).swapaxes(0, 1))
        of_a, of_c, of_b = (each.ctypes.data for each in given)
        steps = (1, len(a)) if turned else (count, 1)
        line_b = 0 if packed else b.shape[1]
        made(height, breadth, count, of_a, *steps, of_b, line_b, bool(add), of_c, c.shape[1], dtype(0))
        bound = 4 * np.finfo(dtype).eps * (count + 1) ** 0.5
        assert np.abs(c - expected).max() <= bound * max(1, np.abs(expected).max()), (case, breadth)


GUARDED = """
import ctypes, mmap, sys
import torch
from efficient_densenet.engines.kernels import scratch
from efficient_densenet.engines.kernels.numba_cpu import operations as compiled
from kernel_operations import OPERATIONS, Case

libc = ctypes.CDLL(None)
libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
kept = []

def room(name, size, dtype, device):
    wanted, page = size * dtype.itemsize, mmap.PAGESIZE
    within = -(-wanted // page) * page
    memory = mmap.mmap(-1, within + 64 * page)
    kept.append(memory)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    assert libc.mprotect(whole.data_ptr() + within, 64 * page, 0) == 0
    return whole[within - wanted : within].view(dtype).fill_(float("nan"))

scratch.room = room
torch.set_num_threads(1)
for operation, made in OPERATIONS.items():
    for rows in (1, 12, 20, 36, 98):
        for channels, width in ((2, 17), (48, 64), (200, 48), (300, 40)):
            case = Case((1, 2, 2 * rows) if "pooled" in operation else (1, 1, rows), channels, width)
            print(operation, rows, channels, width, flush=True)
            made(compiled, case)
print("all")
"""


def test_nothing_is_read_or_written_beyond_scratch():
    """Behind it lies a page that nobody may touch."""
    done = subprocess.run(
        [sys.executable, "-c", GUARDED],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, (done.stdout.splitlines()[-1:], done.stderr)
    assert done.stdout.endswith("all\n")


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("operation", [name for name in OPERATIONS if "backward" in name])
def test_the_first_gradient_takes_the_place_of_what_was_pending(operation):
    check(operation, Case((2, 5, 7), 9, 16, overwrite=True))


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize(
    "operation", [name for name in OPERATIONS if name.startswith(("conv", "pooled")) and name.endswith("backward")]
)
def test_a_weight_that_does_not_learn(operation):
    case = Case((2, 5, 7), 9, 16)
    case.needs_grad_weight = False
    check(operation, case)


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("dilation", [1, 2, 3])
@pytest.mark.parametrize("shape", [(2, 9), (3, 2), (2, 5, 13), (2, 4, 3, 5), (1, 7, 2, 3)])
@pytest.mark.parametrize("operation", ["conv3x3_forward", "conv3x3_forward_with_statistics", "conv3x3_backward"])
def test_signals_volumes_and_dilation(operation, shape, dilation, first):
    case = Case(shape, 9, 16, overwrite=first)
    case.dilation = dilation
    check(operation, case)


@pytest.fixture
def many_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("many_threads", "tile")
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(
    ("shape", "dilation"), [((9, 24), 1), ((17, 6, 5), 1), ((23, 6, 5), 2), ((7, 6, 4, 5), 1), ((13, 5, 4, 5), 2)]
)
def test_more_threads_than_pictures_or_processors(operation, shape, dilation, monkeypatch):
    ran = []
    run = native.run
    monkeypatch.setattr(native, "run", lambda program, threads, job: ran.append(threads) or run(program, threads, job))
    case = Case(shape, 6, 8)
    case.dilation = dilation
    check(operation, case)
    if compiled.TILE == 5 and "affine" not in operation and "pooled" not in operation:
        assert max(ran) == 4


@pytest.mark.usefixtures("many_threads")
def test_rows_that_neighbours_make_too_stay_few():
    """Where a thread has few more rows than those that its neighbours need of them, there are fewer threads."""
    case = Case((1, 16, 16, 16), 4, 8)
    kernel = case.weight3x3.flatten(1).shape[1] // 4 * 8
    held = tensor_peak(lambda: compiled.conv3x3_forward(case.input, case.weight3x3, case.shape))
    beyond = 16 * 16 + 16 + 1
    assert held <= 4 * (4096 * 8 + 3 * (256 * (4 + kernel) + 2 * beyond * kernel) + 2 * kernel * 4)


SMALL_TEAM = """
import torch
from helpers import assert_same_step, picture, small_model, with_engine
from efficient_densenet.engines.kernels import compiled, native
torch.set_num_threads(4)
asked, run = [], native.run
native.run = lambda program, threads, job: asked.append(threads) or run(program, threads, job)
plain = small_model("bc", efficient=False)
assert_same_step(with_engine(plain, "shared"), plain, picture("bc", 32))
assert max(asked) == 4
"""


def test_a_team_may_be_smaller_than_it_was_asked_for():
    environment = {**os.environ, "OMP_THREAD_LIMIT": "2", "PYTHONPATH": os.path.dirname(__file__)}
    subprocess.run([sys.executable, "-c", SMALL_TEAM], env=environment, check=True)


def test_matrices_with_rows_side_by_side():
    case = Case((1, 5, 4), 6, 16)
    case.values, case.grad_output = (matrix.t().contiguous().t() for matrix in (case.values, case.grad_output))
    check("batch_statistics", case)
    check("conv1x1_backward", case)


def test_matrices_with_rows_side_by_side_are_copied_once():
    values = torch.randn(64, 5000).t()
    held = tensor_peak(lambda: compiled.batch_statistics(values))
    assert values.nbytes <= held <= 1.1 * values.nbytes


@pytest.mark.parametrize("operation", ["batch_statistics", "conv1x1_forward_with_statistics"])
def test_variance_of_values_far_from_zero(operation):
    case = Case((50, 9, 7), 16, 16)
    case.values = 1000 + 0.01 * case.values
    case.scale, case.shift, case.weight1x1 = torch.ones_like(case.scale), 0 * case.shift, torch.eye(16)
    *_, variance = OPERATIONS[operation](compiled, case)
    assert_close(variance, case.values.double().var(0, correction=0).float(), 1e-3 * 1e-4)


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name != "batch_statistics"])
def test_not_finite_values_go_where_portable_lets_them(operation):
    """Those inside the picture: at its border they meet the zeros around the gradient, too, and spoil all of the 3×3
    weights of their channel, not just most of them."""
    case = Case((1, 8, 8), 6, 16)
    case.values[9, 1], case.values[30, 4] = math.nan, math.inf
    ours, theirs = (OPERATIONS[operation](each, case) for each in (compiled, portable))
    for found, expected in zip(ours, theirs, strict=True):
        assert torch.equal(found.isfinite(), expected.isfinite())


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name.startswith("conv")])
def test_convolutions_in_another_precision_are_left_to_portable(operation):
    case = Case((1, 8, 8), 6, 16)
    case.values, case.grad_accum = case.values.double(), case.grad_accum.double()
    case.scale, case.shift, case.grad_scale = case.scale.double(), case.shift.double(), case.grad_scale.double()
    ours, theirs = (OPERATIONS[operation](each, case) for each in (compiled, portable))
    for found, expected in zip(ours, theirs, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name.startswith("conv")])
def test_large_weights_are_left_to_portable(operation, monkeypatch):
    monkeypatch.setattr(compiled, "WEIGHT_BYTES", 5 * 16 * 4)
    case = Case((1, 8, 8), 6, 16)
    ours, theirs = (OPERATIONS[operation](each, case) for each in (compiled, portable))
    for found, expected in zip(ours, theirs, strict=True):
        assert torch.equal(found, expected)


def test_what_they_are_used_for():
    for dtype in (torch.float32, torch.float64):
        assert kernels.kernels_for(torch.empty(2, 2, dtype=dtype)) is compiled
    for other in (torch.empty(2, 2, dtype=torch.bfloat16), torch.empty(2, 2, device="meta"), _subclass()):
        assert kernels.kernels_for(other) is portable


def _subclass():
    class Wrapped(torch.Tensor):
        pass

    return torch.empty(2, 2).as_subclass(Wrapped)


def test_without_numba_the_portable_kernels_are_used_without_a_word(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not kernels._has_numba.__wrapped__()


def test_without_what_pytorch_brings_the_portable_kernels_are_used_without_a_word(monkeypatch):
    monkeypatch.setattr(native, "available", native.available.__wrapped__)
    monkeypatch.setattr(native, "functions", lambda: native._library().no_such_function)
    assert not kernels._has_numba.__wrapped__()


def test_a_numba_that_does_not_work_is_told_of(monkeypatch):
    def fail(*args, **kwargs):
        raise TypeError("no such argument")

    monkeypatch.setattr(loops, "made", fail)
    with pytest.warns(UserWarning, match="Numba cannot run here .no such argument.*slower"):
        assert not kernels._has_numba.__wrapped__()


def test_programs_are_made_where_none_can_be_kept(monkeypatch):
    cfunc = loops.cfunc

    def nowhere_to_keep(signature, cache=False, **how):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return cfunc(signature, **how)

    monkeypatch.setattr(loops, "cfunc", nowhere_to_keep)
    monkeypatch.setattr(loops, "made", loops.made.__wrapped__)
    check("batch_statistics", Case((2, 5, 7), 9, 16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_features_in_float32_and_convolutions_in_a_lower_precision(dtype):
    """As autocast has it where a block's input is float32."""
    plain = DenseBlock(3, 8, 4, efficient=False)
    ours, x = copy.deepcopy(plain), torch.randn(4, 8, 9, 7)
    ours.engine = engines.parse("shared")
    assert kernels.kernels_for(x) is compiled
    for block in (ours, plain):
        with torch.autocast("cpu", dtype):
            found = block(x)
        found.float().square().sum().backward()
    for (name, found), expected in zip(ours.named_parameters(), plain.parameters(), strict=True):
        assert found.grad is not None, name
        assert_close(found.grad, expected.grad, 0.05)


def test_a_saved_tensor_may_come_back_with_its_rows_side_by_side():
    plain = small_model("bc", efficient=False)
    ours = with_engine(plain, "shared")

    def pack(tensor):
        return tensor.t().contiguous() if tensor.dim() == 2 else tensor

    def unpack(tensor):
        return tensor.t() if tensor.dim() == 2 else tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        assert_same_step(ours, plain, picture("bc"))
