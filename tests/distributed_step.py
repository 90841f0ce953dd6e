"""Run by torchrun: one training step of this rank's part of the batch; the main process writes the results."""

import sys
import warnings

import torch
from samples import global_batch, tiny_trainer
from training.distributed import init_distributed

if __name__ == "__main__":
    engines, path = sys.argv[1].split(","), sys.argv[2]
    options = dict(word.split("=") for word in sys.argv[3:])
    options = {name: int(value) if value.isdigit() else value == "True" for name, value in options.items()}
    warnings.simplefilter("ignore", UserWarning)
    with init_distributed("cpu") as context:
        results = {}
        for engine in engines:
            trainer = tiny_trainer(engine, context, **options)
            images, labels = global_batch()
            local = context.rank_slice(len(labels))
            sums = context.all_reduce_sum(trainer.step(images[local], labels[local], len(labels), 0.1, (0, 1, 0)))
            gradients = [parameter.grad for parameter in trainer.model.parameters()]
            buffers = list(trainer.model.buffers())
            results[engine] = {"sums": sums, "gradients": gradients, "buffers": buffers}
        trainer = tiny_trainer("plain", context, micro_batch_size=3)
        trainer.step(images[local], labels[local], len(labels), 0.1, (0, 1, 0))
        results["micro"] = {"gradients": [parameter.grad for parameter in trainer.model.parameters()]}
        if context.is_main_process:
            torch.save(results, path)
