"""A training run: from its options to the test error, interrupted and resumed at any step."""

import contextlib
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from efficient_densenet import __version__
from efficient_densenet._archive import to_archive
from efficient_densenet.models.densenet import DenseNet
from efficient_densenet.weights.trained import find_checkpoint

from . import files, finetune, models, run_format, run_log, run_state
from .cuda_graph import check_cuda_graph
from .data import (
    SplitDataset,
    StreamedImages,
    UndecodableImage,
    check_images,
    check_options_of_folders,
    check_prefetched,
    load,
)
from .data.augment import transform_for
from .distributed import DistributedContext, check_parallel, init_distributed
from .evaluate import evaluate
from .freezing import describe_frozen, freeze_parameters
from .loop import Trainer, TrainingPosition, check_finite, num_steps
from .machine import check_options
from .memory_estimate import advice_now, describe_expected_memory, fit_into_memory, largest_batch
from .options import RunOptions, parse
from .report import EpochProgress, may_fail, mib, peak_memory, reset_peak_memory, say
from .results import Row, TensorBoardWriter, check_dependencies, plot_curves, save_csv
from .run_lock import RunLock, refuse_if_held
from .sharding import is_sharded
from .signals import StopRequest, TrainingInterrupted

SECONDS_BETWEEN_PLOTS = 20


def train(given: dict[str, Any], efficient_engine: str = "best") -> None:
    """Train, resume or evaluate, as the `given` options say; `efficient_engine` is what `efficient=True` means."""
    given = finetune.with_full_path(given)
    options = parse(given, efficient_engine)
    with init_distributed(options.device) as context:
        options = replace(options, seed=context.from_main_process(options.seed))  # which may have drawn it
        folder = run_state.run_directory(options)
        check_options(options.workers, options.lr)
        check_parallel(options, context)
        if options.evaluate is not False:
            evaluate(folder if options.evaluate is True else find_checkpoint(options.evaluate), options, context)
            return
        files.check_writable(folder)
        if context.is_main_process:
            refuse_if_held(folder)
        versions = run_state.file_versions(folder)
        run_state.check_save_directory(folder, options)
        state = run_state.read_to_resume(folder, options.resume)
        run_state.check_position(folder, state, context.from_main_process(run_state.position_number(state)))
        if state:
            options = parse(run_state.merge_options(state, given), efficient_engine)
            check_options(options.workers, options.lr)
        pretrained = finetune.read_pretrained(options, given if state is None else asdict(options), state)
        if pretrained and state is None:
            options = replace(parse(pretrained.complete(given), efficient_engine), seed=options.seed)
        check_cuda_graph(options, context)
        if options.sync_bn and state is None and not dist.is_torchelastic_launched():
            raise ValueError(
                "found --sync_bn, but this is the only process: start several with torchrun, or leave it out"
            )
        if context.is_main_process:
            check_dependencies(options.tensorboard)
        Run(options, context, folder, state, versions, pretrained).train()


