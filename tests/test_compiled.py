"""torch.compile: the shared engine's operators in one graph, with plain's numbers, and few recompilations."""

import copy
import re
import shutil
import statistics
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
from third_party_models import (
    MODELS,
    NewestFirst,
    build,
    image_batch,
    plain_reference,
    train,
)
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
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def _compiled(model: nn.Module, backend: Any = "aot_eager", fullgraph: bool = True, **options: Any) -> nn.Module:
    return torch.compile(model, backend=backend, fullgraph=fullgraph, **options)


def _num_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def _train_alike(ours: nn.Module, plain: nn.Module, x: Tensor, compiled: nn.Module | None = None) -> None:
    """Three steps of an optimizer: outputs, gradients, parameters and buffers are plain's."""
    compiled = _compiled(ours) if compiled is None else compiled
    for model, run in ((plain, plain), (ours, compiled)):
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        model.optimizer = torch.optim.SGD(trainable, lr=1e-3, momentum=0.9)
        model.results = []
        for step in range(3):
            model.optimizer.zero_grad()
            torch.manual_seed(step)
            leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
            outputs = run(leaf)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            sum(output.square().mean() for output in outputs).backward()
            model.results += [*(output.detach() for output in outputs), leaf.grad]
            model.optimizer.step()
    assert_all_close(ours.results, plain.results)
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)
    for actual, expected in zip(ours.parameters(), plain.parameters(), strict=True):
        assert_close(actual.detach(), expected.detach())


def _frozen_norms() -> nn.Module:
    model = small_model("bc", efficient=False)
    freeze_norms(model)
    return model


def _partly_frozen() -> nn.Module:
    """The first norms of the layers, and the parameters of the convolutions."""
    model = add_conv_biases(small_model("bc", efficient=False), "transition")
    freeze_norms(model, "norm2")
    freeze_parameters(model, lambda name: "norm" in name or "classifier" in name)
    return model


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    **{family: lambda family=family: small_model(family, efficient=False) for family in FAMILIES},
    "dropout, kept bottlenecks": lambda: small_model("bc", efficient=False, drop_rate=0.3, keep_bottleneck=True),
    "channels_last": lambda: small_model("bc", efficient=False).to(memory_format=torch.channels_last),
    "convolutions with biases": lambda: add_conv_biases(small_model("bc", efficient=False)),
    "volumes with biases, dropout and kept bottlenecks": lambda: add_conv_biases(
        small_model("bc", efficient=False, dims=3, block_config=(2, 1), drop_rate=0.3, keep_bottleneck=True)
    ),
    "frozen norms": _frozen_norms,
    "partly frozen": _partly_frozen,
    "signals": lambda: small_model("bc", efficient=False, dims=1, block_config=(2, 1)),
    "volumes": lambda: small_model("bc", efficient=False, dims=3, block_config=(2, 1)),
    "U-Net": lambda: FCDenseNet(3, (2, 2, 2), num_init_features=4, num_classes=2, efficient=False).double(),
    **{f"backbone, {maps}": lambda maps=maps: features(small_model("bc", efficient=False), maps=maps) for maps in MAPS},
}
QUICK = ("basic", "imagenet", "partly frozen", "volumes with biases, dropout and kept bottlenecks", "U-Net")
QUICK += ("backbone, normalised_rectified", "torchvision", "gpleiss_efficient")


def _images_for(case: str) -> Tensor:
    if case.startswith(("signals", "volumes")):
        return torch.randn(3, 3, *(9, 8, 7)[: 1 if case == "signals" else 3], dtype=torch.double)
    x = random_images(case if case in FAMILIES else "bc")
    return x.to(memory_format=torch.channels_last) if case == "channels_last" else x


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.exhaustive) for case in NETWORKS]
)
def test_training_is_one_graph_and_matches_plain(case):
    plain = NETWORKS[case]()
    _train_alike(with_engine(plain, "shared"), plain, _images_for(case))
    assert _num_graphs() == 1


@pytest.mark.parametrize("engine", ["checkpoint", pytest.param("plain", marks=pytest.mark.exhaustive)])
def test_other_engines_match_plain(engine):
    plain = small_model("bc", efficient=False)
    ours = with_engine(plain, engine)
    _train_alike(ours, plain, random_images("bc"), _compiled(ours, fullgraph=False))


@pytest.mark.exhaustive
def test_a_graph_break_inside_the_model_matches_plain():
    """Outside of a graph the operators run as in eager code: a compiler does not look into them."""
    plain = small_model("bc", efficient=False, block_config=(1, 1))
    ours = with_engine(plain, "shared")
    ours.features.transition1.register_forward_hook(lambda *_: torch._dynamo.graph_break())
    compiled = torch.compile(lambda x: ours(x).square().sum().backward(), backend="aot_eager")
    for batch in (2, 3, 4):
        x = random_images("bc", batch)
        compiled(x)
        plain(x).square().sum().backward()
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)


