"""What a demo does before its other imports: end on Ctrl-C with a line, and prefer the package of its own clone."""

import os
import signal
import sys
from pathlib import Path


def _interrupted(*_: object) -> None:
    print("interrupted", file=sys.stderr)
    os._exit(130)


DEMOS = Path(__file__).resolve().parent
if Path(sys.argv[0]).resolve().parent == DEMOS:  # a demo is being started, and not imported by another program
    signal.signal(signal.SIGINT, _interrupted)
if (DEMOS.parent / "efficient_densenet").is_dir():
    sys.path.insert(0, str(DEMOS.parent))
