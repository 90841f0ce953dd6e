"""Every engine equals plain over all that a network may vary: to 1e-10 in float64, and with at most twice plain's error
in low precision. Outputs, all gradients, gradients of gradients and buffers."""

import copy
import itertools
import statistics

import pytest
import torch
from frozen_norms import CLASSES, replace_norms
from grids import grid, sampled
from helpers import (
    ACTIVATIONS,
    FAMILIES,
    KERNELS,
    RECOMPUTING,
    add_conv_biases,
    assert_all_close,
    assert_same_buffers,
    assert_same_gradients,
    freeze_norms,
    relative_error,
    results_of,
    small_model,
    use_kernels,
    with_engine,
)
from torch import Tensor, nn

from efficient_densenet import FCDenseNet
from efficient_densenet.models.backbone import MAPS
from efficient_densenet.models.layers import DenseLayer, Transition

SIZES = {1: (33,), 2: (33, 38), 3: (27, 26, 25)}
SMALL_SIZES = {1: (23,), 2: (9, 7), 3: (6, 8, 9)}  # in bfloat16, plain's own gradients are wrong at a depth of 2
BIASES = {"no biases": None, "biases": "", "conv1": "conv1", "conv2": "conv2", "transition": "transition"}
TRAINABLE = {
    "all": lambda name: True,
    "none": lambda name: False,
    "norms": lambda name: "norm" in name,
    "convolutions": lambda name: "conv" in name,
    "no norms' weights": lambda name: not ("norm" in name and name.endswith("weight")),
    "the last layer": lambda name: "block3.denselayer2" in name,
    "transitions": lambda name: "transition" in name,
    "convolutions' biases": lambda name: "conv" in name and name.endswith("bias"),
}
WITHOUT_BOTTLENECKS = "basic", "U-Net"


def _valid(engine, family, dims, frozen, biases, keep, batch, maps, dilated, trainable, x_needs_grad, penalty, **_):
    """Layers without bottlenecks have no second norm or convolution, and nothing to keep."""
    few = family in WITHOUT_BOTTLENECKS
    return (
        not (few and (frozen in ("norm2", "class in norm2") or biases == "conv2" or keep))
        and not (family == "U-Net" and (maps or dilated))
        and not (batch == 1 and (dims == 1 or family == "imagenet"))  # a single value per channel has no variance
        and (trainable != "convolutions' biases" or biases == "biases")
        and (trainable != "none" or x_needs_grad)
        and not (keep and engine in RECOMPUTING)
        and not (dims != 2 and str(frozen).startswith("class"))
        and not (penalty and (engine == KERNELS[0] or (dims == 3 and family == "imagenet")))  # they take long
    )


