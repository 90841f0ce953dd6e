"""A training run: from its options to the test error, interrupted and resumed at any step."""

import contextlib
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from efficient_densenet import __version__
from efficient_densenet._extras import need
from efficient_densenet.models.zoo import build_configured
from efficient_densenet.weights.named import find_checkpoint

from . import files, models
from .cuda_graph import can_be_cuda_graph
from .data import Dataset, load
from .data.augment import Transform, transform_for
from .data.sources import check_options_of_folders, download_if_absent
from .distributed import DistributedContext, check_sync_bn, init_distributed
from .evaluate import evaluate
from .finetune import PretrainedWeights, find_weights, inputs_of
from .loop import Trainer, TrainingPosition, check_finite, num_steps
from .options import RunOptions, parse
from .report import describe_epoch, describe_expected_memory, mib, peak_memory, progress_bar
from .results import Row, plot_curves, save_csv
from .run_directory import LAST, RunDirectory, data_changes, merge_options, run_folder, this_process
from .signals import StopRequest, TrainingInterrupted


def train(given: dict[str, Any], efficient_engine: str = "best") -> None:
    """Train, resume or evaluate, as the `given` options say; `efficient_engine` is what `efficient=True` means."""
    options = parse(given, efficient_engine)
    with init_distributed(options.device) as context:
        options = replace(options, seed=context.on_main(lambda: options.seed))  # which may have been drawn
        check_sync_bn(options)
        directory = RunDirectory(run_folder(options))
        if options.evaluate is not False:
            path = directory.folder if options.evaluate is True else find_checkpoint(options.evaluate)
            evaluate(path, options, context)
            return
        with contextlib.closing(directory):
            state = context.on_main(lambda: directory.open(options))
            if state:
                options = parse(merge_options(state, given), efficient_engine)
            pretrained = None
            if options.weights is not None and state is None:
                pretrained = find_weights(options.weights, given)
                options = replace(parse(pretrained.complete(given), efficient_engine), seed=options.seed)
            if can_be_cuda_graph(options, context) and options.cuda_graph is None and not options.compile:
                options = replace(options, cuda_graph=True)
            for name in ("tqdm", "matplotlib", "filelock"):  # which the end of an epoch needs
                need(name, extra="demos")
            try:
                Run(options, context, directory, state, pretrained).train()
            except RuntimeError as exc:
                if "cannot run here" not in str(exc):
                    raise
                raise ValueError(str(exc)) from exc  # of an engine that was named


