"""What runs on this machine, and why: efficient-densenet doctor

Prints the versions, the features of the processor, the caches, and of each GPU whether the Triton kernels run there.
"""

import argparse
import importlib.util
import os
import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from . import DenseNet, __version__, _torch_private, create_model, kernels
from .kernels import device_self_test, disk_cache
from .models.zoo import VARIANTS

KERNELS = (torch.float32, "tf32"), (torch.float32, "ieee"), (torch.bfloat16, "ieee"), (torch.float16, "ieee")
"""Dtypes, and precisions of products."""


def report(compare: bool = False) -> Iterator[str]:
    """The lines; with `compare`, the Triton kernels are tested where no result is known."""
    yield f"efficient_densenet {__version__}, PyTorch {torch.__version__}, Python {platform.python_version()}"
    yield from (str(_torch_private.why_not(each)) for each in dict.fromkeys(_torch_private.MISSING.values()))
    yield from _processor()
    yield from _triton(compare)
    directory = disk_cache.directory()
    place = directory or "nowhere, since there is no directory of the user alone"
    yield f"compiled kernels, and results of the device self-test: {place}"


def _processor() -> Iterator[str]:
    vectors = torch.backends.cpu.get_cpu_capability()
    yield f"processor: {platform.machine()} with {vectors}, {torch.get_num_threads()} threads"
    if importlib.util.find_spec("numba") is None:
        yield "processor kernels: PyTorch's operations, since Numba is not installed (pip install numba)"
    elif not kernels.numba_supports(torch.empty(1)):
        yield "processor kernels: PyTorch's operations, since Numba's do not run here (a warning says why)"
    else:
        from .kernels.numba_cpu.compiler import processor

        found = ", ".join(processor.features()) or "no AVX-512"
        left_out = os.environ.get(processor.VARIABLE)
        yield f"processor kernels: Numba, {found}" + (f"; {processor.VARIABLE}={left_out}" if left_out else "")


def _triton(compare: bool) -> Iterator[str]:
    if not torch.cuda.is_available():
        has_mps = torch.backends.mps.is_available()
        yield "GPU: MPS, on which PyTorch's operations run" if has_mps else "GPU: PyTorch finds none"
        return
    mode = device_self_test.mode()
    yield f"{device_self_test.VARIABLE}: {mode}, which is to {device_self_test.MODES[mode]}"
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        yield f"GPU {index}: {torch.cuda.get_device_name(index)}, compute capability {major}.{minor}"
        device = torch.device("cuda", index)
        kinds = [each for each in KERNELS if kernels.has_triton(device, each[0])]
        if not kinds:
            nvidia = "Triton is not installed or too old for this GPU, or the GPU is too old (needed is 7.0 or higher)"
            other = "the Triton kernels are written for NVIDIA's GPUs"
            yield f"  PyTorch's operations: {other if torch.version.hip else nvidia}"
            continue
        find = device_self_test.result if compare else device_self_test.stored_result
        at_once = max(1, (os.cpu_count() or 1) // 8)  # each test is in a process of its own, and compiles
        with ThreadPoolExecutor(at_once) as pool:
            find = partial(find, index, activation="relu")
            results = pool.map(find, *zip(*kinds, strict=True)) if mode == "check" else [None] * len(kinds)
            for (dtype, precision), result in zip(kinds, results, strict=True):
                name = str(dtype).removeprefix("torch.") + (f", {precision}" if dtype is torch.float32 else "")
                if mode != "check":
                    found = "Triton, unchecked" if mode == "trust" else "PyTorch's operations"
                elif result is None:
                    found = "Triton, if they pass the self-test: the first step tests, as does --compare"
                elif result.passed:
                    found = "; ".join(filter(None, ["Triton, tested", result.times()]))
                else:
                    cause = "of the Triton kernels" if result.certain else "the Triton kernels could not be tested:"
                    failure = "; ".join(filter(None, [result.failure, result.times()]))
                    found = f"PyTorch's operations, since {cause} {failure}"
                yield f"  {name}: {found}"


def warm_up() -> str:
    """Compile the processor's kernels of all dtypes. Returns the names of those for which they run."""
    ready = [dtype for dtype in kernels.NUMBA_DTYPES if kernels.numba_supports(torch.empty(1, dtype=dtype))]
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in ready)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="efficient-densenet doctor", description=__doc__)
    parser.add_argument("--compare", action="store_true", help="test the Triton kernels now")
    parser.add_argument("--warmup", action="store_true", help="compile all kernels now, as does their first use")
    parser.add_argument("--model", help="compile the kernels of this model of the zoo, by a training step")
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--image_size", type=int, help="default: 32 for models for CIFAR, 224 for others")
    arguments = parser.parse_args(words)
    for line in report(arguments.compare or arguments.warmup):
        print(line)
    if arguments.warmup:
        print(f"compiled the kernels for {warm_up() or 'nothing, since they do not run here'}")
    if arguments.model:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model: DenseNet = create_model(arguments.model).to(device)
        size = arguments.image_size or (32 if VARIANTS[arguments.model].get("small_inputs") else 224)
        model(torch.zeros(arguments.batch_size, 3, size, size, device=device)).sum().backward()
        print(f"compiled the kernels of {arguments.model} on {device}")


if __name__ == "__main__":
    main()
