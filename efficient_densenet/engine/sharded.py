"""Modules whose parameters `fully_shard` has sharded: its hooks gather them before a call, and free them after it.

A stage that does not call its modules runs inside of a call of each of them. The hooks then do what they do around any
call: they gather the parameters, and register with autograd when to gather them for the backward and when to reduce
their gradients.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from .._mixins import author_class
from .._torch_private import has_hooks_of_fully_shard_only, policy_of_fully_shard, sharding_of

Result = TypeVar("Result")


def can_run_inside(module: nn.Module, x: Tensor) -> bool:
    """Whether a stage may run on x inside of a call of `module`: it has no hooks but those of `fully_shard`, which cast
    neither x nor the output to another dtype."""
    if not module._forward_pre_hooks:  # the usual case
        return False
    if torch.compiler.is_compiling() or not has_hooks_of_fully_shard_only(module):
        return False
    policy = policy_of_fully_shard(module)
    return {policy.param_dtype, policy.output_dtype} <= {x.dtype, None}


def casts_parameters(modules: Iterable[nn.Module], x: Tensor) -> bool:
    """Whether calls of `modules` cast the parameters that they gather, and then to the dtype of x."""
    return any(can_run_inside(each, x) and policy_of_fully_shard(each).param_dtype for each in modules)


def why_sharded(module: nn.Module) -> str | None:
    """A reason if parameters of exactly this module inside a block are sharded, with the modules to shard; or None."""
    sharding = sharding_of(module)
    if sharding is None:
        return None
    wrapped = getattr(module, "_fsdp_wrapped_module", module)  # of FullyShardedDataParallel
    name = author_class(type(wrapped)).__name__
    return (
        f"found parameters that {sharding} shards on each {name} inside a block: shard blocks, stages or the whole "
        "model instead"
    )


def run_inside(modules: Sequence[nn.Module], function: Callable[[Tensor], Result], x: Tensor) -> Result:
    """`function(x)` inside of a call of each of `modules`."""
    for module in reversed(modules):
        copied = object.__new__(type(module))  # copy.copy would call the __new__ of a class that fully_shard made
        copied.__dict__.update(vars(module), forward=function)
        function = copied
    return function(x)
