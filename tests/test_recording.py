"""Recorded programs: a replay is the direct run, bit for bit, whatever its tensors hold and wherever they lie."""

import contextlib
import copy
import importlib
import itertools
import random
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from children import in_child
from grids import grid
from helpers import freeze_norms, freeze_parameters, small_model
from third_party_models import build, image_batch, loss_of
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from triton_interpreter import mended_interpreter  # noqa: F401 (a fixture)

from efficient_densenet import kernels, make_efficient
from efficient_densenet._tensors import CHANNELS_LAST
from efficient_densenet.engine import operator
from efficient_densenet.engine.recording import program, programs, recorder, slab
from efficient_densenet.engine.recording.program import Program
from efficient_densenet.memory import tensor_peak


@pytest.fixture(autouse=True)
def _uninitialized_memory_is_nan():
    """Allocations are filled: a slab of bytes with 255, which is NaN in each dtype."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def use(kernel_set: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel_set == "Triton":
        pytest.importorskip(
            "triton", minversion="3.6", reason="recording refuses what Triton 3.5 interprets: it runs directly"
        )
        monkeypatch.setattr(kernels, "triton_supports", lambda values: values.dtype != torch.double)
    elif kernel_set == "portable":
        monkeypatch.setattr(kernels, "numba_supports", lambda values: False)
    elif not kernels.numba_supports(torch.empty(1)):
        pytest.skip("needs Numba and a PyTorch with GNU OpenMP")


@contextlib.contextmanager
def recording(mode: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(programs.VARIABLE, mode)
        yield


def results(model: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor] = lambda y: y.square().sum()) -> list[Tensor]:
    """The output, the input's gradient, all parameters' gradients and all buffers after one step."""
    torch.manual_seed(1)
    model.zero_grad()
    x = x.detach().requires_grad_()
    output = model(x)
    loss(output).backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [output.detach(), x.grad, *grads, *model.buffers()]


def assert_replayed(model: nn.Module, *sizes: Tensor, step: Callable[[nn.Module, Tensor], list[Tensor]] = results):
    """Steps equal direct ones, with other parameters and images each time: of each size the first step is direct, the
    second is recorded, and two are replayed."""
    direct = copy.deepcopy(model)
    for run, x in itertools.product(range(4), sizes):
        with torch.no_grad():
            for ours, theirs in zip(model.parameters(), direct.parameters(), strict=True):
                theirs.copy_(ours.add_(torch.randn_like(ours), alpha=0.01))
        x = torch.randn_like(x)
        with counted_replays() as replays:
            actual = step(model, x)
        with recording("off"):
            expected = step(direct, x)
        assert_equal(actual, expected)
        assert bool(replays) == (run > 1), programs.entries()
    assert_programs()


def assert_programs() -> None:
    assert programs.entries()
    for entry in programs.entries():
        assert isinstance(entry, Program), entry


def assert_equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        assert (ours.dtype, ours.stride(), ours.requires_grad) == (theirs.dtype, theirs.stride(), theirs.requires_grad)
        assert torch.equal(ours, theirs)
        assert ours.isfinite().all()


@contextlib.contextmanager
def counted_replays() -> Iterator[list[Program]]:
    replays, run = [], Program.run

    def counted(each: Program, *arguments: list) -> list[Tensor]:
        outputs = run(each, *arguments)
        replays.append(each)
        return outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Program, "run", counted)
        yield replays


DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
VARIANTS: dict[str, dict] = {
    "plain": {},
    "dropout": {"drop_rate": 0.3},
    "kept bottlenecks": {"keep_bottleneck": True},
    "activation": {"activation": "silu"},
    "frozen norms": {},
    "few gradients": {},
}


def model_of(family: str, dtype: str, variant: str, **settings) -> nn.Module:
    model = small_model(family, efficient="shared", **VARIANTS[variant], **settings).to(DTYPES[dtype])
    if variant == "frozen norms":
        freeze_norms(model, "denseblock1")
        freeze_norms(model, "transition1")
    if variant == "few gradients":
        freeze_parameters(model, lambda name: "denseblock2" in name or "classifier" in name)
    return model


@pytest.mark.parametrize(
    *grid(
        family=["basic", "bc", "imagenet"],
        dtype=DTYPES,
        variant=VARIANTS,
        memory_format=[torch.contiguous_format, torch.channels_last],
        autocast=[False, True],
        kernel_set=["Numba", "portable"],
    )
)
def test_a_replay_equals_the_direct_run(family, dtype, variant, memory_format, autocast, kernel_set, monkeypatch):
    use(kernel_set, monkeypatch)
    model = model_of(family, dtype, variant).to(memory_format=memory_format)
    sizes = [(3, 3, 40, 45), (2, 3, 48, 40)] if family == "imagenet" else [(3, 3, 9, 7), (2, 3, 8, 8)]
    images = [torch.randn(size, dtype=DTYPES[dtype]).contiguous(memory_format=memory_format) for size in sizes]

    def step(model: nn.Module, x: Tensor) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return results(model, x)

    assert_replayed(model, *images, step=step)


@pytest.mark.parametrize(*grid(kernel_set=["Numba", "portable"], dims=[1, 3], strength=1))
def test_signals_and_volumes(dims, kernel_set, monkeypatch):
    use(kernel_set, monkeypatch)
    model = small_model("imagenet", efficient="shared", dims=dims).float()
    assert_replayed(model, torch.randn(2, 3, *[40] * dims), torch.randn(3, 3, *[36] * dims))


def _flags_in_each_order(rng: random.Random) -> list[bool]:
    """Whether oneDNN is enabled in each of nine steps: enough of either for a recording and a replay."""
    first = rng.random() < 0.5
    return [first] * 3 + [not first] * 3 + [rng.random() < 0.5 for _ in range(3)]


@pytest.mark.parametrize("kernel_set", ["Numba", pytest.param("portable", marks=pytest.mark.exhaustive)])
def test_a_flag_may_change_the_memory_format_of_an_operation(kernel_set, monkeypatch):
    use(kernel_set, monkeypatch)
    compare_histories_of_flags(seed=3, dims=3, dtype=torch.float32, families=["imagenet"])


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel_set", ["Numba", "portable"])
@pytest.mark.parametrize("seed", range(24))
def test_random_histories_of_flags(seed, kernel_set, monkeypatch):
    use(kernel_set, monkeypatch)
    rng = random.Random(seed)
    dtype = rng.choice([torch.float64, torch.float32, torch.bfloat16, torch.float16])
    compare_histories_of_flags(seed, rng.choice([1, 2, 3]), dtype, ["basic", "bc", "imagenet"])


def compare_histories_of_flags(seed: int, dims: int, dtype: torch.dtype, families: list[str]) -> None:
    """Steps equal direct ones, bit for bit, while flags that choose PyTorch's implementations change."""
    rng = random.Random(seed)
    family = rng.choice(families)
    model = small_model(family, efficient="shared", dims=dims, drop_rate=rng.choice([0.0, 0.3])).to(dtype)
    direct = copy.deepcopy(model)
    side = {1: 70, 2: 40, 3: 30}[dims] if family == "imagenet" else 9
    image_format = CHANNELS_LAST.get(2 + dims, torch.contiguous_format)
    for module in (model, direct) if rng.random() < 0.5 else ():
        module.to(memory_format=image_format)
    x, counts = torch.randn(2, 3, *[side] * dims).to(dtype), []
    if rng.random() < 0.5:
        x = x.contiguous(memory_format=image_format)
    for step, enabled in enumerate(_flags_in_each_order(rng)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.backends.mkldnn, "enabled", enabled)
            patch.setattr(torch.backends.mkldnn, "deterministic", rng.random() < 0.5)
            with counted_replays() as replays:
                actual = results(model, x)
            with recording("off"):
                expected = results(direct, x)
        assert_equal(actual, expected)
        if step in (2, 5):  # both orders are replayed: what a flag has changed was recorded anew
            assert_programs()
            counts.append(len(replays))
    assert counts[0] == counts[1] > 0


