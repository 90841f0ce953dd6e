"""Processes that die or stop: the others end with a cause, and torchrun restarts all to the same numbers."""

import os
import signal
import socket
from pathlib import Path

import pytest
from forks import await_file, fork_processes, torchrun
from samples import DEMOS, TINY, same_run, write_folder

CP_DEMO = str(DEMOS / "cp_demo.py")
LOST = "error: process 0 of 2: lost another process, which ended, was stopped or lost its network ("
WORDS = (*TINY, "--save", "run", "--batch_size", "128", "--device", "cpu", "--n_epochs")


def test_a_killed_process_ends_the_others_at_once(tmp_path):
    first, second = fork_processes(2, DEMOS / "cp_demo.py", *WORDS, "300", cwd=tmp_path)
    await_file(tmp_path / "run" / "results.csv", first)
    second.send_signal(signal.SIGKILL)
    second.wait()
    _, errors = first.communicate(timeout=100)
    assert first.returncode == 1
    assert LOST in errors


def test_nodes_need_not_share_the_directory_and_an_error_of_the_main_process_is_everyones(tmp_path):
    """Only the main process reads and writes it; each process is in a directory of its own."""
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for node in nodes:
        node.mkdir()
    for status, last in ((0, ()), (1, ()), (0, ("--resume",))):
        for process in fork_processes(2, DEMOS / "cp_demo.py", *WORDS, "1", *last, cwd=nodes):
            assert process.wait() == status, process.communicate()
            assert status == 0 or "run contains a run: give --resume" in process.communicate()[1]
    assert [(node / "run" / "model.pt").exists() for node in nodes] == [True, False]


@pytest.mark.exhaustive
@pytest.mark.parametrize("killed_node", [0, 1])
def test_two_nodes_are_one_run_and_restart_together(killed_node, tmp_path):
    """Two agents on one machine, of which one loses its process. Sums depend on the number of threads, which torchrun
    gives its processes: it starts the run that nothing interrupts too."""
    data = str(write_folder(tmp_path / "images"))
    words = [*TINY, "--data", data, "--batch_size", "10", "--workers", "0", "--device", "cpu", "--n_epochs", "8"]
    process = torchrun("--standalone", "--nproc_per_node", "2", CP_DEMO, *words, "--save", "whole", cwd=tmp_path)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    words += ["--save", "run", "--resume", "auto", "--parallel", "fsdp"]
    launch = ["--nnodes", "2", "--nproc_per_node", "1", "--max-restarts", "3"]
    launch += ["--rdzv_backend", "c10d", "--rdzv_endpoint", endpoint, "--rdzv_id", "run", "--local_addr", "127.0.0.1"]
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    agents = [torchrun(*launch, CP_DEMO, *words, cwd=tmp_path, **environment) for _ in range(2)]
    await_file(tmp_path / "run" / "results.csv", agents[0])
    pid = agents[killed_node].pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    os.kill(
        next(int(each) for each in children if b"cp_demo.py" in Path(f"/proc/{each}/cmdline").read_bytes()),
        signal.SIGKILL,
    )
    for agent in agents:
        _, errors = agent.communicate(timeout=150)
        assert agent.returncode == 0, errors
    assert "resumed in epoch" in (tmp_path / "run" / "run_log.txt").read_text()
    same_run(tmp_path / "run", tmp_path / "whole")
