"""One run, from its options to the test error: what the demos share."""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from ..checks import check_between, check_whole
from ..densenet import DenseNet
from ..extras import need
from .data import Splits, load_digits, split
from .files import claim, load_weights, save_table, save_weights
from .loop import evaluate, train


@dataclass(frozen=True)
class Options:
    efficient: bool | str
    depth: int
    growth_rate: int
    n_epochs: int
    batch_size: int
    lr: float
    seed: int
    save: str
    overwrite: bool


def run(options: Options) -> float:
    """Train a DenseNet-BC on the embedded digits, keep the best epoch by validation, and return its test error."""
    check_whole("batch_size", options.batch_size, at_least=1)
    check_whole("n_epochs", options.n_epochs, at_least=1)
    check_whole("depth", options.depth, at_least=10)
    check_whole("seed", options.seed, at_least=0)
    check_between("lr", options.lr, 0, float("inf"), "(]")
    torch.manual_seed(options.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    blocks = _layers_in_blocks(options.depth)
    model = DenseNet(options.growth_rate, blocks, in_channels=1, efficient=options.efficient).to(device)
    data = split(load_digits()).to(device)
    folder = claim(Path(str(options.save)), options.overwrite)
    _introduce(model, data, device)

    _train_to_files(model, data, options, folder)
    model.load_state_dict(load_weights(folder / "model.pt"))
    _, test_error = evaluate(model, data.test, options.batch_size)
    print(f"test error {test_error:.2%}; weights in {folder / 'model.pt'}, every epoch in {folder / 'results.csv'}")
    return test_error


def _train_to_files(model: DenseNet, data: Splits, options: Options, folder: Path) -> None:
    epochs = train(model, data, options.n_epochs, options.batch_size, options.lr, options.seed)
    rows: list[dict] = []
    with need("tqdm", extra="demos").tqdm(total=options.n_epochs, unit="epoch") as bar:
        for epoch in epochs:
            rows.append(asdict(epoch))
            save_table(folder / "results.csv", rows)
            if epoch.valid_error <= min(row["valid_error"] for row in rows):
                save_weights(folder / "model.pt", model.state_dict())
            bar.set_postfix_str(f"loss {epoch.train_loss:.3f}, validation error {epoch.valid_error:.2%}")
            bar.update()


def _introduce(model: DenseNet, data: Splits, device: torch.device) -> None:
    parameters = sum(p.numel() for p in model.parameters())
    sizes = f"{len(data.train)} to train on, {len(data.valid)} to validate, {len(data.test)} to test"
    print(f"DenseNet-BC with {parameters:,} parameters, engine {model.engine}, on {device}")
    print(f"UCI handwritten digits: {sizes}", flush=True)


def _layers_in_blocks(depth: int) -> tuple[int, int, int]:
    """Three equal blocks of two-convolution layers; the stem, two transitions and the classifier are the other four."""
    layers, rest = divmod(depth - 4, 6)
    if rest or layers < 1:
        raise ValueError(f"depth is {depth}, but must be 6n + 4, such as 22, 40 or 100")
    return (layers,) * 3
