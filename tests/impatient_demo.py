"""cp_demo.py, which waits for other processes and network file systems for seconds only. The first word is where it
runs, in which RANK stands for the rank."""

import os
import runpy
import sys
from datetime import timedelta

from samples import DEMOS
from training import heartbeat, run_state

if __name__ == "__main__":
    heartbeat.SILENCE, heartbeat.GRACE = timedelta(seconds=4), 1
    run_state.SECONDS_OF_CACHES = 1
    os.chdir(sys.argv.pop(1).replace("RANK", os.environ["RANK"]))
    runpy.run_path(str(DEMOS / "cp_demo.py"), run_name="__main__")
