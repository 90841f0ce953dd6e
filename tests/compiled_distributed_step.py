"""Run by two processes: a step of this rank's images, compiled and under DistributedDataParallel in either order."""

import copy
import sys
import warnings

import torch
import torch.distributed as dist
from helpers import with_engine
from torch import Tensor, fx, nn
from torch._dynamo.backends.registry import lookup_backend
from torch.nn.parallel import DistributedDataParallel

from efficient_densenet import DenseNet
from efficient_densenet.memory import tensor_peak

BLOCKS, WRAPPINGS = (4, 4), ("DDP(compile)", "compile(DDP)")


def network() -> DenseNet:
    """One with more parameters than a first bucket of gradients takes, so that the compiler may look for a split."""
    torch.manual_seed(1)
    return DenseNet(32, BLOCKS, num_init_features=8, num_classes=3, efficient=False).double()


def images_of_ranks() -> tuple[Tensor, ...]:
    return torch.randn(16, 3, 16, 16, dtype=torch.double, generator=torch.Generator().manual_seed(2)).split(8)


def step(model: nn.Module, x: Tensor) -> None:
    model.zero_grad(set_to_none=False)  # gradients that are there already do not count as the step's memory
    model(x).square().mean().backward()


def _wrapped(model: nn.Module, wrapping: str, num_stages: list[int]) -> nn.Module:
    """`num_stages` gets how many stages each compiled graph has."""

    def backend(graph: fx.GraphModule, inputs: list[Tensor]):
        stage = torch.ops.efficient_densenet.stage
        num_stages.append(sum(node.target in (stage, stage.default) for node in graph.graph.nodes))
        return lookup_backend("aot_eager")(graph, inputs)

    if wrapping == "DDP(compile)":
        return DistributedDataParallel(torch.compile(model, backend=backend))
    return torch.compile(DistributedDataParallel(model), backend=backend)


def _result(model: nn.Module, wrapped: nn.Module, num_stages: list[int], x: Tensor) -> dict:
    step(wrapped, x)
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    buffers = [buffer.clone() for buffer in model.buffers()]
    return {
        "gradients": gradients,
        "buffers": buffers,
        "num_stages": num_stages,
        "peak": tensor_peak(lambda: step(wrapped, x)),
    }


def main(path: str) -> None:
    warnings.simplefilter("ignore")  # of the compiler
    dist.init_process_group("gloo")
    rank, model = dist.get_rank(), network()
    x, plain = images_of_ranks()[rank], copy.deepcopy(model)
    results = {"plain": _result(plain, DistributedDataParallel(plain), [], x)}
    for wrapping in WRAPPINGS:
        torch._dynamo.reset()
        shared, num_stages = with_engine(model, "shared"), []
        results[wrapping] = _result(shared, _wrapped(shared, wrapping, num_stages), num_stages, x)
    torch.save(results, f"{path}.{rank}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
