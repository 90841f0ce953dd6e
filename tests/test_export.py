"""Tracing, export, ONNX and torch.fx."""

import copy

import pytest
import torch
from grids import grid
from helpers import (
    assert_all_close,
    assert_close,
    assert_same_buffers,
    assert_same_gradients,
    backward,
    random_images,
    small_model,
    with_engine,
)
from torchvision.models import feature_extraction

from efficient_densenet import features
from efficient_densenet.models.backbone import MAPS

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]
ENGINES = [True, "plain", "official", "checkpoint", "shared"]


@pytest.mark.parametrize("engine", ["official", "shared"])
def test_jit_trace(engine):
    model = small_model("bc", efficient=engine).eval()
    traced = torch.jit.trace(model, random_images("bc"))
    x = torch.randn(2, 3, 12, 10, dtype=torch.double)
    with torch.no_grad():
        assert_close(traced(x), model(x))
    assert "aten::contiguous" not in str(traced.inlined_graph)  # the memory format is that of each input


def test_jit_script_raises_and_names_alternatives():
    with pytest.raises(NotImplementedError, match=r"torch.jit.script.*use torch.export or torch.jit.trace"):
        torch.jit.script(small_model("bc"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    *grid(
        engine=["checkpoint", "shared", True],
        strict=[False, True],
        training=[False, True],
        dims=[1, 2, 3],
        strength=1,
    )
)
def test_export_with_any_batch_size(engine, strict, training, dims):
    """PyTorch before 2.8 exports strictly by default."""
    model = small_model("bc", efficient=engine, block_config=(2, 1), dims=dims).train(training)
    x, other = (torch.randn(batch, 3, *(9, 7, 8)[:dims], dtype=torch.double) for batch in (5, 3))
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    exported = torch.export.export(model, (x,), dynamic_shapes=shapes, strict=strict).module()
    assert_close(exported(other), model(other))
    if hasattr(torch.compiler, "_is_exporting_flag"):  # PyTorch 2.6 does not tell that it exports in training mode
        assert not any("efficient_densenet" in str(node.target) for node in exported.graph.nodes)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")
def test_onnx_export_of_a_trained_model_matches_plain():
    """A trained model is exported without changes."""
    for module in ("onnx", "onnxscript"):
        pytest.importorskip(module)
    runtime = pytest.importorskip("onnxruntime")
    model = small_model("bc", efficient=True).float()
    x = random_images("bc").float()
    backward(model, x)
    model.eval()
    onnx_program = torch.onnx.export(model, (x,), dynamo=True, dynamic_shapes={"x": {0: torch.export.Dim("batch")}})
    session = runtime.InferenceSession(onnx_program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"])
    other_images = random_images("bc", batch=3).float()
    (output,) = session.run(None, {session.get_inputs()[0].name: other_images.numpy()})
    assert_close(torch.from_numpy(output), with_engine(model, "plain")(other_images).detach(), tolerance=1e-5)


@pytest.mark.parametrize(*grid(engine=ENGINES, family=["bc", "basic", "imagenet"], strength=1))
def test_fx_trace_matches_the_model(engine, family):
    model = small_model(family, efficient=engine)
    traced = torch.fx.symbolic_trace(copy.deepcopy(model))
    plain, x = with_engine(model, "plain"), random_images(family, batch=2)
    for _ in range(2):
        backward(plain, x)
        backward(traced, x)
    assert_same_gradients(traced, plain)
    assert_same_buffers(traced, plain)
    assert_close(traced.eval()(x), plain.eval()(x))
    targets = {node.target for node in traced.graph.nodes if node.op == "call_module"}
    leaves = {name for name, module in model.named_modules() if not any(True for _ in module.children())}
    assert targets == leaves  # every leaf module is called under its own name


@pytest.mark.parametrize("maps", [MAPS[0], *(pytest.param(maps, marks=pytest.mark.exhaustive) for maps in MAPS[1:])])
def test_a_backbone_and_a_block_are_traced_and_exported(maps):
    backbone, x = features(small_model("bc", efficient="shared"), maps=maps).eval(), random_images("bc", batch=3)
    shapes = ({0: torch.export.Dim("batch", min=1, max=64)},)
    exported = torch.export.export(backbone, (random_images("bc"),), dynamic_shapes=shapes).module()
    traced, symbolic = torch.jit.trace(backbone, random_images("bc")), torch.fx.symbolic_trace(backbone)
    with torch.no_grad():
        for each in (exported, traced, symbolic):
            assert_all_close(each(x), backbone(x))
        block, block_input = backbone.features.denseblock1, backbone.features.conv0(x)
        assert_close(torch.fx.symbolic_trace(block)(block_input), block(block_input))


@pytest.mark.parametrize("engine", ["plain", "shared"])
def test_torchvision_feature_extractor(engine):
    model = small_model("imagenet", efficient=engine)
    nodes = ["features.relu0", "features.denseblock1", "features.transition2.relu", "features.norm5"]
    extractor = feature_extraction.create_feature_extractor(copy.deepcopy(model), nodes).eval()
    backbone, x = model.eval(), random_images("imagenet", batch=2)
    maps = extractor(x)
    raw = features(backbone, (0, 1), maps="raw")(x)
    rectified = features(backbone, (2,), maps="normalised_rectified")(x)
    for name, expected in zip(nodes, (*raw, *rectified, backbone.features(x)), strict=True):
        assert_close(maps[name], expected)
    train, evaluation = feature_extraction.get_graph_node_names(model)
    assert train == evaluation
