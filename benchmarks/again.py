"""Measure again what the pages show of this processor, and make their tables and figures from it.

    python benchmarks/again.py                  about an hour on two cores
    python benchmarks/again.py --only crossover
    python benchmarks/again.py --cifar cifar    and nine runs of training on a folder of CIFAR-10's images

The tree must be clean, since the captions name its commit. What was measured at that commit on this processor is left
out: so an interrupted run goes on where it was, and a second run changes no file.
"""

import glob
import shlex
import subprocess
import sys
import time
from pathlib import Path

import rows as results
from options import run_command

FEW = "plain,shared,shared_keep,shared_portable,checkpoint,official,torchvision_efficient,torchvision_converted"
BF16 = "plain,shared,shared_keep"
MEASUREMENTS = [
    f"run.py --threads 2 --allocator tcmalloc --missing {options}"
    for options in (
        "--model densenet_bc_100_12 --batch_size 64 --rounds 5",
        f"--model densenet121 --batch_size 16 --rounds 5 --methods {FEW}",
        "--sweep users --rounds 3",
        "--sweep activations",
        *(
            f"--model {model} --precision bf16 --layout contiguous,channels_last --rounds 5 --methods {BF16}"
            for model in ("densenet_bc_100_12 --batch_size 64", "densenet121 --batch_size 16")
        ),
        *(
            f"--model {model} --inference --rounds 7 --methods plain,plain_channels_last,shared,shared_channels_last"
            for model in ("densenet_bc_100_12 --batch_size 64", "densenet121 --batch_size 16")
        ),
        "--sweep devices --batch_size 4 --rounds 15",
        "--sweep devices --batch_size 256 --rounds 2",
        "--sweep depth",
        "--sweep batch",
    )
]
MEASUREMENTS += ["crossover.py --allocator tcmalloc --threads 1 --seconds 2 --missing", "gpu_host.py --missing"]
PAGES = "README.md", *sorted(glob.glob("docs/*.md", root_dir=results.ROOT))
MADE_OF_THEM = ["checkpointing_probes.py", "plot.py", f"table.py --write {','.join(PAGES)}"]


def again(only: str = "", cifar: str = "") -> None:
    """Run the commands, say what each takes, and fail where one has failed.

    Args:
        only: a text, such as users: the commands in which it stands. Default: all.
        cifar: a folder of images, on which several engines train, as in `convergence.py`.
    """
    commit, failed = results.commit(), []
    if commit.endswith("+"):
        raise ValueError("found uncommitted changes of what is measured: commit them, since captions name a commit")
    training = [f"convergence.py --data {shlex.quote(str(Path(cifar).resolve()))}"] if cifar else []
    for command in [each for each in MEASUREMENTS + training + MADE_OF_THEM if only in each]:
        print(f"== {command}", flush=True)
        start = time.monotonic()
        program, *options = shlex.split(command)
        path = str(results.ROOT / "benchmarks" / program)
        if subprocess.run([sys.executable, path, *options], cwd=results.ROOT, check=False).returncode:
            failed.append(command)
        print(f"== {time.monotonic() - start:.0f} s", flush=True)
    print(results.git("status", "--short") or f"nothing has changed since it was measured at {commit}")
    if failed:
        raise ValueError(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    run_command(again)