def test_batches_and_images_of_several_sizes_compile_twice():
    plain = small_model("bc", efficient=False, block_config=(2, 1))
    ours = with_engine(plain, "shared")
    compiled = _compiled(ours)
    for batch, height, width in ((5, 9, 7), (3, 12, 8), (7, 10, 11), (2, 16, 15)):
        x = torch.randn(batch, 3, height, width, dtype=torch.double)
        assert_same_values(compiled, plain, x)
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)
    assert _num_graphs() == 2


def test_modes_engines_and_settings_changed_after_compiling_are_noticed():
    plain = small_model("bc", efficient=False, block_config=(2,), drop_rate=0.2)
    ours, x = with_engine(plain, "shared"), random_images("bc")
    compiled = _compiled(ours)

    def assert_same(num_graphs: int) -> None:
        assert_same_values(compiled, plain, x)
        assert _num_graphs() == num_graphs

    assert_same(1)
    for model in (ours, plain):
        model.eval()
    assert_same(2)
    for model in (ours, plain):
        model.train()
    assert_same(2)
    ours.set_engine("plain")
    assert_same(3)
    ours.set_engine("shared")
    assert_same(3)
    for i, (drop_rate, eps) in enumerate(((0.3, 0.1), (0.4, 0.2)), start=4):  # a compiler may take the second for any
        for model in (ours, plain):
            for module in model.features.modules():
                if hasattr(module, "drop_rate"):
                    module.drop_rate = drop_rate
                if hasattr(module, "eps"):
                    module.eps = eps
        assert_same(i)
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)


def test_without_gradients_and_in_eval_mode_it_matches_plain():
    plain = small_model("bc", efficient=False, block_config=(2, 1))
    ours, x = with_engine(plain, "shared"), random_images("bc")
    compiled = _compiled(ours)
    with torch.no_grad():
        for training in (True, False):
            ours.train(training), plain.train(training)
            assert_close(compiled(x), plain(x))
    assert_same_buffers(ours, plain)


def _operators_in(model: nn.Module, x: Tensor) -> list[str]:
    """The names of all operations in the graph of a forward."""
    names: list[str] = []

    def record(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        names.extend(str(node.target) for node in graph.graph.nodes if node.op.startswith("call"))
        return graph

    _compiled(model, backend=record)(x)
    return names


def test_the_graph_has_one_operator_for_each_stage_and_nothing_else_of_a_block():
    model = small_model("imagenet", efficient="shared")
    names = _operators_in(model, random_images("imagenet"))
    assert names.count("efficient_densenet.stage.default") == 4
    assert names.count("efficient_densenet.stem.default") == 1
    assert not re.search(r"\b(conv2d|batch_norm|cat|avg_pool2d|dropout)\b", " ".join(names))
    assert sum("getitem" in name for name in names) == 2 * 5  # the outputs and the statistics, which nothing slices


@pytest.mark.parametrize("keep", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_saved_for_backward_are_the_features_statistics_masks_and_kept_bottlenecks(keep):
    model = small_model("bc", efficient="shared", drop_rate=0.3 * keep, keep_bottleneck=keep)
    x = random_images("bc").requires_grad_()
    compiled, saved = _compiled(model.features), []
    compiled(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        compiled(x)
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    shapes = sorted(tuple(tensor.shape) for tensor in saved if tensor.data_ptr() not in {*parameters, x.data_ptr()})
    pixels, layers, inputs = [5 * 9 * 7, 5 * 4 * 3, 5 * 2 * 1], [2, 1, 2], [4, 5, 4]
    sizes = [(9, 7), (4, 3), (2, 1)]
    expected = []
    for n, num_layers, channels, size in zip(pixels, layers, inputs, sizes, strict=True):
        total = channels + 3 * num_layers
        expected += [(n, total), (3, total + 12 * num_layers)]
        expected += [(n, 12), (5, 3, *size)] * num_layers * keep
    assert shapes == sorted(expected)


@pytest.mark.parametrize("family", ["bc", pytest.param("imagenet", marks=pytest.mark.exhaustive)])
def test_error_under_autocast_is_at_most_twice_that_of_plain(family):
    """The median over several networks, all of which one compiled module runs in turn."""
    plain = small_model(family, efficient=False).float()
    ours = with_engine(plain, "shared")
    compiled, ratios = _compiled(ours), []
    for seed in range(5):
        torch.manual_seed(seed)
        exact, x = small_model(family, efficient=False), random_images(family, batch=8)
        expected, errors = results_of(exact, x), []
        for model, run in ((ours, compiled), (plain, plain)):
            model.load_state_dict(exact.state_dict())
            with torch.autocast("cpu", torch.bfloat16):
                errors.append(relative_error(results_of(run, x.float()), expected))
        ratios.append(errors[0] / errors[1])
    assert statistics.median(ratios) <= 2
    assert _num_graphs() == 1


def test_a_hook_on_all_modules_after_compiling_is_called():
    plain = small_model("bc", efficient=False, block_config=(1,))
    ours, x, seen = with_engine(plain, True), random_images("bc"), []
    compiled = _compiled(ours, backend="eager", fullgraph=False)
    assert_same_values(compiled, plain, x)
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    try:
        assert_close(compiled(x), plain(x))
    finally:
        handle.remove()
    assert seen.count(nn.Conv2d) >= 2 * sum(isinstance(module, nn.Conv2d) for module in plain.modules())


# Converted models


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive) for name in MODELS]
)
def test_converted_models_match_plain(name):
    if "efficient" in name and not CHECKPOINTS_UPDATE_ONCE:
        pytest.skip("under this compiler, the author's own checkpointing updates running statistics twice")
    plain = build(name)
    ours, plain = copy.deepcopy(plain), plain_reference(name, plain)
    make_efficient(ours)
    x = image_batch(name)
    compiled = _compiled(ours)
    assert_all_close(train(compiled, x), train(plain, x))
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)


