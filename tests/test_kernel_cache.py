"""Compiled kernels on disk: whatever happened to the files, the right kernels run, and the next process finds them."""

import functools
import importlib
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from children import Child, in_child
from helpers import assert_same_step, random_images, small_model, with_engine
from kernel_operations import Case, check

import efficient_densenet
from efficient_densenet.engines import kernels
from efficient_densenet.engines.kernels.numba_cpu import openmp

numba = pytest.importorskip("numba", reason="the kernels are compiled by Numba")
if not openmp.available():
    pytest.skip("this PyTorch has no GNU OpenMP threads", allow_module_level=True)
operations, compilation, numba_kernels, disk_cache, intrinsics, processor = (
    importlib.import_module(f"efficient_densenet.engines.kernels.numba_cpu.{name}")
    for name in ("operations", "compilation", "kernels", "disk_cache", "intrinsics", "processor")
)
check = functools.partial(check, operations)
KERNEL = numba_kernels.batch_norm_grad_input  # the smallest
NAME = "batch_norm_grad_input"


def load(dtype=torch.float32):
    """How often the kernel was found on disk, once it has computed the right numbers."""
    compiled = compilation.compile_kernel.__wrapped__(KERNEL, dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operations, "_address", lambda kernel, dtype: compiled.address)
        check(NAME, Case((2, 5, 7), 9, 16) if dtype == torch.float32 else Case((2, 5, 7), 9, 16).in_float64())
    return compiled.cache_hits


def load_in_another_process(dtype=torch.float32):
    status = in_child(lambda: load(dtype))
    assert status in (0, 1)
    return status


