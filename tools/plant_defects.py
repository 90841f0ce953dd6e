"""Plant the defects of `defects.txt`, one at a time, in a copy of the project, and see which tier of the tests fails.

    python tools/plant_defects.py                 all of them, into a table
    python tools/plant_defects.py --only halo     those whose names contain a word
    python tools/plant_defects.py --list          their names
    python tools/plant_defects.py --check         only that each edit still applies, in exactly one place

A test that fails without the defect too does not count.
"""

import argparse
import ast
import csv
import functools
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tools" / "defects.txt"
FOLDERS = "efficient_densenet", "demos", "examples", "benchmarks"
COLUMNS = ("defect", "tier", "caught_by", "seconds")
IMPORTED = "torch._dynamo", "torch.distributed.fsdp", "torchvision"
"""Modules that most tests need and that take long to import."""
LIMIT = 1800
"""Seconds that one command of tests may take: a defect may well make something wait for ever."""


class Defect(NamedTuple):
    """The text `old` becomes `new`; `tests` are the test files to try first, test_<name>.py."""

    name: str
    old: str
    new: str
    tests: str


def read(table: Path) -> list[Defect]:
    """The rows of a table: a name and its tests in brackets, then lines of the old text (-) and of the new one (+)."""
    lines = [line for line in table.read_text().splitlines() if line and not line.startswith("#")]
    rows = re.findall(r"(.+) \[(.*)\]\n((?:-.*\n)+)((?:\+.*\n)*)", "".join(f"{line}\n" for line in lines))
    if len(lines) != sum(1 + "".join(texts).count("\n") for _, _, *texts in rows):
        raise ValueError(f"{table} has lines that are neither a row's nor comments")
    return [Defect(name, _text(old), _text(new), tests) for name, tests, old, new in rows]


def _text(lines: str) -> str:
    return "\n".join(line[2:] for line in lines.splitlines())


def place(defect: Defect, root: Path) -> Path:
    """The file that has the defect's text; an error says why the edit does not apply any more."""
    texts = _texts(root)
    found = [path for path, text in texts.items() for _ in range(text.count(defect.old))]
    if len(found) != 1:
        raise ValueError(f"found its text {len(found)} times, but needs it exactly once")
    if defect.old == defect.new:
        raise ValueError("changes nothing")
    try:
        ast.parse(texts[found[0]].replace(defect.old, defect.new))
    except SyntaxError as exc:
        raise ValueError(f"is no Python any more: {exc}") from exc
    for file in _hinted(defect):
        if not (root / file).exists():
            raise ValueError(f"there is no {file}")
    return found[0]


@functools.cache
def _texts(root: Path) -> dict[Path, str]:
    return {path: path.read_text() for folder in FOLDERS for path in sorted((root / folder).rglob("*.py"))}


def check() -> int:
    """Report every defect that is stale, or has the name of another; how many there are."""
    defects, num_stale = read(TABLE), 0
    names = [defect.name for defect in defects]
    for defect in defects:
        try:
            place(defect, ROOT)
            if names.count(defect.name) > 1:
                raise ValueError("there are two of this name")
        except ValueError as exc:
            print(f"stale: {defect.name!r}: {exc}")
            num_stale += 1
    print(f"{len(defects)} defects, {num_stale} stale")
    return num_stale


def _hinted(defect: Defect) -> list[str]:
    return [f"tests/test_{name}.py" for name in defect.tests.split()]


