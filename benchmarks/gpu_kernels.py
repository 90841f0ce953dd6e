"""What each Triton kernel reads, writes and multiplies, by the kernel's name: the table behind `gpu_trace`.

An argument's bytes are those that it touches: of a slice of a matrix's channels only its columns. Vectors that are not
listed are read once: a few hundred numbers, which every program instance finds in the L2 cache. A matrix that is not
listed is an error, and so is a kernel that is not: whoever writes a kernel adds it here.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor


class Access(NamedTuple):
    """How a kernel uses an argument: how often the whole grid reads it and writes it.

    `again_for` is the grid axis for each tile of which the operand is read again. Axis 0 is not named here: its program
    instances start one after another and find what their neighbours have read in the L2 cache. Along another axis that
    holds only where the operand is smaller than the cache.
    `accumulates` marks a result that is read too, unless the kernel is launched with OVERWRITE. `only_with` names a
    constant without which the kernel does not use the argument, in whose place any other tensor may stand.
    """

    reads: int = 0
    writes: int = 0
    again_for: int | None = None
    accumulates: bool = False
    only_with: str = ""


READ, WRITE, ACCUMULATE = Access(reads=1), Access(writes=1), Access(writes=1, accumulates=True)

Arguments = Mapping[str, Any]
"""The arguments and compile-time constants of a launch, by name."""


class Traffic(NamedTuple):
    """The bytes of one operand: `nbytes` moved once, and `reads_again` times more where no cache holds the operand."""

    nbytes: int
    reads_again: int = 0

    def total(self, l2_bytes: int) -> int:
        return self.nbytes * (1 if self.nbytes <= l2_bytes else 1 + self.reads_again)


class KernelModel(NamedTuple):
    """A kernel's use of its matrices, and its products: how often num_rows × channels × OUT_CHANNELS."""

    matrices: Mapping[str, Access]
    products: Callable[[Arguments], int] = lambda arguments: 0

    def traffic(self, name: str, grid: tuple[int, ...], arguments: Arguments) -> list[Traffic]:
        """What a launch moves through memory, a row for each operand and direction."""
        rows = []
        for argument, tensor in arguments.items():
            if not isinstance(tensor, Tensor):
                continue
            if argument not in self.matrices and tensor.dim() > 1:
                raise ValueError(
                    f"the matrix {argument!r} of the Triton kernel {name!r} is not in KERNELS: say in "
                    "benchmarks/gpu_kernels.py how the kernel uses it"
                )
            rows += _traffic(self.matrices.get(argument, READ), tensor, grid, arguments)
        return rows

    def flops(self, arguments: Arguments) -> int:
        count = self.products(arguments)
        if not count:
            return 0
        return 2 * count * arguments["num_rows"] * arguments["channels"] * arguments["OUT_CHANNELS"]


def _traffic(access: Access, tensor: Tensor, grid: tuple[int, ...], arguments: Arguments) -> list[Traffic]:
    if access.only_with and not arguments.get(access.only_with, True):
        return []
    nbytes = tensor.numel() * tensor.element_size()
    reads = access.reads + (access.accumulates and not arguments.get("OVERWRITE", False))
    again = 0 if access.again_for is None else grid[access.again_for] - 1
    return [Traffic(nbytes, again)] * reads + [Traffic(nbytes)] * access.writes


def _of_backward(arguments: Arguments) -> int:
    """The gradient of the input, and that of the weight where it is needed."""
    return 1 + bool(arguments["NEEDS_GRAD_WEIGHT"])


KERNELS: dict[str, KernelModel] = {
    "affine_relu_pool_forward": KernelModel({"output": WRITE, "values": READ}),
    "affine_relu_pool_backward": KernelModel(
        {"partial_sums": WRITE, "grad_accum": ACCUMULATE, "grad_output": READ, "values": READ}
    ),
    "batch_norm_grad_input": KernelModel({"output": WRITE, "grad_accum": READ, "values": READ, "sums": READ}),
    "conv1x1_forward": KernelModel(
        {
            "output": WRITE,
            "stats": Access(writes=1, only_with="WITH_STATISTICS"),
            "values": READ,
            "weight": READ,
        },
        lambda arguments: 1,
    ),
    "conv1x1_backward": KernelModel(
        {
            "partial_grad_weight": WRITE,
            "partial_sums": WRITE,
            "grad_accum": ACCUMULATE,
            "grad_output": READ,  # by the tiles of channels, grid axis 0, one after another
            "output": Access(reads=1, only_with="HAS_SUMS"),
            "output_grad_accum": READ,
            "out_sums": Access(reads=1, only_with="HAS_SUMS"),
            "values": READ,
            "weight": Access(reads=1, again_for=1),
        },
        _of_backward,
    ),
    "conv3x3_forward": KernelModel(
        {
            "output": WRITE,
            "stats": Access(writes=1, only_with="HAS_STATISTICS"),
            "values": Access(reads=1, again_for=1),  # for each tap, from a cache
            "weight": READ,
        },
        lambda arguments: 9,
    ),
    "conv3x3_grad_input": KernelModel(
        {
            "partial_sums": WRITE,
            "grad_accum": ACCUMULATE,
            "grad_output": READ,
            "values": READ,
            "weight": Access(reads=1, again_for=1),
        },
        lambda arguments: 9,
    ),
    "conv3x3_grad_weight": KernelModel(
        {"partial_grad_weight": WRITE, "grad_output": Access(reads=1, again_for=1), "values": READ},
        lambda arguments: 9,
    ),
    "finish_backward": KernelModel(
        {
            "grad_norm_bias": WRITE,
            "grad_norm_weight": WRITE,
            "grad_weight": Access(writes=1, only_with="HAS_GRAD_WEIGHT"),
            "sums": Access(reads=1, writes=1, only_with="HAS_SUMS"),
            "partial_sums": READ,
            "partial_grad_weight": Access(reads=1, only_with="HAS_GRAD_WEIGHT"),
        }
    ),
    "tile_statistics": KernelModel({"stats": WRITE, "values": READ}),
    "combine_statistics": KernelModel({"result": WRITE, "stats": Access(reads=2)}),
    "image_statistics": KernelModel({"stats": WRITE, "values": READ}),
    "norm_relu_max_pool_forward": KernelModel({"output": WRITE, "values": READ}),
    "norm_relu_max_pool_backward_reduce": KernelModel(
        {"indices": WRITE, "partial_sums": WRITE, "grad_output": READ, "values": READ}
    ),
    "norm_relu_max_pool_backward": KernelModel(
        {"grad_values": WRITE, "indices": READ, "grad_output": READ, "values": READ}
    ),
}
"""The kernels of `efficient_densenet.kernels.triton_gpu`."""


def model_of(name: str) -> KernelModel:
    """The table's entry."""
    if name not in KERNELS:
        raise ValueError(
            f"the Triton kernel {name!r} is not in KERNELS: add to benchmarks/gpu_kernels.py what it reads and writes"
        )
    return KERNELS[name]
