"""torch.compile: the shared engine's operators in one graph, with plain's numbers, and few recompilations."""

import copy
import re
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    FAMILIES,
    add_conv_biases,
    assert_all_close,
    assert_close,
    assert_same_buffers,
    assert_same_gradients,
    assert_same_values,
    freeze_norms,
    freeze_parameters,
    random_images,
    relative_error,
    results_of,
    small_model,
    with_engine,
)
from third_party_models import MODELS, NewestFirst, build, image_batch, plain_reference, train
from torch import Tensor, nn

from efficient_densenet import FCDenseNet, features, make_efficient, restore
from efficient_densenet._compilers import CHECKPOINTS_UPDATE_ONCE, READS_CONVERTED_MODULES
from efficient_densenet.models.backbone import MAPS

pytestmark = [
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore"),  # of the compiler
    pytest.mark.filterwarnings("error:Dynamo detected a call to a .functools.lru_cache"),  # of ours
]

reads_converted_modules = pytest.mark.skipif(
    not READS_CONVERTED_MODULES, reason="this compiler cannot trace how converted modules are read"
)
needs_cpp = pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="Inductor needs a C++ compiler"
)


def _compiled(model: nn.Module, backend: Any = "aot_eager", fullgraph: bool = True, **options: Any) -> nn.Module:
    return torch.compile(model, backend=backend, fullgraph=fullgraph, **options)


def _num_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _train_alike(ours: nn.Module, plain: nn.Module, x: Tensor, compiled: nn.Module | None = None) -> None:
    """Three steps of an optimizer: outputs, gradients, parameters and buffers are plain's."""
    compiled, results = _compiled(ours) if compiled is None else compiled, ([], [])
    for model, run, found in ((plain, plain, results[0]), (ours, compiled, results[1])):
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trainable, lr=1e-3, momentum=0.9)
        for step in range(3):
            optimizer.zero_grad()
            torch.manual_seed(step)
            leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
            outputs = run(leaf)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            sum(output.square().mean() for output in outputs).backward()
            found += [*(output.detach() for output in outputs), leaf.grad]
            optimizer.step()
        found += [parameter.detach() for parameter in model.parameters()]
    assert_all_close(*results)
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)


def _partly_frozen() -> nn.Module:
    """The first norms of the layers, and the parameters of the convolutions."""
    model = add_conv_biases(small_model("bc", efficient=False, block_config=(2, 1)), "transition")
    freeze_norms(model, "norm2")
    freeze_parameters(model, lambda name: "norm" in name or "classifier" in name)
    return model


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    **{family: lambda family=family: small_model(family, efficient=False) for family in ("basic", "bc")},
    "imagenet": lambda: small_model("imagenet", efficient=False, block_config=(2, 1)),
    "channels_last": lambda: small_model("bc", efficient=False).to(memory_format=torch.channels_last),
    "volumes with biases, dropout and kept bottlenecks": lambda: add_conv_biases(
        small_model("bc", efficient=False, dims=3, block_config=(2,), drop_rate=0.3, keep_bottleneck=True)
    ),
    "partly frozen": _partly_frozen,
    "U-Net": lambda: FCDenseNet(3, (1, 2, 1), num_init_features=4, num_classes=2, efficient=False).double(),
    **{f"backbone, {maps}": lambda maps=maps: features(small_model("bc", efficient=False), maps=maps) for maps in MAPS},
}


def _cases(names: Any) -> list:
    return [pytest.param(name, marks=() if name == "imagenet" else pytest.mark.exhaustive) for name in names]


def _images_for(case: str) -> Tensor:
    if case.startswith("volumes"):
        return torch.randn(3, 3, 9, 8, 7, dtype=torch.double)
    x = random_images(case if case in FAMILIES else "bc")
    return x.to(memory_format=torch.channels_last) if case == "channels_last" else x


@pytest.mark.parametrize("case", _cases(NETWORKS))
def test_training_is_one_graph_of_stages_and_matches_plain(case):
    """A block is its operator alone in the graph."""
    plain, names = NETWORKS[case](), []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes if node.op.startswith("call"))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    ours = with_engine(plain, "shared")
    _train_alike(ours, plain, _images_for(case), _compiled(ours, backend))
    assert _num_graphs() == 1
    stages = names.count("efficient_densenet.stage.default")
    assert stages >= sum(name.split(".")[-1].startswith("denseblock") for name, _ in plain.named_modules())
    if case == "imagenet":
        assert names.count("efficient_densenet.stem.default") == 1
        assert not re.search(r"\b(conv2d|batch_norm|cat|avg_pool2d|dropout)\b", " ".join(names))


