"""The training of cp_demo.py through PyTorch's official checkpointing, to compare with.

python demos/original_demo.py
python demos/original_demo.py --data cifar --save model_official --batch_size 256

--efficient True (the default) is torch.utils.checkpoint around each layer, --efficient False the plain network.
"""

import os
import signal
import sys
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # Ctrl-C ends it with a line, even while modules are imported

    def interrupted(*_: object) -> None:
        print("interrupted", file=sys.stderr)
        os._exit(130)

    signal.signal(signal.SIGINT, interrupted)
if (Path(__file__).resolve().parents[1] / "efficient_densenet").is_dir():  # in a clone, its package comes first
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training import Options, command, train

if __name__ == "__main__":
    command(partial(train, efficient_engine="official"), Options, about=__doc__)
