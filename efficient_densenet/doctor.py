"""What runs on this machine, and why: python -m efficient_densenet.doctor

Prints the versions, the features of the processor, the caches, and of each GPU whether the Triton kernels run there.
"""

import argparse
import importlib.util
import os
import platform
from collections.abc import Iterator

import torch

from . import DenseNet, __version__, create_model, kernels
from .kernels import disk_cache, first_contact
from .models.zoo import VARIANTS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def report(compare: bool = False) -> Iterator[str]:
    """The lines; with `compare`, the Triton kernels are compared with PyTorch's operations where that is not known."""
    yield f"efficient_densenet {__version__}, PyTorch {torch.__version__}, Python {platform.python_version()}"
    yield from _processor()
    yield from _triton(compare)
    directory = disk_cache.directory()
    yield f"compiled kernels and verdicts: {directory or 'nowhere, since there is no directory of the user alone'}"


def _processor() -> Iterator[str]:
    vectors = torch.backends.cpu.get_cpu_capability()
    yield f"processor: {platform.machine()} with {vectors}, {torch.get_num_threads()} threads"
    if importlib.util.find_spec("numba") is None:
        yield "processor kernels: PyTorch's operations, since Numba is not installed (pip install numba)"
    elif not kernels.numba_supports(torch.empty(1)):
        yield "processor kernels: PyTorch's operations, since Numba's do not run here (a warning says why)"
    else:
        from .kernels.numba_cpu.host import processor

        found = ", ".join(name for name in processor.features()) or "no AVX-512"
        left_out = os.environ.get(processor.VARIABLE)
        yield f"processor kernels: Numba, {found}" + (f"; {processor.VARIABLE}={left_out}" if left_out else "")


def _triton(compare: bool) -> Iterator[str]:
    if not torch.cuda.is_available():
        yield "GPU: PyTorch finds none"
        return
    mode = first_contact.mode()
    yield f"{first_contact.VARIABLE}: {mode}, which is to {first_contact.MODES[mode]}"
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        yield f"GPU {index}: {torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"
        if not kernels.has_triton(torch.device("cuda", index)):
            yield "  PyTorch's operations: Triton is not installed, or does not know this GPU (needed is 8.0 or higher)"
            continue
        for dtype in DTYPES:
            yield f"  {str(dtype).removeprefix('torch.')}: {_verdict(index, dtype, compare and mode == 'check')}"


def _verdict(index: int, dtype: torch.dtype, compare: bool) -> str:
    precision = first_contact.precision_of(dtype)
    if compare:
        first_contact.may_run(torch.device("cuda", index), dtype)
    verdict = first_contact.stored_verdict(index, dtype, precision)
    if verdict is None:
        return "Triton, not compared with PyTorch's operations yet: --compare does, as does the first step"
    return f"PyTorch's operations, since of the Triton kernels {verdict}" if verdict else "Triton, compared"


def prepare(name: str, batch_size: int, image_size: int | None, device: str) -> None:
    """Compile the kernels of a model by a training step."""
    model: DenseNet = create_model(name).to(device)
    image_size = image_size or (32 if VARIANTS[name].get("small_inputs") else 224)
    model(torch.zeros(batch_size, 3, image_size, image_size, device=device)).sum().backward()


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m efficient_densenet.doctor", description=__doc__)
    parser.add_argument("--compare", action="store_true", help="compare the Triton kernels now")
    parser.add_argument("--model", help="compile the kernels of this model of the zoo, by a training step")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--image_size", type=int, help="default: 32 for models for CIFAR, 224 for others")
    return parser.parse_args(words)


def main() -> None:
    arguments = parse()
    for line in report(arguments.compare):
        print(line)
    if arguments.model:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        prepare(arguments.model, arguments.batch_size, arguments.image_size, device)
        print(f"compiled the kernels of {arguments.model} on {device}")


if __name__ == "__main__":
    main()