@reads_converted_modules
def test_converting_and_restoring_after_compiling_changes_the_operators():
    model = build("kuangliu")
    plain, x, graphs = copy.deepcopy(model), image_batch("kuangliu"), []

    def record(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op.startswith("call")])
        return graph

    compiled = _compiled(model, backend=record)
    for change in (lambda _: None, make_efficient, restore):
        change(model)
        assert_same_values(compiled, plain, x)
    stages = [names.count("efficient_densenet.stage.default") for names in graphs]
    assert stages[:2] == [0, 3]
    assert not any(stages[2:])
    assert sum("conv2d" in name for name in graphs[1]) == 1  # the network's first
    assert not re.search(r"\b(batch_norm|cat|avg_pool2d)\b", " ".join(graphs[1]))
    assert_same_buffers(model, plain)


class Scaled(NewestFirst):
    """A layer whose scale is neutral when it is converted."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale) if self.scale != 1.0 else super().forward(x)


@reads_converted_modules
@pytest.mark.filterwarnings("ignore:falling back")
def test_an_author_s_attribute_changed_after_compiling_is_noticed():
    plain = nn.Sequential(*(Scaled(6 + 4 * i) for i in range(2))).double()
    ours = copy.deepcopy(plain)
    make_efficient(ours)
    compiled, x = _compiled(ours), torch.randn(3, 6, 5, 6, dtype=torch.double)
    for i, scale in enumerate((1.0, 0.5, 0.25), start=1):
        for model in (ours, plain):
            model[1].scale = scale
        assert_same_values(compiled, plain, x)
        assert _num_graphs() == i
    assert_same_gradients(ours, plain)


# Inductor and CUDA graphs


@pytest.mark.exhaustive
@needs_cpp
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_inductor_training_matches_plain(mode):
    plain = small_model("bc", efficient=False, block_config=(1, 1))
    ours = with_engine(plain, "shared")
    _train_alike(ours, plain, random_images("bc"), _compiled(ours, backend="inductor", mode=mode))


def _on_gpu(efficient: bool | str) -> tuple[nn.Module, Tensor]:
    model = small_model("bc", efficient=efficient).float().cuda()
    return model, random_images("bc").float().cuda()


@needs_gpu
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_inductor_s_cuda_graphs_match_plain(mode):
    plain, x = _on_gpu(False)
    ours = copy.deepcopy(plain).set_engine("shared")
    compiled = _compiled(ours, backend="inductor", mode=mode)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        for model, run in ((ours, compiled), (plain, plain)):
            model.zero_grad()
            run(x).square().sum().backward()
    assert_same_gradients(ours, plain, 1e-3)
    assert_same_buffers(ours, plain, 1e-4)


@needs_gpu
def test_graphed_callables_match_plain():
    plain, x = _on_gpu(False)
    ours = copy.deepcopy(plain).set_engine("shared")
    state = copy.deepcopy(ours.state_dict())
    graphed = torch.cuda.make_graphed_callables(ours, (x.clone(),))
    ours.load_state_dict(state)  # the warm-up has updated the running statistics
    for model in (graphed, plain):
        for _ in range(2):
            model(x).square().sum().backward()
    assert_same_gradients(ours, plain, 1e-3)
    assert_same_buffers(ours, plain, 1e-4)
