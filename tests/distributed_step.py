"""Run by torchrun: one training step of a share of the batch; the first process writes what came of it."""

import sys
import warnings

import torch
from samples import joined_batch, tiny_trainer

from efficient_densenet.training.distributed import assemble

if __name__ == "__main__":
    engines, path = sys.argv[1].split(","), sys.argv[2]
    options = dict(word.split("=") for word in sys.argv[3:])
    options = {name: int(value) if value.isdigit() else value == "True" for name, value in options.items()}
    warnings.simplefilter("ignore", UserWarning)
    with assemble("cpu") as team:
        results = {}
        for engine in engines:
            trainer = tiny_trainer(engine, team, **options)
            images, labels = joined_batch()
            share = team.share(len(labels))
            sums = team.sum(trainer.step(images[share], labels[share], len(labels), 0.1, (0, 1, 0)))
            gradients = [parameter.grad for parameter in trainer.model.parameters()]
            buffers = list(trainer.model.buffers())
            results[engine] = {"sums": sums, "gradients": gradients, "buffers": buffers}
        trainer = tiny_trainer("plain", team, micro_batch_size=3)
        trainer.step(images[share], labels[share], len(labels), 0.1, (0, 1, 0))
        results["micro"] = {"gradients": [parameter.grad for parameter in trainer.model.parameters()]}
        if team.leads:
            torch.save(results, path)