def use_directory(directory, monkeypatch):
    monkeypatch.setattr(numba.core.config, "CACHE_DIR", str(directory))


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A directory with the kernel for two dtypes."""
    directory = tmp_path_factory.mktemp("filled")
    with pytest.MonkeyPatch.context() as patch:
        use_directory(directory, patch)
        assert load(torch.float32) == load(torch.float64) == 0
    return directory


@pytest.fixture
def cache(filled, tmp_path, monkeypatch):
    """A copy of `filled` that is used: the directory of the files."""
    shutil.copytree(filled, tmp_path / "cache")
    use_directory(tmp_path / "cache", monkeypatch)
    (directory,) = (tmp_path / "cache").glob("*/*")
    return directory


def file_of(cache, dtype=torch.float32):
    """The file that is touched when the kernel is loaded."""
    for file in cache.iterdir():
        os.utime(file, (0, 0))
    assert load(dtype) == 1
    (file,) = (file for file in cache.iterdir() if file.stat().st_mtime > 0)
    return file


def flip_bit(file, bit):
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def swap(file):
    """Put the file of float64 in its place."""
    (other,) = (each for each in file.parent.iterdir() if each != file)
    shutil.copy(other, file)


def make_fifo(file):
    file.unlink()
    os.mkfifo(file)


def make_link(file):
    elsewhere = file.rename(file.with_suffix(".elsewhere"))
    file.symlink_to(elsewhere)


DAMAGE = {
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "short of a byte": lambda file: os.truncate(file, file.stat().st_size - 1),
    "a byte more": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "empty": lambda file: os.truncate(file, 0),
    "a flipped bit": lambda file: flip_bit(file, 8 * 5000),
    "a flipped bit of the checksum": lambda file: flip_bit(file, 7),
    "another kernel's": swap,
    "another format": lambda file: file.write_bytes(b"\x80\x05."),
    "removed": Path.unlink,
    "a FIFO": make_fifo,
    "a symbolic link": make_link,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files_are_compiled_again_and_replaced(cache, damage):
    file = file_of(cache)
    whole = file.read_bytes()
    DAMAGE[damage](file)
    assert load() == 0
    assert stat.S_ISREG(file.lstat().st_mode)
    assert len(file.read_bytes()) == pytest.approx(len(whole), rel=0.01)
    assert load_in_another_process() == 1


def test_any_flipped_bit_and_any_length_is_noticed(cache, monkeypatch):
    file = file_of(cache)
    whole = file.read_bytes()
    unpickled = []
    monkeypatch.setattr(disk_cache.pickle, "loads", unpickled.append)
    target = numba.core.registry.cpu_target.target_context
    signature = KERNEL.signature(*[torch.empty(0).numpy().dtype] * 3)
    rng = random.Random(0)
    for _ in range(200):
        file.write_bytes(whole)
        flip_bit(file, rng.randrange(8 * len(whole)))
        assert disk_cache.open_cache(KERNEL.function).load_overload(signature, target) is None
        file.write_bytes(whole[: rng.randrange(len(whole))])
        assert disk_cache.open_cache(KERNEL.function).load_overload(signature, target) is None
    assert not unpickled
    file.write_bytes(whole)
    disk_cache.open_cache(KERNEL.function).load_overload(signature, target)
    assert len(unpickled) == 1


def test_a_file_that_no_longer_unpickles_is_replaced(cache, monkeypatch):
    """As after an update of a library whose version is not part of the key."""
    with monkeypatch.context() as patch:
        patch.setattr(disk_cache, "dumps", lambda data: b"no pickle")
        file_of(cache).unlink()
        assert load() == 0
    assert load() == 0
    assert load_in_another_process() == 1


def test_the_fast_kernels_stay_when_their_files_are_damaged(cache, monkeypatch):
    """Here those that are tried before anything runs."""
    compiled = []
    monkeypatch.setattr(
        numba_kernels,
        "compile_kernel",
        lambda kernel, dtype: compiled.append(compilation.compile_kernel.__wrapped__(KERNEL, dtype)),
    )
    os.truncate(file_of(cache), 100)
    assert kernels._has_numba.__wrapped__()
    assert [each.cache_hits for each in compiled] == [0, 1]


def test_files_and_their_directory_are_the_users_alone(cache):
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in cache.iterdir()} == {0o600}


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777])
def test_a_directory_that_others_may_write_is_not_used(cache, mode):
    before = {file.name: file.read_bytes() for file in cache.iterdir()}
    cache.chmod(mode)
    with pytest.warns(UserWarning, match=f"{cache} is a d.* that user {os.geteuid()} alone.*NUMBA_CACHE_DIR") as caught:
        assert load() == 0
    assert len(caught) == 1
    assert load() == 0  # without a second warning
    assert {file.name: file.read_bytes() for file in cache.iterdir()} == before


def test_a_directory_of_another_user_is_not_used(cache, monkeypatch):
    owner = os.geteuid()
    monkeypatch.setattr(disk_cache.os, "geteuid", lambda: owner + 1)
    directory = cache.rename(cache.with_name(f"kernels-{owner + 1}"))
    with pytest.warns(UserWarning, match=f"of user {owner}, where one is needed that user {owner + 1} alone"):
        assert load() == 0
    assert len(list(directory.iterdir())) == 2


def test_a_link_to_a_directory_is_not_used(cache):
    cache.rename(cache.with_name("elsewhere"))
    cache.symlink_to("elsewhere")
    with pytest.warns(UserWarning, match="is a l.*NUMBA_CACHE_DIR"):
        assert load() == 0


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_may_write_is_replaced(cache, mode):
    file = file_of(cache)
    file.chmod(mode)
    with pytest.warns(UserWarning, match="the kernel is compiled again"):
        assert load() == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert load_in_another_process() == 1


def test_the_directory_above_may_be_shared(cache):
    """Whoever replaces the user's directory there owns what takes its place."""
    cache.parent.chmod(0o777)
    assert load() == 1