class Run:
    """A run and its directory, in which only the main process writes.

    It goes on from the `state`, or begins with the `pretrained` weights, if there are any.
    """

    def __init__(
        self,
        options: RunOptions,
        context: DistributedContext,
        directory: RunDirectory,
        state: Mapping[str, Any] | None,
        pretrained: PretrainedWeights | None = None,
    ) -> None:
        self.options, self.context, self.directory, self.resumed = options, context, directory, state is not None
        torch.manual_seed(options.seed)
        started = models.ModelConfig.of(state["model"]) if state else None
        inputs = inputs_of(started) if started else pretrained.inputs if pretrained else None
        self.dataset = self._load_dataset(state is None, inputs or {})
        self.valid: Any = self.dataset.valid
        flip = self.dataset.horizontal_flip if options.mirror is None else options.mirror
        if inputs:
            size = self.dataset.image_size
            self.transform = Transform(tuple(inputs["mean"]), tuple(inputs["std"]), size // 8, flip)
        else:
            self.transform = transform_for(self.dataset.train, flip)
        network = {name: getattr(options, name) for name in ("model", "depth", "growth_rate", "drop_rate")}
        images = {name: getattr(self.dataset, name) for name in ("channels", "image_size", "classes", "value_range")}
        self.config = models.ModelConfig(**network, **images, mean=self.transform.mean, std=self.transform.std)
        self.record = self._record()
        self.said = data_changes(state["data"], self.record["data"], options.accept_changed_data) if state else []
        self.said = [f"note: {change}" for change in self.said]
        self.model = build_configured(self.config, options.engine, options.keep_bottleneck).to(context.device)
        if pretrained:
            self.said += pretrained.load_into(self.model, self.dataset.classes)
        devices = context.world_size * max(context.num_gpus, 1)
        per_device = -(-min(len(self.dataset.train), options.batch_size) // devices)
        self.largest_batch = min(per_device, options.micro_batch_size or per_device)
        shape = self.largest_batch, self.config.channels, *[self.dataset.image_size] * 2
        self.expected_memory = describe_expected_memory(self.model, shape, options)
        if options.cuda_graph:
            self.said.append("a step's forward and backward are one CUDA graph (not with --cuda_graph False)")
        self.trainer = Trainer(self.model, self.transform, options, context)
        with self.trainer.autocast():
            engines = models.describe_engines(self.model, self.largest_batch, shape[-1], options.compile)
        self.environment = f"engine {engines}; {context.describe()}"
        self.position, self.rows = TrainingPosition(), []
        if state:
            self._restore(state)
        if context.is_main_process:
            self._print_summary()
        self.stop_request = StopRequest()

    def train(self) -> None:
        with self.stop_request.listening():
            state = self.trainer.state()
            self.context.on_main(lambda: self._prepare_directory(state))
            try:
                while self.position.epoch <= self.options.n_epochs:
                    self._train_epoch()
                self._finish()
            except TrainingInterrupted as interrupted:
                self._save_and_exit(interrupted)
            except torch.OutOfMemoryError as exc:
                raise MemoryError(
                    f"out of memory in a step of {self.largest_batch} images with engine {self.options.engine}: start "
                    "over with --overwrite and --engine best, --keep_bottleneck False, --cuda_graph False, a smaller "
                    "--micro_batch_size, or smaller images"
                ) from exc

    def _load_dataset(self, may_download: bool, inputs: Mapping[str, Any]) -> Dataset:
        options, context = self.options, self.context
        size = options.image_size or models.default_image_size(options.model)
        if may_download:
            context.on_main(lambda: download_if_absent(options.data, options.dataset))
        of_inputs = inputs.get("channels"), inputs.get("value_range")
        dataset = load(options.data, options.dataset, size, options.workers, options.stream, *of_inputs)
        check_options_of_folders(dataset, None if options.weights else options.image_size, options.stream)
        dataset = dataset.with_validation(options.valid_size).to(context.device)
        smallest = min(len(dataset.train), options.batch_size)
        if smallest < context.world_size:
            raise ValueError(
                f"found a batch of {smallest} images for {context.world_size} processes, but each needs at least one: "
                "give a larger --batch_size or fewer processes"
            )
        return dataset

    def _record(self) -> dict[str, Any]:
        """What describes the run in config.json and last.pt."""
        data = self.options.data and str(Path(self.options.data).absolute())  # so that it can be resumed from anywhere
        dataset = self.dataset
        return {
            "options": asdict(self.options) | {"data": data},
            "model": asdict(self.config),
            "data": {
                "name": dataset.name,
                "train_images": len(dataset.train),
                "valid_images": len(self.valid),
                "test_images": len(dataset.test),
                "image_size": dataset.image_size,
                "classes": list(dataset.classes),
                "fingerprint": dataset.fingerprint,
            },
        }

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Go on where the run was saved; with another number of images, from the beginning of the epoch."""
        with files.damage_named(self.directory.folder / LAST):
            self.trainer.load_state(state["state"])
        self.position, self.rows = TrainingPosition(**state["position"]), list(state["rows"])
        if self.rows:
            weights = self.directory.folder / models.WEIGHTS  # which the end of the run needs
            self.context.on_main(lambda: models.read_weights(weights, build_configured(self.config)) and None)
        if self.position.step and state["data"]["train_images"] != len(self.dataset.train):
            self.said.append(f"note: epoch {self.position.epoch} begins anew, since its batches are others")
            self.position = TrainingPosition(self.position.epoch)

    def _print_summary(self) -> None:
        dataset, parameters = self.dataset, list(self.model.parameters())
        count, size = sum(p.numel() for p in parameters), sum(p.numel() * p.element_size() for p in parameters)
        print(f"{self.config.name}: {count:,} parameters, {mib(size)}; {self.environment}; seed {self.options.seed}")
        for line in self.said:
            print(line)
        print(f"expected memory of a step: {self.expected_memory}")
        splits = f"{len(dataset.train):,} to train, {len(self.valid):,} to validate, {len(dataset.test):,} to test"
        print(f"{dataset.name}: {len(dataset.classes)} classes; images: {splits}")
        if dataset.value_range:
            low, high = dataset.value_range
            print(f"images of more than 8 bits: {low:g} is black and {high:g} is white, of the training images' values")

    def _prepare_directory(self, state: dict[str, Any]) -> None:
        where, folder = self._describe_position(), self.directory.folder
        self.directory.prepare(self.options)
        self.directory.save(state, self.position, self.rows, self.record)
        versions = {"efficient_densenet": __version__, "torch": torch.__version__}
        files.write_atomic(folder / models.CONFIG, json.dumps(self.record | {"versions": versions}, indent=2).encode())
        event = f"resumed {where}" if self.resumed else "started"
        self.directory.log(f"{event} {this_process()}; {self.environment}; PyTorch {torch.__version__}")
        if self.rows:
            save_csv(folder, self.rows)
        if self.resumed:
            print(f"resuming {folder} {where}")
        elif self.options.resume:
            print(f"nothing to resume in {folder}: starting")

    def _describe_position(self) -> str:
        """Where training goes on."""
        epoch, step = self.position.epoch, self.position.step
        if epoch > self.options.n_epochs:
            return "after the last epoch"
        return f"in epoch {epoch}, after step {step}" if step else f"in epoch {epoch}"

    def _train_epoch(self) -> None:
        position, device = self.position, self.context.device
        started = time.perf_counter() - position.seconds
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        steps = num_steps(len(self.dataset.train), self.options.batch_size)
        title = f"epoch {position.epoch}/{self.options.n_epochs}"
        with progress_bar(title, steps, position.step, self.context.is_main_process) as bar:
            for _ in self.trainer.steps(self.dataset.train, position):
                position.seconds = time.perf_counter() - started
                loss, error = position.loss / position.seen, position.wrong / position.seen
                speed, peak = position.seen / position.seconds, mib(self._peak_memory())
                bar.set_postfix_str(f"loss {loss:.3f}, error {error:.2%}, {speed:,.0f} images/s, peak {peak}", False)
                bar.update()
                self._raise_if_stopped()
            # Where processes evaluate different numbers of batches, they cannot agree on stopping between them.
            after_batch = self._raise_if_stopped if self.context.world_size == 1 else None
            valid = self.trainer.evaluate(self.valid, after_batch) if len(self.valid) else ("", "")
        row = self._row(valid, time.perf_counter() - started)
        if row["valid_loss"] != "":
            check_finite("validation loss", row["valid_loss"], f"epoch {row['epoch']}", row["lr"])
        self.rows.append(row)
        self.position = TrainingPosition(position.epoch + 1)
        self._save_epoch(row)
        if self.context.is_main_process:
            print(describe_epoch(title, row, whole_process=device.type == "cpu"))

    def _peak_memory(self) -> int:
        return peak_memory(self.context.device, reserved=bool(self.options.cuda_graph))

    def _row(self, valid: tuple[float | str, float | str], seconds: float) -> Row:
        """`test_error` is empty but in the last row: only the best epoch's model is tested, at the end of the run."""
        position = self.position
        return {
            "epoch": position.epoch,
            "train_loss": position.loss / position.seen,
            "train_error": position.wrong / position.seen,
            "valid_loss": valid[0],
            "valid_error": valid[1],
            "test_error": "",
            "seconds": seconds,
            "images_per_second": position.seen / position.seconds,
            "peak_memory_mib": self._peak_memory() / 2**20,
            "lr": self.trainer.optimizer.param_groups[0]["lr"],
        }

    def _save_epoch(self, row: Row) -> None:
        """Save the weights before the position: a run that is killed in between repeats the epoch."""
        state = self.trainer.state()
        if not self.context.is_main_process:
            return
        # The best by validation, or the last one if there are no images to validate by.
        best = min(self.rows, key=lambda row: (row["valid_error"], row["valid_loss"])) if len(self.valid) else row
        if row is best:
            self.directory.write(models.WEIGHTS, files.saved_bytes(state["model"]))
        self._save(state)

    def _save(self, state: dict[str, Any]) -> None:
        """Save the trainer's state first: nothing that fails afterwards costs an epoch."""
        self.directory.save(state, self.position, self.rows, self.record)
        if self.rows:
            self._save_results()

    def _save_results(self) -> None:
        save_csv(self.directory.folder, self.rows)
        plot_curves(self.directory.folder, self.rows, self.config.name, self.dataset.name)

    def _raise_if_stopped(self) -> None:
        number = self.stop_request.received
        if self.context.all_reduce_sum([number])[0]:
            raise TrainingInterrupted(number)

    def _save_and_exit(self, interrupted: TrainingInterrupted) -> NoReturn:
        state = self.trainer.state()
        if self.context.is_main_process:
            self._save(state)
            stopped = (
                f"stopped by {interrupted.number.name} in epoch {self.position.epoch} after step {self.position.step}"
            )
            self.directory.log(stopped)
            print(f"{stopped}: continue with --resume and --save {self.directory.folder}")
        self.context.barrier()  # a process that leaves while another one writes looks dead to it
        sys.exit(128 + interrupted.number)

    def _finish(self) -> None:
        """Test the weights of the best epoch, or of the last one if there are no images to validate by."""
        folder = self.directory.folder
        self.model.load_state_dict(self.context.on_main(lambda: models.read_weights(folder / models.WEIGHTS)))
        test_loss, test_error = self.trainer.evaluate(self.dataset.test)
        check_finite("test loss", test_loss, f"epoch {self.rows[-1]['epoch']}", self.rows[-1]["lr"])
        self.rows[-1]["test_error"] = test_error
        if not self.context.is_main_process:
            return
        self._save_results()
        self.directory.log(f"finished: test error {test_error:.2%}")
        which = "the best epoch by validation" if len(self.valid) else "the last epoch"
        print(
            f"test error {test_error:.2%}; in {folder}: {models.WEIGHTS} ({which}), "
            f"{LAST}, results.csv, curves.png, {models.CONFIG}"
        )
