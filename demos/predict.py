"""Classify images with a model that a demo has trained.

python demos/predict.py photo.png another.jpg --model checkpoints/digits --top 3
"""

import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":  # Ctrl-C ends it with a line, even while modules are imported

    def interrupted(*_: object) -> None:
        print("interrupted", file=sys.stderr)
        os._exit(130)

    signal.signal(signal.SIGINT, interrupted)
if (Path(__file__).resolve().parents[1] / "efficient_densenet").is_dir():  # in a clone, its package comes first
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training import command, predict

if __name__ == "__main__":
    command(predict)
