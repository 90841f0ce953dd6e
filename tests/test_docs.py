"""README and docs: snippets run, commands are ones that exist, tables are what was measured, links lead somewhere.

Python blocks of a page run in order in one namespace, in a temporary directory. Of a diff block the new side runs, and
the old side parses. Of commands of sh blocks the scripts exist, and the options are words of the sources.
"""

import ast
import configparser
import re
import shlex
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import rows as results
import table
import torch
import torchvision
from torch import nn

import efficient_densenet
from efficient_densenet import DenseNet, adapt, checkpoint, densenet121, memory
from efficient_densenet.adapt import Report

ROOT = Path(__file__).parents[1]
FOLDERS_OF_PAGES = ".", "docs", "checkpoints"
PAGES = sorted(str(path.relative_to(ROOT)) for folder in FOLDERS_OF_PAGES for path in (ROOT / folder).glob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str, *languages: str) -> list[tuple[str, str, int]]:
    """Language, content and first line of each block in one of these languages."""
    text = (ROOT / page).read_text()
    found = [(match[1], match[2], text[: match.start(2)].count("\n")) for match in BLOCK.finditer(text)]
    return [block for block in found if block[0] in languages]


def pages_with(*languages: str) -> list[str]:
    return [page for page in PAGES if blocks(page, *languages)]


def prose(page: str) -> str:
    """A page without blocks, tables and comments."""
    text = BLOCK.sub("", (ROOT / page).read_text())
    return re.sub(r"<!--.*?-->|^\|[^\n]*$", "", text, flags=re.MULTILINE | re.DOTALL)


class Block(nn.Module):
    """A dense block of one's own, as the page on other libraries describes one: layers of norm and 3×3 convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in range(3))
        for i, layer in enumerate(self.layers):
            layer.bn, layer.conv = nn.BatchNorm2d(8 + 4 * i), nn.Conv2d(8 + 4 * i, 4, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.cat([x, layer.conv(layer.bn(x).relu())], 1)
        return x


class Masked(nn.Linear):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x if mask is None else x * mask)


def backbones() -> dict:
    Path("demos").symlink_to(ROOT / "demos")
    torch.save(densenet121(num_classes=14).state_dict(), "theirs.pth")
    return {"images": torch.randn(2, 3, 64, 64)}


def checkpointing() -> dict:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    model.encoder = nn.Linear(8, 8)
    x, layers = torch.randn(4, 8, requires_grad=True), nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    block, head, mask = Masked(8, 8), nn.Linear(8, 8), torch.ones(4, 8)
    return {"torch": torch, "model": model, "x": x, "layers": layers, "block": block, "head": head, "mask": mask}


def recipes() -> dict:
    for library in ("lightning", "transformers", "onnxscript"):
        pytest.importorskip(library)
    return {}


def migrating() -> dict:
    """Libraries that are not installed everywhere are stood in for; the tests of `adapt` convert the real ones."""
    named = {name.replace("norm5", "norm_final"): value for name, value in DenseNet().state_dict().items()}
    torch.save(named, "model.dat")
    timm = types.SimpleNamespace(create_model=lambda name: torchvision.models.DenseNet(8, (2, 2)))
    monai = types.SimpleNamespace(networks=types.SimpleNamespace(nets=sys.modules["monai.networks.nets"]))
    theirs = torchvision.models.DenseNet(8, (2, 2))
    return {"torch": torch, "torchvision": torchvision, "timm": timm, "monai": monai, "their_model": theirs}


STAND_INS = {
    "docs/backbones-and-weights.md": backbones,
    "docs/checkpoint.md": checkpointing,
    "docs/migrating.md": migrating,
    "docs/other-libraries.md": lambda: {"MyBlock": Block},
    "docs/recipes.md": recipes,
}
"""Names that the snippets of a page take for granted."""


def slow(page: str) -> Any:
    pages = "backbones-and-weights", "detection", "how-it-works", "memory", "recipes", "your-model"
    takes_long = page in [f"docs/{each}.md" for each in pages]
    return pytest.param(page, marks=pytest.mark.exhaustive) if takes_long else page


@pytest.mark.filterwarnings("default")  # a snippet may use what warns, such as a legacy exporter
@pytest.mark.parametrize("page", [slow(page) for page in pages_with("python", "diff")])
def test_python_runs(page, tmp_path, monkeypatch, capsys):
    published = torchvision.models.get_model("densenet121").state_dict
    monkeypatch.setattr(torchvision.models.WeightsEnum, "get_state_dict", lambda *_, **__: published())
    monkeypatch.chdir(tmp_path)
    nets = types.ModuleType("nets")
    vars(nets)["DenseNet121"] = lambda spatial_dims, in_channels, out_channels: Block()
    monkeypatch.setitem(sys.modules, "monai.networks.nets", nets)
    if page != "docs/your-model.md":  # which prints what becomes of torchvision's densenet121
        small = torchvision.models.DenseNet
        monkeypatch.setattr(torchvision.models, "densenet121", lambda weights=None: small(8, (2, 2)))
    namespace = STAND_INS.get(page, dict)()
    for language, code, line in blocks(page, "python", "diff"):
        if language == "diff":
            old, new = (
                "\n".join(each[1:] if each[:1] in signs else "" for each in code.splitlines()) for signs in ("- ", "+ ")
            )
            ast.parse(old)
            code = new
        exec(compile("\n" * line + code, str(ROOT / page), "exec"), namespace)
    assert all(value.changed for value in namespace.values() if isinstance(value, Report))
    printed = capsys.readouterr().out
    for text in re.findall(r"<!-- printed -->\n```text\n(.*?)```", (ROOT / page).read_text(), re.DOTALL):
        assert text in printed


def commands(page: str) -> list[list[str]]:
    """The words of each command, without the variables that are set in front of it."""
    found = []
    for _, text, _ in blocks(page, "sh"):
        for line in re.split(r"\n|&&", text.replace("\\\n", " ")):
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words = words[1:]
            found += [words] if words else []
    return found


def words_of_sources() -> set[str]:
    """All words of the commands' sources, in which the names of their options are."""
    folders = "benchmarks", "demos", "examples", "tests", "tools", "efficient_densenet"
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".sh")]
    return {word.replace("-", "_") for path in files for word in re.findall(r"\w+(?:-\w+)*", path.read_text())}


