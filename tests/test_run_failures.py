"""Runs that fail: a full disk, a loss that is not finite, out of memory."""

import re
import signal

import torch
from forks import ForkedDemo, await_file, forked_demo
from samples import RUN, demo, refused
from training.loop import Trainer


def test_a_full_disk_is_reported_and_the_old_checkpoint_kept(tmp_path):
    process = ForkedDemo("cp_demo.py", *RUN, "--n_epochs", "3", cwd=tmp_path)
    await_file(tmp_path / "run" / "last.pt", process)
    process.send_signal(signal.SIGTERM)
    process.communicate()
    before = (tmp_path / "run" / "last.pt").read_bytes()
    done = forked_demo("cp_demo.py", "--save", "run", "--resume", cwd=tmp_path, max_file_bytes=len(before) // 2)
    refused(done, "run/last.pt could not be written (File too large): its previous content is kept")
    assert (tmp_path / "run" / "last.pt").read_bytes() == before
    assert [path.name for path in (tmp_path / "run").glob(".*")] == []


def test_a_loss_that_is_not_finite_keeps_the_last_good_state(tmp_path):
    done = demo("cp_demo.py", *RUN, "--n_epochs", "3", "--lr", "1e30", "--recipe", "step", cwd=tmp_path)
    assert done.returncode == 1
    assert "error: the loss became" in done.stderr
    assert "start over with a smaller --lr; what was saved before is kept" in done.stderr
    assert "Traceback" not in done.stderr
    state = torch.load(tmp_path / "run" / "last.pt", weights_only=True)["state"]
    assert all(torch.isfinite(tensor).all() for tensor in state["model"].values())


def test_a_validation_loss_that_is_not_finite_is_not_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "evaluate", lambda *_: (float("nan"), 0.9))
    done = demo("cp_demo.py", *RUN, "--n_epochs", "1", cwd=tmp_path)
    assert done.returncode == 1
    assert "error: the validation loss became nan in epoch 1, at a learning rate of" in done.stderr
    written = ["config.json", "last.pt", "run.lock", "run_log.txt"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == written
    assert torch.load(tmp_path / "run" / "last.pt", weights_only=True)["position"]["step"] == 0


def test_out_of_memory_is_reported_with_what_would_fit(tmp_path, monkeypatch):
    """The allocator of a GPU is simulated; the memory of the engines is measured."""

    def step(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Trainer, "step", step)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7 * 2**20)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * 2**20, 16 * 2**20))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * 2**20)
    words = [*RUN, "--batch_size", "100", "--efficient", "False", "--device", "cpu"]
    done = demo("cp_demo.py", *words, cwd=tmp_path)
    refused(done, "out of memory in a step of 100 images with engine plain: tensors had reached 7.0 MiB of 8.0 MiB;")
    assert re.search(r"--micro_batch_size \d+ would fit, with about [\d.]+ MiB", done.stderr), done.stderr
    assert "last.pt" in [path.name for path in (tmp_path / "run").iterdir()]
