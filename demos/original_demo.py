"""The same training as cp_demo.py through PyTorch's official checkpointing, to compare with.

python demos/original_demo.py
"""

from efficient_densenet.training.command_line import command
from efficient_densenet.training.run import Options, run


def demo(
    depth: int = 22,
    growth_rate: int = 12,
    n_epochs: int = 20,
    batch_size: int = 64,
    lr: float = 0.1,
    seed: int = 0,
    save: str = "checkpoints/digits_original",
    overwrite: bool = False,
) -> None:
    """Train on the embedded digits with torch.utils.checkpoint; the options are cp_demo.py's."""
    run(Options("official", depth, growth_rate, n_epochs, batch_size, lr, seed, save, overwrite))


if __name__ == "__main__":
    command(demo)
