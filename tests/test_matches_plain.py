"""Every engine equals plain to 1e-10 in float64: outputs, all gradients and buffers, over what a network may vary."""

import copy

import pytest
import torch
from grids import sampled
from helpers import (
    FAMILIES,
    KERNELS,
    RECOMPUTING,
    add_conv_biases,
    assert_all_close,
    assert_same_buffers,
    assert_same_gradients,
    freeze_norms,
    small_model,
    use_kernels,
)
from test_activations import MODULES as ACTIVATIONS
from torch import Tensor, nn

SIZES = {1: (33,), 2: (33, 38), 3: (33, 30, 29)}
SMALL_SIZES = {1: (23,), 2: (9, 7), 3: (8, 9, 10)}
BIASES = {"no biases": None, "biases": "", "conv1": "conv1", "conv2": "conv2", "transition": "transition"}
TRAINABLE = {
    "all": lambda name: True,
    "none": lambda name: False,
    "norms": lambda name: "norm" in name,
    "convolutions": lambda name: "conv" in name,
    "no norms' weights": lambda name: not ("norm" in name and name.endswith("weight")),
    "no biases": lambda name: not name.endswith("bias"),
    "the last norm": lambda name: "norm5" in name,
    "the last layer": lambda name: "block3.denselayer2" in name,
    "transitions": lambda name: "transition" in name,
    "second layers": lambda name: "denselayer2" in name,
    "convolutions' biases": lambda name: "conv" in name and name.endswith("bias"),
}


def _valid(engine, family, dims, frozen, biases, keep, batch, trainable, x_needs_grad, **_):
    """Layers without bottlenecks have no second norm or convolution, and nothing to keep."""
    return (
        not (family == "basic" and (frozen == "norm2" or biases == "conv2" or keep))
        and not (batch == 1 and (dims == 1 or family == "imagenet"))  # a single value per channel has no variance
        and (trainable != "convolutions' biases" or biases == "biases")
        and (trainable != "none" or x_needs_grad)
        and not (keep and engine in RECOMPUTING)
    )


@pytest.mark.parametrize(
    *sampled(
        _valid,
        engine=[*KERNELS, *RECOMPUTING],
        family=list(FAMILIES),
        activation=[name for name in ACTIVATIONS if name != "identity"],
        dims=[1, 2, 3],
        batch=[1, 2, 5],
        channels_last=[False, True],
        frozen=[None, "", "norm1", "norm2", "block2", "all"],
        drop_rate=[0.0, 0.3],
        biases=list(BIASES),
        keep=[False, True],
        maps=[False, True],
        trainable=list(TRAINABLE),
        x_needs_grad=[False, True],
    )
)
def test_matches_plain(
    engine,
    family,
    activation,
    dims,
    batch,
    channels_last,
    frozen,
    drop_rate,
    biases,
    keep,
    maps,
    trainable,
    x_needs_grad,
    monkeypatch,
):
    if isinstance(engine, tuple):
        use_kernels(monkeypatch, *engine)
        engine = "shared"
    settings = {"dims": dims, "drop_rate": drop_rate, "keep_bottleneck": keep, "features_only": maps}
    plain = small_model(family, efficient=False, activation=ACTIVATIONS[activation], **settings)
    if BIASES[biases] is not None:
        add_conv_biases(plain, BIASES[biases])
    if frozen is not None:
        freeze_norms(plain, "" if frozen == "all" else frozen)
    plain.train(frozen != "all") if frozen in (None, "all") else None
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(TRAINABLE[trainable](name))
    x = torch.randn(batch, 3, *(SIZES if family == "imagenet" else SMALL_SIZES)[dims], dtype=torch.double)
    if channels_last and dims > 1:
        memory_format = torch.channels_last if dims == 2 else torch.channels_last_3d
        plain, x = plain.to(memory_format=memory_format), x.to(memory_format=memory_format)
    efficient = copy.deepcopy(plain).set_engine(engine)
    for _ in range(2):  # gradients accumulate, and running statistics move on
        assert_all_close(_step(efficient, x, x_needs_grad), _step(plain, x, x_needs_grad))
    assert_same_gradients(efficient, plain)
    assert_same_buffers(efficient, plain)


def _step(model: nn.Module, x: Tensor, x_needs_grad: bool) -> list[Tensor]:
    torch.manual_seed(1)
    x = x.detach().requires_grad_(x_needs_grad)
    outputs = model(x)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    loss = sum(output.square().sum() for output in outputs)
    if loss.requires_grad:  # maps may not need the parameters that require gradients
        loss.backward()
    return [*(output.detach() for output in outputs), *([] if x.grad is None else [x.grad])]
