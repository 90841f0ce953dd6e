"""README and docs: snippets run, commands are ones that exist, tables are what was measured, links lead somewhere.

Python blocks of a page run in order in one namespace, in a temporary directory. Of a diff block the new side runs, and
the old side parses. Commands of sh blocks are checked against the option parsers; the cheap ones run.
"""

import ast
import configparser
import contextlib
import inspect
import io
import os
import re
import shlex
import types
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

import budgets
import checkpointing as checkpointing_benchmark
import communication
import gpu_counts
import gpu_host
import options as benchmark_options
import plot
import pytest
import replicas
import run as benchmark
import table
import torch
import torchvision
import training
from methods import METHODS
from PIL import Image
from samples import CIFAR10_CLASSES, demo, write_folder
from torch import nn
from torch.distributed.run import get_args_parser as torchrun_parser
from training.options import Options, parse

from efficient_densenet import DenseNet, densenet121, doctor
from efficient_densenet.adapt import Report
from efficient_densenet.memory import __main__ as memory_command

ROOT = Path(__file__).parents[1]
FOLDERS_OF_PAGES = ".", "docs", "checkpoints"
PAGES = sorted(str(path.relative_to(ROOT)) for folder in FOLDERS_OF_PAGES for path in (ROOT / folder).glob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BENCHMARKS = {
    "run.py": benchmark.run,
    "plot.py": plot.plot,
    "table.py": table.table,
    "checkpointing.py": checkpointing_benchmark.measure,
    "gpu_counts.py": gpu_counts.count,
    "gpu_host.py": gpu_host.measure,
    "communication.py": communication.communication,
    "replicas.py": replicas.overlap,
    "budgets.py": budgets.compare,
}


def blocks(page: str, *languages: str) -> list[tuple[str, str, int]]:
    """Language, content and first line of each block in one of these languages."""
    text = (ROOT / page).read_text()
    found = [(match[1], match[2], text[: match.start(2)].count("\n")) for match in BLOCK.finditer(text)]
    return [block for block in found if block[0] in languages]


def pages_with(*languages: str) -> list[str]:
    return [page for page in PAGES if blocks(page, *languages)]


def side(diff: str, *signs: str) -> str:
    """The old or the new side of a diff, with a line for each of its lines."""
    return "\n".join(line[1:] if line[:1] in signs else "" for line in diff.splitlines())


def prose(page: str) -> str:
    """A page without blocks, tables and comments."""
    text = BLOCK.sub("", (ROOT / page).read_text())
    return re.sub(r"<!--.*?-->|^\|.*$", "", text, flags=re.MULTILINE | re.DOTALL)


def test_every_block_is_in_a_language_that_is_checked():
    assert {"README.md", "CONTRIBUTING.md", "docs/migrating.md"} < set(PAGES)
    for page in PAGES:
        text = (ROOT / page).read_text()
        assert {match[1] for match in BLOCK.finditer(text)} <= {"python", "diff", "sh", "text"}, page
        assert text.count("\n```") == 2 * len(BLOCK.findall(text)), page
        assert not re.search(r"^(    |\t)(python|pip|import|from) ", BLOCK.sub("", text), re.MULTILINE), page


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


def migrating() -> dict:
    """Libraries that are not installed everywhere are stood in for; tests/test_adapt.py converts the real ones."""
    named = {name.replace("norm5", "norm_final"): value for name, value in DenseNet().state_dict().items()}
    torch.save(named, "model.dat")
    timm = types.SimpleNamespace(create_model=lambda name: torchvision.models.DenseNet(8, (2, 2)))
    nets = types.SimpleNamespace(DenseNet121=lambda spatial_dims, in_channels, out_channels: Block())
    monai = types.SimpleNamespace(networks=types.SimpleNamespace(nets=nets))
    theirs = torchvision.models.DenseNet(8, (2, 2))
    return {"torch": torch, "torchvision": torchvision, "timm": timm, "monai": monai, "their_model": theirs}


STAND_INS = {
    "docs/backbones-and-weights.md": backbones,
    "docs/checkpoint.md": checkpointing,
    "docs/migrating.md": migrating,
    "docs/other-libraries.md": lambda: {"MyBlock": Block},
}
"""What the snippets of a page take for granted."""


@pytest.fixture
def _published_weights_without_a_network(monkeypatch):
    def get_state_dict(*_, **__):
        return torchvision.models.get_model("densenet121").state_dict()

    monkeypatch.setattr(torchvision.models.WeightsEnum, "get_state_dict", get_state_dict)


@pytest.mark.usefixtures("_published_weights_without_a_network")
@pytest.mark.filterwarnings("default")  # a snippet may use what warns, such as a legacy exporter
@pytest.mark.parametrize("page", pages_with("python", "diff"))
def test_python_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if page != "README.md":  # which converts torchvision's densenet121; a small network stands in elsewhere
        small = torchvision.models.DenseNet
        monkeypatch.setattr(torchvision.models, "densenet121", lambda weights=None: small(8, (2, 2)))
    namespace = STAND_INS.get(page, dict)()
    for language, code, line in blocks(page, "python", "diff"):
        if language == "diff":
            ast.parse(side(code, "-", " "))
            code = side(code, "+", " ")
        exec(compile("\n" * line + code, str(ROOT / page), "exec"), namespace)
    assert all(value.changed for value in namespace.values() if isinstance(value, Report))


def commands(page: str) -> list[list[str]]:
    """The words of each command, without what is set in front of it."""
    found = []
    for _, text, _ in blocks(page, "sh"):
        for line in text.replace("\\\n", " ").splitlines():
            for part in " ".join(shlex.quote(word) for word in shlex.split(line, comments=True)).split(" '&&' "):
                words = shlex.split(part)
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    words = words[1:]
                found += [words] if words else []
    return found


def check_pip(words: list[str]) -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    assert words[0] == "install", words
    assert {word for word in words if word.startswith("-")} <= {"-q", "-e"}, words
    for extras in re.findall(r"\[(.*?)\]", " ".join(words)):
        assert set(extras.split(",")) <= set(setup["options.extras_require"]), words


def check_module(name: str, words: list[str], config: pytest.Config) -> None:
    if name == "venv":
        assert words == [".venv"]
    elif name == "pip":
        check_pip(words)
    elif name == "efficient_densenet.doctor":
        doctor.parse(words)
    else:
        assert name == "pytest", name
        known = {marker.split(":")[0] for marker in config.getini("markers")}
        for option, value in pairwise([*words, ""]):
            if option == "-m" and value:
                named = {node.id for node in ast.walk(ast.parse(value, mode="eval")) if isinstance(node, ast.Name)}
                assert named <= known, value
            elif option.startswith("--"):
                config.getoption(option[2:].replace("-", "_"))  # which raises for one that pytest does not have
            elif option.startswith("tests/"):
                assert (ROOT / option).exists(), option


def check_demo(script: str, words: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own option parser takes the words; nothing is trained."""
    seen = []

    def train(given: dict, efficient_engine: str = "best") -> None:
        seen.append(parse(given, efficient_engine))

    with monkeypatch.context() as patched:
        patched.setattr(training, "train", train)
        done = demo(script, *words, cwd=folder)
    assert done.returncode == 0, (script, words, done.stderr)
    assert len(seen) == 1, words


def example_options(script: str) -> set[str]:
    """The options of a program in examples/, read from its text: its libraries are not installed everywhere."""
    texts = [(ROOT / "examples" / name).read_text() for name in (script, "common.py")]
    return {name for text in texts for name in re.findall(r"^    add\(\"--(\w+)\"", text, re.MULTILINE)}


def check_benchmark(script: str, words: list[str], monkeypatch) -> None:
    if "--help" in words:
        return
    function = BENCHMARKS[script]
    known = set(inspect.signature(function).parameters)
    assert {word[2:].partition("=")[0] for word in words if word.startswith("--")} <= known, (script, words)
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            given, named = benchmark_options.parse_arguments(function, words)
        except SystemExit:
            pytest.fail(f"{script} {words}: {errors.getvalue()}")
    if script == "table.py":  # cheap: it runs
        monkeypatch.chdir(ROOT)
        table.table(*given, **named)
    if script == "run.py":
        assert {name for name in str(named["methods"] or "plain").split(",") if name} <= set(METHODS)
        assert named["sweep"] in ("", *benchmark.SWEEPS)


TOOLS = {
    "ruff": {"check", "format", ".", "--check"},
    "pyright": set(),
    "pre-commit": {"install", "run", "--all-files"},
}


@pytest.mark.parametrize("page", pages_with("sh"))
def test_commands_exist_with_their_options(page, tmp_path, monkeypatch, request):
    write_folder(tmp_path / "cifar")
    for command, *words in commands(page):
        name = Path(command).name
        if name == "torchrun":
            launch = torchrun_parser().parse_args(words)
            name, words = "python", [launch.training_script, *launch.training_script_args]
        if name in ("python", "python3") and words[0] == "-m":
            check_module(words[1], words[2:], request.config)
        elif name in ("python", "python3"):
            script = ROOT / words[0]
            assert script.is_file(), words
            if script.name in ("cp_demo.py", "original_demo.py"):
                check_demo(script.name, words[1:], tmp_path, monkeypatch)
            elif script.parent.name == "examples":
                assert {word[2:] for word in words if word.startswith("--")} <= example_options(script.name), words
            elif script.parent.name == "benchmarks":
                check_benchmark(script.name, words[1:], monkeypatch)
            else:
                assert script.name in ("predict.py", "memory_tour.py"), words  # these run below
        elif name == "pip":
            check_pip(words)
        elif name == "bash":
            assert (ROOT / words[0]).is_file(), words
            assert all(word in (ROOT / words[0]).read_text() for word in words[1:]), words
        else:
            assert name in TOOLS, command
            assert set(words) <= TOOLS[name], words


TINY = {"--n_epochs": "1", "--batch_size": "64", "--valid_size": "4"}


def shortened(words: list[str]) -> list[str]:
    """The same command on a network and for a time that are the smallest."""
    names = [*TINY, "--depth"]
    kept = [word for i, word in enumerate(words) if word not in names and words[i - 1 : i] not in [[n] for n in names]]
    if {"--resume", "--evaluate"} & set(words):
        return kept  # a run's own options
    network = {} if "cifar10" in words else {"--depth": "10", "--growth_rate": "4"}
    return [*kept, *(word for pair in (network | TINY).items() for word in pair), "--device", "cpu"]


def test_the_training_page_s_commands_run_in_turn(tmp_path):
    """On a few images. Other tests run what is missing: the digits, several processes, the memory tour."""
    write_folder(tmp_path / "cifar", each=12)
    write_folder(tmp_path / "cifar10_jpeg", CIFAR10_CLASSES, each=2)
    write_folder(tmp_path / "mine", ("left", "middle", "right"), each=12)
    Image.new("RGB", (50, 40), (10, 10, 10)).save(tmp_path / "mine.jpg")
    for place in ("demos/pictures", "checkpoints/digits"):
        (tmp_path / place).parent.mkdir()
        (tmp_path / place).symlink_to(ROOT / place)
    ran = []
    for command, script, *words in commands("docs/training.md"):
        elsewhere = not words or words[-1] == "checkpoints/digits" or "densenet121" in words
        if command != "python" or script not in ("demos/cp_demo.py", "demos/predict.py") or elsewhere:
            continue
        words = shortened(words) if script == "demos/cp_demo.py" else words
        done = demo(Path(script).name, *words, cwd=tmp_path)
        assert done.returncode == 0, (script, words, done.stderr)
        ran.append(script)
    assert len(ran) == 10
    assert (tmp_path / "model" / "model.pt").exists()


@pytest.mark.parametrize("page", PAGES)
def test_options_that_are_named_exist(page):
    known = {field.name for field in fields(Options)} | {"top", "model", "dry-run", "help", "all-files", "check"}
    known |= {"warmup"}  # of the doctor
    known |= {name for path in (ROOT / "examples").glob("*.py") for name in example_options(path.name)}
    known |= {name for function in BENCHMARKS.values() for name in inspect.signature(function).parameters}
    parsers = torchrun_parser(), memory_command.make_parser()
    known |= {name.lstrip("-") for each in parsers for action in each._actions for name in action.option_strings}
    for code in re.findall(r"`([^`]+)`", prose(page)):
        for name in re.findall(r"(?<!\S)--([\w-]+)", code):
            assert name in known, f"{page}: --{name}"


def slugs(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", (ROOT / page).read_text())):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        place = (ROOT / page).parent / path if path else ROOT / page
        assert place.exists(), f"{page}: {target}"
        assert not anchor or anchor in slugs(place), f"{page}: {target}"


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page):
    """A path in a sentence is one of the repository, or of the package; a run's own files are not paths."""
    for path in re.findall(r"`((?:[\w.]+/)+[\w.]*)`", prose(page)):
        if path.split("/")[0] in ("train", "test", "val", "conv2_block1_1_conv", ".venv", "gpleiss", "csrhddlam"):
            continue
        homes = ROOT, ROOT / "efficient_densenet", ROOT / "efficient_densenet/kernels"
        assert any((home / path).exists() for home in homes), f"{page}: {path}"


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_what_was_measured(page):
    assert table.outdated((ROOT / page).read_text()) == []


@pytest.mark.parametrize("page", ["README.md", "docs/other-libraries.md"])
def test_figures_in_sentences_stand_in_a_table(page):
    shown = "\n".join(
        line for line in (ROOT / "docs" / "benchmarks.md").read_text().splitlines() if line.startswith("|")
    )
    figures = re.findall(r"[\d,]+\sMiB|\d\.\d\d×", prose(page))
    assert figures
    for figure in figures:
        assert re.sub(r"\s", " ", figure) in shown, f"{page}: {figure}"


def test_the_train_and_test_commands_are_as_ci_reads_them():
    text = (ROOT / "README.md").read_text()
    for name in ("train command", "test command"):
        block = re.search(rf"<!-- {name} -->\n```sh\n(python3 [^\n]*)\n```\n", text)
        assert block, name
    assert os.linesep not in block[1]