class Run:
    """A run and its directory, in which only the main process writes. With a `state` the run is resumed.

    The state may be no more than its config, of a run that was ended before it had one. A run that has no state begins
    with the `pretrained` weights, if there are any.
    """

    def __init__(
        self,
        options: RunOptions,
        context: DistributedContext,
        folder: Path,
        state: dict[str, Any] | None,
        versions: run_state.FileVersions,
        pretrained: finetune.PretrainedWeights | None = None,
    ) -> None:
        self.options, self.context, self.folder, self.resumed = options, context, folder, state is not None
        self.lock, self.versions = RunLock(folder), versions
        torch.manual_seed(options.seed)
        inputs = state["model"] if state else pretrained and pretrained.inputs  # which the weights depend on
        channels = inputs["channels"] if inputs and options.weights else None
        self.dataset = self._load_dataset(may_download=state is None, channels=channels)
        flip = self.dataset.horizontal_flip if options.mirror is None else options.mirror
        transform = transform_for(self.dataset.train, flip)
        self.config = models.config_for(options, self.dataset, transform)
        self.record = run_state.run_record(options, self.config, self.dataset)
        changes: list[str] = []
        if state:
            changes = run_state.data_changes(state, self.record, options.accept_changed_data)
        if inputs:
            mean, std = (tuple(inputs[name]) for name in ("mean", "std"))
            transform, self.config = replace(transform, mean=mean, std=std), replace(self.config, mean=mean, std=std)
            self.record["model"] = self.config.as_dict()
        self.model = self.config.build(options.engine, options.keep_bottleneck).to(context.device)
        self.said = pretrained.load_into(self.model, self.dataset.classes) if pretrained else []
        freeze_parameters(self.model, options.freeze)
        if state and "state" in state:
            run_format.check_state(folder / run_state.LAST, state, self.model)
            run_state.check_weights_of_best_epoch(folder, state, self.model)
        for images in (self.dataset.valid, self.dataset.test):
            check_images(images, slice(context.rank, None, context.world_size))
        self.largest_batch = largest_batch(options, len(self.dataset.train), context)
        self.expected_memory = self._fit_into_memory()
        self.trainer = Trainer(self.model, transform, self.options, context)
        self.environment = f"engine {self._describe_engines()}; {self.context.describe()}"
        self._print_summary()
        self.position, self.rows, self.peak = TrainingPosition(), [], 0
        if state and "state" in state:
            self._restore(state, changes)
        if context.is_main_process:
            for change in changes:
                say(f"note: {change}")
        self.stop_request = StopRequest()

    def train(self) -> None:
        self.context.barrier()  # no process writes before all have read
        with self.stop_request, contextlib.closing(self.lock):
            self._prepare_directory()
            run_state.check_version(self.folder, self.context.from_main_process(run_state.version_number(self.folder)))
            try:
                while self.position.epoch <= self.options.n_epochs:
                    self._train_epoch()
                self._finish()
            except TrainingInterrupted as interrupted:
                self._save_and_exit(interrupted)
            except UndecodableImage as exc:
                remedy = f"then continue with --resume --accept_changed_data and --save {self.folder}"
                raise UndecodableImage(f"{exc}, {remedy}") from exc
            except torch.OutOfMemoryError as exc:
                self.model.zero_grad()
                advice = advice_now(self._whole_model(), self.dataset.image_size, self.options, self.largest_batch)
                raise MemoryError(advice) from exc

    def _fit_into_memory(self) -> str:
        """Choose what `--memory` leaves open, the same in all processes; returns the expected peak in words."""
        size = self.dataset.image_size
        options, chosen = fit_into_memory(self.model, size, self.options, self.largest_batch, self.resumed)
        micro_batch_size = self.context.from_main_process(options.micro_batch_size or 0) or None
        self.options = replace(self.options, micro_batch_size=micro_batch_size)
        self.record["options"]["micro_batch_size"] = micro_batch_size
        self.largest_batch = largest_batch(self.options, len(self.dataset.train), self.context)
        if chosen:
            self.said.append(f"memory: {chosen}")
        return describe_expected_memory(self.model, size, self.options, self.largest_batch)

    def _whole_model(self) -> DenseNet:
        """The model, or one like it where its parameters are sharded, which cannot be copied."""
        if not is_sharded(self.model):
            return self.model
        model = self.config.build(self.options.engine, self.options.keep_bottleneck).to(self.context.device)
        freeze_parameters(model, self.options.freeze)
        return model

    def _load_dataset(self, may_download: bool, channels: int | None) -> SplitDataset:
        options, context = self.options, self.context
        size = options.image_size or models.default_image_size(options.model)
        if not context.is_main_process:
            context.barrier()  # waits for what the main process downloads
        dataset = load(options.data, options.dataset, size, options.workers, options.stream, may_download)
        if context.is_main_process:
            context.barrier()
        context.barrier()  # waits for the others, which decode after the main process
        check_options_of_folders(dataset, None if options.weights else options.image_size, options.stream)
        dataset = dataset.with_validation(options.valid_size).to(context.device)
        if channels is not None:
            dataset = dataset.with_channels(channels)
        smallest = min(len(dataset.train), options.batch_size)
        if smallest < context.world_size:
            raise ValueError(
                f"found a batch of {smallest} images for {context.world_size} processes, but each needs at least one: "
                "give a larger --batch_size or fewer processes"
            )
        if isinstance(dataset.train, StreamedImages):
            check_prefetched(dataset.image_size, -(-smallest // context.world_size), options.workers)
        return dataset

    def _restore(self, state: dict[str, Any], changes: list[str]) -> None:
        """Go on where the run was saved; with another number of images, from the beginning of the epoch."""
        self.position, self.rows = run_state.restore(state, self.trainer)
        if self.position.step and state["data"]["train_pictures"] != len(self.dataset.train):
            changes.append(f"epoch {self.position.epoch} begins anew, since its batches are others")
            self.position = TrainingPosition(self.position.epoch)

    def _print_summary(self) -> None:
        if not self.context.is_main_process:
            return
        dataset = self.dataset
        count, size = models.count_parameters(self.model)
        say(f"{self.config.name}: {count:,} parameters, {mib(size)}; {self.environment}; seed {self.options.seed}")
        for line in filter(None, [*self.said, describe_frozen(self.model)]):
            say(line)
        say(f"expected memory of a step: {self.expected_memory}")
        splits = f"{len(dataset.train):,} to train, {len(dataset.valid):,} to validate, {len(dataset.test):,} to test"
        say(f"{dataset.name}: {len(dataset.classes)} classes; images: {splits}")

    def _describe_engines(self) -> str:
        try:
            with self.trainer.autocast():
                size = self.dataset.image_size
                return models.describe_engines(self.model, self.largest_batch, size, self.options.compile)
        except RuntimeError as exc:  # an engine that was named, and cannot run with synchronized norms
            raise ValueError(str(exc)) from exc

    def _prepare_directory(self) -> None:
        state = self.trainer.state()
        if not self.context.is_main_process:
            return
        files.make_directory(self.folder)
        self.lock.acquire()
        run_state.check_unchanged(self.folder, self.versions)
        files.remove_temporary_files(self.folder)
        if self.options.overwrite:
            for name in run_state.WRITTEN:
                (self.folder / name).unlink(missing_ok=True)
        versions = {"efficient_densenet": __version__, "torch": torch.__version__}
        models.write_config(self.folder, self.record | {"versions": versions})
        where = self._describe_position()
        event = f"resumed {where}" if self.resumed else "started"
        run_log.append(self.folder, f"{event}; {self.environment}; PyTorch {torch.__version__}")
        run_state.write(self.folder, state, self.position, self.rows, self.record)
        self.tensorboard = TensorBoardWriter(self.folder, self.options.tensorboard, self.position.epoch)
        self.last_plot = time.monotonic()
        if self.rows:
            save_csv(self.folder, self.rows)
        if self.options.resume and not self.resumed:
            say(f"nothing to resume in {self.folder}: starting")
        elif self.resumed:
            say(f"resuming {self.folder} {where}")

    def _describe_position(self) -> str:
        """Where training goes on."""
        epoch, step = self.position.epoch, self.position.step
        if epoch > self.options.n_epochs:
            return "after the last epoch"
        if step == num_steps(len(self.dataset.train), self.options.batch_size):
            return f"in epoch {epoch}, after its last step"
        return f"in epoch {epoch}, step {step + 1}" if step else f"in epoch {epoch}"

    def _train_epoch(self) -> None:
        position = self.position
        started = time.perf_counter() - position.seconds
        reset_peak_memory(self.context.device)
        progress = self._epoch_progress()
        try:
            self._train_steps(progress, started)
            # Where processes evaluate different numbers of batches, they cannot agree on stopping between them.
            after_batch = self._raise_if_stopped if self.context.world_size == 1 else None
            valid = self.trainer.evaluate(self.dataset.valid, after_batch) if len(self.dataset.valid) else ("", "")
        except ChildProcessError:
            if self.context.world_size == 1:
                self._raise_if_stopped()  # a signal to the process group has killed the decoding processes too
            raise
        finally:
            progress.close()
        row = self._row(valid, time.perf_counter() - started)
        if row["valid_loss"] != "":
            check_finite("validation loss", row["valid_loss"], f"epoch {row['epoch']}", row["lr"])
        self.rows.append(row)
        self.position = TrainingPosition(position.epoch + 1)
        self._save_epoch(row)
        progress.finish(row)

    def _epoch_progress(self) -> EpochProgress:
        steps = num_steps(len(self.dataset.train), self.options.batch_size)
        visible = self.context.is_main_process
        whole_process = self.context.device.type == "cpu"
        return EpochProgress(
            self.position.epoch, self.options.n_epochs, steps, self.position.step, visible, whole_process
        )

    def _train_steps(self, progress: EpochProgress, started: float) -> None:
        position = self.position
        for _ in self.trainer.steps(self.dataset.train, position):
            position.seconds = time.perf_counter() - started
            loss, error = position.loss / position.seen, position.wrong / position.seen
            progress.step(loss, error, position.seen / position.seconds, self._peak_memory())
            self._raise_if_stopped()

    def _peak_memory(self) -> int:
        return peak_memory(self.context.device, reserved=self.options.cuda_graph)

    def _row(self, valid: tuple[float | str, float | str], seconds: float) -> Row:
        position = self.position
        self.peak = max(self.peak, self._peak_memory())
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
        self.lock.check()
        if row is self._best_row():
            files.write_atomic(self.folder / models.WEIGHTS, to_archive(state["model"]))
        self._save(state)
        with may_fail("TensorBoard's events"):
            self.tensorboard.add(row)

    def _best_row(self) -> Row:
        """The best by validation, or the last one if there are no images to validate by."""
        if not len(self.dataset.valid):
            return self.rows[-1]
        return min(self.rows, key=lambda row: (row["valid_error"], row["valid_loss"]))

    def _save(self, state: dict[str, Any], plot: bool = False) -> None:
        """Save the trainer's state first: nothing that fails afterwards costs an epoch."""
        self.lock.check()
        run_state.write(self.folder, state, self.position, self.rows, self.record)
        if self.rows:
            save_csv(self.folder, self.rows)
            if plot or time.monotonic() - self.last_plot > SECONDS_BETWEEN_PLOTS:
                self._plot()

    def _plot(self) -> None:
        with may_fail("curves.png"):
            plot_curves(self.folder, self.rows, f"{self.config.name}, {self.dataset.name}")
        self.last_plot = time.monotonic()

    def _raise_if_stopped(self) -> None:
        number = int(self.stop_request.signal or 0)
        if self.context.all_reduce_sum([number])[0]:
            raise TrainingInterrupted(number)

    def _save_and_exit(self, interrupted: TrainingInterrupted) -> NoReturn:
        state = self.trainer.state()
        if self.context.is_main_process:
            self._save(state, plot=True)
            stopped = f"stopped by {interrupted.name} in epoch {self.position.epoch} after step {self.position.step}"
            run_log.append(self.folder, stopped)
            say(f"{stopped}: continue with --resume and --save {self.folder}")
        self.context.barrier()  # a process that leaves while another one writes looks dead to it
        sys.exit(128 + interrupted.number)

    def _finish(self) -> None:
        """Test the weights of the best epoch, or of the last one if there are no images to validate by."""
        self.context.barrier()
        models.load_weights(self.model, self.folder / models.WEIGHTS)
        test_loss, test_error = self.trainer.evaluate(self.dataset.test)
        check_finite("test loss", test_loss, f"epoch {self.rows[-1]['epoch']}", self.rows[-1]["lr"])
        self.rows[-1]["test_error"] = test_error
        if not self.context.is_main_process:
            return
        self.lock.check()
        run_state.update_rows(self.folder, self.rows)
        save_csv(self.folder, self.rows)
        self._plot()
        with may_fail("TensorBoard's events"):
            self.tensorboard.add(self.rows[-1])
        run_log.append(self.folder, f"finished: test error {test_error:.2%}")
        if self.options.memory is not None or self.context.device.type == "cuda":
            what = "the process, with Python and PyTorch," if self.context.device.type == "cpu" else "all tensors"
            say(f"memory: {self.expected_memory} was expected; {what} took {mib(self.peak)}")
        which = "the best epoch by validation" if len(self.dataset.valid) else "the last epoch"
        say(
            f"test error {test_error:.2%}; in {self.folder}: {models.WEIGHTS} ({which}), "
            f"{run_state.LAST}, results.csv, curves.png, {models.CONFIG}"
        )
