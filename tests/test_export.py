"""Tracing, export and compilation see an ordinary model."""

import pytest
import torch
from helpers import assert_same_buffers, assert_same_gradients, backward, picture, small_model, with_engine

ENGINES = [True, "plain", "official", "checkpoint", "shared"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
@pytest.mark.parametrize("engine", ENGINES)
def test_jit_trace(engine):
    model = small_model("bc", efficient=engine).eval()
    traced = torch.jit.trace(model, picture("bc"))
    x = torch.randn(2, 3, 12, 10, dtype=torch.double)
    with torch.no_grad():
        assert torch.equal(traced(x), model(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
def test_jit_script_is_refused_with_the_ways_that_work():
    with pytest.raises(NotImplementedError, match=r"torch.jit.script.*use torch.export or torch.jit.trace"):
        torch.jit.script(small_model("bc"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("engine", ENGINES)
def test_export_with_any_batch_size(engine):
    model = small_model("bc", efficient=engine).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(model, (picture("bc"),), dynamic_shapes=({0: batch},)).module()
    x = picture("bc", batch=3)
    with torch.no_grad():
        assert torch.equal(exported(x), model(x))


@pytest.mark.filterwarnings("ignore")  # the compiler's own remarks on this machine's toolchain
@pytest.mark.parametrize("engine", ["plain", "checkpoint", True])
def test_compiled_training_has_plain_s_numbers(engine):
    plain = small_model("bc", efficient=False)
    ours = with_engine(plain, engine)
    compiled = torch.compile(ours, backend="aot_eager")
    x = picture("bc")
    for _ in range(2):
        backward(plain, x)
        backward(compiled, x)
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)
