"""One run, from its options to the test error: what the demos share."""

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import __version__
from . import files, models
from . import run_state as saved
from .data import Source, load
from .data.augment import preparation_for
from .distributed import Team, assemble
from .interruption import Interruption, Stop
from .loop import Position, Trainer, check_finite, num_steps
from .memory_estimate import StepMemory, advice
from .options import Options, parse
from .report import Progress, mib, peak_memory, reset_peak
from .results import Events, Row, draw_curves, save_table

SECONDS_BETWEEN_DRAWINGS = 20


def train(given: dict[str, Any], saving_engine: str = "best") -> None:
    """Do what the options ask for: train, go on with a run, or evaluate one."""
    options = parse(given, saving_engine)
    with assemble(options.device) as team:
        if options.evaluate is not False:
            evaluate(options, team)
            return
        folder = folder_of(options, saving_engine)
        saved.refuse_occupied(folder, options)
        state = saved.read(folder) if options.resume else None
        if state:
            options = parse(saved.options_of(state, given), saving_engine)
        elif options.resume and options.save is None:
            raise ValueError(f"found --resume, but {folder} holds no run to go on with: name one with --save")
        if options.sync_bn and state is None and not dist.is_torchelastic_launched():
            raise ValueError(
                "found --sync_bn, but this is the only process: start several with torchrun, or leave it out"
            )
        Run(options, team, folder, state).go()


def folder_of(options: Options, saving_engine: str = "best") -> Path:
    if options.save is not None:
        return Path(options.save)
    data = "digits" if options.data is None else Path(options.data).absolute().name
    model = options.model or f"densenet_bc_{options.depth}_{options.growth_rate}"
    engine = "" if options.engine == "best" else f"_{options.engine}"
    return Path("checkpoints") / f"{data}_{model}{engine}"


def evaluate(options: Options, team: Team) -> tuple[float, float]:
    """Test loss and error of a saved model, on the data it was trained with or on other data with the same classes."""
    place = Path(str(options.evaluate)) if options.evaluate is not True else folder_of(options)
    model, description = models.load_model(place)
    begun = models.read_config(place if place.is_dir() else place.parent)["options"]
    data = begun["data"] if options.data is None else options.data
    size = description.image_size
    source = load(data, options.dataset, size, options.workers, options.stream, may_download=False)
    if source.classes != description.classes or source.channels != description.channels:
        raise ValueError(
            f"{source.name} has {_listed(source.classes)} in {source.channels} channels, but {place} was trained on "
            f"{_listed(description.classes)} in {description.channels}: give --data with the same"
        )
    preparation = replace(preparation_for(source.test, False), mean=description.mean, std=description.std)
    trainer = Trainer(model, preparation, replace(options, sync_bn=False), team)
    loss, error = trainer.evaluate(source.test.to(team.device))
    if team.leads:
        print(f"{place}: {description.name} on {len(source.test):,} test pictures of {source.name}")
        print(f"test loss {loss:.4f}, test error {error:.2%}")
    return loss, error


