"""The package of the demos' own clone is imported, whether another one is installed or none."""

import sys
from pathlib import Path

CLONE = Path(__file__).resolve().parents[2]
if (CLONE / "efficient_densenet").is_dir():
    sys.path.insert(0, str(CLONE))