KNOWN = words_of_sources() | {"all_files", "dist", "index_url", "master_addr", "master_port", "node_rank"}
"""The options of pip, pre-commit, pytest's plugins and torchrun are no words of ours."""
FOREIGN = {"train", "test", "val", "ten_more_epochs", "conv2_block1_1_conv", ".venv", "gpleiss", "csrhddlam"}
"""What the paths begin with that are none of the repository's."""
TOOLS = "ruff", "pyright", "pre-commit", "pip", "mkdocs", "efficient-densenet"


@pytest.mark.parametrize("page", pages_with("sh"))
def test_commands_exist_with_their_options(page):
    extras = configparser.ConfigParser()
    extras.read(ROOT / "setup.cfg")
    for command, *words in commands(page):
        name = Path(command).name
        if name in ("python", "python3", "torchrun", "bash"):
            assert "-m" in words or any((ROOT / word).is_file() for word in words), words
        else:
            assert name in TOOLS, command
        options = {word[2:].partition("=")[0].replace("-", "_") for word in words if word.startswith("--")}
        assert {option for option in options if option not in KNOWN and option.removeprefix("no") not in KNOWN} == set()
        for listed in re.findall(r"(?:\.|efficient_densenet)\[(.*?)\]", " ".join(words)):
            assert set(listed.split(",")) <= set(extras["options.extras_require"]), words


