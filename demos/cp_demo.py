"""Train a DenseNet-BC on handwritten digits with this package's memory-saving engines.

python demos/cp_demo.py                        the best engine, digits that ship with the package, offline
python demos/cp_demo.py --efficient False      the plain network, for comparison
"""

from efficient_densenet.training.command_line import command
from efficient_densenet.training.run import Options, run


def demo(
    efficient: bool | str = True,
    depth: int = 22,
    growth_rate: int = 12,
    n_epochs: int = 20,
    batch_size: int = 64,
    lr: float = 0.1,
    seed: int = 0,
    save: str = "checkpoints/digits",
    overwrite: bool = False,
) -> None:
    """Train on the embedded digits; weights and a table of epochs go to SAVE.

    Args:
        efficient: True for the best engine, False for plain, or an engine's name.
        depth: convolutions and classifier, 6n + 4.
        growth_rate: channels that each layer adds.
        n_epochs: passes over the training pictures.
        batch_size: pictures in a step.
        lr: the highest learning rate of the one-cycle schedule.
        seed: the same seed gives the same run on a CPU.
        save: folder for the results.
        overwrite: start over in a folder that holds a run.
    """
    run(Options(efficient, depth, growth_rate, n_epochs, batch_size, lr, seed, save, overwrite))


if __name__ == "__main__":
    command(demo)
