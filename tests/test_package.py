"""The cost of an import, the modules that it does not need, and the wheel alone."""

import configparser
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from test_zoo import PARAMETERS_IN_MILLIONS

import efficient_densenet
from efficient_densenet._extras import need

ROOT = Path(__file__).parents[1]
OPTIONAL = [
    "torchvision",
    "fire",
    "tqdm",
    "matplotlib",
    "PIL",
    "timm",
    "monai",
    "numba",
    "triton",
    "safetensors",
    "huggingface_hub",
]
"""Packages that parts of this one use where they are installed."""


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the wheel and the sdist of a copy of the sources, built without a network or an environment."""
    copy = tmp_path_factory.mktemp("sources")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    shutil.copytree(ROOT / "efficient_densenet", copy / "efficient_densenet", ignore=ignored)
    shutil.copytree(ROOT / "tests", copy / "tests", ignore=ignored)
    for name in ("setup.cfg", "setup.py", "MANIFEST.in", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    built = tmp_path_factory.mktemp("built")
    code = "from setuptools import build_meta as build; "
    code += f"build.build_sdist({str(built)!r}); build.build_wheel({str(built)!r})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return built


@pytest.fixture(scope="module")
def wheel(built) -> Path:
    (path,) = built.glob("*.whl")
    return path


def test_the_sdist_builds_itself_and_has_no_tests(built):
    """They need a clone's demos, benchmarks and examples."""
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE", "efficient_densenet/py.typed"} <= names
    assert not [name for name in names if name.startswith("tests")]


def test_the_wheel_holds_the_package_and_its_data_alone(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    inside = {name for name in names if ".dist-info/" not in name}
    sources = (path for path in (ROOT / "efficient_densenet").rglob("*") if path.is_file())
    expected = {str(path.relative_to(ROOT)) for path in sources if "__pycache__" not in path.parts}
    assert inside == expected
    assert "efficient_densenet/py.typed" in inside
    assert any(name.endswith("LICENSE") for name in names)
    required = re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)
    assert [each for each in required if "extra ==" not in each] == ["torch>=2.6"]
    assert f"\nVersion: {efficient_densenet.__version__}\n" in metadata
    assert "\n## Limits\n" in metadata  # the README, whose links into the repository lead nowhere from an index
    assert [target for target in re.findall(r"\]\(([^)]*)\)", metadata) if not target.startswith("https://")] == []
    (scripts,) = (name for name in names if name.endswith("/entry_points.txt"))
    with zipfile.ZipFile(wheel) as archive:
        assert b"\nefficient-densenet = efficient_densenet.__main__:script\n" in archive.read(scripts)


def test_the_wheel_alone_trains_and_importing_it_does_nothing_else(wheel, tmp_path):
    """The wheel, in a directory of its own, imports torch and the standard library alone, and no compiler, which takes
    as much memory as a training step."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = f"""
import builtins, sys
sys.modules.update(dict.fromkeys({OPTIONAL}))
import_module, imported = builtins.__import__, set()

def watched(name, globals=None, locals=None, fromlist=(), level=0):
    if level == 0 and (globals or {{}}).get("__name__", "").startswith("efficient_densenet"):
        imported.add(name.split(".")[0])
    return import_module(name, globals, locals, fromlist, level)

builtins.__import__ = watched
import torch
before, state = set(sys.modules), torch.get_rng_state()
settings = torch.get_num_threads(), torch.is_grad_enabled()
import efficient_densenet
assert efficient_densenet.__file__.startswith({str(tmp_path)!r}), efficient_densenet.__file__
assert torch.equal(state, torch.get_rng_state())
assert settings == (torch.get_num_threads(), torch.is_grad_enabled())
small = efficient_densenet.DenseNet(block_config=(1,), num_init_features=4, efficient="shared")
for _ in range(3):  # directly, recorded and replayed
    small(torch.randn(1, 3, 4, 4)).sum().backward()
assert not [name for name in set(sys.modules) - before if name.startswith(("torch._dynamo", "torch._inductor"))]
model = efficient_densenet.densenet121(num_classes=10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.nn.functional.cross_entropy(model(torch.randn(2, 3, 32, 32)), torch.tensor([3, 7])).backward()
optimizer.step()
assert all(p.grad is not None for p in model.parameters())
assert all(hasattr(efficient_densenet, name) for name in efficient_densenet.__all__)
assert model.features.norm5.num_batches_tracked == 1
print(*(imported - set(sys.stdlib_module_names)))
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [sys.executable, "-W", "error", "-c", code]
    environment["PYTHONPATH"] = str(tmp_path)
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["torch"]


def test_a_missing_extra_names_its_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "no_such_package", None)
    monkeypatch.delitem(sys.modules, "no_such_package")
    with pytest.raises(ModuleNotFoundError, match=r"pip install -e '\.\[demos\]'"):
        need("no_such_package", extra="demos")
    with pytest.raises(ModuleNotFoundError, match="no_such_package is not installed"):
        need("no_such_package.inside", extra="demos")
    assert need("json", extra="demos").__name__ == "json"


def test_the_metadata_agree_on_authors_version_and_fast_kernels():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    version, date = re.findall(r"^## ([\d.]+), ([\d-]+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    author, citation = setup["metadata"]["author"], (ROOT / "CITATION.cff").read_text()
    assert f"- name: {author}\n" in citation
    assert author in (ROOT / "LICENSE").read_text()
    assert version == efficient_densenet.__version__
    assert f'\nversion: {version}\ndate-released: "{date}"\n' in citation
    extras = setup["options.extras_require"]
    assert "numba" in extras["demos"]  # the fast kernels
    for packages in extras.values():  # older ones compile no bfloat16
        assert [each for each in packages.split() if each.startswith("numba")] in ([], ["numba>=0.62"])


def test_the_zoo_s_table_lists_every_model_with_its_size():
    text = (ROOT / "docs" / "backbones-and-weights.md").read_text()
    rows = re.findall(r"^\| (\w*densenet\w+) \| ([\d.]+) \|", text, re.MULTILINE)
    assert [name for name, _ in rows] == efficient_densenet.list_models()
    assert all(f"{PARAMETERS_IN_MILLIONS[name]:.3f}" == size for name, size in rows)
