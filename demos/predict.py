"""Classify images by a model that a demo has trained, as the command efficient-densenet predict does.

python demos/predict.py photo.png another.jpg --model checkpoints/digits --top 3
"""

import sys

from training import clone  # noqa: F401 - before anything of the package

from efficient_densenet.__main__ import script

if __name__ == "__main__":
    sys.argv.insert(1, "predict")
    script()
