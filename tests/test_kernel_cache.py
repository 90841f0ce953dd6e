"""Compiled kernels on disk: whatever happened to the files, the right kernels run, and the next process finds them."""

import ctypes
import os
import random
import shutil
import signal
import stat
from pathlib import Path

import pytest
import torch
from children import Child, in_child
from helpers import kernel_modules
from kernel_operations import check

from efficient_densenet.kernels import disk_cache
from efficient_densenet.kernels.comparison import Case
from efficient_densenet.kernels.numba_cpu.host import openmp

pytest.importorskip("numba", reason="the kernels are compiled by Numba")
if not openmp.available():
    pytest.skip("this PyTorch has no GNU OpenMP threads", allow_module_level=True)
operations, launch, compilation, numba_kernels, intrinsics, memory = kernel_modules(
    "numba_cpu", "operations", "launch", "compilation", "kernels", "intrinsics", "memory"
)
KERNEL = numba_kernels.batch_norm_grad_input  # the smallest
NAME = "batch_norm_grad_input"


def load(dtype=torch.float32):
    """Whether the kernel was found on disk, once it has computed the right numbers."""
    is_stored = compilation.is_stored(KERNEL, dtype)
    address = compilation.load_or_compile.__wrapped__(KERNEL, dtype, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "address", lambda kernel, dtype: address)
        case = Case((2, 5, 7), 9, 16)
        check(operations, NAME, case if dtype == torch.float32 else case.in_float64())
    return is_stored


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A directory with the kernel."""
    directory = tmp_path_factory.mktemp("filled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUMBA_CACHE_DIR", str(directory))
        assert not load()
    return directory


@pytest.fixture
def cache(filled, tmp_path, monkeypatch):
    """A copy of `filled` that is used: the directory of the files."""
    shutil.copytree(filled, tmp_path / "cache")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    (directory,) = (tmp_path / "cache").iterdir()
    return directory


def test_a_damaged_file_is_compiled_again_and_replaced(cache):
    (file,) = cache.iterdir()
    assert load()
    os.truncate(file, file.stat().st_size // 2)
    assert not load()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert in_child(load) == 1


def test_any_flipped_bit_and_any_length_is_noticed(cache):
    rng, key, content = random.Random(0), b"of a kernel", bytes(range(256)) * 9
    disk_cache.store("any", key, content)
    (file,) = cache.glob("any-*")
    whole = file.read_bytes()
    for _ in range(200):
        changed, bit = bytearray(whole), rng.randrange(8 * len(whole))
        changed[bit // 8] ^= 1 << bit % 8
        for damaged in (changed, whole[: rng.randrange(len(whole))], whole + b"\0"):
            file.write_bytes(damaged)
            assert disk_cache.load("any", key) is None
    file.write_bytes(whole)
    assert disk_cache.load("any", key) == content
    shutil.copy(file, disk_cache._file(cache, "any", b"of another"))
    assert disk_cache.load("any", b"of another") is None


def make_link(directory):
    directory.rename(directory.with_name("elsewhere"))
    directory.symlink_to("elsewhere")


def give_away(directory):
    """Let the directory seem another user's."""
    owner = os.geteuid()
    directory.rename(directory.with_name(f"efficient_densenet-{owner + 1}"))
    os.geteuid = lambda: owner + 1


@pytest.mark.parametrize("change", [lambda d: d.chmod(0o770), lambda d: d.chmod(0o707), make_link, give_away])
def test_a_directory_that_others_may_write_is_not_used(cache, change, monkeypatch):
    monkeypatch.setattr(os, "geteuid", os.geteuid)  # which is restored
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    cache.parent.chmod(0o777)  # the directory above may be shared
    assert disk_cache.directory() == cache
    disk_cache._private_directory.cache_clear()
    change(cache)
    with pytest.warns(UserWarning, match=r"is a [dl].*, where a directory is needed that user \d+ alone"):
        disk_cache.store("any", b"key", b"content")
    assert disk_cache.load("any", b"key") is None  # without a second warning


