"""Compiled kernels on disk: whatever happened to the files, the right kernels run, and the next process finds them."""

import functools
import itertools
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from children import Child, in_child
from helpers import kernel_modules
from kernel_operations import check

import efficient_densenet
from efficient_densenet.kernels import disk_cache
from efficient_densenet.kernels.comparison import Case
from efficient_densenet.kernels.numba_cpu.host import openmp

pytest.importorskip("numba", reason="the kernels are compiled by Numba")
if not openmp.available():
    pytest.skip("this PyTorch has no GNU OpenMP threads", allow_module_level=True)
operations, launch, compilation, numba_kernels, intrinsics, memory = kernel_modules(
    "numba_cpu", "operations", "launch", "compilation", "kernels", "intrinsics", "memory"
)
check = functools.partial(check, operations)
KERNEL = numba_kernels.batch_norm_grad_input  # the smallest
NAME = "batch_norm_grad_input"


def load(dtype=torch.float32, name=NAME):
    """Whether the kernel was found on disk, once it has computed the right numbers."""
    compiled = compilation.load_or_compile.__wrapped__(getattr(numba_kernels, name), dtype, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "address", lambda kernel, dtype: compiled.address)
        check(name, Case((2, 5, 7), 9, 16) if dtype == torch.float32 else Case((2, 5, 7), 9, 16).in_float64())
    return compiled.from_disk


def load_in_another_process(dtype=torch.float32):
    status = in_child(lambda: load(dtype))
    assert status in (0, 1)
    return status


def use_directory(directory, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(directory))


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
    (directory,) = (tmp_path / "cache").iterdir()
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


def test_any_flipped_bit_and_any_length_is_noticed(cache):
    whole = file_of(cache).read_bytes()
    key = b"of a kernel"
    content = whole[disk_cache._CHECKSUM_BYTES :]
    disk_cache.store("any", key, content)
    (file,) = cache.glob("any-*")
    whole, rng = file.read_bytes(), random.Random(0)
    for _ in range(200):
        file.write_bytes(whole)
        flip_bit(file, rng.randrange(8 * len(whole)))
        assert disk_cache.load("any", key) is None
        file.write_bytes(whole[: rng.randrange(len(whole))])
        assert disk_cache.load("any", key) is None
    file.write_bytes(whole)
    assert disk_cache.load("any", key) == content
    assert disk_cache.load("any", b"of another") is None


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
    directory = cache.rename(cache.with_name(f"efficient_densenet-{owner + 1}"))
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
    assert load() == load() == 0


