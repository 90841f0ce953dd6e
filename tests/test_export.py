"""Tracing, export and compilation see an ordinary model."""

import copy
import shutil

import pytest
import torch
import torchvision
from grids import grid
from helpers import (
    assert_close,
    assert_same_buffers,
    assert_same_gradients,
    backward,
    random_images,
    small_model,
    with_engine,
)
from torch import nn
from torchvision.models import feature_extraction

from efficient_densenet import create_model, features, restore_batchnorm
from efficient_densenet.models.backbone import MAPS

ENGINES = [True, "plain", "official", "checkpoint", "shared"]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
@pytest.mark.parametrize("engine", ENGINES)
def test_jit_trace(engine):
    model = small_model("bc", efficient=engine).eval()
    traced = torch.jit.trace(model, random_images("bc"))
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
    exported = torch.export.export(model, (random_images("bc"),), dynamic_shapes=({0: batch},)).module()
    x = random_images("bc", batch=3)
    with torch.no_grad():
        assert torch.equal(exported(x), model(x))


@pytest.mark.filterwarnings("ignore")  # the compiler's own remarks on this machine's toolchain
@pytest.mark.parametrize("engine", [pytest.param("plain", marks=pytest.mark.exhaustive), "checkpoint", True])
def test_compiled_training_has_plain_s_numbers(engine):
    plain = small_model("bc", efficient=False)
    ours = with_engine(plain, engine)
    compiled = torch.compile(ours, backend="aot_eager")
    x = random_images("bc")
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
            backward(run, random_images("basic", batch))
            optimizer.step()
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)
    for found, expected in zip(ours.parameters(), plain.parameters(), strict=True):
        assert_close(found.detach(), expected.detach())


@pytest.mark.exhaustive
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="Inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")
def test_inductor_trains_with_plain_s_numbers():
    plain = small_model("bc", efficient=False, block_config=(1, 1))
    ours = with_engine(plain, "shared")
    x = random_images("bc")
    assert_close(backward(torch.compile(ours), x)[1], backward(plain, x)[1])
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("engine", [True, pytest.param("shared", marks=pytest.mark.exhaustive)])
def test_onnx_of_a_trained_model_gives_plain_s_numbers(engine):
    """The model that was trained is exported as it is."""
    for module in ("onnx", "onnxscript"):
        pytest.importorskip(module)
    runtime = pytest.importorskip("onnxruntime")
    model = small_model("bc", efficient=engine).float()
    x = random_images("bc").float()
    backward(model, x)
    model.eval()
    program = torch.onnx.export(model, (x,), dynamo=True, dynamic_shapes={"x": {0: torch.export.Dim("batch")}})
    session = runtime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    other = random_images("bc", batch=3).float()
    (found,) = session.run(None, {session.get_inputs()[0].name: other.numpy()})
    assert_close(torch.from_numpy(found), with_engine(model, "plain")(other).detach(), tolerance=1e-5)


# Backbones


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("maps", MAPS)
def test_a_backbone_traced_and_exported(maps):
    backbone = features(small_model("bc", efficient="shared"), maps=maps).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(backbone, (random_images("bc"),), dynamic_shapes=({0: batch},)).module()
    x = random_images("bc", batch=3)
    with torch.no_grad():
        expected = backbone(x)
        for found in (exported(x), torch.jit.trace(backbone, random_images("bc"))(x)):
            for a, b in zip(found, expected, strict=True):
                assert torch.equal(a, b)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_onnx_of_a_backbone():
    for module in ("onnx", "onnxscript"):
        pytest.importorskip(module)
    runtime = pytest.importorskip("onnxruntime")
    backbone = features(small_model("imagenet"), maps="normalised_rectified").float().eval()
    program = torch.onnx.export(backbone, (random_images("imagenet").float(),), dynamo=True)
    session = runtime.InferenceSession(program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    x = random_images("imagenet").float()
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    for a, b in zip(found, backbone(x), strict=True):
        assert_close(torch.from_numpy(a), b.detach(), tolerance=1e-5)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("maps", [MAPS[-1], *(pytest.param(maps, marks=pytest.mark.exhaustive) for maps in MAPS[:-1])])
def test_a_backbone_compiled_trains_with_plain_s_numbers(maps):
    plain = features(small_model("bc", efficient=False), maps=maps)
    ours = with_engine(plain, "shared")
    compiled = torch.compile(ours, backend="aot_eager")
    x = random_images("bc")
    for run in (plain, compiled):
        sum(y.sin().sum() for y in run(x)).backward()
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)


