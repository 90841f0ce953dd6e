"""Run by several processes: steps with synchronized norms by an engine, and by plain on the joined batch of all.

A case is the text "model | norms | images of the processes | engine". What is written for each is "equal, by …" with
the engines that ran, or how much it differs; and the numbers of collectives and of bytes of one step.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torchvision.models.densenet as torchvision_densenet
from sharded_steps import ENGINES, TOLERANCE, largest_difference, recorded_engines, write_outcomes
from torch import Tensor, nn

from efficient_densenet import DenseNet, kernels, make_efficient
from efficient_densenet.norms.sync_batch_norm import synchronize_norms

STEPS = 2


def _ours(engine: bool | str, small_inputs: bool = True) -> nn.Module:
    return DenseNet(4, (3, 2), num_init_features=6, num_classes=3, small_inputs=small_inputs, efficient=engine)


def _ours_with_stem(engine: bool | str) -> nn.Module:
    return _ours(engine, small_inputs=False)


def _torchvision(engine: bool | str) -> nn.Module:
    return torchvision_densenet.DenseNet(4, (3, 2), num_init_features=6, bn_size=2, num_classes=3)


MODELS = {
    "ours": _ours,
    "ours without Numba": _ours,
    "ours with a stem": _ours_with_stem,
    "torchvision": _torchvision,
}
SIDES = {"ours": 8, "ours without Numba": 4, "ours with a stem": 40, "torchvision": 40}


def _synchronized(model: nn.Module, norms: str, engine: bool | str) -> nn.Module:
    """`model` with its norms synchronized, and converted if it is another library's."""
    if norms == "torch's after conversion":
        make_efficient(model, engine)
    if norms == "ours":
        synchronize_norms(model, None)
    else:
        nn.SyncBatchNorm.convert_sync_batchnorm(model)
    if norms == "torch's" and not isinstance(model, DenseNet):
        make_efficient(model, engine)
    return model


def _train(model: nn.Module, batches: list[Tensor], rows: slice, reduces: bool) -> list[Tensor]:
    """Losses and gradients of the steps, those of the input for this process's rows; then parameters and buffers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = []
    for batch in batches:
        x = batch.detach().clone().requires_grad_()
        loss = model(x).square().sum()
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        loss = loss.detach()
        if reduces:
            for tensor in (loss, *gradients):
                dist.all_reduce(tensor)
        results += [loss, x.grad[rows], *(gradient.clone() for gradient in gradients)]
        optimizer.step()
        optimizer.zero_grad()
    return results + [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


@contextmanager
def counted_collectives(counts: list[int]) -> Iterator[None]:
    """Add the number of the norms' collectives, and of the bytes that this process gives to them."""

    def counting(function: Callable, tensor_of: Callable[..., Tensor]) -> Callable:
        def wrapper(*args, **kwargs):
            counts[0] += 1
            counts[1] += tensor_of(*args).nbytes
            return function(*args, **kwargs)

        return wrapper

    gather, reduce = dist.all_gather, dist.all_reduce
    dist.all_gather = counting(gather, lambda gathered, tensor: tensor)
    dist.all_reduce = counting(reduce, lambda tensor: tensor)
    try:
        yield
    finally:
        dist.all_gather, dist.all_reduce = gather, reduce


def outcome(case: str) -> str:
    name, norms, images, engine = case.split(" | ")
    rank, sizes, generator = dist.get_rank(), list(map(int, images.split())), torch.Generator().manual_seed(3)
    shape = 3, SIDES[name], SIDES[name]
    joined = [torch.randn(sum(sizes), *shape, dtype=torch.double, generator=generator) for _ in range(STEPS)]
    rows = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    torch.manual_seed(0)
    plain = MODELS[name](False).double()
    model = MODELS[name](ENGINES[engine]).double()
    model.load_state_dict(plain.state_dict())
    model, engines, counts = _synchronized(model, norms, ENGINES[engine]), set(), [0, 0]
    expected = _train(plain, joined, rows, reduces=False)
    numba_supports = kernels.numba_supports
    if name == "ours without Numba":
        kernels.numba_supports = lambda values: False
    with recorded_engines(engines):
        actual = _train(model, [batch[rows] for batch in joined], slice(None), reduces=True)
    with counted_collectives(counts):
        model(joined[0][rows]).square().sum().backward()
    kernels.numba_supports = numba_supports
    difference = largest_difference(actual, expected)
    verdict = "equal" if difference <= TOLERANCE else f"differs by {difference:.1e}"
    return f"{verdict}, by {', '.join(sorted(engines))}, {counts[0]} collectives, {counts[1]} bytes"


if __name__ == "__main__":
    write_outcomes(outcome, *sys.argv[1:])
