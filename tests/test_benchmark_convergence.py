"""The benchmark of convergence: runs of the demo, the subset of images, table and figure."""

import subprocess

import convergence
import plot
import pytest

ROWS = """epoch,valid_error,test_error,seconds,peak_memory_mib
1,0.5,,1200,100.5
2,0.4,,9000,100.5
3,0.25,{},1100,120.25
"""


@pytest.fixture
def folders(monkeypatch, tmp_path):
    monkeypatch.setattr(convergence, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(convergence, "RUNS", tmp_path / "runs")
    return tmp_path


@pytest.mark.exhaustive
def test_what_is_not_kept_is_trained(folders):
    (folders / "kept" / "convergence").mkdir(parents=True)
    (folders / "kept" / "convergence" / "plain_seed1.csv").write_text(ROWS.format(0.3))
    convergence.train(variants="plain,shared_bf16", seeds="1", depth=10, n_epochs=1)
    assert [path.name for path in (folders / "runs" / "convergence").iterdir()] == ["shared_bf16_seed1"]
    (row,) = convergence.read()["shared_bf16"][0]
    assert 0 < float(row["test_error"]) < 1


def test_the_options_of_a_run(folders, monkeypatch):
    commands = []

    def run(command, check):
        commands.append(command)
        folder = folders / "runs" / "short" / "shared_bf16_seed2"
        folder.mkdir(parents=True)
        (folder / "results.csv").write_text(ROWS.format(0.3))

    monkeypatch.setattr(subprocess, "run", run)
    convergence.train(variants="shared_bf16", seeds=2, study="short")
    convergence.train(variants="shared_bf16", seeds=2, study="short")
    (command,) = commands
    options = dict(zip(command[2::2], command[3::2], strict=True))
    assert (options["--seed"], options["--amp"], options["--engine"], options["--resume"]) == (
        *("2", "bf16", "shared"),
        "auto",
    )
    with pytest.raises(ValueError, match="unknown variant 'fast': there are plain, "):
        convergence.train(variants="fast")


def test_a_subset_has_the_first_training_images_and_all_test_images(folders):
    for split in ("train", "test"):
        for name in "ab":
            folder = folders / "data" / split / name
            folder.mkdir(parents=True)
            for i in range(3):
                (folder / f"{i}.png").write_bytes(bytes([i]))
    for _ in range(2):  # what is there already stays
        subset = convergence._subset(folders / "data", 2, folders / "runs")
        found = sorted(str(path.relative_to(subset)) for path in subset.glob("*/*/*"))
        assert found == [
            *(f"test/{name}/{i}.png" for name in "ab" for i in range(3)),
            *(f"train/{name}/{i}.png" for name in "ab" for i in range(2)),
        ]
    assert (subset / "train" / "b" / "1.png").read_bytes() == b"\1"


def test_table_and_figure(folders, capsys):
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="nothing to draw"):
        convergence.draw()
    (folders / "kept" / "convergence").mkdir(parents=True)
    for seed, error in enumerate([0.2, 0.1, 0.3]):
        (folders / "kept" / "convergence" / f"shared_seed{seed}.csv").write_text(ROWS.format(error))
    (folders / "kept" / "convergence" / "plain_seed0.csv").write_text(ROWS.format(0.2))
    convergence.draw(str(folders))
    assert "| `shared` | 3 | 20.00% (10.00% to 30.00%) | 120 MiB | 1.00 |" in capsys.readouterr().out
    drawn = (folders / "convergence.svg").read_text()
    assert ">plain</text>" in drawn
    assert len(convergence._figure(convergence.read()).axes[0].lines) == 4
    assert all(plot.fingerprint(path) in drawn for path in (folders / "kept" / "convergence").iterdir())


@pytest.mark.parametrize("figure", sorted(plot.FIGURES.glob("convergence*.svg")), ids=lambda path: path.stem)
def test_a_committed_figure_is_drawn_from_all_committed_runs(figure):
    drawn = figure.read_text()
    assert all(plot.fingerprint(path) in drawn for path in (convergence.KEPT / figure.stem).glob("*.csv"))
