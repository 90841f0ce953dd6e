"""The engine that a run reports is the one that runs, with the kernels of the model's device and dtype."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from training.models import describe_engines

from efficient_densenet import DenseNet, kernels
from efficient_densenet.engine import choose


def _model(efficient: bool | str = True, **overrides) -> DenseNet:
    return DenseNet(4, (2, 1), num_init_features=4, efficient=efficient, **overrides)


def _with_kernels(monkeypatch: pytest.MonkeyPatch, fused: bool, compiled: bool) -> None:
    monkeypatch.setattr(kernels, "triton_supports", lambda values: fused)
    monkeypatch.setattr(kernels, "numba_supports", lambda values: compiled)


@pytest.mark.parametrize("engine", ["plain", "official", "checkpoint"])
def test_engines_without_kernels_of_their_own(engine):
    assert describe_engines(_model(engine), 2, 8) == engine


@pytest.mark.parametrize("engine", [True, "shared"])
@pytest.mark.parametrize(("fused", "compiled", "name"), [(1, 0, "Triton"), (0, 1, "Numba"), (0, 0, "portable")])
def test_the_shared_engine_with_its_kernels(engine, fused, compiled, name, monkeypatch):
    _with_kernels(monkeypatch, fused, compiled)
    assert describe_engines(_model(engine), 2, 8) == f"shared ({name})"


@pytest.mark.parametrize("small_inputs", [True, False])
@pytest.mark.parametrize("amp_dtype", [None, torch.bfloat16])
def test_the_reported_kernels_are_those_that_a_step_asks_for(small_inputs, amp_dtype, monkeypatch):
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


def test_blocks_that_differ_are_reported_one_by_one(monkeypatch):
    _with_kernels(monkeypatch, fused=False, compiled=False)
    model = _model()
    model.get_submodule("features.denseblock2.denselayer1.conv1").register_forward_hook(lambda *_: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # falling back
        reported = describe_engines(model, 2, 8)
    assert reported == "shared (portable) in denseblock1, checkpoint in denseblock2"


@pytest.mark.parametrize("engine", [True, "plain", "checkpoint"])
def test_a_compiled_model_reports_what_the_dispatcher_chooses_for_it(engine, monkeypatch):
    model = _model(engine)
    reported = describe_engines(model, 2, 8, compiled=True)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    block = model.get_submodule("features.denseblock1")
    assert reported.split(" ")[0] == choose.plan_block(block, torch.randn(2, 4, 8, 8)).engine.value
