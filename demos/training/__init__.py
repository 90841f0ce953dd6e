"""What the demos are made of: data, the training loop, and the directory of a run."""

from . import clone  # noqa: F401 - before anything of the package
from .command_line import command
from .options import Options
from .run import train

__all__ = ["Options", "command", "train"]
