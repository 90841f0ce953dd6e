"""The engine that a run reports is the one that runs, with the kernels of the model's device and dtype."""

import pytest
import torch
import torch.nn.functional as F
from training.models import describe_engines

from efficient_densenet import DenseNet, kernels
from efficient_densenet.engine import choose


def _model(efficient: bool | str = True, **overrides) -> DenseNet:
    return DenseNet(4, (2, 1), num_init_features=4, efficient=efficient, **overrides)


def _with_kernels(monkeypatch: pytest.MonkeyPatch, triton: bool, numba: bool) -> None:
    monkeypatch.setattr(kernels, "triton_supports", lambda values: triton)
    monkeypatch.setattr(kernels, "numba_supports", lambda values: numba)


@pytest.mark.parametrize("engine", [True, "shared", "plain", "official", "checkpoint"])
@pytest.mark.parametrize(("triton", "numba", "name"), [(1, 0, "Triton"), (0, 1, "Numba"), (0, 0, "portable")])
def test_engines_and_their_kernels(engine, triton, numba, name, monkeypatch):
    _with_kernels(monkeypatch, triton, numba)
    expected = f"shared ({name})" if engine in (True, "shared") else engine
    assert describe_engines(_model(engine), 2, 8) == expected
    compiled = describe_engines(_model(engine), 2, 8, compiled=True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    block = _model(engine).get_submodule("features.denseblock1")
    assert compiled.split(" ")[0] == choose.plan_block(block, torch.randn(2, 4, 8, 8)).engine.value


@pytest.mark.parametrize("small_inputs", [True, False])
@pytest.mark.parametrize("amp_dtype", [None, torch.bfloat16])
def test_the_reported_kernels_are_those_of_a_step(small_inputs, amp_dtype, monkeypatch):
    used, numba_supports = set(), kernels.numba_supports

    def note(values: torch.Tensor) -> bool:
        used.add(f"shared ({'Numba' if numba_supports(values) else 'portable'})")
        return numba_supports(values)

    model = _model(small_inputs=small_inputs)
    with torch.autocast("cpu", amp_dtype, enabled=amp_dtype is not None):
        reported = describe_engines(model, 2, 32)
        monkeypatch.setattr(kernels, "numba_supports", note)
        loss = F.cross_entropy(model(torch.randn(2, 3, 32, 32)), torch.tensor([0, 1]))
    loss.backward()
    assert used == {reported}


@pytest.mark.filterwarnings("ignore:falling back")
def test_blocks_that_differ_are_reported_one_by_one(monkeypatch):
    _with_kernels(monkeypatch, triton=False, numba=False)
    model = _model()
    model.get_submodule("features.denseblock2.denselayer1.conv1").register_forward_hook(lambda *_: None)
    assert describe_engines(model, 2, 8) == "shared (portable) in denseblock1, checkpoint in denseblock2"
