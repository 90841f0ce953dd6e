"""Classifying images by a saved model: what is printed, what is refused, and where nobody reads."""

import os
import subprocess
import sys
from unittest import mock

import pytest
from samples import DEMOS, demo, refused

from efficient_densenet import DenseNet
from efficient_densenet.training import predict

DIGITS = DEMOS.parent / "checkpoints" / "digits"
IMAGE = str(DEMOS / "pictures" / "digit_3.png")


def test_predicting_with_the_committed_model_from_anywhere(tmp_path):
    done = demo("predict.py", IMAGE, cwd=tmp_path)
    assert "digit_3.png: 3 (" in done.stdout, done.stderr


def test_predict_reports_what_is_wrong(tmp_path):
    (tmp_path / "a.png").write_text("not an image")
    model = ("--model", str(DIGITS))
    refused(demo("predict.py", *model, cwd=tmp_path), "found no image to classify")
    refused(demo("predict.py", "b.png", *model, cwd=tmp_path), "b.png is not a file")
    refused(demo("predict.py", "a.png", *model, cwd=tmp_path), "a.png is not an image that can be decoded")
    refused(demo("predict.py", "a.png", "--modle", "x", cwd=tmp_path), "unknown option --modle: did you mean --model?")
    refused(demo("predict.py", "a.png", "--model", "nowhere", cwd=tmp_path), "nowhere does not exist")


@pytest.fixture
def printing_to(monkeypatch):
    """A function that makes a descriptor standard output; whether the interpreter can flush it is seen at the end."""
    opened = []

    def redirect(descriptor: int) -> None:
        opened.append(os.fdopen(descriptor, "w"))
        monkeypatch.setattr(sys, "stdout", opened[0])

    yield redirect
    opened[0].close()


def test_predicting_ends_quietly_where_nobody_reads(printing_to):
    """As after `| head`: nothing is classified after the first image whose line is lost."""
    reading, writing = os.pipe()
    os.close(reading)
    printing_to(writing)
    with mock.patch.object(DenseNet, "forward", autospec=True, side_effect=DenseNet.forward) as forward:
        predict(IMAGE, IMAGE)
    assert forward.call_count == 1


def test_predicting_to_a_full_disk_is_an_error(printing_to):
    printing_to(os.open("/dev/full", os.O_WRONLY))
    with pytest.raises(OSError, match=r"digit_3.png: its classes could not be printed \(No space left on device\)"):
        predict(IMAGE)


@pytest.mark.exhaustive
def test_predict_in_a_pipe_that_is_closed_early(tmp_path):
    pipe = '"$@" | head -1; exit ${PIPESTATUS[0]}'
    command = [sys.executable, str(DEMOS / "predict.py"), *[IMAGE] * 20]
    done = subprocess.run(["bash", "-c", pipe, "bash", *command], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout.count("\n")) == (0, "", 1)
