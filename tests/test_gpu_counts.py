"""What a step asks of a GPU, counted by rules and held by bounds; a step that runs launches the same kernels."""

from pathlib import Path

import gpu_counts
import pytest
import torch
import torch.nn.functional as F
from gpu_counts import layer_launches, trace
from gpu_kernels import launch_bytes
from gpu_trace import TracingMode, trace_step
from methods import LAYOUTS, Setting, architecture, expand

from efficient_densenet import DenseNet
from efficient_densenet.memory import tensor_peak
from efficient_densenet.models.zoo import VARIANTS

pytest.importorskip("triton", reason="needs Triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TINY = Setting("densenet_bc_16_4", 3, 8, "float32", "contiguous", "cuda", 1)


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


def test_bytes_of_a_launch():
    matrix = torch.empty(4, 16, device="meta")
    slice_and_vector = {"values": matrix[:, :8], "weight": matrix, "mean": matrix[0]}
    assert launch_bytes("conv1x1_forward", slice_and_vector | {"output": matrix}) == 128 + 256 + 64 + 256
    for overwrite in (False, True):
        accumulated = {"grad_accum": matrix, "OVERWRITE": overwrite}
        assert launch_bytes("conv1x1_backward", accumulated) == (256 if overwrite else 512)
    for needed in (False, True):
        assert launch_bytes("finish_backward", {"grad_weight": matrix, "HAS_GRAD_WEIGHT": needed}) == 256 * needed
    with pytest.raises(ValueError, match=r"'conv5x5' is not in KERNELS: add to benchmarks/gpu_kernels\.py"):
        launch_bytes("conv5x5", {})


@pytest.mark.parametrize("engine", ["plain", "shared"])
def test_a_step_under_autocast_moves_fewer_bytes(engine):
    exact, half = (
        trace(setting, engine) for setting in expand(TINY.model, 64, precision="float32,bf16", device="cuda")
    )
    assert half.bytes < 0.7 * exact.bytes
    assert half.peak < 0.7 * exact.peak
    assert not torch.is_autocast_enabled("cuda")


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


def test_a_step_of_shared_moves_a_fraction_of_plains_bytes():
    (setting,) = expand("densenet_bc_40_12", 64, precision="tf32", device="cuda")
    plain, shared = trace(setting, "plain"), trace(setting, "shared")
    assert plain.launches(is_triton=True) == 0 < shared.launches(is_triton=True)
    assert shared.launches() < 0.8 * plain.launches()
    assert shared.bytes < 0.45 * plain.bytes
    assert shared.peak < 0.2 * plain.peak
    forward, backward = layer_launches(setting, "shared", shared)
    assert forward + backward < 0.6 * sum(layer_launches(setting, "plain", plain))


@pytest.mark.exhaustive
def test_the_counts_in_the_docs_are_what_the_program_prints():
    text = (Path(__file__).parents[1] / "docs" / "benchmarks.md").read_text()
    assert "<!-- python benchmarks/gpu_counts.py" in text
    assert gpu_counts.rewritten_counts(text) == text
