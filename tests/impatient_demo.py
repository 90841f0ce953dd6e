"""cp_demo.py, which waits for other processes for seconds only.

The first word may be where it runs, with RANK for the rank.
"""

import os
import runpy
import sys
from datetime import timedelta

from samples import DEMOS
from training import distributed

if __name__ == "__main__":
    distributed.TIMEOUT = timedelta(seconds=4)
    if "RANK" in sys.argv[1]:
        os.chdir(sys.argv.pop(1).replace("RANK", os.environ["RANK"]))
    runpy.run_path(str(DEMOS / "cp_demo.py"), run_name="__main__")