def test_kernels_are_compiled_where_no_directory_is_writable(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    use_directory(tmp_path / "file" / "cache", monkeypatch)
    implementation = disk_cache.FunctionCache._impl_class
    monkeypatch.setattr(implementation, "_locator_classes", implementation._locator_classes[:1])  # CACHE_DIR's
    assert load() == load() == 0


def test_a_read_only_cache_is_read(cache):
    cache.chmod(0o500)
    assert load_in_another_process(torch.float32) == load_in_another_process(torch.float64) == 1


def test_a_full_disk_costs_the_file_only(cache, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    file_of(cache).unlink()
    with monkeypatch.context() as patch:
        patch.setattr(disk_cache.os, "replace", full)
        assert load() == 0
    assert len(list(cache.iterdir())) == 1
    assert load() == 0
    assert load() == 1


def test_processes_that_compile_at_once_and_one_is_killed_while_it_writes(cache, monkeypatch):
    def killed(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    file_of(cache).unlink()
    others = [Child(load) for _ in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(disk_cache.os, "replace", killed)
        victim = Child(load)
    assert victim.wait() == -signal.SIGKILL
    assert {child.wait() for child in others} <= {0, 1}
    (left,) = cache.glob("*.tmp")
    assert load_in_another_process() == 1
    os.utime(left, (time.time() - 7200,) * 2)
    file_of(cache).unlink()
    assert load() == 0
    assert not left.exists()


def test_versions_that_share_a_directory_keep_each_others_files(cache, monkeypatch):
    """So many files of a kernel stay, those used last."""
    with monkeypatch.context() as patch:
        patch.setattr(disk_cache, "_hash_of_sources", lambda: "other sources")
        assert [load(), load()] == [0, 1]
    assert load() == 1
    files = list(cache.iterdir())
    assert len(files) == 3
    older = [cache / f"{NAME}-{i:032}.kernel" for i in range(disk_cache.FILES_PER_KERNEL)]
    for i, file in enumerate(older):
        file.touch()
        os.utime(file, (i, i))
    (cache / "gemm-0.kernel").touch()
    file_of(cache).unlink()
    for i, file in enumerate([*older, *(file for file in files if file.exists())]):
        os.utime(file, (i, i))
    assert load() == 0
    assert [file.exists() for file in older] == [i >= 3 for i in range(len(older))]
    assert all(file.exists() for file in files)
    assert (cache / "gemm-0.kernel").exists()


def test_the_key_depends_on_every_source_file(tmp_path, monkeypatch):
    folder = Path(disk_cache.__file__).parent
    copied = [Path(shutil.copy(source, tmp_path)) for source in folder.glob("*.py")]
    monkeypatch.setattr(disk_cache.importlib.resources, "files", lambda package: tmp_path)
    hashes = [disk_cache._hash_of_sources.__wrapped__()]
    assert hashes[0] == disk_cache._hash_of_sources()
    for file in copied:
        with file.open("a") as source:
            source.write("# changed\n")
        hashes.append(disk_cache._hash_of_sources.__wrapped__())
    assert len(copied) > 10
    assert len(set(hashes)) == len(hashes)


def test_the_key_depends_on_the_features_of_the_processor_that_are_used(cache, monkeypatch):
    assert load() == 1
    monkeypatch.setattr(disk_cache, "features", lambda: ("another",))
    assert load() == 0
    assert load() == 1


COMPILES = """
import torch
from efficient_densenet.engines.kernels.numba_cpu import compilation, kernels
assert kernels.__file__.startswith(FOLDER), kernels.__file__
print(compilation.compile_kernel(kernels.batch_norm_grad_input, torch.float32).cache_hits)
"""


@pytest.mark.exhaustive
def test_the_next_process_uses_the_repaired_file_until_a_source_changes(tmp_path):
    package = Path(efficient_densenet.__file__).parent
    shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    folder = tmp_path / package.name / "engines" / "kernels" / "numba_cpu"

    def cache_hits():
        command = [sys.executable, "-W", "error", "-c", f"FOLDER = {str(tmp_path)!r}\n{COMPILES}"]
        environment = {key: value for key, value in os.environ.items() if key != "NUMBA_CACHE_DIR"}
        environment["PYTHONPATH"] = os.pathsep.join((str(tmp_path), *sys.path))
        completed = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
        return int(completed.stdout)

    assert cache_hits() == 0
    (file,) = folder.glob("__pycache__/*/*.kernel")
    os.truncate(file, 1000)
    assert cache_hits() == 0
    assert cache_hits() == 1
    with (folder / "affine.py").open("a") as source:
        source.write("# changed\n")
    assert cache_hits() == 0
    assert len(list(file.parent.iterdir())) == 2


def training_step():
    """The times that a kernel was found on disk or not, once a training step has had the right numbers."""
    compiled = []

    def compile_kernel(kernel, dtype, operand=None):
        compiled.append(compilation.compile_kernel(kernel, dtype, operand))
        return compiled[-1]

    compilation.compile_kernel.cache_clear()
    for cached in (operations._address, operations._gemm):
        cached.cache_clear()
    operations.compile_kernel = compile_kernel
    plain = small_model("bc", efficient=False)
    assert_same_step(with_engine(plain, "shared"), plain, random_images("bc"))
    hits = {each.cache_hits for each in compiled}
    return {frozenset({0}): 10, frozenset({1}): 11, frozenset({0, 1}): 12}[frozenset(hits)]


@pytest.mark.exhaustive
def test_training_with_every_file_damaged(tmp_path, monkeypatch):
    use_directory(tmp_path, monkeypatch)
    assert Child(training_step, timeout=300).wait() == 10
    (directory,) = tmp_path.glob("*/*")
    rng, files = random.Random(0), sorted(directory.iterdir())
    assert len(files) >= 8
    assert Child(training_step).wait() == 11
    contents = [file.read_bytes() for file in files]
    for i, file in enumerate(files):
        damage = rng.choice([name for name in DAMAGE if name != "another kernel's"])
        file.write_bytes(contents[i - 1]) if i % 3 == 0 else DAMAGE[damage](file)
    assert Child(training_step, timeout=300).wait() == 10
    assert Child(training_step).wait() == 11


def scaled(factor, then=None):
    """A compiled function that encloses a number, and a function if there is one."""
    if then is None:
        return intrinsics.compiled(lambda x: x * factor)
    return intrinsics.compiled(lambda x: then(x) * factor)


def test_functions_that_enclose_different_values_have_different_names():
    """Numba names machine code by them: what several processes compiled is linked into one."""
    buffers = [intrinsics.stack_buffer(count) for count in (16, 32, 16)]
    inner = [scaled(2), scaled(3), scaled(2)]
    for made in (inner, [scaled(1, then) for then in inner], [scaled(1, then) for then in buffers]):
        first, other, again = (function.py_func.__qualname__ for function in made)
        assert first == again != other


SUM_OF_ONES = """
import sys
import numpy as np
import torch
from efficient_densenet.engines.kernels.numba_cpu import compilation, gemm
for name in sys.argv[1:]:
    kernel = compilation.compile_kernel(getattr(gemm, name), torch.float32)
    one = np.float32(1) if name == "gemm" else np.array([0x3F803F80], np.uint32).view(np.float32)[0]
    a, b, c = (np.full((256, 256), value, np.float32) for value in (one, one, 0))
    a, b = a.view(np.uint32), b.view(np.uint32)
    a[:] = b[:] = np.array([one]).view(np.uint32)
    kernel.ctypes(48, 48, 32, a.ctypes.data, 256, 1, b.ctypes.data, 256, 0, c.ctypes.data, 256, np.float32(0))
    assert (c[:48, :48] == (32 if name == "gemm" else 64)).all(), (name, c[:2, :20])
    print(kernel.cache_hits)
"""


@pytest.mark.skipif(not processor.has("avx512_bf16"), reason="this processor has no AVX512-BF16")
def test_kernels_of_several_processes_are_linked_into_one(tmp_path):
    def run(*names):
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        command = [sys.executable, "-c", SUM_OF_ONES, *names]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stdout.split()

    assert run("gemm") == run("gemm_bfloat16") == ["0"]
    assert run("gemm", "gemm_bfloat16") == ["1", "1"]
    assert run("gemm_bfloat16", "gemm") == ["1", "1"]