class Run:
    """A run in a directory: all of what it holds is written from here, by the team's first process."""

    def __init__(self, options: Options, team: Team, folder: Path, state: dict[str, Any] | None) -> None:
        self.options, self.team, self.folder, self.resumed = options, team, folder, state is not None
        torch.manual_seed(options.seed)
        self.source = self._load(may_download=state is None)
        mirror = self.source.mirror if options.mirror is None else options.mirror
        preparation = preparation_for(self.source.train, mirror)
        source = self.source
        self.description = models.describe(options, source.channels, source.classes, preparation, source.image_size)
        model = self.description.build(options.engine).to(team.device)
        data = options.data and str(Path(options.data).absolute())  # a run is gone on with from any directory
        self.facts = {
            "options": options.as_dict() | {"data": data},
            "model": models.as_config(self.description),
            "data": facts(source),
        }
        if state:
            saved.check_same_data(state, self.facts)
        self._introduce(model)
        self.trainer = Trainer(model, preparation, options, team)
        self.position, self.rows = Position(), []
        if state:
            self.position, self.rows = saved.restore(state, self.trainer, folder)
        self.interruption = Interruption()

    def go(self) -> None:
        self.team.wait()  # nobody writes before everybody has read
        with self.interruption:
            self._begin()
            try:
                while self.position.epoch <= self.options.n_epochs:
                    self._epoch()
                self._finish()
            except Stop as stop:
                self._stop(stop)
            except torch.OutOfMemoryError as exc:
                raise MemoryError(self._too_much()) from exc

    def _load(self, may_download: bool) -> Source:
        options = self.options
        size = options.image_size or models.usual_image_size(options.model)
        if not self.team.leads:
            self.team.wait()  # for what the first one downloads
        source = load(options.data, options.dataset, size, options.workers, options.stream, may_download)
        if self.team.leads:
            self.team.wait()
        source = source.with_validation(options.valid_size).to(self.team.device)
        self._check_team(source)
        return source

    def _check_team(self, source: Source) -> None:
        options = self.options
        smallest = min(len(source.train), options.batch_size)
        if smallest < self.team.size:
            raise ValueError(
                f"found a batch of {smallest} pictures for {self.team.size} processes, but each needs at least one: "
                "give a larger --batch_size or fewer processes"
            )

    def _begin(self) -> None:
        if not self.team.leads:
            return
        files.make_folder(self.folder)
        files.remove_unfinished(self.folder)
        if self.options.overwrite:
            for name in (*saved.OURS, "curves.png"):
                (self.folder / name).unlink(missing_ok=True)
        files.write_whole(self.folder / models.DESCRIPTION, files.as_json(self.facts | {"versions": versions()}))
        saved.write(self.folder, self.trainer, self.position, self.rows, self.facts)
        self.events = Events(self.folder, self.options.tensorboard, self.position.epoch)
        self.drawn = time.monotonic()
        if self.options.resume and not self.resumed:
            print(f"nothing to go on with in {self.folder}: beginning", flush=True)
        elif self.resumed:
            after = f", step {self.position.step + 1}" if self.position.step else ""
            print(f"going on in {self.folder} with epoch {self.position.epoch}{after}", flush=True)

    def _epoch(self) -> None:
        position, device = self.position, self.team.device
        steps = num_steps(len(self.source.train), self.options.batch_size)
        progress = Progress(position.epoch, self.options.n_epochs, steps, position.step, self.team.leads)
        reset_peak(device)
        started = time.perf_counter() - position.seconds
        try:
            for _ in self.trainer.steps(self.source.train, position):
                position.seconds = time.perf_counter() - started
                speed = position.seen / position.seconds
                progress.step(position.loss / position.seen, position.wrong / position.seen, speed, peak_memory(device))
                self._check()
            valid = self.trainer.evaluate(self.source.valid, self._check if self.team.size == 1 else None)
        except ChildProcessError:
            if self.team.size == 1:
                self._check()  # a signal to all processes of the run has ended those that decode for it
            raise
        finally:
            progress.close()
        row = self._row(valid, time.perf_counter() - started)
        check_finite("validation loss", row["valid_loss"], f"epoch {row['epoch']}", row["lr"])
        self.rows.append(row)
        self.position = Position(position.epoch + 1)
        progress.finish(row)
        self._save_epoch(row)

    def _row(self, valid: tuple[float, float], seconds: float) -> Row:
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
            "peak_memory_mib": peak_memory(self.team.device) / 2**20,
            "lr": self.trainer.optimizer.param_groups[0]["lr"],
        }

    def _save_epoch(self, row: Row) -> None:
        """The weights first and the position last: a run killed in between does the epoch again, to the same end."""
        if not self.team.leads:
            return
        if row is min(self.rows, key=lambda row: (row["valid_error"], row["valid_loss"])):
            files.write_whole(self.folder / models.WEIGHTS, files.tensors(self.trainer.model.state_dict()))
        self._save()
        self.events.add(row)

    def _save(self, draw: bool = False) -> None:
        if not self.team.leads:
            return
        if self.rows:
            save_table(self.folder, self.rows)
            if draw or time.monotonic() - self.drawn > SECONDS_BETWEEN_DRAWINGS:
                draw_curves(self.folder, self.rows, f"{self.description.name}, {self.source.name}")
                self.drawn = time.monotonic()
        saved.write(self.folder, self.trainer, self.position, self.rows, self.facts)

    def _check(self) -> None:
        wanted = self.interruption.wanted or 0
        if self.team.sum([wanted])[0]:
            raise Stop(wanted)

    def _stop(self, stop: Stop) -> None:
        self._save(draw=True)
        if self.team.leads:
            where = f"epoch {self.position.epoch} after step {self.position.step}"
            print(f"stopped by {stop.name} in {where}: go on with --resume and --save {self.folder}", flush=True)
        sys.exit(128 + stop.number)

    def _finish(self) -> None:
        self.team.wait()
        weights = self.folder / models.WEIGHTS
        models.load_into(self.trainer.model, files.read_tensors(weights), weights)
        _, test_error = self.trainer.evaluate(self.source.test)
        self.rows[-1]["test_error"] = test_error
        if not self.team.leads:
            return
        # The weights of the last epoch are what last.pt holds already; now come the table and the drawing.
        state = files.read_tensors(self.folder / saved.LAST)
        files.write_whole(self.folder / saved.LAST, files.tensors(state | {"rows": self.rows}))
        save_table(self.folder, self.rows)
        draw_curves(self.folder, self.rows, f"{self.description.name}, {self.source.name}")
        self.events.add(self.rows[-1])
        print(
            f"test error {test_error:.2%}; in {self.folder}: {models.WEIGHTS} (the best epoch by validation), "
            f"{saved.LAST}, results.csv, curves.png, {models.DESCRIPTION}"
        )

    def _introduce(self, model: torch.nn.Module) -> None:
        options, source, team = self.options, self.source, self.team
        expected = self._expected_memory(model)
        if not team.leads:
            return
        number, size = models.count(model)
        print(
            f"{self.description.name}: {number:,} parameters, {mib(size)}; engine {options.engine}; {team.describe()}"
        )
        print(f"expected memory of a step: {expected}")
        sizes = f"{len(source.train):,} to train on, {len(source.valid):,} to validate, {len(source.test):,} to test"
        print(f"{source.name}: {len(source.classes)} classes; {sizes}", flush=True)
        if source.note:
            print(f"note: {source.note}", flush=True)

    def _expected_memory(self, model: torch.nn.Module) -> str:
        """Measured on a few pictures, where an engine that cannot run here says so before anything is written."""
        pictures = self._pictures_at_once()
        try:
            memory = StepMemory(model, self.source.image_size, self.options, self.options.engine)
        except OSError as exc:  # what the profiler notes passes through a temporary file
            return f"not measured ({exc.strerror})"
        except torch.OutOfMemoryError as exc:
            raise MemoryError(
                f"out of memory on {self.team.device} before the first step: use a smaller model"
            ) from exc
        except RuntimeError as exc:
            raise ValueError(str(exc)) from exc
        return f"about {mib(memory.of(pictures))} for {pictures} pictures at once on a device"

    def _pictures_at_once(self) -> int:
        joined = min(self.options.batch_size, len(self.source.train))
        share = -(-joined // (self.team.size * max(self.team.num_gpus, 1)))
        return min(share, self.options.micro_batch_size or share)

    def _too_much(self) -> str:
        device = self.team.device
        peak = torch.cuda.max_memory_allocated(device)
        self.trainer.optimizer.zero_grad()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        available = free + torch.cuda.memory_reserved(device)
        at_once = self._pictures_at_once()
        return advice(self.trainer.model, self.source.image_size, self.options, peak, available, at_once)


def _listed(classes: tuple[str, ...]) -> str:
    return f"{len(classes)} classes ({', '.join(classes[:3])}{', …' if len(classes) > 3 else ''})"


def facts(source: Source) -> dict[str, Any]:
    """What tells one set of pictures from another, wherever it lies."""
    return {
        "name": source.name,
        "train_pictures": len(source.train),
        "valid_pictures": len(source.valid),
        "test_pictures": len(source.test),
        "image_size": source.image_size,
        "classes": list(source.classes),
        "note": source.note,
        "fingerprint": source.fingerprint,
    }


def versions() -> dict[str, str]:
    return {"efficient_densenet": __version__, "torch": torch.__version__}