@pytest.mark.usefixtures("mended_interpreter")
@pytest.mark.parametrize(
    ("family", "dtype", "variant", "blocks", "side"),
    [
        ("bc", "float32", "plain", (1,), 4),
        pytest.param("bc", "float32", "plain", (1, 1), 4, marks=pytest.mark.exhaustive),
        pytest.param("bc", "float32", "plain", (2, 1), 8, marks=pytest.mark.exhaustive),
        pytest.param("bc", "bfloat16", "frozen norms", (2, 1, 2), 8, marks=pytest.mark.exhaustive),
        pytest.param("basic", "float32", "dropout", (2, 1, 2), 8, marks=pytest.mark.exhaustive),
        pytest.param("imagenet", "float32", "kept bottlenecks", (1, 2, 1, 1), 32, marks=pytest.mark.exhaustive),
    ],
)
def test_triton_kernels(family, dtype, variant, blocks, side, monkeypatch):
    """The kernels are interpreted on a machine without a GPU, with a slab as there."""
    use("Triton", monkeypatch)
    monkeypatch.setattr(program, "WITHOUT_CACHE", ())
    x = torch.randn(2, 3, side, side, dtype=DTYPES[dtype])
    assert_replayed(model_of(family, dtype, variant, block_config=blocks), x)


