"""cp_demo.py in two processes of PyTorch's elastic agent, which torchrun runs too; here they are forks, and start fast.

The words are how often the agent restarts, seconds by which each file is written more slowly, and cp_demo.py's own.
"""

import os
import runpy
import sys
import time

from samples import DEMOS
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

fsync = os.fsync


def _worker(*words: str) -> None:
    sys.argv = ["cp_demo.py", *words]
    runpy.run_path(str(DEMOS / "cp_demo.py"), run_name="__main__")


def main(max_restarts: str, delay: str, *words: str) -> None:
    os.fsync = lambda descriptor: time.sleep(float(delay)) or fsync(descriptor)
    launch = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "start_method": "fork", "monitor_interval": 0.1}
    config = LaunchConfig(1, 1, 2, run_id="test", max_restarts=int(max_restarts), **launch)
    elastic_launch(config, _worker)(*words)


if __name__ == "__main__":
    main(*sys.argv[1:])
