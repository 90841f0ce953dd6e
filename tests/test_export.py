"""Tracing, export and compilation see an ordinary model."""

import shutil

import pytest
import torch
from helpers import (
    assert_close,
    assert_same_buffers,
    assert_same_gradients,
    backward,
    picture,
    small_model,
    with_engine,
)

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


@pytest.mark.filterwarnings("ignore")
def test_compiled_training_steps_end_where_plain_s_do():
    """The engine asked for by name, an optimizer, batches of two sizes."""
    plain = small_model("basic", efficient=False)
    ours = with_engine(plain, "shared")
    compiled = torch.compile(ours, backend="aot_eager")
    for model, run in ((plain, plain), (ours, compiled)):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        torch.manual_seed(0)
        for batch in (4, 2, 2):
            optimizer.zero_grad()
            backward(run, picture("basic", batch))
            optimizer.step()
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)
    for found, expected in zip(ours.parameters(), plain.parameters(), strict=True):
        assert_close(found.detach(), expected.detach())


@pytest.mark.slow
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="Inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")
def test_inductor_trains_with_plain_s_numbers():
    plain = small_model("bc", efficient=False, block_config=(1, 1))
    ours = with_engine(plain, "shared")
    x = picture("bc")
    assert_close(backward(torch.compile(ours), x)[1], backward(plain, x)[1])
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", [True, "shared"])
def test_onnx_of_a_trained_model_gives_plain_s_numbers(engine):
    """The model that was trained is exported as it is."""
    for module in ("onnx", "onnxscript"):
        pytest.importorskip(module)
    runtime = pytest.importorskip("onnxruntime")
    model = small_model("bc", efficient=engine).float()
    x = picture("bc").float()
    backward(model, x)
    model.eval()
    program = torch.onnx.export(model, (x,), dynamo=True, dynamic_shapes={"x": {0: torch.export.Dim("batch")}})
    session = runtime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    other = picture("bc", batch=3).float()
    (found,) = session.run(None, {session.get_inputs()[0].name: other.numpy()})
    assert_close(torch.from_numpy(found), with_engine(model, "plain")(other).detach(), tolerance=1e-5)
