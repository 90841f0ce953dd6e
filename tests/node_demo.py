"""cp_demo.py in a directory of each process's own, node0 or node1."""

import os
import runpy

from samples import DEMOS

if __name__ == "__main__":
    os.chdir(f"node{os.environ['RANK']}")
    runpy.run_path(str(DEMOS / "cp_demo.py"), run_name="__main__")
