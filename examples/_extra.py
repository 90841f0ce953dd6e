"""Imported first by each program: a package that it needs and that is not installed is named in a sentence."""

import importlib.util
import os
import sys
from pathlib import Path

ALL = ("pandas", "torchmetrics", "torchvision", "matplotlib", "tqdm")
OWN = {
    "chest_xray": ("pytorch_grad_cam",),
    "segment_volumes": ("monai", "nibabel"),
    "volumes": ("monai", "nibabel"),
}


def need(*modules: str) -> None:
    """Stop where one of these cannot be imported."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        print(f"error: {missing[0]} is not installed: pip install -e '.[examples]'", file=sys.stderr)
        raise SystemExit(2)


if int(os.environ.get("RANK", 0)):  # of torchrun's processes the first one alone shows progress
    os.environ["TQDM_DISABLE"] = "1"
need(*ALL, *OWN.get(Path(sys.argv[0]).stem, ()))
