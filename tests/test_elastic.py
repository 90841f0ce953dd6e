"""Processes that die or stop: the others end with a cause, and torchrun restarts all to the same numbers."""

import os
import random
import signal
import socket
import subprocess
import time
from pathlib import Path

import elastic_demo
import node_demo
import pytest
from forks import ForkedDemo, await_file, fork_processes, torchrun
from samples import DEMOS, TINY, same_run, write_folder

CP_DEMO = str(DEMOS / "cp_demo.py")
ENDLESS = (*TINY, "--save", "run", "--n_epochs", "300", "--batch_size", "128", "--device", "cpu")


def _words(folder: Path, *others: str) -> list[str]:
    """Epochs of two steps, which take a tenth of a second."""
    data = write_folder(folder / "images")
    return [*TINY, "--data", str(data), "--batch_size", "10", "--workers", "0", "--device", "cpu", *others]


def _whole(words: list[str], folder: Path) -> Path:
    """The run that nothing interrupts."""
    for process in fork_processes(2, DEMOS / "cp_demo.py", *words, "--save", "whole", cwd=folder):
        assert process.wait() == 0, process.communicate()
    return folder / "whole"


def _whole_by_torchrun(words: list[str], folder: Path) -> Path:
    """The same with one thread in each process, as torchrun starts them: sums depend on the number of threads."""
    launch = ["--standalone", "--nproc_per_node", "2", CP_DEMO]
    process = torchrun(*launch, *words, "--save", "whole", cwd=folder)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return folder / "whole"


def _elastic(words: list[str], delay: float, folder: Path) -> ForkedDemo:
    return ForkedDemo(elastic_demo.__file__, "20", str(delay), *words, "--save", "run", "--resume", "auto", cwd=folder)


def _workers(agent: ForkedDemo | subprocess.Popen) -> list[int]:
    """The processes of the agent that train, without those that it has ended."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    return sorted(int(child) for child in children if _is_worker(child))


def _is_worker(pid: str) -> bool:
    try:
        is_zombie = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return False
    return not is_zombie and (b"cp_demo.py" in command or b"forked_demos.py" in command)


def _await_write(folder: Path) -> bool:
    """Wait until last.pt is being written, for at most twenty seconds: processes may be starting."""
    deadline = time.monotonic() + 20
    while not list(folder.glob(".last.pt*")) and time.monotonic() < deadline:
        time.sleep(0.001)
    return time.monotonic() < deadline


@pytest.mark.exhaustive
@pytest.mark.parametrize(("parallel", "seed"), [("ddp", 0), ("fsdp", 1)])
def test_an_elastic_run_killed_at_random_moments_ends_with_the_same_numbers(parallel, seed, tmp_path):
    """Five times, at a start or in a step, an evaluation or a write; the main process, or the other one."""
    words = _words(tmp_path, "--n_epochs", "40")
    whole = _whole(words, tmp_path)
    agent, rng, killed = _elastic([*words, "--parallel", parallel], 0.05, tmp_path), random.Random(seed), []
    in_writes = 0
    await_file(tmp_path / "run" / "last.pt", agent)
    for kill in range(5):
        time.sleep(rng.uniform(0, 4))
        while len(_workers(agent)) < 2 and agent.poll() is None:
            time.sleep(0.01)  # until both have been started again
        if kill % 2:
            in_writes += _await_write(tmp_path / "run")
        workers = _workers(agent)
        if len(workers) == 2:
            which = rng.randrange(2)
            os.kill(workers[which], signal.SIGKILL)
            killed.append(which)
    assert agent.wait(100) == 0, agent.communicate()
    assert len(killed) >= 4
    assert in_writes
    same_run(tmp_path / "run", whole)
    assert list((tmp_path / "run").glob(".*")) == []


LOST = "error: process 0 of 2: lost another process, which ended, was stopped or lost its network ("


def test_a_killed_process_ends_the_others_at_once(tmp_path):
    first, second = fork_processes(2, DEMOS / "cp_demo.py", *ENDLESS, cwd=tmp_path)
    await_file(tmp_path / "run" / "results.csv", first)
    second.send_signal(signal.SIGKILL)
    second.wait()
    _, errors = first.communicate(timeout=100)
    assert first.returncode == 1
    assert LOST in errors


def test_nodes_need_not_share_the_directory_and_an_error_of_the_main_process_is_everyones(tmp_path):
    """Only the main process reads and writes it; each process is in a directory of its own."""
    nodes = [tmp_path / f"node{rank}" for rank in range(2)]
    for node in nodes:
        node.mkdir()
    words = (*TINY, "--save", "run", "--n_epochs", "1", "--batch_size", "128", "--device", "cpu")
    for status, last in ((0, ()), (1, ()), (0, ("--resume",))):
        for process in fork_processes(2, Path(node_demo.__file__), *words, *last, cwd=tmp_path):
            assert process.wait() == status, process.communicate()
            assert status == 0 or "run contains a run: give --resume" in process.communicate()[1]
    assert [(node / "run" / "model.pt").exists() for node in nodes] == [True, False]


def _rendezvous() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("killed_node", [0, 1])
def test_two_nodes_are_one_run_and_restart_together(killed_node, tmp_path):
    """Two agents on one machine, of which one loses its process."""
    words = _words(tmp_path, "--n_epochs", "8")
    whole, endpoint = _whole_by_torchrun(words, tmp_path), _rendezvous()
    words = [*words, "--save", "run", "--resume", "auto", "--parallel", "fsdp"]
    launch = ["--nnodes", "2", "--nproc_per_node", "1", "--max-restarts", "3"]
    launch += ["--rdzv_backend", "c10d", "--rdzv_endpoint", endpoint, "--rdzv_id", "run", "--local_addr", "127.0.0.1"]
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    agents = [torchrun(*launch, CP_DEMO, *words, cwd=tmp_path, **environment) for _ in range(2)]
    await_file(tmp_path / "run" / "results.csv", agents[0])
    os.kill(_workers(agents[killed_node])[0], signal.SIGKILL)
    for agent in agents:
        _, errors = agent.communicate(timeout=150)
        assert agent.returncode == 0, errors
    assert "resumed in epoch" in (tmp_path / "run" / "run_log.txt").read_text()
    same_run(tmp_path / "run", whole)