def no_home():
    raise RuntimeError("Could not determine home directory.")


def test_where_the_directory_is(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "numba"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert disk_cache.directory().parent == tmp_path / "numba"
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    assert disk_cache.directory().parent == tmp_path / "xdg"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert disk_cache.directory().parent == tmp_path / ".cache"
    monkeypatch.setattr(disk_cache.Path, "home", no_home)
    assert disk_cache.directory() is None
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file"))
    assert disk_cache.directory() is None
    monkeypatch.delattr(os, "geteuid")  # as where there are no Unix users
    assert disk_cache.directory() is None


def test_processes_that_compile_at_once_and_one_is_killed_while_it_writes(cache, monkeypatch):
    def killed(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    (file,) = cache.iterdir()
    file.unlink()
    others = [Child(load) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(disk_cache.os, "replace", killed)
        victim = Child(load)
    assert victim.wait() == -signal.SIGKILL
    assert {child.wait() for child in others} <= {0, 1}
    (left,) = cache.glob("*.tmp")
    assert in_child(load) == 1
    assert left.exists()


def test_the_key_depends_on_every_source_file(tmp_path, monkeypatch):
    package = Path(compilation.__file__).parents[1]
    shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("__pycache__", "host"))
    for name in ("activations.py", "interface.py"):
        shutil.copy(package.parent / name, tmp_path)
    copied = sorted(tmp_path.rglob("*.py"))
    monkeypatch.setattr(compilation.importlib.resources, "files", lambda name: tmp_path.joinpath(*name.split(".")[2:]))
    hashes = {compilation._hash_of_sources.__wrapped__(), compilation._hash_of_sources()}
    for file in copied:
        file.write_text("# changed\n")
        hashes.add(compilation._hash_of_sources.__wrapped__())
    assert len(hashes) == len(copied) + 1 > 10


@pytest.mark.parametrize("name", ["_hash_of_sources", "features"])
def test_kernels_of_other_sources_and_processors_are_others(name, cache, monkeypatch):
    assert compilation.is_stored(KERNEL, torch.float32)
    monkeypatch.setattr(compilation, name, lambda: ("another",))
    assert not compilation.is_stored(KERNEL, torch.float32)


def scrambling_kernel(factor):
    """A kernel that calls a function which is too long to be inlined, and whose name says nothing of the factor."""
    rounds = [f"    x = (x ^ (x >> 7)) * {factor}" for _ in range(100)]
    kernel = ["def kernel(address, x, zero):", "    elements(address, 0, 1, zero)[0] = scramble(x)"]
    functions = {"elements": memory.elements, "__name__": __name__}
    exec(compile("\n".join(["def scramble(x):", *rounds, "    return x % 90", *kernel]), __file__, "exec"), functions)
    functions["scramble"] = intrinsics.compiled(functions["scramble"])
    functions["kernel"].__name__ = f"scramble_by_{factor}"
    return compilation.subroutine(2)(functions["kernel"])


def scramble(factor, from_disk):
    kernel, result = scrambling_kernel(factor), torch.empty(1)
    assert compilation.is_stored(kernel, torch.float32) == from_disk
    signature = ctypes.CFUNCTYPE(None, ctypes.c_ssize_t, ctypes.c_ssize_t, ctypes.c_float)
    signature(compilation.compile_kernel(kernel, torch.float32))(result.data_ptr(), 12345, 0.0)
    return int(result.item())


def test_kernels_that_processes_compiled_apart_run_together(tmp_path, monkeypatch):
    """Forks count compilations and types alike, so that functions of their kernels have one name and different code."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    results = {factor: in_child(lambda factor=factor: scramble(factor, from_disk=False)) for factor in (3, 5)}
    assert len({*results.values()} - {99}) == 2

    def differ(order):
        return [scramble(each, from_disk=True) for each in order] != [results[each] for each in order]

    assert [in_child(lambda order=order: differ(order)) for order in ((3, 5), (5, 3))] == [0, 0]
