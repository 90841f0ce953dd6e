"""Run by one or several processes: small networks trained by other libraries' trainers, with their checkpoints.

A case is the text "trainer | model | variant". Each is trained by the shared engine, which saves a checkpoint in the
middle; resumed from that checkpoint, in a model that began with other values; and trained by plain.
"""

import functools
import json
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torchvision.models.densenet as torchvision_densenet
from process_steps import largest_difference, local, recorded_engines
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from efficient_densenet import DenseNet, make_efficient
from efficient_densenet.models.layers import DenseBlock
from efficient_densenet.norms.sync_batch_norm import synchronize_norms

PROCESSES = int(os.environ.get("WORLD_SIZE", "1"))
IMAGES, BATCH, EPOCHS = 8, 2, 2
STEPS = EPOCHS * IMAGES // BATCH // PROCESSES
BLOCKS = (DenseBlock, torchvision_densenet._DenseBlock)
WARNINGS = (
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",
    "The dirpath has changed",  # Lightning's, of the folder of checkpoints
)
engines: set[str] = set()
"""Those of the training steps of a run."""


def _ours(efficient: bool, drop_rate: float) -> nn.Module:
    return DenseNet(4, (2, 2), num_init_features=6, num_classes=3, drop_rate=drop_rate, efficient=efficient)


def _torchvision(efficient: bool, drop_rate: float, converts: bool = True) -> nn.Module:
    options = {"drop_rate": drop_rate, "memory_efficient": efficient}  # its own checkpointing, as users may have it on
    model = torchvision_densenet.DenseNet(4, (2, 2), 6, bn_size=2, num_classes=3, **options)
    if efficient and converts:
        make_efficient(model)
    return model


MODELS = {"ours": _ours, "converted": _torchvision, "converted last": functools.partial(_torchvision, converts=False)}
"""A model "converted last" is converted when the trainer has prepared it."""


