"""Several processes: every engine under DistributedDataParallel, FSDP1 and `fully_shard`, with synchronized norms,
trains as plain does, or is refused with a sentence."""

import itertools
from collections.abc import Callable
from pathlib import Path

import communication
import process_steps
import pytest
import torch
from forks import outcomes_of_processes
from process_steps import ENGINES, UNITS, WAYS
from torch import nn

from efficient_densenet import DenseNet
from efficient_densenet.memory import tensor_peak

STEPS = Path(process_steps.__file__)
SHARDED = [
    "ours | fully_shard | convolution | checkpoint",
    "ours | fully_shard | layer | best",
    "ours | fully_shard | convolution | shared",
    "ours | FSDP1, flat | block | checkpoint",
    "converted | fully_shard | stage | best",
    "converted last | FSDP1 | block | best",
    "ours | fully_shard, clipped | block | shared",
    "ours | fully_shard, mixed | block | shared",
    "ours | fully_shard, offloaded | block | shared",
]
OTHERS = [
    *(f"ours | DDP | {way} | best" for way in ("small buckets", "accumulated")),
    "converted | DDP | joined | best",
    *(f"ours | synchronized | 2 3 | {engine}" for engine in ("plain", "official", "checkpoint", "shared")),
    *(f"ours | synchronized | 0 3 | {engine}" for engine in ("official", "checkpoint", "shared")),  # an empty batch
    "ours without Numba | synchronized by torch | 1 2 | shared",  # so few pixels that batch_norm computes gradients
    "ours | synchronized by torch | 1 1 | best",
    "ours with a stem | synchronized by torch | 1 2 | shared",
    "ours with a stem | synchronized | 0 3 | best",
    "converted | synchronized by torch | 3 1 | shared",
    "converted last | synchronized by torch | 2 3 | best",
    "converted last | synchronized by torch | 0 2 | best",
]
SHARDINGS = ["fully_shard", "fully_shard, not resharded", "FSDP1", "FSDP1, flat"]
ALL = [
    *(
        " | ".join(case)
        for case in itertools.product(("ours", "converted", "converted last"), SHARDINGS, UNITS, ENGINES)
    ),
    *(f"{model} | DDP | {way} | best" for model in ("ours", "converted") for way in WAYS),
]
OF_THREE = [
    f"{model} | {wrapper} | {images} | shared"
    for model, wrapper in (
        ("ours", "synchronized"),
        ("ours with a stem", "synchronized by torch"),
        ("converted", "synchronized by torch"),
        ("converted last", "synchronized by torch"),
    )
    for images in ("1 1 1", "0 0 2", "2 0 1", "3 2 4")
]
COMPILED = [f"ours | compiled | {order} | shared" for order in ("DDP(compile)", "compile(DDP)")]


def _is_right(case: str, outcome: str) -> bool:
    model, wrapper, unit, engine = case.split(" | ")
    if unit not in UNITS:
        by = "2 stages in one graph" if wrapper == "compiled" else engine.replace("best", "shared")
        return outcome == f"equal, by {by}"
    runs_shared = unit in ("root", "stage", "block") or (unit == "layer" and wrapper.startswith("fully_shard"))
    if model != "ours" and (engine == "plain" or (model == "converted last" and wrapper.startswith("FSDP1"))):
        return outcome == "equal, by the author's forward"  # a model that FSDP1 has sharded is not converted
    replaced = model == "converted" and wrapper.startswith("FSDP1") and not runs_shared  # as if not verified
    if (engine == "shared" and not runs_shared) or (replaced and engine not in ("plain", "best")):
        sharder = "FullyShardedDataParallel" if wrapper.startswith("FSDP1") else "fully_shard"
        refusal = (
            f"forward 0: RuntimeError: engine {engine!r} cannot run here: found parameters that {sharder} shards on"
        )
        return outcome.startswith(refusal) and "shard blocks, stages or the whole model instead" in outcome
    runs = engine if engine != "best" else "shared" if runs_shared else "plain" if replaced else "checkpoint"
    return outcome == f"equal, by {runs}"


def _wrong(cases: list[str], processes: int, folder: Path) -> list[str]:
    outcomes = outcomes_of_processes(cases, processes, STEPS, folder)
    return [f"{case}: {each[case]}" for each in outcomes for case in cases if not _is_right(case, each[case])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def outcomes(folder) -> list[dict[str, str]]:
    """All cases of two processes, which take seconds to start."""
    return outcomes_of_processes([*SHARDED, *OTHERS, "save"], 2, STEPS, folder)


@pytest.mark.parametrize("case", [*SHARDED, *OTHERS])
def test_two_processes_train_as_plain_or_are_refused(case, outcomes):
    for of_rank in outcomes:
        assert _is_right(case, of_rank[case]), of_rank[case]


@pytest.mark.usefixtures("outcomes", "process_group_of_one")
def test_a_checkpoint_of_two_processes_is_loaded_by_one(folder):
    assert process_steps.loads(folder)


@pytest.mark.usefixtures("process_group_of_one")
def test_a_sharded_layer_with_a_hook_of_the_user_is_refused():
    model = process_steps._fully_shard(DenseNet(4, (2, 2), num_init_features=6, efficient="shared"), "layer")
    model.features.denseblock1.denselayer2.register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match="found parameters that fully_shard shards on each DenseLayer inside"):
        model(torch.randn(2, 3, 8, 8))


def test_a_module_in_the_place_of_another_is_named():
    model = process_steps.MODELS["converted"]("shared")
    model.features.denseblock1.denselayer2.relu1 = nn.ELU()
    with pytest.raises(RuntimeError, match="found that a ReLU has become a ELU since it was verified: call"):
        model.train()(torch.randn(2, 3, 32, 32))


def _peak(wrap: Callable, engine: str) -> int:
    """The tensor peak of a process that builds a model and trains two steps: parameters, gradients and all else.

    Its collectives send nothing: a thread that sends may release its tensors late.
    """
    x = torch.randn(4, 3, 16, 16)

    def train() -> None:
        torch.manual_seed(0)
        model = wrap(DenseNet(16, (5, 5), num_init_features=16, efficient=engine))
        for _ in range(2):
            model(x).sum().backward()

    return tensor_peak(train)


def test_a_process_needs_less_memory_than_with_plain_and_than_with_ddp():
    with communication._processes(2):
        shared, plain = (
            _peak(lambda m: process_steps._fully_shard(m, "block"), engine) for engine in ("shared", "plain")
        )
        with_ddp = _peak(communication._ddp, "shared")
    assert shared < 0.5 * plain
    assert shared < with_ddp


@pytest.mark.exhaustive
@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("model", ["ours", "converted", "converted last"])
def test_every_model_and_wrapper(model, processes, tmp_path):
    assert _wrong([case for case in ALL if case.startswith(f"{model} | ")], processes, tmp_path) == []


@pytest.mark.exhaustive
def test_three_processes_with_batches_of_all_sizes(tmp_path):
    assert _wrong(OF_THREE, 3, tmp_path) == []


@pytest.mark.exhaustive
def test_compiled_models_under_ddp_are_one_graph(tmp_path):
    assert _wrong(COMPILED, 2, tmp_path) == []
