"""What a step asks of a GPU, counted by rules and held by bounds; a step that runs launches the same kernels."""

import ast
import importlib
import inspect
import textwrap
from pathlib import Path
from typing import NamedTuple

import gpu_counts
import gpu_trace
import pytest
import torch
import torch.nn.functional as F
from gpu_counts import layer_launches, trace
from gpu_kernels import KERNELS, L2_BYTES, READ, WRITE, Access, launch_traffic
from gpu_trace import TracingMode, trace_step
from methods import LAYOUTS, Setting, architecture, expand

from efficient_densenet import DenseNet
from efficient_densenet.memory import tensor_peak
from efficient_densenet.models.zoo import VARIANTS

pytest.importorskip("triton", reason="needs Triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = Setting("densenet_bc_16_4", 3, 8, "float32", "contiguous", "cuda", 1)


class Bounds(NamedTuple):
    """The most launches, of Triton kernels and of ATen's operations, in a step of the shared engine in TF32; those that
    a layer adds to the forward and to the backward; bytes and tensor peak over plain's."""

    launches: int
    layer_forward: float
    layer_backward: float
    traffic_ratio: float
    peak_ratio: float


BOUNDS = {
    ("densenet_bc_100_12", 256): Bounds(653, 5, 7, 0.3196, 0.0675),
    ("densenet121", 64): Bounds(847, 5.5, 8.5, 0.3665, 0.0821),
}

PLAIN_LAUNCHES = {"densenet_bc_100_12": 1265, "densenet121": 1580}
"""Of plain modules, which no change of the engine moves: the counting has changed if these have."""


def traced(function, *shapes, dtype=torch.float32, **options):
    tensors = [torch.empty(shape, device="meta", dtype=dtype, **options) for shape in shapes]
    with TracingMode("meta", tensors) as mode:
        function(*tensors)
    return mode.trace


KIB = 256
"""Numbers of float32 in a KiB: sizes below are in KiB."""


@pytest.mark.parametrize(
    ("function", "shapes", "launches", "kib"),
    [
        (lambda x: x.view(2, -1)[:, 3:].t(), [(4, KIB)], 0, 0),
        (lambda x: torch.empty_like(x), [(4, KIB)], 0, 0),
        (lambda x: x + 1, [(4, KIB)], 1, 8),
        (lambda x: x[:, : KIB // 2] + 1, [(4, KIB)], 1, 4),
        (lambda x: x.add_(1), [(4, KIB)], 1, 8),
        (lambda x: x.zero_(), [(4, KIB)], 1, 4),
        (lambda x, y: x.copy_(y), [(4, KIB), (4, KIB)], 1, 8),
        (lambda x, y: torch.add(x, x, out=y), [(4, KIB), (4, KIB)], 1, 12),
        (lambda x, y: x + y.expand(4, KIB), [(4, KIB), (1, KIB)], 1, 9),
        (lambda x, y: torch.cat([x, y], 1), [(4, KIB), (4, 2 * KIB)], 1, 24),
        (lambda x: torch.cat([x] * 129), [(1, KIB)], 2, 258),
        (lambda x: torch.max_pool2d(x, 2), [(1, 4, 16, 16)], 1, 7),  # values, and indices of eight bytes
        (lambda x, w: torch.mm(x, w), [(KIB, 8), (8, KIB)], 1, 272),
    ],
)
def test_operations_of_aten(function, shapes, launches, kib):
    trace = traced(function, *shapes)
    assert (trace.launches(), trace.bytes) == (launches, kib * 1024)


def test_a_batch_norm_reads_its_input_twice_and_its_backward_both_inputs():
    def step(x):
        y = F.batch_norm(x.requires_grad_(), None, None, training=True)
        y.backward(x.detach())

    trace = traced(step, (4, 1, 16, 16))
    forward, backward = (each for each in trace.computations if "batch_norm" in each.name)
    vectors = 2 * 4
    assert forward.bytes == 3 * 4096 + vectors
    assert backward.bytes == 5 * 4096 + vectors


def test_a_convolution_backward_is_a_launch_for_each_gradient():
    def step(x, weight):
        F.conv2d(x.requires_grad_(), weight.requires_grad_()).backward(x.detach())

    trace = traced(step, (1, 16, 16, 16), (16, 16, 1, 1))
    images, weight = 16 * 1024, 1024
    assert [each.name for each in trace.computations] == ["convolution", "convolution_backward"]
    assert [each.launches for each in trace.computations] == [1, 2]
    assert [each.bytes for each in trace.computations] == [2 * images + weight, 4 * images + 2 * weight]


@pytest.mark.parametrize(
    ("count", "size", "launches"),
    [(110, 1, 1), (111, 1, 2), (2, 65_536 * 160, 1), (2, 65_536 * 160 + 1, 2)],
)
def test_foreach_operations_launch_a_kernel_for_each_chunk(count, size, launches):
    trace = traced(lambda *tensors: torch._foreach_add_(tensors, 1), *[(size,)] * count)
    assert trace.launches() == launches
    assert trace.bytes == 2 * count * size * 4


def test_foreach_operations_with_two_lists_take_fewer_tensors():
    trace = traced(lambda *tensors: torch._foreach_lerp_(tensors[:65], tensors[65:], 0.1), *[(1,)] * 130)
    assert trace.launches() == 2


def test_the_memory_of_tensors_is_the_allocators_on_the_cpu():
    def function(x):
        y = x + 1
        z = (y * 2).view(-1)
        del y
        return [z.exp(), z[:1024].clone()]

    x = torch.zeros(64, 512)
    with TracingMode("cpu", [x]) as mode:
        function(x)
    assert mode.trace.peak == tensor_peak(lambda: function(x)) > 0


def step_on(device, setting):
    """The trace of a step that runs, through Triton's interpreter where there is no GPU."""
    memory_format = LAYOUTS[setting.layout]
    network = DenseNet(**architecture(setting.model), efficient="shared").to(device, memory_format=memory_format)
    images = torch.randn(setting.batch_size, 3, setting.image_size, setting.image_size, device=device)
    step = trace_step(network, images.contiguous(memory_format=memory_format), setting.precision, run_kernels=True)
    assert all(parameter.grad.isfinite().all() for parameter in network.parameters())
    return step


@pytest.mark.parametrize(
    ("model", "image_size", "precision", "layout"),
    [
        (TINY.model, 8, "float32", "channels_last"),
        pytest.param(TINY.model, 8, "bf16", "contiguous", marks=pytest.mark.exhaustive),
        pytest.param("with_stem", 32, "float32", "contiguous", marks=pytest.mark.exhaustive),
    ],
)
def test_the_trace_of_meta_tensors_is_that_of_a_step_that_runs(model, image_size, precision, layout, monkeypatch):
    monkeypatch.setitem(VARIANTS, "with_stem", architecture(TINY.model) | {"small_inputs": False})
    setting = Setting(model, 2, image_size, precision, layout, "cuda", 1)
    expected, on_meta = step_on(DEVICE, setting), trace(setting, "shared")
    launched, counted = ([each for each in t.computations if each.is_triton] for t in (expected, on_meta))
    assert len(launched) > 20
    assert counted == launched
    # On a CPU the portable stem pools in another memory format, and autocast casts other functions of PyTorch too.
    # Which memory format a convolution's gradients have depends on the device, and with it what must be copied. Only on
    # a CPU does a stage's matrix of statistics start at zero.
    if DEVICE == "cpu" and model == TINY.model and precision == "float32":
        others = {"clone", "copy_", "_to_copy", "new_zeros"}
        names, expected_names = (
            [each.name for each in t.computations if each.name not in others] for t in (on_meta, expected)
        )
        assert names == expected_names


def test_the_trace_sees_what_is_inside_operators():
    names = trace(TINY, "shared").by_name().keys()
    assert not {"stage", "stage_backward", "stem", "update_running_statistics"} & names
    assert {"convolution_backward", "_foreach_lerp_", "conv1x1_backward"} <= names


def test_kernels_outside_of_the_table_are_refused():
    with pytest.raises(ValueError, match=r"'conv5x5' is not in KERNELS: add to benchmarks/gpu_kernels\.py"):
        launch_traffic("conv5x5", (1,), {})
    with pytest.raises(ValueError, match=r"the matrix 'halo' of the Triton kernel 'tile_statistics' is not in KERNELS"):
        launch_traffic("tile_statistics", (1,), {"halo": torch.empty(2, 2)})


def launched_kernels():
    """The names of the kernels that no other device function calls, nor a formula of an activation."""
    kernels, called = set(), {"expm1"}
    for module in gpu_trace.triton_modules():
        for name, value in vars(module).items():
            function = getattr(value, "fn", None)
            if not inspect.isfunction(function) or function.__module__ != module.__name__:
                continue
            kernels.add(name)
            for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    called.add(node.func.id)
    return kernels - called


def test_the_table_has_every_kernel():
    assert "conv1x1_forward" in launched_kernels()
    assert launched_kernels() <= KERNELS.keys()


def test_the_bytes_of_a_launch(monkeypatch):
    again = Access(reads=1, every=(0, 1), loads=lambda grid, arguments: (1, 3))
    monkeypatch.setitem(KERNELS, "kernel", {"x": READ, "out": WRITE, "again": again})
    matrix = torch.empty(4, 16, device="meta")
    arguments = {"x": matrix[:, :8], "out": matrix, "again": matrix, "vector": matrix[0]}
    once = 128 + 256 + 64
    assert launch_traffic("kernel", (2, 5), arguments) == (once + 256, once + 10 * 256, once + 30 * 256)
    larger = torch.empty(L2_BYTES // 4 + 1, 1, device="meta")
    assert launch_traffic("kernel", (2, 5), {"again": larger}).memory == 5 * (L2_BYTES + 4)


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_accumulated_is_read_unless_it_is_overwritten(overwrite):
    arguments = {"grad_accum": torch.empty(4, 16, device="meta"), "OVERWRITE": overwrite}
    nbytes = 256 if overwrite else 512
    assert launch_traffic("conv1x1_backward", (1, 1), arguments) == (nbytes, nbytes, nbytes)


@pytest.mark.parametrize("needed", [False, True])
def test_an_argument_that_is_not_used_is_not_counted(needed):
    arguments = {"grad_weight": torch.empty(4, 16, device="meta"), "HAS_GRAD_WEIGHT": needed}
    assert launch_traffic("finish_backward", (1,), arguments).memory == 256 * needed


class CountedBytes:
    """What Triton's interpreter loads and stores in each launch of a step: of all accesses (`l1`), and without those
    that a program instance repeats (`l2`)."""

    def __init__(self, monkeypatch):
        self.l1, self.l2, self.loaded = [], [], []
        builder = importlib.import_module("triton.runtime.interpreter").InterpreterBuilder
        for owner, name, before in [
            (TracingMode, "add_launch", self.start_launch),
            (builder, "set_grid_idx", self.end_instance),
            (builder, "create_masked_load", self.load),
            (builder, "create_masked_store", self.store),
        ]:
            monkeypatch.setattr(owner, name, self.preceded(getattr(owner, name), before))

    @staticmethod
    def preceded(function, before):
        def both(self, *arguments):
            before(*arguments)
            return function(self, *arguments)

        return both

    def start_launch(self, *_):
        self.end_instance()
        self.l1.append(0)
        self.l2.append(0)

    def end_instance(self, *_):
        if self.loaded:
            addresses, sizes = (torch.cat(each) for each in zip(*self.loaded, strict=True))
            self.l2[-1] += sum(len(addresses[sizes == size].unique()) * size for size in sizes.unique().tolist())
            self.loaded.clear()

    def load(self, pointers, mask, *_):
        addresses = torch.from_numpy(pointers.data[mask.data].astype("int64"))
        size = pointers.get_element_ty().primitive_bitwidth // 8
        self.loaded.append((addresses, torch.full_like(addresses, size)))
        self.l1[-1] += len(addresses) * size

    def store(self, pointers, value, mask, *_):
        nbytes = int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8
        self.l1[-1] += nbytes
        self.l2[-1] += nbytes


@pytest.mark.exhaustive
@pytest.mark.skipif(DEVICE == "cuda", reason="counts in Triton's interpreter")
@pytest.mark.parametrize("image_size", [16, 32])
def test_the_bytes_in_caches_are_those_that_program_instances_load_and_store(image_size, monkeypatch):
    """But for vectors that are passed and not read, and edges of images where tiles of 3×3 convolutions overlap."""
    sizes = {16: (36, 72, 2), 32: (12, 24, 4)}  # several instances on each axis of a grid; the sizes of BC-100-12
    growth_rate, num_init_features, bn_size = sizes[image_size]
    network = DenseNet(growth_rate, (1,), num_init_features=num_init_features, bn_size=bn_size, efficient="shared")
    counted = CountedBytes(monkeypatch)
    step = trace_step(network, torch.randn(1, 3, image_size, image_size), "tf32", run_kernels=True)
    counted.end_instance()
    launched = [each for each in step.computations if each.is_triton]
    if image_size == 16:
        tiles = {each.name: min(each.grid) for each in launched if each.name.startswith("conv")}
        assert len(tiles) == 5
        assert min(tiles.values()) > 1
    for each, l1, l2 in zip(launched, counted.l1, counted.l2, strict=True):
        assert each.l1_bytes == pytest.approx(l1, rel=0.02, abs=512), each
        assert each.l2_bytes == pytest.approx(l2, rel=0.04, abs=512), each


@pytest.mark.parametrize("engine", ["plain", "shared"])
def test_a_step_under_autocast_moves_fewer_bytes(engine):
    exact, half = (
        trace(setting, engine) for setting in expand(TINY.model, 64, precision="float32,bf16", device="cuda")
    )
    assert half.bytes < 0.7 * exact.bytes
    assert half.peak < 0.7 * exact.peak
    assert not torch.is_autocast_enabled("cuda")


@pytest.mark.parametrize(("model", "batch_size"), BOUNDS)
def test_few_launches_few_bytes_and_little_memory(model, batch_size):
    (setting,) = expand(model, batch_size, precision="tf32", device="cuda")
    plain, shared = trace(setting, "plain"), trace(setting, "shared")
    ratios = shared.bytes / plain.bytes, shared.peak / plain.peak
    found = Bounds(shared.launches(), *layer_launches(setting, "shared", shared), *ratios)
    assert all(number <= bound for number, bound in zip(found, BOUNDS[model, batch_size], strict=True)), found
    assert (plain.launches(is_triton=False), plain.launches(is_triton=True)) == (PLAIN_LAUNCHES[model], 0)


def test_the_tables_of_a_page_are_written_again(tmp_path):
    options, page = f"--model {TINY.model} --batch_size 2,3 --image_size 8", tmp_path / "page.md"
    command, end = f"<!-- python benchmarks/gpu_counts.py {options} -->\n", "<!-- end of the counts -->\n\nText.\n"
    page.write_text(f"# Title\n\n{command}An old table.\n{end}")
    gpu_counts.count(page=str(page))
    written = page.read_text()
    assert written.startswith(f"# Title\n\n{command}\n{TINY.model}, batch 2, images of 8×8, tf32, contiguous:\n\n| ")
    assert written.endswith(f" |\n\n{end}")
    assert written.count("| counted |") == written.count("| `shared` | ") == 2
    assert "An old table" not in written


def test_the_blocks_of_launches(capsys):
    """Six layers, forward and recomputed, on 65,536, 16,384 and 4,096 rows in tiles of 128, and on a 64th of them."""
    gpu_counts.count(TINY.model, "1,64", image_size=32, what="blocks")
    printed = capsys.readouterr().out
    assert "| batch 1 | batch 64 |" in printed
    assert "| `conv1x1_forward` | 1 / 2 / 8; 12 of 12 | 32 / 128 / 512; 8 of 12 |" in printed
    with pytest.raises(ValueError, match="unknown 'memory': take 'step' or 'blocks'"):
        gpu_counts.count(TINY.model, what="memory")


@pytest.mark.exhaustive
@pytest.mark.parametrize("page", ["benchmarks.md", "kernels.md"])
def test_the_counts_in_the_docs_are_what_the_program_prints(page):
    text = (Path(__file__).parents[1] / "docs" / page).read_text()
    assert "<!-- python benchmarks/gpu_counts.py" in text
    assert gpu_counts.rewritten_counts(text) == text


LAYER_LAUNCHES = {4: (7, 11), 0: (5, 7)}
"""The most launches of a layer, forward and backward, by `bn_size`: one with a bottleneck, and one without.

Forward: norm, ReLU and product of the bottleneck in one and its statistics, the activation, the 3×3 convolution, its
statistics in two, and the copy of the new channels less their mean. Backward: the gradient of the new channels, the
bottleneck again; the activation, the two gradients of the 3×3 convolution, a copy of one, the ReLU and sums, and what
finishes those; the bottleneck's gradient, both gradients of its convolution in one, and what finishes those.
"""


def step_launches(num_layers, precision, **settings):
    """Launches of the forward, and of the backward, of a network of one block."""
    with torch.device("meta"):
        model = DenseNet(8, (num_layers,), num_init_features=8, efficient="shared", **settings)
        x = torch.empty(2, 3, 8, 8).to(memory_format=torch.channels_last)
    step = trace_step(model, x, precision)
    return step.by_name("forward"), step.by_name("backward")


@pytest.mark.parametrize("bn_size", LAYER_LAUNCHES)
@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_launches_of_a_layer(precision, bn_size):
    two, three = (step_launches(num_layers, precision, bn_size=bn_size) for num_layers in (2, 3))
    forward, backward = (many - few for few, many in zip(two, three, strict=True))
    assert forward["conv1x1_forward"] == backward["conv1x1_backward"] == (bn_size > 0)
    assert forward["combine_statistics"] == backward["finish_backward"] == 1 + (bn_size > 0)
    assert forward.total() <= LAYER_LAUNCHES[bn_size][0], forward
    assert backward.total() <= LAYER_LAUNCHES[bn_size][1], backward


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_running_statistics_and_weights_take_launches_of_a_stage_and_not_of_a_norm(precision):
    forward, backward = step_launches(5, precision)
    assert forward["_foreach_lerp_"] == forward["_foreach_add_"] == 1
    assert forward["_foreach_copy_"] == backward["_foreach_copy_"] == (precision == "bf16")
    assert forward["mul_"] == 1


def test_gradients_of_layer_groups_are_not_copied(monkeypatch):
    """autograd copies what anyone else refers to."""
    monkeypatch.setattr("efficient_densenet.engine.stage.groups.LAYER_GROUP_BYTES", 1)
    few, many = (step_launches(num_layers, "float32")[1] for num_layers in (2, 3))
    assert (many - few)["copy_"] == 0
    assert (many - few).total() <= LAYER_LAUNCHES[4][1] + 3  # a stage has a few scalars for each of its groups