class Copy:
    """A copy of the project's files, those that git does not know yet too, in which one defect at a time is planted.

    It is one for all, and files get their old times back, so that kernels compiled for it are compiled once.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
        for name in subprocess.check_output(listed, cwd=ROOT, text=True).split("\0"):
            if name and (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        self.failing: set[str] = set()

    def caught(self, defect: Defect) -> tuple[str, str]:
        """The tier that caught a defect, and the test, which passes without it."""
        while True:
            with self._planted(defect):
                tier, test = self._search(defect)
            if "::" not in test or test in self.failing or not self._first_failure("", [test]):
                return tier, test
            print(f"fails without a defect, and is left out: {test}", flush=True)
            self.failing.add(test)

    @contextmanager
    def _planted(self, defect: Defect) -> Iterator[None]:
        path = place(defect, self.folder)
        text, times = path.read_text(), path.stat()
        path.write_text(text.replace(defect.old, defect.new))
        try:
            yield
        finally:
            path.write_text(text)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def _search(self, defect: Defect) -> tuple[str, str]:
        hinted = _hinted(defect)
        others = [f"tests/{file.name}" for file in sorted(self.folder.glob("tests/test_*.py"))]
        others = [file for file in others if file not in hinted and file != "tests/test_defects.py"]
        for tier, marker in (("first", "not exhaustive"), ("exhaustive", "exhaustive")):
            for files in (*([file] for file in hinted), others):
                test = self._first_failure(marker, files)
                if test:
                    return tier, test
        return "none", ""

    def _first_failure(self, marker: str, files: list[str]) -> str | None:
        left_out = [word for name in sorted(self.failing) for word in ("--deselect", name)]
        words = "-q", "-rfE", "-p", "no:cacheprovider", "-m", marker, "-x", *left_out, *files
        with tempfile.TemporaryFile("w+") as printed:
            status = self._pytest(printed.fileno(), *words)
            printed.seek(0)
            failed = _failed(printed.read())
        if failed:
            return failed[0]
        if status is None:
            return f"no end within {LIMIT} s of {' '.join(files)}"
        # 0: all passed; 5: there was none. Anything else is an interpreter or a collection that broke down.
        return None if status in (0, 5) else f"exit status {status} of {' '.join(files)}"

    def _pytest(self, output: int, *words: str) -> int | None:
        """The exit status of pytest in a fork, which need not import PyTorch again; None if it takes too long."""
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            for standard in (1, 2):
                os.dup2(output, standard)
            os.chdir(self.folder)
            os.environ["PYTHONPATH"] = str(self.folder)
            sys.path.insert(0, str(self.folder))
            status = int(pytest.main([*words]))
            sys.stdout.flush()
            os._exit(status)
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.1)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None


def _failed(printed: str) -> list[str]:
    return re.findall(r"^(?:FAILED|ERROR) (tests/\S.*?)(?: - .*)?$", printed, re.MULTILINE)


def run(chosen: list[Defect], table: Path) -> int:
    """Plant them, print and write what became of each; how many no test has caught."""
    os.environ.setdefault("TRITON_INTERPRET", "1")  # the conftest's line comes too late for what these import
    for name in IMPORTED:
        importlib.import_module(name)
    rows = []
    with tempfile.TemporaryDirectory() as folder, table.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        copy = Copy(Path(folder))
        for defect in chosen:
            start = time.monotonic()
            try:
                tier, test = copy.caught(defect)
            except ValueError as exc:
                tier, test = "stale", str(exc)
            seconds = round(time.monotonic() - start)
            rows.append({"defect": defect.name, "tier": tier, "caught_by": test, "seconds": seconds})
            writer.writerow(rows[-1])
            file.flush()
            print(f"{tier:10}  {defect.name}  ({test}, {seconds} s)", flush=True)
    missed = [row["defect"] for row in rows if row["tier"] in ("none", "stale")]
    for tier in ("first", "exhaustive"):
        print(f"caught by the {tier} tier: {sum(row['tier'] == tier for row in rows)} of {len(rows)}")
    print(f"missed: {', '.join(missed) or 'none'}")
    return len(missed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="WORD", default="", help="defects whose names contain this")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--table", type=Path, default=Path("planted_defects.csv"), help="where the table is written")
    given = parser.parse_args()
    chosen = [defect for defect in read(TABLE) if given.only in defect.name]
    if not chosen:
        parser.error(f"no defect has {given.only!r} in its name: --list shows them")
    if given.list:
        print(*(defect.name for defect in chosen), sep="\n")
    else:
        sys.exit(min(1, check() if given.check else run(chosen, given.table)))


if __name__ == "__main__":
    main()