def test_sizes_modes_engines_and_settings_changed_after_compiling_are_noticed():
    """A second size makes one graph for all sizes; a second change of a number is not taken for any number."""
    plain = small_model("bc", efficient=False, block_config=(1,), drop_rate=0.2)
    ours = with_engine(plain, "shared")
    compiled = _compiled(ours, "eager")

    def assert_same(num_graphs: int, x: Tensor) -> None:
        assert_same_values(compiled, plain, x)
        assert _num_graphs() == num_graphs

    x = random_images("bc")
    assert_same(1, x)
    for size in ((3, 3, 12, 8), (2, 3, 16, 15)):
        assert_same(2, torch.randn(size, dtype=torch.double))
    ours.eval(), plain.eval()
    assert_same(3, x)
    ours.train(), plain.train()
    assert_same(3, x)
    ours.set_engine("plain")
    assert_same(4, x)
    ours.set_engine("shared")
    for i, (drop_rate, eps) in enumerate(((0.3, 0.1), (0.4, 0.2)), start=5):
        for module in (*ours.features.modules(), *plain.features.modules()):
            if hasattr(module, "drop_rate"):
                module.drop_rate = drop_rate
            if hasattr(module, "eps"):
                module.eps = eps
        assert_same(i, x)
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)


@pytest.mark.exhaustive
def test_without_gradients_under_autocast_and_a_hook_on_all_modules():
    plain = small_model("bc", efficient=False, block_config=(1,)).float()
    ours, x, seen = with_engine(plain, True), random_images("bc").float(), []
    compiled = _compiled(ours, backend="eager", fullgraph=False)
    with torch.no_grad():
        for training in (True, False):
            ours.train(training), plain.train(training)
            assert_close(compiled(x), plain(x), 1e-5)
    assert_same_buffers(ours, plain, 1e-5)
    expected = results_of(copy.deepcopy(plain).double(), x.double())
    with torch.autocast("cpu", torch.bfloat16):
        errors = [relative_error(results_of(run, x), expected) for run in (compiled, plain)]
    assert errors[0] <= 2 * errors[1]
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    try:
        assert_close(compiled(x), plain(x), 1e-5)
    finally:
        handle.remove()
    assert seen.count(nn.Conv2d) >= 2 * sum(isinstance(module, nn.Conv2d) for module in plain.modules())


@pytest.mark.exhaustive
def test_a_graph_saves_the_features_and_their_statistics():
    """Neither concatenations nor bottlenecks are saved."""
    model, saved = small_model("bc", block_config=(3,), efficient="shared"), []
    x = random_images("bc").requires_grad_()
    compiled = _compiled(model.features)
    compiled(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        compiled(x)
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    sizes = sorted(tensor.numel() for tensor in saved if tensor.data_ptr() not in {*parameters, x.data_ptr()})
    assert sizes[-1] == 5 * 9 * 7 * (4 + 3 * 3)
    assert sum(sizes[:-1]) <= 3 * (4 + 3 * 3 + 12 * 3)


# Converted models


@pytest.mark.parametrize("name", _cases(MODELS))
def test_converted_models_match_plain(name):
    if "efficient" in name and not CHECKPOINTS_UPDATE_ONCE:
        pytest.skip("under this compiler, the author's own checkpointing updates running statistics twice")
    plain = build(name)
    ours, plain = copy.deepcopy(plain), plain_reference(name, plain)
    make_efficient(ours)
    x = image_batch(name)
    assert_all_close(train(_compiled(ours), x), train(plain, x))
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)


class Scaled(NewestFirst):
    """A layer whose scale is neutral when it is converted."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale) if self.scale != 1.0 else super().forward(x)


@pytest.mark.exhaustive
@reads_converted_modules
@pytest.mark.filterwarnings("ignore:falling back")
def test_converting_an_author_s_attribute_and_restoring_after_compiling_are_noticed():
    plain = nn.Sequential(*(Scaled(6 + 4 * i) for i in range(2))).double()
    ours, x, graphs = copy.deepcopy(plain), torch.randn(3, 6, 5, 6, dtype=torch.double), []

    def record(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
        return graph

    def rescale(scale: float) -> None:
        ours[1].scale = plain[1].scale = scale

    compiled = _compiled(ours, backend=record)
    changes = [lambda: None, lambda: make_efficient(ours), lambda: rescale(0.5), lambda: rescale(0.25)]
    for change in (*changes, lambda: rescale(1.0), lambda: restore(ours)):
        change()
        assert_same_values(compiled, plain, x)
    stages = [names.count("efficient_densenet.stage.default") for names in graphs]
    assert stages[:2] == [0, 1]
    assert not any(stages[2:])
    assert not re.search(r"\b(conv2d|batch_norm|cat)\b", " ".join(graphs[1]))
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)


@pytest.mark.exhaustive
@needs_cpp
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor_training_matches_plain(mode):
    plain = small_model("bc", efficient=False, block_config=(1, 1))
    ours = with_engine(plain, "shared")
    _train_alike(ours, plain, random_images("bc"), _compiled(ours, backend="inductor", mode=mode))
