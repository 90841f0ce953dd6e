"""What importing costs, and what it does not need."""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from test_zoo import MILLIONS

import efficient_densenet
from efficient_densenet._extras import need


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_core_imports_with_torch_alone():
    blocked = ["torchvision", "fire", "tqdm", "matplotlib", "numpy_extras", "PIL", "timm", "monai"]
    code = f"import sys; sys.modules.update(dict.fromkeys({blocked})); import efficient_densenet as e; e.densenet121()"
    _python(code)


def test_importing_does_nothing_else():
    code = """
import sys, torch
before, state = set(sys.modules), torch.get_rng_state()
settings = torch.get_num_threads(), torch.is_grad_enabled()
import efficient_densenet
assert torch.equal(state, torch.get_rng_state())
assert settings == (torch.get_num_threads(), torch.is_grad_enabled())
print(*(m for m in set(sys.modules) - before if m.split('.')[0] in ('torchvision', 'fire', 'tqdm', 'matplotlib')))
print(*(m for m in set(sys.modules) - before if m.startswith(('torch._dynamo', 'torch._inductor'))))
"""
    assert _python(code).split() == []


def test_a_missing_extra_names_its_install_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "no_such_package", None)
    monkeypatch.delitem(sys.modules, "no_such_package")
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'efficient_densenet\[demos\]'"):
        need("no_such_package", extra="demos")
    assert need("json", extra="demos").__name__ == "json"


def test_version_and_types():
    assert efficient_densenet.__version__ == version("efficient_densenet")
    assert (Path(efficient_densenet.__file__).parent / "py.typed").exists()


def test_every_public_name_is_there_and_in_order():
    for name in efficient_densenet.__all__:
        assert hasattr(efficient_densenet, name)


def test_pyproject_holds_the_build_system_only():
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert re.findall(r"^\[(.*)\]", text, re.MULTILINE) == ["build-system"]


def test_the_readme_lists_the_zoo_with_its_sizes():
    text = (Path(__file__).parents[1] / "README.md").read_text()
    rows = re.findall(r"^\| (densenet\w+) \| ([\d.]+) \|", text, re.MULTILINE)
    assert [name for name, _ in rows] == efficient_densenet.list_models()
    assert all(f"{MILLIONS[name]:.3f}" == size for name, size in rows)
