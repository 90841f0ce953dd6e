"""Activation checkpointing for any function: its intermediate tensors are recomputed in the backward, not saved."""

from .._recompute_mode import disable_checkpointing, is_checkpointing, is_recomputing
from .call import CheckpointFunction, checkpoint, checkpoint_sequential
from .wrapper import checkpoint_wrapper, unwrap

__all__ = [
    "CheckpointFunction",
    "checkpoint",
    "checkpoint_sequential",
    "checkpoint_wrapper",
    "disable_checkpointing",
    "is_checkpointing",
    "is_recomputing",
    "unwrap",
]
