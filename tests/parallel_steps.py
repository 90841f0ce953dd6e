"""Run by several processes: training steps, and an evaluation, by trainers of the options that each case gives.

Besides options of a run, a case may have an engine, a dtype, a first step with the path of a state to begin with, and
the first scale of fp16; `record` counts how often the last step reduces sharded gradients. The main process writes the
outcomes.
"""

import contextlib
import json
import sys
import warnings
from typing import Any

import torch
from samples import global_batch, tiny_trainer
from training.data.images import Images
from training.distributed import DistributedContext, init_distributed

STEPS, EVALUATED = 3, 9
REDUCTION = "c10d::_reduce_scatter_base_"


def outcome(case: dict[str, Any], context: DistributedContext) -> dict:
    """The state, the sums of each step, the evaluation, and the number of reductions."""
    special = {"engine": "shared", "dtype": "float64", "first": 0, "path": None, "scale": None, "record": False}
    engine, dtype, first, path, scale, record = (case.get(name, default) for name, default in special.items())
    options = {name: value for name, value in case.items() if name not in special}
    trainer = tiny_trainer(engine, context, getattr(torch, dtype), **options)
    if scale is not None:
        trainer.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    if path is not None:
        trainer.load_state(torch.load(path, weights_only=True))
    images, labels = global_batch()
    local, sums = context.rank_slice(len(labels)), []
    for step in range(first, first + STEPS):
        recorded = record and step == first + STEPS - 1
        with torch.profiler.profile() if recorded else contextlib.nullcontext() as profiler:
            step_sums = trainer.step(images[local], labels[local], len(labels), 0.1, (0, 1, step))
        sums.append(context.all_reduce_sum(step_sums))
    evaluated = trainer.evaluate(Images(images[:EVALUATED], labels[:EVALUATED]))
    reductions = [event for event in profiler.events() if event.name == REDUCTION] if profiler else []
    return {"state": trainer.state(), "sums": sums, "evaluated": evaluated, "reductions": len(reductions)}


if __name__ == "__main__":
    cases, path = json.loads(sys.argv[1]), sys.argv[2]
    warnings.simplefilter("ignore", UserWarning)
    with init_distributed("cpu") as context:
        outcomes = [outcome(case, context) for case in cases]
        if context.is_main_process:
            torch.save(outcomes, path)