class Run:
    """A model with its data, a folder for checkpoints, and the folder of the checkpoint to resume from."""

    def __init__(self, case: str, efficient: bool, folder: Path, saved: Path | None = None) -> None:
        _, self.name, self.variant = case.split(" | ")
        self.efficient, self.folder, self.saved = efficient, folder, saved
        self.converts_last = efficient and self.name == "converted last"
        torch.manual_seed(0 if saved is None else 1)
        self.model = self.new_model(efficient)

    def new_model(self, efficient: bool) -> nn.Module:
        return MODELS[self.name](efficient, 0.2).double()

    def synchronize_norms(self) -> None:
        if self.efficient:
            nn.SyncBatchNorm.convert_sync_batchnorm(self.model)
        else:
            synchronize_norms(self.model, None)  # PyTorch's run on CPUs in the shared engine only

    def dataset(self) -> TensorDataset:
        images = torch.randn(IMAGES, 3, 32, 32, dtype=torch.double, generator=torch.Generator().manual_seed(2))
        return TensorDataset(images, torch.arange(IMAGES) % 3)

    def results(self) -> list[Tensor | None]:
        """Parameters and buffers, then the last gradients where the trainer leaves them."""
        parameters = list(self.model.parameters())
        return [local(tensor) for tensor in (*parameters, *self.model.buffers(), *(each.grad for each in parameters))]


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def _assert_same_states(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert torch.equal(tensor, expected[name]), name


LIGHTNING: dict[str, dict[str, Any]] = {
    "steps": {},
    "accumulated and clipped": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
    "synchronized": {"sync_batchnorm": True},
    "fully_shard": {},
}


def _lightning(run: Run) -> None:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy

    class Task(lightning.LightningModule):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def configure_model(self) -> None:  # after the processes have met
            if run.variant == "fully_shard":
                run.synchronize_norms()
                for module in self.model.modules():
                    if isinstance(module, BLOCKS):
                        fully_shard(module)
                fully_shard(self.model)
            if run.converts_last:
                make_efficient(self)

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            torch.manual_seed(index)  # Lightning saves no states of random generators
            with recorded_engines(engines):
                return F.cross_entropy(self.model(batch[0]), batch[1])

        def validation_step(self, batch: list[Tensor], _: int) -> None:  # in inference mode, also before training
            self.log("loss", F.cross_entropy(self.model(batch[0]), batch[1]), sync_dist=True)

        def configure_optimizers(self) -> Any:
            optimizer = _optimizer(self)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    options = LIGHTNING[run.variant] | {"strategy": "ddp" if PROCESSES > 1 else "auto"}
    if run.variant == "fully_shard":
        options["strategy"] = ModelParallelStrategy(data_parallel_size=PROCESSES, tensor_parallel_size=1)
    if run.variant == "synchronized" and not run.efficient:
        options["sync_batchnorm"] = False
        run.synchronize_norms()
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    saving = ModelCheckpoint(run.folder, "{epoch}", save_top_k=-1)
    options |= quiet | {"accelerator": "cpu", "devices": PROCESSES, "max_epochs": EPOCHS, "callbacks": [saving]}
    loaders = [DataLoader(run.dataset(), BATCH), DataLoader(run.dataset(), BATCH)]
    task, trainer = Task(run.model), lightning.Trainer(**options)
    trainer.fit(task, *loaders, ckpt_path=run.saved / "epoch=0.ckpt" if run.saved else None)
    assert trainer.global_step == STEPS // options.get("accumulate_grad_batches", 1)
    if PROCESSES == 1:
        loaded = Task.load_from_checkpoint(run.folder / f"epoch={EPOCHS - 1}.ckpt", model=run.new_model(False))
        _assert_same_states(loaded.state_dict(), task.state_dict())


ACCELERATE: dict[str, dict[str, Any]] = {"steps": {}, "accumulated and clipped": {"gradient_accumulation_steps": 2}}


def _accelerate(run: Run) -> None:
    import accelerate
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # it refuses other options in one process
    loading = accelerate.DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
    accelerator = accelerate.Accelerator(cpu=True, dataloader_config=loading, **ACCELERATE[run.variant])
    optimizer = _optimizer(run.model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    loader = DataLoader(run.dataset(), BATCH, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(run.model, optimizer, loader, scheduler)
    if run.converts_last:
        make_efficient(model)
    assert accelerator.unwrap_model(model) is run.model
    if run.saved:
        accelerator.load_state(str(run.saved))
    for epoch in range(1 if run.saved else 0, EPOCHS):
        loader.set_epoch(epoch)
        for images, labels in loader:
            with accelerator.accumulate(model):
                with recorded_engines(engines):
                    loss = F.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        if epoch == 0:
            accelerator.save_state(str(run.folder))


TRANSFORMERS: dict[str, dict[str, Any]] = {
    "steps": {},
    "accumulated": {"gradient_accumulation_steps": 2, "ddp_find_unused_parameters": False},
}


class Classifier(nn.Module):
    """What the Trainer of transformers takes: a module that returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        with recorded_engines(engines) if self.training else nullcontext():
            logits = self.model(pixel_values)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def _transformers(run: Run) -> None:
    import transformers
    from safetensors.torch import load_file

    arguments = transformers.TrainingArguments(
        output_dir=str(run.folder),
        use_cpu=True,
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        save_strategy="epoch",
        eval_strategy="epoch",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **TRANSFORMERS[run.variant],
    )
    data = [{"pixel_values": image, "labels": label} for image, label in run.dataset()]
    model = Classifier(run.model)
    optimizers = _optimizer(model), None
    trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data, optimizers=optimizers)
    if run.converts_last:
        make_efficient(model)
    steps = STEPS // arguments.gradient_accumulation_steps
    trainer.train(resume_from_checkpoint=str(run.saved / f"checkpoint-{steps // EPOCHS}") if run.saved else None)
    assert trainer.state.global_step == steps
    if trainer.is_world_process_zero():  # which alone saves
        saved = load_file(run.folder / f"checkpoint-{steps}" / "model.safetensors")
        _assert_same_states(saved, model.state_dict())


TRAINERS: dict[str, Callable[[Run], None]] = {
    "lightning": _lightning,
    "accelerate": _accelerate,
    "transformers": _transformers,
}


def outcome(case: str, folder: Path) -> dict[str, Any]:
    runs = {
        "shared": Run(case, True, folder / "shared"),
        "resumed": Run(case, True, folder / "resumed", folder / "shared"),
        "plain": Run(case, False, folder / "plain"),
    }
    used, results, counts = {}, {}, []
    for name, run in runs.items():
        engines.clear()
        torch.manual_seed(0)
        TRAINERS[case.split(" | ")[0]](run)
        used[name], results[name] = sorted(engines), run.results()
        counts += [buffer for key, buffer in run.model.named_buffers() if key.endswith("num_batches_tracked")]
    return {
        "engines": used["shared"] + used["resumed"],
        "difference": largest_difference(results["shared"], results["plain"]),
        "difference of the resumed": largest_difference(results["resumed"], results["shared"]),
        "steps of norms": sorted(set(map(int, counts))),
    }


def main(cases: str, path: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message)
    # DistributedDataParallel refuses SyncBatchNorm on CPUs, where the shared engine runs it.
    nn.parallel.DistributedDataParallel._passing_sync_batchnorm_handle = lambda self, module: None
    outcomes = {}
    for i, case in enumerate(json.loads(Path(cases).read_text())):
        print(case, file=sys.stderr)  # above the traceback of an error
        outcomes[case] = outcome(case, Path.cwd() / str(i))
    Path(f"{path}.{os.environ.get('RANK', 0)}").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
