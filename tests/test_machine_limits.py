"""Options that ask for more than this machine has are refused in a sentence, before anything is written."""

import pytest
from samples import TINY, demo, refused, write_folder
from training import machine


@pytest.fixture
def small_machine(monkeypatch, tmp_path_factory):
    """A function that gives the machine so many MiB, and two processors."""
    limit = tmp_path_factory.mktemp("limits") / "memory.max"

    def set_memory(num_mib: int) -> None:
        limit.write_text(f"{num_mib * 2**20}\n")

    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(machine, "_CONTAINER_LIMITS", (limit,))
    return set_memory


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--workers 1000", "workers is 1000, but must be at most 16 on the 2 processors of this machine"),
        ("--lr 1e308", "lr is 1e+308, but must be at most 3.4e+38, the largest number of float32"),
        ("--image_size 1000000", "image_size is 1000000, but must be a whole number of at least 1 and at most 65536"),
        ("--image_size 65536 --stream", "4 batches of 9 images of 65536×65536 would take 442,368 MiB, but this"),
        ("--image_size 65536 --no-stream", "the images of own at 65536×65536 would take 245,760 MiB, but this machine"),
        ("--image_size 256 --stream --workers 16", "32 batches of 9 images of 256×256 would take 54 MiB, but this"),
        ("--image_size 512", "a step of 9 images of 512×512 would take"),
        ("--image_size 64 --engine plain", "--engine best would fit, with about"),
        ("--image_size 64 --batch_size 1000000000", "--micro_batch_size 4 would fit, with about"),
    ],
)
def test_what_the_machine_lacks_is_refused(words, message, small_machine, tmp_path):
    small_machine(13 if "plain" in words else 6 if "64 " in words else 50)
    write_folder(tmp_path / "own", each=5)
    done = demo("cp_demo.py", *TINY, "--data", "own", "--save", "run", "--device", "cpu", *words.split(), cwd=tmp_path)
    refused(done, message)
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


def test_a_container_may_have_less_memory_than_the_machine(tmp_path, monkeypatch):
    limits = [tmp_path / name for name in ("absent", "unlimited", "limited")]
    limits[1].write_text("max\n")
    limits[2].write_text(f"{30 * 2**20}\n")
    monkeypatch.setattr(machine, "_CONTAINER_LIMITS", limits[:2])
    assert machine.total_memory() > 2**30
    monkeypatch.setattr(machine, "_CONTAINER_LIMITS", limits)
    assert machine.total_memory() == 30 * 2**20