@pytest.mark.parametrize(
    *sampled(
        _valid,
        engine=[*KERNELS, *RECOMPUTING],
        family=[*FAMILIES, "U-Net"],
        activation=[*(name for name in ACTIVATIONS if name != "identity"), "mixed"],
        dims=[1, 2, 3],
        batch=[1, 2, 5],
        channels_last=[False, True],
        frozen=[None, "", "norm1", "norm2", "block2", "all", "class constant in forward", "class in norm2"],
        drop_rate=[0.0, 0.3],
        biases=list(BIASES),
        keep=[False, True, "second layers"],
        maps=[None, *MAPS],
        dilated=[False, True],
        trainable=list(TRAINABLE),
        x_needs_grad=[False, True],
        penalty=[False, True],
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
    dilated,
    trainable,
    x_needs_grad,
    penalty,
    monkeypatch,
):
    if isinstance(engine, tuple):
        use_kernels(monkeypatch, *engine)
        engine = "shared"
    settings = {"dims": dims, "drop_rate": drop_rate, "activation": ACTIVATIONS.get(activation, "relu")}
    if family == "U-Net":
        plain = FCDenseNet(3, (2, 1, 2), num_init_features=4, num_classes=2, efficient=False, **settings).double()
        add_conv_biases(plain)
    else:
        settings |= {"block_config": (1, 2, 1)} if dims == 3 else {}
        settings |= {"features_only": maps is not None, **({"maps": maps} if maps else {})}
        settings |= {"output_stride": 8 if family == "imagenet" else 2} if dilated else {}
        plain = small_model(family, efficient=False, **settings)
    if activation == "mixed":
        mix_activations(plain)
    for name, layer in plain.named_modules():
        if isinstance(layer, DenseLayer) and layer.has_bottleneck:
            layer.norm2.eps, layer.keep_bottleneck = 0.1, keep is True or (keep and name.endswith("layer2"))
    if BIASES[biases] is not None:
        add_conv_biases(plain, BIASES[biases])
    if frozen == "class in norm2":
        replace_norms(plain, CLASSES["torchvision"], "norm2", others_in_training=True)
    elif frozen and frozen.startswith("class "):
        replace_norms(plain, CLASSES[frozen.removeprefix("class ")])
    elif frozen is not None:
        freeze_norms(plain, "" if frozen == "all" else frozen)
        plain.train(frozen != "all") if frozen == "all" else None
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(TRAINABLE[trainable](name))
    x = torch.randn(batch, 3, *(SIZES if family == "imagenet" else SMALL_SIZES)[dims], dtype=torch.double)
    if channels_last and dims > 1:
        memory_format = torch.channels_last if dims == 2 else torch.channels_last_3d
        plain, x = plain.to(memory_format=memory_format), x.to(memory_format=memory_format)
    efficient = with_engine(plain, engine)
    for _ in range(2):  # gradients accumulate, and running statistics move on
        assert_all_close(_step(efficient, x, x_needs_grad, penalty), _step(plain, x, x_needs_grad, penalty), 1e-9)
    assert_same_gradients(efficient, plain, 1e-9 if penalty else 1e-10)  # large terms cancel
    assert_same_buffers(efficient, plain)


def mix_activations(model: nn.Module) -> None:
    """Give neighbors different activations, or the same one with different constants."""
    makers = [lambda: nn.LeakyReLU(-0.3), lambda: nn.Hardtanh(-0.5, 2), lambda: nn.ELU(0.4), *ACTIVATIONS.values()]
    activations = itertools.cycle(makers)
    for module in list(model.modules()):
        for name in ("relu", "relu1", "relu2") if isinstance(module, (DenseLayer, Transition)) else ():
            if name in module._modules:
                setattr(module, name, next(activations)())


def _step(model: nn.Module, x: Tensor, x_needs_grad: bool, penalty: bool) -> list[Tensor]:
    """The outputs and the input's gradient; with a penalty, the loss contains the gradients of what is trained."""
    torch.manual_seed(1)
    x = x.detach().requires_grad_(x_needs_grad)
    outputs = model(x)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    loss = sum(output.square().sum() for output in outputs)
    if loss.requires_grad:  # maps may not need the parameters that require gradients
        if penalty:
            trainable = [each for each in (x, *model.parameters()) if each.requires_grad]
            grads = torch.autograd.grad(loss, trainable, create_graph=True, allow_unused=True)
            loss = loss.sin() + sum(grad.sin().sum() for grad in grads if grad is not None)
        loss.backward()
    return [*(output.detach() for output in outputs), *([] if x.grad is None else [x.grad])]


PRECISIONS = {
    "float32": (torch.float32, torch.float32, None),
    "autocast bfloat16": (torch.float32, torch.float32, torch.bfloat16),
    "autocast float16": (torch.float32, torch.float32, torch.float16),
    "bfloat16": (torch.bfloat16, torch.bfloat16, None),
    "bfloat16, norms float32": (torch.bfloat16, torch.float32, None),
}
WITH_BIASES = "float32", "bfloat16", "autocast bfloat16"


@pytest.mark.parametrize(
    *grid(
        # The gradient of a bias before batch statistics is rounding error alone, in some cases over twice plain's.
        lambda precision, biases, dims, frozen, activation, **_: (
            (not biases or (dims == 2 and activation == "relu" and precision in WITH_BIASES))
            and (dims == 2 or (precision == "autocast bfloat16" and frozen != "class"))
            and not (frozen == "class" and precision.startswith("bfloat16,"))
        ),
        family=FAMILIES,
        precision=PRECISIONS,
        biases=[False, True],
        frozen=[None, "", "class"],
        dims=[1, 2, 3],
        activation=["relu", "silu", "hardtanh"],
        strength=1,
    )
)
def test_the_error_in_low_precision_is_at_most_twice_that_of_plain(family, precision, biases, frozen, dims, activation):
    """The median over several networks: in a single one, rounding may switch a ReLU on or off."""
    dtype, norm_dtype, autocast = PRECISIONS[precision]
    ratios = []
    for seed in range(7):
        torch.manual_seed(seed)
        settings = {"dims": dims, "activation": ACTIVATIONS[activation], "block_config": (1, 2, 1)}
        exact = small_model(family, efficient=False, **settings)
        if biases:
            add_conv_biases(exact)
        if frozen == "class":
            replace_norms(exact, CLASSES["input's dtype"])
        elif frozen is not None:
            freeze_norms(exact, frozen)
        size = (SIZES if family == "imagenet" else SMALL_SIZES)[dims]
        x = torch.randn(4 if dims == 3 else 8, 3, *size, dtype=torch.double)
        expected = _results_and_statistics(exact, x)
        plain = copy.deepcopy(exact).to(dtype)
        for module in plain.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.to(norm_dtype)
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            found = [_results_and_statistics(m, x.to(dtype)) for m in (with_engine(plain, "shared"), plain)]
        assert [each.dtype for each in found[0]] == [each.dtype for each in found[1]]
        error, plain_error = (relative_error(each, expected) for each in found)
        ratios.append(error / plain_error)
    assert statistics.median(ratios) <= 2


def _results_and_statistics(model: nn.Module, x: Tensor) -> list[Tensor]:
    return [*results_of(model, x), *(buffer for buffer in model.buffers() if buffer.is_floating_point())]