@pytest.mark.parametrize("kernel_set", ["Numba", "portable"])
@pytest.mark.parametrize(("small_run_bytes", "without_cache"), [(0, {"cpu"}), (1 << 30, {"cpu"}), (0, ())])
def test_images_of_several_tiles(small_run_bytes, without_cache, kernel_set, monkeypatch):
    """A run that frees what it does not need any more, one with a slab, and one with a slab as on a GPU."""
    use(kernel_set, monkeypatch)
    monkeypatch.setitem(importlib.import_module("efficient_densenet.kernels.row_tiles").TILE_BYTES, "cpu", 3000)
    monkeypatch.setattr(program, "SMALL_RUN_BYTES", small_run_bytes)
    monkeypatch.setattr(program, "WITHOUT_CACHE", without_cache)
    assert_replayed(small_model("imagenet", efficient="shared").float(), torch.randn(5, 3, 40, 36))


@pytest.mark.parametrize(
    "name", ["torchvision", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("timm", "tiramisu"))]
)
def test_converted_models(name):
    model = build(name)
    make_efficient(model, "shared")
    assert_replayed(model, image_batch(name), step=lambda model, x: results(model, x, loss_of))


def test_externals_are_read_where_they_lie_in_each_run(monkeypatch):
    """Parameters in new memory, images within other tensors, all parameters in one flat tensor."""
    use("Numba", monkeypatch)
    model = small_model("bc", efficient="shared").float()

    def swapped(model: nn.Module, x: Tensor) -> list[Tensor]:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        within = torch.randn(x.shape[0] + 2, *x.shape[1:])
        within[1:-1] = x
        return results(model, within[1:-1])

    def flat(model: nn.Module, x: Tensor) -> list[Tensor]:
        parameters = list(model.parameters())
        memory = torch.cat([torch.zeros(4), *(each.data.flatten() for each in parameters)])
        parts = memory[4:].split([each.numel() for each in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.data = part.view_as(parameter)
        return results(model, x)

    x = torch.randn(4, 3, 8, 8)
    assert_replayed(model, x)
    for i in range(8):
        with counted_replays() as replays:
            actual = (swapped, flat)[i % 2](model, x)
        reference = copy.deepcopy(model)
        reference.load_state_dict(model.state_dict())
        with recording("off"):
            expected = results(reference, x)
        assert_equal(actual[: -len(list(model.buffers()))], expected[: -len(list(model.buffers()))])
        assert len(replays) > 0 or i < 4


def test_tied_parameters_are_one_memory_only_while_they_are_tied():
    """A program that was recorded with two parameters in one memory does not run with them in two."""
    model = small_model("bc", block_config=(2,), efficient="shared").float()
    first, second = (layer.norm2 for layer in model.features.denseblock1.children())
    x, weights = torch.randn(2, 3, 8, 8), [first.weight, second.weight]
    second.weight.data = first.weight.data
    for _ in range(4):
        results(model, x)
    for untied in (False, True, True, False):
        second.weight.data = torch.rand_like(first.weight) if untied else first.weight.data
        reference = copy.deepcopy(model)
        with recording("off"):
            expected = results(reference, x)
        actual = results(model, x)
        assert_equal(actual[:-1], expected[:-1])
    assert weights[0] is first.weight


def test_each_part_of_the_key_matters():
    """A run has a program of its own for each value of what changes its kernels, allocations or launches."""
    torch.set_num_threads(2)
    model, x = small_model("bc", efficient="shared").float(), torch.randn(2, 3, 8, 8)
    layer = model.features.denseblock1.denselayer1
    weight = layer.conv2.weight
    transposed = weight.data.transpose(2, 3).contiguous().transpose(2, 3)
    misaligned = torch.empty(weight.numel() + 1)[1:].view_as(weight).copy_(weight.data)
    changes: dict[str, Callable[[], object]] = {
        "the first run": lambda: None,
        "images": lambda: results(model, torch.randn(3, 3, 8, 8)),
        "threads": lambda: torch.set_num_threads(1),
        "gradients": lambda: layer.conv1.weight.requires_grad_(False),
        "eps": lambda: setattr(layer.norm2, "eps", 0.01),
        "strides": lambda: setattr(weight, "data", transposed),
        "alignment": lambda: setattr(weight, "data", misaligned),
        "kernels": lambda: patch.setattr(operator, "kernels_for", lambda *_: "another set"),
        "precision": lambda: patch.setattr(programs, "precision", lambda: "another"),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, change in changes.items():
            change()
            before = len(programs.entries())
            results(model, x)
            after = len(programs.entries())
            results(model, x)
            assert (after > before, len(programs.entries())) == (name != "images", after), name


def test_an_absent_tensor_is_not_the_next_one():
    """Two runs whose tensors are alike, but for the place of the one that is absent."""
    x, other = torch.rand(5), torch.rand(5)
    for _, absent in itertools.product(range(3), (1, 2)):
        externals = [x, other, other]
        externals[absent] = None
        (actual,) = programs.run(lambda absent=absent: [x - other if absent == 1 else x + other], "settings", externals)
        assert torch.equal(actual, x - other if absent == 1 else x + other)


def test_two_threads_replay_one_program(monkeypatch):
    use("Numba", monkeypatch)
    models = [small_model("bc", efficient="shared").float().eval() for _ in range(2)]
    images = [torch.randn(3, 3, 8, 8) for _ in models]
    with recording("off"):
        expected = [results(copy.deepcopy(model), x) for model, x in zip(models, images, strict=True)]
    for _, model, x in itertools.product(range(3), models, images):
        results(model, x)

    def run(i: int) -> list[list[Tensor]]:
        return [[*map(torch.clone, results(models[i], images[i]))] for _ in range(20)]

    with ThreadPoolExecutor(2) as executor:
        for found, reference in zip(executor.map(run, range(2)), expected, strict=True):
            for each in found:
                assert_equal(each, reference)


def test_a_program_runs_after_a_fork():
    """GNU OpenMP's threads do not exist in the child, whose one thread may sum in another order."""
    torch.set_num_threads(2)
    model, x = small_model("bc", efficient="shared").float(), torch.randn(8, 3, 12, 12)
    for _ in range(3):
        results(model, x)

    def compare() -> None:
        for _ in range(3):
            with recording("off"):
                expected = results(copy.deepcopy(model), x)
            assert_equal(results(model, x), expected)

    assert in_child(compare) == 0
    assert torch.get_num_threads() == 2


def test_interrupted_steps_leave_the_next_ones_right(monkeypatch):
    """A signal's handler raises KeyboardInterrupt anywhere in direct runs, recordings and replays."""
    use("Numba", monkeypatch)

    def interrupted() -> None:
        signal.signal(signal.SIGVTALRM, signal.default_int_handler)
        model, x = small_model("bc", efficient="shared").float(), torch.randn(2, 3, 8, 8)
        reference = copy.deepcopy(model)
        with recording("off"):
            expected, seconds = results(copy.deepcopy(reference), x), -time.process_time()
            results(copy.deepcopy(reference), x)
        seconds += time.process_time()
        for i in range(40):
            if i % 10 == 0:
                programs.forget()
            with contextlib.suppress(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_VIRTUAL, seconds * (i + 1) / 40)
                while True:
                    results(model, x)
            torch.set_grad_enabled(True)  # which the end of PyTorch's own no_grad may have been kept from
            model.load_state_dict(reference.state_dict())
            assert_equal(results(model, x), expected)
            model.load_state_dict(reference.state_dict())

    assert in_child(interrupted) == 0


@pytest.mark.parametrize("where", ["replay", "recording"])
def test_an_error_anywhere_leaves_the_next_steps_right(where, monkeypatch):
    """Memory may be exhausted at each call of a replay, and at each event that is recorded."""
    use("Numba", monkeypatch)
    model, x = small_model("bc", block_config=(1,), efficient="shared").float(), torch.randn(2, 3, 8, 8)
    state = copy.deepcopy(model.state_dict())
    with recording("off"):
        expected = results(copy.deepcopy(model), x)
    for _ in range(3 if where == "replay" else 1):
        results(model, x)
    countdown = [0]

    def failing(function: Callable) -> Callable:
        def call(*args: object, **kwargs: object) -> object:
            countdown[0] -= 1
            if countdown[0] == 0:
                raise torch.OutOfMemoryError
            return function(*args, **kwargs)

        return call

    for name in ("_event", "_remember", "launched") if where == "recording" else ():
        monkeypatch.setattr(recorder.Recorder, name, failing(getattr(recorder.Recorder, name)))
    for entry in programs.entries() if where == "replay" else ():
        names = entry._replay.__globals__
        names.update({name: failing(each) for name, each in names.items() if callable(each) and name != "replay"})
    for number in itertools.count(1):
        if where == "recording":
            programs.forget()
            results(model, x)
        model.load_state_dict(state)
        countdown[0] = number
        try:
            results(model, x)
        except torch.OutOfMemoryError:
            model.load_state_dict(state)
            assert_equal(results(model, x), expected)
        else:
            break
    assert number > 20


def test_a_checkpoint_around_replays(monkeypatch):
    """The forward of `torch.utils.checkpoint` and its recomputation."""
    use("Numba", monkeypatch)

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = small_model("bc", efficient="shared").float()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.model, x, use_reentrant=False)

    model, x = Around(), torch.randn(2, 3, 8, 8)
    for run in range(4):
        with recording("off"):
            expected = results(copy.deepcopy(model), x)
        with counted_replays() as replays:
            assert_equal(results(model, x), expected)
        assert bool(replays) == (run > 0)  # the recomputation is the second run
    assert_programs()


def run_three_times(function: Callable[[list[Tensor]], list[Tensor]], *externals: Tensor) -> object:
    """The entry of a function after three runs, which gave equal results."""
    outcomes = [programs.run(lambda: function(list(externals)), "settings", externals) for _ in range(3)]
    for outcome in outcomes[1:]:
        assert_equal(outcome, outcomes[0])
    (entry,) = programs.entries()
    return entry


def test_what_cannot_be_recorded_runs_directly(monkeypatch):
    x, constant = torch.rand(5), torch.rand(5)

    def written(tensors: list[Tensor]) -> list[Tensor]:
        return [tensors[0].mul_(1)]

    reasons = {
        "random": lambda tensors: [torch.rand(5).mul_(0)],
        "values": lambda tensors: [tensors[0] * tensors[0].sum().item()],
        "sizes": lambda tensors: [tensors[0][tensors[0] > 0.5]],
        "unknown": lambda tensors: [tensors[0] + constant],
        "written": written,
    }
    for function in reasons.values():
        programs.forget()
        assert isinstance(run_three_times(function, x), str)
    programs.forget()
    assert isinstance(run_three_times(lambda tensors: [tensors[0] + 1], x), Program)


def test_views_of_one_memory_are_freed_with_it(monkeypatch):
    """Columns of a matrix, which is freed after its last use."""
    monkeypatch.setattr(program, "SMALL_RUN_BYTES", 0)
    x = torch.rand(1000, 60)

    def divided(tensors: list[Tensor]) -> list[Tensor]:
        (x,) = tensors
        matrix = x * 2
        sums = [matrix[:, start:stop].sum(0) for start, stop in ((0, 10), (12, 40), (40, 60), (5, 50))]
        del matrix
        return [*sums, (x * 3).sum(0)]

    entry = run_three_times(divided, x)
    assert isinstance(entry, Program)
    assert tensor_peak(lambda: programs.run(lambda: divided([x]), "settings", [x])) < 1.5 * x.nbytes


def test_views_may_be_empty():
    x = torch.rand(4, 6)

    def computed(tensors: list[Tensor]) -> list[Tensor]:
        matrix = tensors[0] * 2
        return [matrix[:, 3:3] + 1, matrix[:, 2:4] + matrix[2:2].sum()]

    assert isinstance(run_three_times(computed, x), Program)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_numbers_in_place_of_tensors(dtype):
    """They are not rounded before the operation rounds its result, and zeros keep their signs."""
    x, wide = torch.rand(1000).to(dtype), torch.rand(1000, dtype=torch.float64)

    def computed(tensors: list[Tensor]) -> list[Tensor]:
        x, wide = tensors
        return [
            x + 1e-3,
            x * (1 / 3),
            wide * (1 / 3),
            torch.ones_like(x).copysign(x * 0.0),
            torch.ones_like(x).copysign(x * -0.0),
        ]

    assert isinstance(run_three_times(computed, x, wide), Program)


@pytest.mark.parametrize("where", ["mode", "subclass", "off"])
def test_runs_that_others_see_are_direct(where, monkeypatch):
    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **kwargs or {})

    class Subclass(Tensor):
        pass

    x = torch.rand(5)
    x = x.as_subclass(Subclass) if where == "subclass" else x
    monkeypatch.setenv(programs.VARIABLE, "off" if where == "off" else "on")
    with Mode() if where == "mode" else contextlib.nullcontext():
        programs.run(lambda: [x + 1], "settings", [x])
    assert not programs.entries()


def test_an_unknown_mode_is_an_error(monkeypatch):
    monkeypatch.setenv(programs.VARIABLE, "sometimes")
    with pytest.raises(ValueError, match="'sometimes', but must be one of on, off"):
        programs.mode()


def test_the_least_recently_used_programs_are_forgotten(monkeypatch):
    monkeypatch.setattr(programs, "MAX_PROGRAMS", 2)
    x = torch.rand(5)
    for settings in ("a", "b", "a", "b", "b", "a", "c"):
        programs.run(lambda: [x + 1], settings, [x])
    assert [isinstance(entry, Program) for entry in programs.entries()] == [True, False]


@pytest.mark.parametrize("seed", range(5))
def test_temporaries_that_live_at_once_do_not_overlap(seed):
    class Temporary:
        def __init__(self, nbytes: int, first: int, last: int) -> None:
            self.nbytes, self.first, self.last = nbytes, first, last

    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 3000, (60, 3), generator=generator).tolist()
    each = {i: Temporary(size, first % 40, first % 40 + more % 9) for i, (size, first, more) in enumerate(numbers)}
    offsets, size = slab.plan(each)
    assert all(offset % slab.ALIGNMENT == 0 for offset in offsets.values())
    for a, b in itertools.combinations(each, 2):
        if each[a].first <= each[b].last and each[b].first <= each[a].last:
            low, high = sorted((a, b), key=offsets.__getitem__)
            assert offsets[low] + each[low].nbytes <= offsets[high]
    assert max(offsets[i] + each[i].nbytes for i in each) <= size < sum(each[i].nbytes + 512 for i in each)


def test_a_long_run_is_not_recorded(monkeypatch):
    use("portable", monkeypatch)
    monkeypatch.setattr(recorder, "MAX_EVENTS", 60)
    model, direct = (small_model("bc", efficient=engine).float() for engine in ("shared", "shared"))
    direct.load_state_dict(model.state_dict())
    for _ in range(4):
        x = torch.randn(2, 3, 8, 8)
        actual = results(model, x)
        with recording("off"):
            expected = results(direct, x)
        assert_equal(actual, expected)
    assert any("more than 60 events" in str(entry) for entry in programs.entries())