# torch.fx


@pytest.mark.parametrize(
    *grid(
        engine=ENGINES,
        family=["bc", "basic", "imagenet"],
        strength=1,
    )
)
def test_fx_s_trace_computes_and_trains_as_the_model(engine, family):
    model = small_model(family, efficient=engine)
    traced = torch.fx.symbolic_trace(copy.deepcopy(model))
    plain, x = with_engine(model, "plain"), random_images(family, batch=2)
    for _ in range(2):
        backward(plain, x)
        backward(traced, x)
    assert_same_gradients(traced, plain)
    assert_same_buffers(traced, plain)
    assert torch.equal(traced.eval()(x), plain.eval()(x))
    targets = {node.target for node in traced.graph.nodes if node.op == "call_module"}
    leaves = {name for name, module in model.named_modules() if not any(True for _ in module.children())}
    assert targets == leaves  # every module by its own name


@pytest.mark.parametrize("maps", MAPS)
def test_fx_s_trace_of_a_backbone_and_a_block(maps):
    backbone = features(small_model("bc", efficient="shared"), maps=maps).eval()
    x = random_images("bc", batch=2)
    with torch.no_grad():
        for a, b in zip(torch.fx.symbolic_trace(backbone)(x), backbone(x), strict=True):
            assert torch.equal(a, b)
        block, features_of = backbone.features.denseblock1, backbone.features.conv0(x)
        assert torch.equal(torch.fx.symbolic_trace(block)(features_of), block(features_of))


@pytest.mark.parametrize("engine", ["plain", "shared"])
def test_torchvision_s_feature_extractor(engine):
    model = small_model("imagenet", efficient=engine)
    nodes = ["features.relu0", "features.denseblock1", "features.transition2.relu", "features.norm5"]
    extractor = feature_extraction.create_feature_extractor(copy.deepcopy(model), nodes).eval()
    backbone, x = model.eval(), random_images("imagenet", batch=2)
    found = extractor(x)
    raw = features(backbone, (0, 1), maps="raw")(x)
    rectified = features(backbone, (2,), maps="normalised_rectified")(x)
    for name, expected in zip(nodes, (*raw, *rectified, backbone.features(x)), strict=True):
        assert_close(found[name], expected)
    train, evaluation = feature_extraction.get_graph_node_names(model)
    assert train == evaluation


WORDS = {"growth_rate": 4, "block_config": (1, 2, 1, 1), "num_init_features": 8, "num_classes": 5}


@pytest.mark.filterwarnings("ignore")
def test_fx_quantisation_is_torchvision_s():
    quantization = pytest.importorskip("torch.ao.quantization.quantize_fx")
    from torch.ao.quantization import get_default_qconfig_mapping

    theirs = torchvision.models.DenseNet(**WORDS)
    ours = create_model("densenet121", **WORDS)
    ours.load_state_dict(theirs.state_dict())
    x, found = random_images("imagenet", batch=4).float(), []
    for model in (theirs, ours, restore_batchnorm(copy.deepcopy(ours))):
        prepared = quantization.prepare_fx(model.eval(), get_default_qconfig_mapping("x86"), (x,))
        prepared(x)
        found.append(quantization.convert_fx(prepared)(x))
    expected = theirs(x)
    assert torch.equal(found[2], found[0])
    assert not torch.equal(found[0], expected)
    assert (found[1] - expected).abs().max() <= 2 * (found[0] - expected).abs().max()  # where norms are not fused


def test_norms_restored_are_torch_s_own_and_train_under_the_rule_again():
    plain = small_model("bc", efficient=False)
    ours = restore_batchnorm(with_engine(plain, "checkpoint"))
    assert {type(m) for m in ours.modules() if isinstance(m, nn.BatchNorm2d)} == {nn.BatchNorm2d}
    assert list(ours.state_dict()) == list(plain.state_dict())
    x = random_images("bc")
    for model in (ours, plain):
        backward(model, x)
        backward(model, x)
    assert_same_buffers(ours, plain)
    assert_same_gradients(ours, plain)
