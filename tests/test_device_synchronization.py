"""A training step never waits for the device: neither a number nor a shape depends on values there.

On the meta device tensors have no values, and whatever asks for one raises.
"""

import pytest
import torch
from checkpoint_outcomes import CountingOperations
from helpers import FAMILIES, SIZES, freeze_norms, small_model
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from efficient_densenet import DenseNet


def _train(model: nn.Module, family: str, device: str = "meta") -> None:
    images = torch.empty(3, 3, *SIZES[family], dtype=torch.double, device=device).fill_(1).requires_grad_()
    labels = torch.zeros(3, dtype=torch.long, device=device)
    nn.functional.cross_entropy(model.to(device)(images), labels).backward()
    assert images.grad.shape == images.shape


def _average_cumulatively(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.momentum = None


def _freeze_inner_norms(model: DenseNet) -> None:
    freeze_norms(model, "norm2" if model.features.denseblock1.denselayer1.has_bottleneck else "norm1")


CHANGES = {
    "batch statistics": lambda model: None,
    "cumulative averages": _average_cumulatively,
    "frozen norms": freeze_norms,
    "some frozen norms": _freeze_inner_norms,
    "channels last": lambda model: model.to(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("change", CHANGES)
def test_engines_do_not_wait_for_the_device(family, change):
    engines = (
        ["shared"] if change == "cumulative averages" else ["shared", "checkpoint"]
    )  # PyTorch's norms read a count
    for engine in engines:
        model = small_model(family, efficient=engine, drop_rate=0.2)
        CHANGES[change](model)
        _train(model, family)


def test_the_meta_device_notices_what_reads_a_number():
    model = small_model("bc", efficient="shared")
    model.features.register_forward_hook(lambda module, args, output: output * output.sum().item())
    with pytest.raises(RuntimeError, match="meta tensors"):
        _train(model, "bc")


def test_cumulative_averages_take_a_few_operations_for_all_norms_of_a_stage():
    counts = []
    for num_layers in (2, 12):
        model = DenseNet(3, (num_layers,), num_init_features=4, efficient="shared").double()
        _average_cumulatively(model)
        with CountingOperations() as counted:
            update = torch.ops.efficient_densenet.update_running_statistics.default
            norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
            running = [buffer for norm in norms for buffer in (norm.running_mean, norm.running_var)]
            batch = [torch.ones_like(buffer) for buffer in running]
            counted.counts.clear()
            update(running, [norm.num_batches_tracked for norm in norms], batch, None)
        assert all(torch.equal(mean, ones) for mean, ones in zip(running, batch, strict=True))  # the first batch's
        counts.append({name: number for name, number in counted.counts.items() if "slice" not in str(name)})
    assert counts[0] == counts[1]
