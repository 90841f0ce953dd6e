"""Classifying images by a saved model: what is printed, what is refused, and where nobody reads."""

import shutil
import signal
import subprocess
import sys

import pytest
from samples import DEMOS, DIGITS, IMAGE, demo, refused


def test_predict_reports_what_is_wrong(tmp_path):
    (tmp_path / "a.png").write_text("not an image")
    model = ("--model", str(DIGITS))
    done = demo("predict.py", *model, cwd=tmp_path)
    assert done.returncode == 2
    assert "error: the following arguments are required: IMAGE" in done.stderr
    refused(demo("predict.py", "b.png", *model, cwd=tmp_path), "b.png is neither a file nor a folder")
    done = demo("predict.py", "a.png", *model, cwd=tmp_path)
    assert "note: a.png is not an image that can be decoded" in done.stderr
    assert (done.returncode, done.stderr.count("\n")) == (1, 2), done.stderr
    refused(demo("predict.py", "a.png", "--model", "nowhere", cwd=tmp_path), "nowhere does not exist")
    refused(demo("predict.py", "a.png", *model, "--top", "0", cwd=tmp_path), "top is 0, but must be a whole number")


def test_a_folder_stands_for_the_images_in_it(tmp_path):
    (tmp_path / "some" / "more").mkdir(parents=True)
    refused(
        demo("predict.py", "some", cwd=tmp_path), "some contains no images: give a folder with files such as .bmp, "
    )
    for name in ("b.png", "a.PNG", "more/c.png", "notes.txt"):
        shutil.copy(IMAGE, tmp_path / "some" / name)
    done = demo("predict.py", "some", IMAGE, "--model", str(DIGITS), cwd=tmp_path)
    names = [line.partition(": 3 (")[0] for line in done.stdout.splitlines()]
    assert names == ["some/a.PNG", "some/b.png", "some/more/c.png", IMAGE], done.stderr


@pytest.mark.exhaustive
def test_predict_in_a_pipe_that_is_closed_early(tmp_path):
    pipe = '"$@" | head -1; exit ${PIPESTATUS[0]}'
    command = [sys.executable, str(DEMOS / "predict.py"), *[IMAGE] * 200, "--model", str(DIGITS)]
    done = subprocess.run(["bash", "-c", pipe, "bash", *command], cwd=tmp_path, capture_output=True, text=True)
    assert (done.stderr, done.stdout.count("\n")) == ("", 1)
    assert done.returncode == 128 + signal.SIGPIPE


@pytest.mark.exhaustive
def test_predict_that_is_interrupted(tmp_path):
    command = [sys.executable, str(DEMOS / "predict.py"), *[IMAGE] * 5000, "--model", str(DIGITS)]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline().startswith(IMAGE)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert (process.returncode, errors) == (128 + signal.SIGINT, "interrupted\n")
