"""Two runs in one directory: the second is told who is there, and nothing of the first is touched."""

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import socket
from pathlib import Path

import pytest
from forks import ForkedDemo, await_file, forked_demo
from samples import TINY, contents, demo, refused, same_run, write_cifar10, write_folder
from training import files, run_lock

WORDS = [*TINY, "--data", "cifar", "--batch_size", "45", "--recipe", "one_cycle", "--device", "cpu", "--n_epochs", "6"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A run that nothing disturbed, and its data."""
    folder = tmp_path_factory.mktemp("whole")
    write_cifar10(folder / "cifar")
    assert forked_demo("cp_demo.py", *WORDS, "--save", "run", cwd=folder).returncode == 0
    return folder


@pytest.fixture
def paused(whole, tmp_path):
    """A run that is in the middle, and does not go on: its process is stopped."""
    (tmp_path / "cifar").symlink_to(whole / "cifar")
    process = ForkedDemo("cp_demo.py", *WORDS, "--save", "run", cwd=tmp_path)
    await_file(tmp_path / "run" / "last.pt", process)
    process.send_signal(signal.SIGSTOP)
    yield process
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
        process.wait()


def test_a_second_run_is_refused_may_evaluate_and_goes_on_where_the_first_was_killed(paused, whole, tmp_path):
    before = contents(tmp_path / "run")
    holder = f"run is in use by process {paused.pid} on {socket.gethostname()} since "
    for words in (["--seed", "1"], ["--resume"], ["--overwrite", "--seed", "1"]):
        done = demo("cp_demo.py", *WORDS, "--save", "run", *words, cwd=tmp_path)
        refused(done, holder)
        assert re.search(r" since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\S+: wait until that run ends", done.stderr)
    assert contents(tmp_path / "run") == before
    shutil.copy(whole / "run" / "model.pt", tmp_path / "run" / "model.pt")
    done = demo("cp_demo.py", "--save", "run", "--evaluate", cwd=tmp_path)
    assert "test error" in done.stdout, done.stderr
    (tmp_path / "run" / "model.pt").unlink()
    paused.send_signal(signal.SIGKILL)
    assert paused.wait() == -signal.SIGKILL
    done = demo("cp_demo.py", "--save", "run", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    same_run(tmp_path / "run", whole / "run")


def test_of_several_resumes_at_once_one_goes_on(paused, whole, tmp_path):
    paused.send_signal(signal.SIGKILL)
    paused.wait()
    resumed = [ForkedDemo("cp_demo.py", "--save", "run", "--resume", cwd=tmp_path) for _ in range(3)]
    ended = [(process.wait(), process.communicate()[1]) for process in resumed]
    assert sorted(status for status, _ in ended) == [0, 1, 1], ended
    for status, errors in ended:
        assert status == 0 or re.search("run is in use by|another process has written to run", errors), errors
    same_run(tmp_path / "run", whole / "run")


def test_what_another_run_wrote_in_the_meantime_is_not_mixed(whole, tmp_path, monkeypatch):
    """It read, waited for its data, and got the lock when the other run had ended."""
    shutil.copytree(whole / "run", tmp_path / "run")
    acquire = run_lock.RunLock.acquire

    def late(lock: run_lock.RunLock) -> None:
        acquire(lock)
        files.write_atomic(tmp_path / "run" / "last.pt", b"of another run")

    monkeypatch.setattr(run_lock.RunLock, "acquire", late)
    done = demo("cp_demo.py", "--save", "run", "--resume", cwd=tmp_path)
    refused(done, "another process has written to run since this one began: start again")
    assert (tmp_path / "run" / "last.pt").read_bytes() == b"of another run"
    assert (tmp_path / "run" / "config.json").read_bytes() == (whole / "run" / "config.json").read_bytes()


def test_processes_that_decode_images_do_not_keep_the_lock(tmp_path):
    write_folder(tmp_path / "own")
    words = [*TINY, "--data", "own", "--stream", "--image_size", "8", "--batch_size", "2", "--device", "cpu"]
    process = ForkedDemo("cp_demo.py", *words, "--n_epochs", "3", "--save", "run", cwd=tmp_path)
    await_file(tmp_path / "run" / "last.pt", process)
    workers: list[str] = []
    while not workers:
        assert process.poll() is None, process.communicate()
        workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for worker in workers:
        os.kill(int(worker), signal.SIGSTOP)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = demo("cp_demo.py", "--save", "run", "--resume", cwd=tmp_path)
    for worker in workers:
        os.kill(int(worker), signal.SIGKILL)
    assert done.returncode == 0, done.stderr


def test_a_run_whose_lock_was_removed_saves_nothing_more(paused, tmp_path):
    (tmp_path / "run" / "run.lock").unlink()
    before = contents(tmp_path / "run")
    paused.send_signal(signal.SIGCONT)
    _, errors = paused.communicate()
    assert paused.returncode == 1
    assert "error: run/run.lock was removed or replaced during the run, so that another run may write" in errors
    assert contents(tmp_path / "run") == before


def test_a_lock_of_another_host_is_named(tmp_path, monkeypatch):
    """As far as it is known: whoever has just locked has not written yet."""
    holder = tmp_path / "run.lock"
    monkeypatch.setattr(fcntl, "lockf", lambda *_: (_ for _ in ()).throw(OSError(errno.EAGAIN, "busy")))
    for content, who in (
        ('{"pid": 3, "host": "node7", "since": "noon"}', "process 3 on node7 since noon"),
        ("", "another process"),
        ("[]", "another process"),
        ("{", "another process"),
    ):
        holder.write_text(content)
        with pytest.raises(FileExistsError, match=f"is in use by {who}: wait until that run ends, or end it"):
            run_lock.refuse_if_held(tmp_path)
        with pytest.raises(FileExistsError, match=f"is in use by {who}"):
            run_lock.RunLock(tmp_path).acquire()
        assert holder.read_text() == content


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "lockf", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOLCK, "No locks available")))
    done = demo("cp_demo.py", *TINY, "--save", "run", cwd=tmp_path)
    refused(done, "run/run.lock cannot be locked (No locks available), so that two runs could mix there: give a --save")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.lock"]


@pytest.mark.parametrize(
    ("kind", "option", "right"),
    [("nfs4", "local_lock=none", True), ("nfs", "local_lock=all", False), ("ext4", "nolock", True)],
)
def test_a_network_file_system_with_local_locks_is_refused(kind, option, right, tmp_path, monkeypatch):
    device = os.stat(tmp_path).st_dev
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        f"21 1 0:5 / /proc rw shared:1 - proc proc rw\n"
        f"22 1 {os.major(device)}:{os.minor(device)} / /data rw - {kind} server:/data rw,hard,{option},vers=4.2\n"
    )
    monkeypatch.setattr(run_lock, "_MOUNTS", mounts)
    lock = run_lock.RunLock(tmp_path)
    if right:
        lock.acquire()
        lock.close()
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
    else:
        with pytest.raises(OSError, match=f"run.lock cannot be locked .other hosts do not see it, .* {option}"):
            lock.acquire()


def test_unfinished_files_have_names_of_their_own_and_are_removed_by_the_next_run(whole, tmp_path, monkeypatch):
    shutil.copytree(whole / "run", tmp_path / "run")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            files.write_atomic(tmp_path / "run" / "last.pt", b"half")
    monkeypatch.undo()
    assert len(list((tmp_path / "run").glob(".last.pt.*.unfinished"))) == 2
    done = demo("cp_demo.py", "--save", "run", "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "run").glob(".*")) == []
