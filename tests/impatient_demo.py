"""cp_demo.py, in the directory that the first word says (RANK is the rank), or else impatient with other processes."""

import os
import runpy
import sys
from datetime import timedelta

from samples import DEMOS
from training import distributed

if __name__ == "__main__":
    if "RANK" in sys.argv[1]:
        os.chdir(sys.argv.pop(1).replace("RANK", os.environ["RANK"]))
    else:
        distributed.TIMEOUT = timedelta(seconds=4)
    runpy.run_path(str(DEMOS / "cp_demo.py"), run_name="__main__")