def test_the_users_cache_directory_is_the_default(tmp_path, monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert [load(), load()] == [False, True]
    assert len(list((tmp_path / "xdg").glob("*/*.kernel"))) == 1
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert [load(), load()] == [False, True]
    assert len(list((tmp_path / ".cache").glob("*/*.kernel"))) == 1


def no_home():
    raise RuntimeError("Could not determine home directory.")


def test_kernels_are_compiled_for_a_user_without_a_home(monkeypatch):
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(disk_cache.Path, "home", no_home)
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
        patch.setattr(compilation, "_hash_of_sources", lambda: "other sources")
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


def test_threads_get_one_kernel(monkeypatch):
    compilation.load_or_compile.cache_clear()
    linked, begin, compiled = [], threading.Barrier(4), compilation.CompiledKernel

    def link(*arguments, **settings):
        time.sleep(0.05)  # while others come
        linked.append(compiled(*arguments, **settings))
        return linked[-1]

    def use():
        begin.wait()
        addresses.append(compilation.compile_kernel(KERNEL, torch.float32).address)

    monkeypatch.setattr(compilation, "CompiledKernel", link)
    addresses, threads = [], [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert addresses == [linked[0].address] * 4
    assert len(linked) == 1


def test_the_key_depends_on_every_source_file(tmp_path, monkeypatch):
    package = Path(compilation.__file__).parents[1]
    shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(package.parent / "activations.py", tmp_path)
    copied = sorted(tmp_path.rglob("*.py"))
    monkeypatch.setattr(compilation.importlib.resources, "files", lambda name: tmp_path.joinpath(*name.split(".")[2:]))
    hashes = [compilation._hash_of_sources.__wrapped__()]
    assert hashes[0] == compilation._hash_of_sources()
    for file in copied:
        with file.open("a") as source:
            source.write("# changed\n")
        hashes.append(compilation._hash_of_sources.__wrapped__())
    assert len(copied) > 10
    assert len(set(hashes)) == len(hashes)


def test_the_key_depends_on_the_features_of_the_processor_that_are_used(cache, monkeypatch):
    assert load() == 1
    monkeypatch.setattr(compilation, "features", lambda: ("another",))
    assert load() == 0
    assert load() == 1


COMPILES = """
import torch
from efficient_densenet.kernels.numba_cpu.compiler import compilation
from efficient_densenet.kernels.numba_cpu.kernels import kernels
assert kernels.__file__.startswith(FOLDER), kernels.__file__
print(int(compilation.compile_kernel(kernels.batch_norm_grad_input, torch.float32).from_disk))
"""


@pytest.mark.exhaustive
def test_the_next_process_uses_the_repaired_file_until_a_source_changes(tmp_path):
    package = Path(efficient_densenet.__file__).parent
    shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    folder = tmp_path / package.name / "kernels" / "numba_cpu" / "kernels"

    def cache_hits():
        command = [sys.executable, "-W", "error", "-c", f"FOLDER = {str(tmp_path)!r}\n{COMPILES}"]
        environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
        environment["PYTHONPATH"] = os.pathsep.join((str(tmp_path), *sys.path))
        completed = subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, text=True)
        return int(completed.stdout)

    assert cache_hits() == 0
    (file,) = tmp_path.glob("cache/*/*.kernel")
    os.truncate(file, 1000)
    assert cache_hits() == 0
    assert cache_hits() == 1
    with (folder / "affine.py").open("a") as source:
        source.write("# changed\n")
    assert cache_hits() == 0
    assert len(list(file.parent.iterdir())) == 2


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
    compiled = compilation.compile_kernel(scrambling_kernel(factor), torch.float32)
    assert compiled.from_disk == from_disk
    result = torch.empty(1)
    compiled.ctypes(result.data_ptr(), 12345, 0.0)
    return int(result.item())


def test_kernels_that_processes_compiled_apart_run_together(tmp_path, monkeypatch):
    """Forks count compilations and types alike, so that functions of their kernels have one name and different code."""
    use_directory(tmp_path, monkeypatch)
    results = {factor: in_child(lambda factor=factor: scramble(factor, from_disk=False)) for factor in (3, 5)}
    assert len({*results.values()} - {99}) == 2
    for order in ((3, 5), (5, 3)):
        assert (
            in_child(
                lambda order=order: [scramble(each, from_disk=True) for each in order] != [*map(results.get, order)]
            )
            == 0
        )


STEPS = """
import sys, hashlib, torch
from efficient_densenet import DenseNet
torch.set_num_threads(1)
for name in sys.argv[1:]:
    for small_inputs, bn_size, training in ((True, 4, True), (False, 0, True), (True, 4, False)):
        torch.manual_seed(0)
        dtype = getattr(torch, "float32" if name == "autocast" else name)
        arguments = dict(num_init_features=6, small_inputs=small_inputs, bn_size=bn_size, efficient="shared")
        model = DenseNet(4, (3, 2), **arguments).to(dtype).train(training)
        with torch.autocast("cpu", torch.bfloat16, enabled=name == "autocast"):
            output = model(torch.randn(2, 3, 32, 32, dtype=dtype))
        output.float().square().sum().backward()
        hashed = hashlib.sha256(output.detach().double().numpy().tobytes())
        for tensor in (*(p.grad for p in model.parameters()), *model.buffers()):
            assert torch.isfinite(tensor).all(), (name, small_inputs, bn_size, training)
            hashed.update(tensor.detach().double().numpy().tobytes())
        print(name, hashed.hexdigest())
"""


class Steps:
    """A process that trains in these dtypes, with kernels of a directory."""

    def __init__(self, directory, *dtypes):
        environment = os.environ | {"NUMBA_CACHE_DIR": str(directory)}
        command = [sys.executable, "-c", STEPS, *dtypes]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    def lines(self):
        """What it has printed at its end."""
        output, _ = self.process.communicate(timeout=600)
        assert self.process.returncode == 0
        return sorted(output.splitlines())


DTYPES = "float32", "bfloat16", "float64"


@pytest.fixture(scope="module")
def steps_with_empty_caches(tmp_path_factory):
    """Of each dtype by itself."""
    names = *DTYPES, "autocast"
    return {name: Steps(tmp_path_factory.mktemp("empty"), name).lines() for name in names}


@pytest.mark.exhaustive
@pytest.mark.parametrize("order", [*itertools.permutations(DTYPES), ("float32", "autocast", "float64")])
def test_steps_do_not_depend_on_who_compiled_what_before(order, steps_with_empty_caches, tmp_path):
    expected = sorted(line for name in order for line in steps_with_empty_caches[name])
    assert sorted(line for name in order for line in Steps(tmp_path, name).lines()) == expected
    for together in (order, order[::-1]):
        assert Steps(tmp_path, *together).lines() == expected
