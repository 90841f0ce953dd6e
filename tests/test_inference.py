"""Without gradients, blocks run by the shared engine's forward where its kernels are the faster ones."""

import pytest
import torch
from checkpoint_outcomes import CountingOperations
from grids import grid
from helpers import (
    FAMILIES,
    assert_all_close,
    assert_close,
    assert_same_buffers,
    random_images,
    small_model,
    use_kernels,
    with_engine,
)
from third_party_models import build, image_batch, plain_reference
from torch import Tensor, nn

from efficient_densenet import kernels, make_efficient

CONTEXTS = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}


@pytest.fixture(autouse=True)
def _compiled_kernels(monkeypatch):
    use_kernels(monkeypatch, "compiled", 256)


def num_stages(model: nn.Module, x: Tensor) -> int:
    """How many stages of a forward the shared engine runs."""
    with CountingOperations() as counted:
        model(x)
    return counted.counts[torch.ops.efficient_densenet.stage.default]


def blocks_of(family: str) -> int:
    return len(FAMILIES[family]["block_config"])


@pytest.mark.parametrize(*grid(family=FAMILIES, engine=[True, "shared"], context=CONTEXTS, maps=[False, True]))
def test_values_and_buffers_are_those_of_plain(family, engine, context, maps):
    plain, x = small_model(family, efficient=False, features_only=maps), random_images(family)
    ours = with_engine(plain, engine)
    with CONTEXTS[context]():
        for training in (True, False):  # the first updates running statistics
            outputs = [model.train(training)(x) for model in (ours, plain)]
            assert_all_close(*(outputs if maps else ([each] for each in outputs)))
            assert_same_buffers(ours, plain)
        assert num_stages(ours, x) == blocks_of(family)


def test_frozen_parameters_need_no_context():
    ours = small_model("bc").requires_grad_(False).eval()
    assert num_stages(ours, random_images("bc")) == blocks_of("bc")


@pytest.mark.parametrize("name", ["torchvision", "gpleiss", "kuangliu"])
def test_converted_models(name):
    ours, x = build(name), image_batch(name)
    plain = plain_reference(name, ours).eval()
    make_efficient(ours.eval())
    with torch.no_grad():
        assert_close(ours(x), plain(x))
        assert num_stages(ours, x) == 3


@pytest.mark.parametrize("operand", [torch.bfloat16, torch.float32])
def test_where_plain_modules_run(monkeypatch, operand):
    """Plain modules run with another engine or other kernels, and in precisions that the processor cannot multiply."""
    model, x = small_model("bc").float().eval(), random_images("bc").float()
    monkeypatch.setattr(kernels, "numba_multiplies", lambda dtype: dtype is operand)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            assert num_stages(model, x) == (blocks_of("bc") if operand is torch.bfloat16 else 0)
        with torch.autocast("cpu", torch.float16):
            assert num_stages(model, x) == 0
        for engine in ("plain", "official", "checkpoint"):
            assert num_stages(with_engine(model, engine), x) == 0
        use_kernels(monkeypatch, "portable", 1 << 22)
        assert num_stages(model, x) == 0


def test_what_the_engine_cannot_run_runs_by_plain_modules_without_a_warning():
    model, x, seen = small_model("bc").eval(), random_images("bc"), []
    with torch.no_grad():
        expected = model(x)
        model.features.denseblock1.denselayer1.conv1.register_forward_hook(lambda *_: seen.append(1))
        assert_close(model(x), expected)
        assert seen
        assert num_stages(model, x) == blocks_of("bc") - 1
        model.set_engine("shared")
        assert_close(model(x), expected)  # nothing is to be saved, so nothing is refused
