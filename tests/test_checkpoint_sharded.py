"""`checkpoint` with sharded modules: FSDP of both versions. One or two processes, gloo."""

import pytest
import torch
import torch.distributed as dist
from checkpoint_outcomes import assert_same_tensors, plain_call, tensor
from grids import grid
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from efficient_densenet.checkpoint import CheckpointFunction, checkpoint, checkpoint_wrapper

pytestmark = pytest.mark.filterwarnings("ignore:.*FSDP.*:UserWarning", "ignore::FutureWarning")


def _network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 4)
    return nn.Sequential(*layers).double()


def _fsdp1(use_orig_params: bool, each_layer: bool):
    def shard(net):
        policy = ModuleWrapPolicy({nn.Linear}) if each_layer else None
        device = torch.device("cpu")
        return FullyShardedDataParallel(net, use_orig_params=use_orig_params, device_id=device, auto_wrap_policy=policy)

    return shard


def _fsdp2(each_layer: bool, reshard: bool = True):
    def shard(net):
        for layer in net if each_layer else ():
            if isinstance(layer, nn.Linear):
                fully_shard(layer, reshard_after_forward=reshard)
        return fully_shard(net, reshard_after_forward=reshard)

    return shard


SHARDINGS = {
    "FSDP1, original parameters": _fsdp1(True, False),
    "FSDP1, original parameters, each layer": _fsdp1(True, True),
    "FSDP1, flat parameters": _fsdp1(False, False),
    "FSDP2": _fsdp2(False),
    "FSDP2, each layer": _fsdp2(True),
    "FSDP2, each layer, not resharded": _fsdp2(True, reshard=False),
}


def _train(net, run) -> list[torch.Tensor]:
    """Return the losses of three steps of SGD, and the input's gradients."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    results = []
    for step in range(3):
        torch.manual_seed(step + 10 * dist.get_rank())
        x = tensor(6, 4).requires_grad_()
        loss = run(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results += [loss.detach(), x.grad]
    return results


CALLS = {
    "a wrapped module": (checkpoint_wrapper, lambda y: y),
    "a module": (lambda net: lambda x: checkpoint(net, x), lambda y: y),
    "a module, to its end": (lambda net: lambda x: checkpoint(net, x, early_stop=False), lambda y: y),
    "a closure": (lambda net: lambda x: checkpoint(lambda x: net(x).sin(), x), torch.sin),
    "CheckpointFunction": (lambda net: lambda x: CheckpointFunction.apply(net, 1, x, *net.parameters()), lambda y: y),
}


def _compare_with_unchecked(sharding: str, call: str) -> None:
    """Compare a checkpointed sharded module with the same module without checkpointing."""
    plain, ours = (SHARDINGS[sharding](_network()) for _ in range(2))
    checkpointed, after = CALLS[call]
    assert_same_tensors(_train(ours, checkpointed(ours)), _train(plain, lambda x: after(plain(x))))
    norms = [module for module in ours.modules() if isinstance(module, nn.BatchNorm1d)]
    assert [norm.num_batches_tracked.item() for norm in norms] == [3]


@pytest.mark.usefixtures("process_group_of_one")
@pytest.mark.parametrize(*grid(sharding=SHARDINGS, call=CALLS, strength=1))
def test_a_sharded_module_can_be_checkpointed(sharding, call):
    _compare_with_unchecked(sharding, call)


class _DropsItsOutput(nn.Linear):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


@pytest.mark.usefixtures("process_group_of_one")
def test_eval_mode_set_before_the_backward_of_a_sharded_module_changes_nothing():
    results = []
    for run in (plain_call, checkpoint):
        torch.manual_seed(0)
        net, x = fully_shard(_DropsItsOutput(4, 4).double()), tensor(5, 4).requires_grad_()
        loss = run(net, x).sin().sum()
        net.eval()
        loss.backward()
        results.append([x.grad])
    assert_same_tensors(*results)