def slugs(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_exists(page):
    """Languages of blocks, links, options, and paths of the repository or the package."""
    text = (ROOT / page).read_text()
    assert {match[1] for match in BLOCK.finditer(text)} <= {"python", "diff", "sh", "text"}
    for target in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", text)):
        if not target.startswith(("http://", "https://")):
            path, _, anchor = target.partition("#")
            place = (ROOT / page).parent / path if path else ROOT / page
            assert place.exists(), target
            assert not anchor or anchor in slugs(place), target
    options = set(re.findall(r"(?<!\S)--([\w-]+)", " ".join(re.findall(r"`([^`]+)`", prose(page)))))
    assert {option for option in options if option.replace("-", "_") not in KNOWN} == set()
    for path in re.findall(r"`((?:[\w.]+/)+[\w.]*)`", prose(page)):
        if path.split("/")[0] not in FOREIGN:
            homes = (
                ROOT,
                (ROOT / page).parent,
                *(ROOT / "efficient_densenet" / room for room in ("", "engine", "kernels", "kernels/numba_cpu")),
            )
            assert any((home / path).exists() for home in homes), path


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_what_was_measured(page):
    assert table.outdated((ROOT / page).read_text()) == []


def has_whole_history() -> bool:
    try:
        return results.git("rev-parse", "--is-shallow-repository") == "false"
    except (OSError, subprocess.CalledProcessError):
        return False


MEASURED = re.compile(r"^(?:<!-- (\w+).* -->\n)?((?:\|.*\n)+)\n?(?:Measured (.*)\n)?", re.MULTILINE)
"""A table of a page, with the first word of the comment above it and the caption below it."""
RUN = re.compile(rf"commit (\w+)(?: with uncommitted changes)?({re.escape(table.AGE)})?")


@pytest.mark.parametrize("page", PAGES)
def test_measurements_say_how_old_they_are(page):
    """`benchmarks/table.py --write` makes it so."""
    for kind, rows, caption in MEASURED.findall((ROOT / page).read_text()):
        if kind in ("predicted", "counted") or not re.search(r"\| [\d,.]+ (MiB|ms|s)\b", rows):
            continue
        assert RUN.search(caption), f"no caption below\n{rows}"
        for commit, says_that_it_is_old in RUN.findall(caption):
            lines = table.lines_changed_since(commit)
            if lines is None and has_whole_history():
                pytest.fail(f"{commit} is no commit")
            if lines is None:
                pytest.skip(f"needs git and the history back to commit {commit}")
            assert says_that_it_is_old or lines <= table.LINES, f"{lines} lines changed since commit {commit}"


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", [page for page in PAGES if table.PREDICTED.search((ROOT / page).read_text())])
def test_tables_are_what_is_predicted(page):
    for expression, rows in table.PREDICTED.findall((ROOT / page).read_text()):
        assert table.predicted(expression) == rows


FIGURE = re.compile(r"(?:\d[\d.]* to )?\d+\.\d+×|\d[\d.,]*\s(?:s|ms|µs|[MG]iB)\b")
"""A ratio to plain, a time, a size: what a measurement gives."""


def figures_without_a_source(text: str) -> list[str]:
    """The figures in sentences. Those of facts.csv may stand in a paragraph, or an item of a list, that names their
    commit; all others belong into tables, which are made of rows."""
    facts = results.read_others(results.RESULTS / "facts.csv", "figure")
    without = []
    for paragraph in re.split(r"\n\s*\n|\n(?=- )", text):
        known = " ".join(fact["figure"] for fact in facts if fact["commit"] in paragraph)
        without += [figure for figure in FIGURE.findall(paragraph) if re.sub(r"\s", " ", figure) not in known]
    return without


@pytest.mark.parametrize("page", PAGES)
def test_sentences_have_no_figures_of_their_own(page):
    """Of the changelog, the present version's."""
    assert (
        figures_without_a_source(re.split(r"\n## .*\n", prose(page))[1] if page == "CHANGELOG.md" else prose(page))
        == []
    )


def test_a_figure_in_a_sentence_is_noticed():
    text = "A step takes 0.41× of plain's time (458\nms, 1.15 s) and 143 MiB, or 2.3 to 3.1× of 3×3 pixels."
    assert figures_without_a_source(text) == ["0.41×", "458\nms", "1.15 s", "143 MiB", "2.3 to 3.1×"]
    assert figures_without_a_source("It took 2.3 to 3.1× at 19d371c.\n- It takes 2.3 to 3.1×.") == ["2.3 to 3.1×"]


def test_facts_name_commits_that_exist():
    for fact in results.read_others(results.RESULTS / "facts.csv", "figure"):
        assert re.fullmatch(r"\w{7}", fact["commit"]), fact
        assert results.git("cat-file", "-t", fact["commit"]) == "commit"


def test_the_readme_is_one_page_with_the_commands_that_ci_reads():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 140
    for name in ("train command", "test command"):
        assert re.search(rf"<!-- {name} -->\n```sh\n(python3 [^\n]*)\n```\n", text), name


def test_the_reference_has_every_public_name():
    page = (ROOT / "docs" / "api.md").read_text()
    for module in (efficient_densenet, adapt, checkpoint, memory):
        assert [name for name in module.__all__ if not re.search(rf"\b{name}\b", page)] in ([], ["__version__"])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "checks"), [("first_steps", "0"), ("memory_tricks", "0"), ("memory_tricks", "1")])
def test_the_notebooks_run(name, checks, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    monkeypatch.setenv("PYTORCH_INTRO_CHECK_MODE", checks)
    notebook = nbformat.read(ROOT / "docs" / f"{name}.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(ROOT)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert [output for output in outputs if output.get("name") == "stderr"] == []
    shown = "".join(output.get("text", "") for output in outputs)
    if name == "first_steps":
        assert float(re.search(r"right on new pictures: (\d+)%", shown)[1]) >= 80
