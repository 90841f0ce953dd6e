"""The state of a run is saved first: no drawing, no line and no closed stream costs an epoch."""

import errno
import os
import stat
import subprocess
import sys

import pytest
import torch
from samples import DEMOS, RUN, demo, read_rows
from training import files, results, run
from training.report import EpochProgress


@pytest.fixture
def saved_epochs(tmp_path):
    """A function that tells how many epochs last.pt contains."""
    path = tmp_path / "run" / "last.pt"
    return lambda: torch.load(path, weights_only=True)["position"]["epoch"] - 1


def test_the_state_is_saved_before_curves_are_drawn_and_lines_printed(saved_epochs, tmp_path, monkeypatch):
    """And a pipe in the place of the log is replaced: nobody may ever read it, so that opening it would wait."""
    drawn, printed = [], []
    monkeypatch.setattr(run, "SECONDS_BETWEEN_PLOTS", 0)
    monkeypatch.setattr(run, "plot_curves", lambda folder, rows, _: drawn.append((len(rows), saved_epochs())))
    monkeypatch.setattr(EpochProgress, "finish", lambda _, row: printed.append((row["epoch"], saved_epochs())))
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run" / "run_log.txt")
    done = demo("cp_demo.py", *RUN, "--n_epochs", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert drawn == [(1, 1), (2, 2), (2, 2)]
    assert printed == [(1, 1), (2, 2)]
    assert len((tmp_path / "run" / "run_log.txt").read_text().splitlines()) == 2


def test_curves_events_and_a_log_that_cannot_be_written_end_no_run(saved_epochs, tmp_path, monkeypatch):
    def fails(*_):
        raise RuntimeError("no\nfont")

    def fails_for_the_log(path, content):
        if path.name == "run_log.txt":
            raise OSError("no space")
        write_atomic(path, content)

    write_atomic = files.write_atomic
    monkeypatch.setattr(files, "write_atomic", fails_for_the_log)
    monkeypatch.setattr(run, "SECONDS_BETWEEN_PLOTS", 0)
    monkeypatch.setattr(run, "plot_curves", fails)
    monkeypatch.setattr(results.TensorBoardWriter, "add", fails)
    done = demo("cp_demo.py", *RUN, "--n_epochs", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("note: curves.png could not be written (RuntimeError: no font)\n") == 3
    assert done.stdout.count("note: TensorBoard's events could not be written (RuntimeError: no font)\n") == 3
    assert done.stdout.count("note: run_log.txt could not be written (OSError: no space)\n") == 2
    assert saved_epochs() == 2
    assert read_rows(tmp_path / "run")[1]["test_error"] != ""


@pytest.mark.exhaustive
def test_a_closed_pipe_and_a_closed_error_stream_end_no_run(tmp_path):
    words = [sys.executable, str(DEMOS / "cp_demo.py"), *RUN, "--n_epochs", "2", "--device", "cpu"]
    pipe = '"$@" 2>&- | head -2; exit ${PIPESTATUS[0]}'
    done = subprocess.run(["bash", "-c", pipe, "bash", *words], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 2
    rows = read_rows(tmp_path / "run")
    assert len(rows) == 2
    assert rows[1]["test_error"] != ""
    assert (tmp_path / "run" / "curves.png").exists()


@pytest.mark.exhaustive
def test_what_is_printed_to_closed_streams_lands_in_no_file(tmp_path):
    words = [sys.executable, str(DEMOS / "cp_demo.py"), *RUN, "--n_epochs", "1", "--device", "cpu", "--lr", "1e30"]
    done = subprocess.run(["bash", "-c", '"$@" 0<&- 1>&- 2>&-', "bash", *words], cwd=tmp_path, check=False)
    assert done.returncode == 1
    for path in (tmp_path / "run").iterdir():
        assert b"error" not in path.read_bytes() or path.suffix == ".pt"


def test_a_file_is_written_where_directories_cannot_be_flushed(tmp_path, monkeypatch):
    flush = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    files.write_atomic(tmp_path / "last.pt", b"new")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"new"]


PEAKS = """
import torch
from efficient_densenet.memory import high_water_mark
from training.report import peak_memory
peak = peak_memory(torch.device("cpu"))
print(peak, high_water_mark())
"""


def test_the_peak_memory_of_a_process_is_not_that_of_its_parent():
    large = bytearray(b"1" * 2**30)
    done = subprocess.run([sys.executable, "-c", PEAKS], cwd=DEMOS, capture_output=True, text=True, check=True)
    del large
    peak, own = map(int, done.stdout.split())
    assert 0 < peak <= own < 2**30
