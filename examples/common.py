"""Parts that the programs share: options, what is checked first, what fits the card, checkpoints, splits, AUROC."""

import argparse
import difflib
import functools
import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, Dataset, default_collate
from torchmetrics.functional.classification import binary_auroc
from tqdm import tqdm

from efficient_densenet.memory.card import describe_card, what_fits
from efficient_densenet.norms.sync_batch_norm import synchronize_norms

_of_torchrun = os.environ if dist.is_torchelastic_launched() else {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1}
RANK, LOCAL_RANK, WORLD_SIZE = (int(_of_torchrun[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
DEVICE = torch.device("cuda", LOCAL_RANK) if torch.cuda.is_available() else torch.device("cpu")
DTYPES = {"float32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
MAY_CHANGE = {"out", "resume", "workers", "card", "engine", "resamples", "predict", "no_check", "sync_bn", "program"}
"""Options that may differ between a run and its continuation."""
T = TypeVar("T")


class _Stopped(SystemExit):
    """Exit status 2, and the sentence that was printed as its text."""

    code = 2


def stop(sentence: str) -> NoReturn:
    process = f"process {RANK} of {WORLD_SIZE}: " if WORLD_SIZE > 1 else ""
    tqdm.write(f"error: {process}{sentence}", sys.stderr)  # past a bar of progress
    raise _Stopped(sentence)


def script(main: Callable[[], Any]) -> None:
    """Call a program's `main`, under torchrun in a process group; after Ctrl-C say how to go on."""
    if WORLD_SIZE > 1:
        if DEVICE.type == "cuda":
            torch.cuda.set_device(DEVICE)
        dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo", timeout=timedelta(hours=1))
        if RANK:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    try:
        main()
        if WORLD_SIZE > 1:
            dist.destroy_process_group()
    except KeyboardInterrupt:
        if RANK:
            raise SystemExit(130) from None
        epoch, steps = (Run.latest.epoch, Run.latest.steps) if Run.latest else (0, 0)
        where = f"in epoch {epoch} after step {steps}" if epoch else "before the first epoch"
        go_on = "continue with --resume, after the last whole epoch" if epoch > 1 else "give the same command again"
        print(f"\nstopped {where}: {go_on}", file=sys.stderr)
        raise SystemExit(130) from None


def on_main(function: Callable[..., T], *arguments: Any) -> T:
    """What a function returns in the first process, in all of them."""
    result: list[Any] = [function(*arguments) if RANK == 0 else None]
    if WORLD_SIZE > 1:
        dist.broadcast_object_list(result)
    return result[0]


def leave_to_main() -> None:
    """End all processes but the first."""
    if RANK:
        dist.destroy_process_group()
        raise SystemExit(0)


def gather(value: T) -> list[T]:
    """The values of all processes."""
    values = [value] * WORLD_SIZE
    if WORLD_SIZE > 1:
        dist.all_gather_object(values, value)
    return values


def join_rows(rows: Tensor) -> Tensor:
    """The rows that the processes have found, each of which has NaN in those of the others."""
    return torch.stack(gather(rows)).nanmean(0)


def first_line(error: BaseException) -> str:
    """What an error says, or its cause: MONAI's own say which transform failed, not why."""
    while error.__cause__:
        error = error.__cause__
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) < 200 else f"{text[:200]} …"


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the description's lines, and shows defaults that are values."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False) else super()._get_help_string(action)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if wrong := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            near = difflib.get_close_matches(wrong[1], re.findall(r"[\w.-]+", wrong[2]), n=1)
            message += "".join(f", did you mean {name}?" for name in near)
        stop(f"{message} (--help explains each option)")


def at_least(smallest: int) -> Callable[[str], int]:
    """A type of options."""

    def whole_number(text: str) -> int:
        if not text.lstrip("-").isdecimal() or int(text) < smallest:
            raise argparse.ArgumentTypeError(f"{text} is no whole number of {smallest} or more")
        return int(text)

    return whole_number


def _number(text: str) -> float:
    """NaN for what is none."""
    try:
        return float(text)
    except ValueError:
        return float("nan")


def positive(text: str) -> float:
    """A type of options."""
    if not 0 < _number(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no number above 0")
    return float(text)


def share(text: str) -> float:
    """A type of options."""
    if not 0 <= _number(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no share from 0 to below 1, such as 0.5")
    return float(text)


def make_parser(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """The options that every program has, with its own defaults; the demos' words for them are taken too."""
    parser = _Parser(description=description, formatter_class=_Help, allow_abbrev=False)
    parser.set_defaults(program=Path(inspect.stack()[1].filename).name)
    add = parser.add_argument
    add("--out", "--save", required=True, type=Path, help="folder for checkpoints, tables and pictures")
    resume = "continue the run in --out after its last whole epoch; auto also begins one where there is none"
    add("--resume", nargs="?", const=True, default=False, choices=["auto"], help=resume)
    predict = "no training: write what the run in --out finds in the files of this folder into predicted.csv there"
    add("--predict", metavar="FOLDER", type=Path, help=predict)
    add("--epochs", "--n_epochs", type=at_least(1), help="passes over the training data")
    add("--batch_size", type=at_least(1), help="samples in a training step")
    add("--learning_rate", "--lr", type=positive, help="the optimizer's learning rate")
    precision = "dtype of automatic mixed precision; fp16 for GPUs"
    add("--precision", "--amp", choices=list(DTYPES), default="float32", help=precision)
    add("--engine", choices=["shared", "plain"], default="shared", help="shared saves memory, plain is for comparison")
    add("--card", metavar="8GB", help="memory to plan for; by default this GPU's, or 8GB without one")
    add("--workers", type=at_least(0), default=0, help="processes that read data")
    add("--seed", type=at_least(0), default=0, help="seed of the split, the first weights and the order of the data")
    add("--no_check", action="store_true", help="do not look into every file before training")
    add("--sync_bn", action="store_true", help="norms take their statistics over all processes of torchrun")
    parser.set_defaults(**defaults)
    return parser


def parse_options(parser: argparse.ArgumentParser, words: list[str] | None, **of_generated: Any) -> argparse.Namespace:
    """The options; where the data are generated, options that are not given have defaults for a quick first run."""
    options = parser.parse_args(words)
    if options.predict is None and options.data is None:
        parser.error("--data is missing")
    if options.sync_bn and WORLD_SIZE == 1:
        parser.error("--sync_bn needs several processes: start them with torchrun --nproc_per_node 2")
    for name in ("window", "range"):
        if (ends := vars(options).get(name)) and not ends[0] < ends[1]:
            parser.error(f"--{name} {ends[0]:g} {ends[1]:g} must begin with the smaller one")
    if options.predict is None and options.batch_size < WORLD_SIZE:
        parser.error(f"--batch_size {options.batch_size} leaves processes without a sample: give {WORLD_SIZE} or more")
    if options.data == "generated":
        parser.set_defaults(**of_generated)
        options = parser.parse_args(words)
        used = (f"--{name} {str(getattr(options, name)).strip('[]').replace(',', '')}" for name in of_generated)
        print(f"generated data, for a quick first run: {' '.join(used)}")
    return options


def prepare_folder(options: argparse.Namespace, generate: Callable[[Path], Path]) -> None:
    """Stop unless a run may begin or go on in --out; draw the data in it, if they are generated."""
    on_main(_check_folder, options)
    if options.data == "generated":
        options.data = str(on_main(generate, options.out / "generated"))
    if options.resume and not RANK and (checkpoint := options.out / "checkpoint.pt").exists():
        known = {name: value for name, value in _settings(options).items() if value != "None"}  # others are measured
        _use_saved(checkpoint, lambda state: _check_settings(known, state["settings"], options.out))


def _check_folder(options: argparse.Namespace) -> None:
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / ".writable").touch()
        (options.out / ".writable").unlink()
    except OSError as error:
        stop(f"--out {options.out} cannot be written ({error.strerror}): give another folder")
    has_run = (options.out / "checkpoint.pt").exists()
    if has_run and not options.resume:
        stop(f"{options.out} holds a run: add --resume to continue it, or give another --out")
    if options.resume is True and not has_run:
        stop(f"{options.out} has no run to resume: give the --out of one that has ended an epoch, or leave --resume "
             "out to begin one (--resume auto begins or resumes)")  # fmt: skip


def _settings(options: argparse.Namespace) -> dict[str, str]:
    return {name: str(value) for name, value in vars(options).items() if name not in MAY_CHANGE}


def _check_settings(settings: dict[str, str], began_with: dict[str, str], folder: Path) -> None:
    for name, value in settings.items():
        if (then := began_with.get(name)) != value:
            stop(f"--{name} is {value}, but the run in {folder} began with {then}: give that to continue it")


def _use_saved(path: Path, use: Callable[[Any], T]) -> T:
    """What `use` makes of a saved file's content; stop where the file, or what it holds, is another than it should."""
    try:
        return use(torch.load(path, map_location="cpu", weights_only=True))
    except torch.OutOfMemoryError:
        raise
    except Exception:  # torch's sentences advise to load it in other ways, or list every tensor
        stop(f"{path} is damaged, or of another model than this run's: bring back the run's own, or train anew in "
             "another --out")  # fmt: skip


def read_csv(path: str | Path, **settings: Any) -> pd.DataFrame:
    try:
        table = pd.read_csv(path, skipinitialspace=True, **settings)
    except UnicodeDecodeError as error:
        stop(f"{path} is not in UTF-8 ({error.reason}): save it again as a CSV in UTF-8")
    except (OSError, ValueError) as error:  # pandas' errors are ValueErrors
        stop(f"{path} cannot be read as a CSV ({first_line(error)}): give the path of one")
    for mark, name in ((";", "semicolons"), ("\t", "tabs")):
        if mark in table.columns[0]:
            stop(f"{path} seems to be separated by {name}: save it again with commas")
    return table


def check_files(files: Iterable[str | Path], read: Callable[[Any], Any], options: argparse.Namespace) -> None:
    """Call `read` on each file, which looks at its header; stop at the first that fails."""
    for file in [] if options.no_check else tqdm(files, "checking files", leave=False):
        try:
            read(file)
        except Exception as error:
            named = str(file).replace("\n", " or ")
            stop(f"{named} cannot be read ({first_line(error)}): replace it, take it out, or give --no_check, which "
                 "leaves it out")  # fmt: skip


def autocast(options: argparse.Namespace) -> torch.autocast:
    dtype = DTYPES[options.precision]
    return torch.autocast(DEVICE.type, dtype, enabled=dtype is not None)


def print_what_fits(
    model: nn.Module, batch_size: int, sample: tuple[int, ...], optimizer: str, options: argparse.Namespace
) -> None:
    """Print the memory of a training step and the largest batch by each engine, from sizes alone: nothing runs."""
    card = options.card or (torch.cuda.mem_get_info()[1] if DEVICE.type == "cuda" else "8GB")
    settings: dict[str, Any] = {"optimizer": optimizer, "precisions": [options.precision], "batch_size": batch_size}
    try:
        print(f"A training step on {'×'.join(map(str, sample))} in {options.precision}; {describe_card(card)}")
    except ValueError as error:
        stop(f"--{error}")
    print(f"{'engine':<8}{f'a batch of {batch_size}':>18}{'largest batch':>16}", flush=True)
    for fit in what_fits(model, sample[1:], card, **settings):
        largest = f"{fit.largest_batch:,}" if fit.largest_batch else "none"
        if fit.refused:
            stop(f"engine {fit.engine} cannot run the model: {fit.refused}")
        print(f"{fit.engine:<8}{f'{fit.sizes[batch_size] / 2**30:.2f} GiB':>18}{largest:>16}", flush=True)
    print(flush=True)


class _Readable(Dataset):
    """The samples of a data set with their numbers; for one that cannot be read, the reason.

    Random transforms draw what `seed` and the sample's number say, whatever process reads it.
    """

    def __init__(self, data: Any, seed: int) -> None:
        self.data, self.seed = data, seed
        self.set_random_state = getattr(getattr(data, "transform", None), "set_random_state", None)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> tuple[int, Any, str]:
        if self.set_random_state:
            self.set_random_state(self.seed + i)
        try:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(self.seed + i)
                return i, self.data[i], ""
        except Exception as error:  # whatever a damaged file raises
            return i, None, first_line(error)


def _collate(samples: list, combine: Callable) -> tuple[list[int], Any, dict[int, str]]:
    whole = [(i, sample) for i, sample, reason in samples if not reason]
    batch = combine([sample for _, sample in whole]) if whole else None
    return [i for i, _ in whole], batch, {i: reason for i, _, reason in samples if reason}


class Run:
    """A model's training: the steps of its optimizer, and its checkpoints in a folder.

    Under torchrun each process takes its part of every batch, and the first writes. `network` is what to call in
    training: it averages gradients over the processes.
    checkpoint.pt is what a run continues from, best.pt the model of the epoch with the best validation, config.json
    what predicting needs. Each is written under another name and then renamed, so that an interruption never leaves
    half of one.
    """

    latest: "ClassVar[Run | None]" = None

    def __init__(
        self,
        options: argparse.Namespace,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        **of_predicting: Any,
    ) -> None:
        self.options, self.folder, self.best_score = options, options.out, float("-inf")
        self.epoch, self.steps, self.broken = 1, 0, dict[str, str]()
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.network: nn.Module = model
        self.refusals = dict[torch.Size, str]()
        if WORLD_SIZE > 1 and optimizer:
            if options.sync_bn:
                synchronize_norms(model, None)
            self.network = nn.parallel.DistributedDataParallel(model)
        self.scaler = torch.amp.GradScaler(DEVICE.type, enabled=options.precision == "fp16")
        self.parts: dict[str, Any] = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "scaler": self.scaler,
        }
        self.settings = _settings(options)
        given = {name: vars(options)[name] for name in self.settings}
        self.config = json.dumps({"program": options.program, "options": given, **of_predicting}, default=str, indent=2)
        Run.latest = self

    def batches(
        self, data: Any, names: Sequence[str], title: str, size: int, shuffle: bool = False,
        combine: Callable = default_collate,
    ) -> Iterator[tuple[list[int], Any]]:  # fmt: skip
        """The samples' numbers and batches, shuffled in training; a sample whose file cannot be read is left out and
        noted. So is in training a last batch of one, where the model needs more. Of training's batches each process has
        a part; other data are divided into batches of each."""
        collate, workers = functools.partial(_collate, combine=combine), self.options.workers
        seed = on_main(lambda: int(torch.randint(2**31, ())))
        samples = _Readable(data, seed)
        if shuffle:
            order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
            parts = [batch[RANK::WORLD_SIZE].tolist() for batch in order.split(size)]
        else:
            parts = [batch.tolist() for batch in torch.arange(len(data))[RANK::WORLD_SIZE].split(size)]
        if RANK:  # for other masks of dropout
            torch.manual_seed(torch.initial_seed() + RANK)
        loader = DataLoader(samples, batch_sampler=parts, num_workers=workers, collate_fn=collate)
        self.num_batches, steps, self.is_pending = len(loader), self.steps, False
        with tqdm(loader, title, leave=False) as self.bar:
            for rows, batch, broken in self.bar:
                for i, reason in broken.items():
                    if names[i] not in self.broken:
                        self.bar.write(f"note: {names[i]} cannot be read and is left out ({reason})", sys.stderr)
                    self.broken[names[i]] = reason
                if shuffle:
                    self.share = self._share(len(rows), len(rows) > 0 and self._trains_on(batch))
                else:
                    self.share = float(len(rows) > 0)
                if self.share:
                    yield rows, batch
        if shuffle and self.steps == steps:
            reasons = [reason for refusals in gather(self.refusals) for reason in refusals.values() if reason]
            stop(f"no batch can be trained on ({reasons[0]}): give a larger --batch_size" if reasons else
                 "no file for training can be read: give others")  # fmt: skip
        if self.is_pending:  # of the last batches, where the very last was left out
            self._update()
        if WORLD_SIZE > 1:
            for broken in gather(self.broken):
                self.broken.update(broken)
            for buffer in self.model.buffers():  # the running statistics of norms that are not synchronized
                dist.broadcast(buffer, 0)

    def _trains_on(self, batch: Any) -> bool:
        """Whether a batch has enough for norms: of one sample the smallest feature map may have a single pixel."""
        inputs = batch["image"] if isinstance(batch, dict) else batch[0]
        if len(inputs) > 1 or self.options.sync_bn:  # of which other processes have one, too
            return True
        if inputs.shape not in self.refusals:  # a first forward, which changes nothing
            buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
            self.refusals[inputs.shape] = ""
            try:
                with torch.no_grad(), torch.random.fork_rng([LOCAL_RANK] if DEVICE.type == "cuda" else []):
                    functional_call(self.model.train(), buffers, inputs.as_subclass(Tensor).to(DEVICE))
            except ValueError as error:
                self.refusals[inputs.shape] = reason = first_line(error)
                self.bar.write(f"note: a batch of one, another in each epoch, is left out ({reason})", sys.stderr)
        return not self.refusals[inputs.shape]

    def _share(self, num_rows: int, trains: bool) -> float:
        """By how much this process's loss counts in the mean over all; 0 if one of them has no batch that trains: the
        others would wait for its gradients."""
        counts = torch.tensor([num_rows, not trains], dtype=torch.int64, device=DEVICE)
        if WORLD_SIZE > 1:
            dist.all_reduce(counts)
        total, without = counts.tolist()
        return 0.0 if without else num_rows * WORLD_SIZE / total

    def step(self, loss: Tensor, update: bool = True, accumulate: int = 1) -> None:
        """Add the gradients of a loss, of as many as are accumulated; change the weights if `update`."""
        self.scaler.scale(loss * (self.share / accumulate)).backward()
        self.is_pending = True
        if update:
            self._update()
        self.steps += 1
        self.bar.set_postfix(loss=f"{loss.item():.3f}")

    def _update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.is_pending = False

    def resume(self) -> int:
        """Load the checkpoint, if the run has one; return the number of whole epochs."""
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            self._write("config.json", self.config)
            return 0

        def load(state: dict[str, Any]) -> None:
            _check_settings(self.settings, state["settings"], self.folder)
            for name, part in self.parts.items():
                part.load_state_dict(state[name])
            self.best_score, self.epoch = state["best_score"], state["epoch"] + 1

        _use_saved(path, load)
        print(f"continuing after epoch {self.epoch - 1}", flush=True)
        return self.epoch - 1

    def save(self, epochs_done: int, score: float) -> None:
        """Write the checkpoint after an epoch, and the best model first if no score was higher."""
        if not score < self.best_score:  # also where validation gives no number
            self.best_score = score
            self._write("best.pt", self.model.state_dict())
        states = {name: part.state_dict() for name, part in self.parts.items()}
        self._write("checkpoint.pt", {**states, "epoch": epochs_done, "best_score": self.best_score,
                                      "settings": self.settings})  # fmt: skip
        self.epoch, self.steps = epochs_done + 1, 0
        if WORLD_SIZE > 1:
            dist.barrier()  # others wait until the best model is written

    def print_broken(self) -> None:
        if self.broken:
            print(f"left out {counted(len(self.broken), 'file')} that could not be read:")
            print("\n".join(f"  {name}: {reason}" for name, reason in self.broken.items()))

    def _write(self, name: str, content: Any) -> None:
        if RANK:
            return
        temporary = self.folder / f"{name}.tmp"
        temporary.write_text(content) if isinstance(content, str) else torch.save(content, temporary)
        os.replace(temporary, self.folder / name)


def load_best(model: nn.Module, folder: Path) -> None:
    _use_saved(folder / "best.pt", model.load_state_dict)


class _Config(dict[str, Any]):
    """The content of a run's config.json at `path`; stops at a name that it lacks."""

    path: Path

    def __missing__(self, name: str) -> NoReturn:
        stop(f"{self.path} has no {name}: it is damaged, or of another program; give the --out of a run of this one")


def load_config(options: argparse.Namespace) -> dict[str, Any]:
    """What the run in --out knows; `options` become those that it was trained with."""
    missing = [name for name in ("config.json", "best.pt") if not (options.out / name).is_file()]
    if missing:
        stop(f"{options.out} has no {missing[0]}: give the --out of a run as the model of --predict")
    path = options.out / "config.json"
    try:
        config = _Config(json.loads(path.read_text()))
        config.path = path
        trained_with = dict(config["options"])
    except (OSError, ValueError, TypeError) as error:
        stop(f"{path} is damaged ({first_line(error)}): bring back the run's own, or train anew in another --out")
    if (program := config.get("program", options.program)) != options.program:
        stop(f"{options.out} is a run of {program}: predict by it, or give a run of {options.program} as --out")
    vars(options).update({**trained_with, "weights": None})
    return config


def files_in(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """The files of these formats in a folder and below it, but for hidden ones, such as macOS writes beside others."""
    if not folder.is_dir():
        stop(f"{folder} is {'no folder' if folder.exists() else 'missing'}: give a folder of {', '.join(suffixes)}")
    names = (path for path in folder.rglob("*") if path.name.lower().endswith(suffixes) and path.name[0] != ".")
    found = sorted(path for path in names if path.is_file())
    if not found:
        stop(f"{folder} has no files of {', '.join(suffixes)}: give a folder that has some")
    return found


def write_predicted(run: Run, files: list[str], classes: list[str], scores: Tensor) -> pd.DataFrame:
    """A row a file, with a column a class, into predicted.csv."""
    scores = join_rows(scores)
    leave_to_main()
    table = pd.DataFrame(scores.numpy(), columns=classes)
    table.insert(0, "file", files)
    path = run.folder / "predicted.csv"
    table.to_csv(path, index=False)
    run.print_broken()
    print(f"{path} has a row for each of {counted(len(files), 'file')}")
    return table


def split_by_patient(
    patients: pd.Series, seed: int, valid: float = 0.1, test: float = 0.2, strata: pd.Series | None = None
) -> np.ndarray:
    """The names train, valid and test, so that all samples of a patient have the same.

    With `strata`, such as the samples' classes, the patients of each (by their first sample) are divided alike, and
    three or more of them are in all parts.
    """
    firsts = patients.drop_duplicates()
    groups = [firsts] if strata is None else [firsts[strata[firsts.index] == each] for each in sorted(strata.unique())]
    generator, part_of = np.random.default_rng(seed), dict[Any, str]()
    for group in groups:
        smallest = int(strata is not None and len(group) > 2)
        num_valid, num_test = (max(round(share * len(group)), smallest if share else 0) for share in (valid, test))
        parts = ["train"] * (len(group) - num_valid - num_test) + ["valid"] * num_valid + ["test"] * num_test
        part_of.update(zip(generator.permutation(group), parts, strict=True))
    return patients.map(part_of).to_numpy()


def auroc(scores: Tensor, targets: Tensor) -> float:
    """NaN where every sample is positive, or none is."""
    is_defined = 0 < targets.sum() < len(targets)
    return min(1.0, float(binary_auroc(scores, targets))) if is_defined else float("nan")  # float32 rounds it above 1


def auroc_interval(
    scores: Tensor, targets: Tensor, patients: np.ndarray, options: argparse.Namespace
) -> tuple[float, float]:
    """The 95 % interval by a bootstrap over patients: samples of a patient are alike, and are drawn together."""
    generator, (names, codes) = np.random.default_rng(options.seed), np.unique(patients, return_inverse=True)
    values = []
    for _ in range(options.resamples):
        times_drawn = np.bincount(generator.integers(len(names), size=len(names)), minlength=len(names))
        rows = torch.from_numpy(np.repeat(np.arange(len(codes)), times_drawn[codes]))
        values.append(auroc(scores[rows], targets[rows]))
    if np.isnan(values).all():
        return float("nan"), float("nan")
    low, high = np.nanquantile(values, [0.025, 0.975])
    return float(low), float(high)
