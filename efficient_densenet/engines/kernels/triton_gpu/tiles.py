"""A device's own limits, from which the Triton kernels' tiles and splits are chosen."""

import functools
from typing import NamedTuple

import torch

KIB = 1024


class DeviceLimits(NamedTuple):
    """What a kernel's launch may count on. Bytes of shared memory are of a multiprocessor, and of a block."""

    multiprocessors: int
    shared_memory: int
    shared_memory_of_a_block: int


WITHOUT_DEVICE = DeviceLimits(multiprocessors=2, shared_memory=64 * KIB, shared_memory_of_a_block=64 * KIB)
"""For Triton's interpreter: few multiprocessors, so that the loops over rows go round."""


@functools.cache
def device_limits(device: torch.device) -> DeviceLimits:
    """The limits of a device, read once."""
    if device.type != "cuda":
        return WITHOUT_DEVICE
    properties = torch.cuda.get_device_properties(device)
    of_a_block = properties.shared_memory_per_block_optin
    return DeviceLimits(properties.multi_processor_count, properties.shared_memory_per_multiprocessor, of_a_block)
