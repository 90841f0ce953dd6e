"""The shared engine matches plain to 1e-10 in float64, over what a training run can vary."""

import copy
import pickle
import threading

import pytest
import torch
from grids import grid
from helpers import (
    FAMILIES,
    add_conv_biases,
    assert_close,
    assert_same_buffers,
    assert_same_gradients,
    assert_same_step,
    backward,
    freeze_norms,
    freeze_parameters,
    small_model,
    with_engine,
)
from torch import Tensor, nn

SMALL_SIZES = [(4, 4), (9, 7)]  # with the first, the last stage has one pixel
SIZES = {"basic": SMALL_SIZES, "bc": SMALL_SIZES, "imagenet": [(29, 29), (61, 37)]}
CASES = [(family, size) for family in FAMILIES for size in SIZES[family]]


def _images(batch: int, size: tuple[int, int]) -> Tensor:
    return torch.randn(batch, 3, *size, dtype=torch.double)


def _valid(family, size, batch, frozen, **_):
    """A single value per channel has no variance; layers without bottlenecks have no norm2."""
    return not (batch == 1 and size in ((4, 4), (29, 29))) and not (family == "basic" and frozen == "norm2")


@pytest.mark.parametrize(
    *grid(
        _valid,
        family__size=CASES,
        batch=[1, 2, 7],
        drop_rate=[0.0, 0.3],
        frozen=[None, "norm", "norm2", "block2"],
        layout=[torch.contiguous_format, torch.channels_last],
    )
)
def test_outputs_gradients_and_buffers_match_plain(family, size, batch, drop_rate, frozen, layout):
    plain = small_model(family, efficient=False, drop_rate=drop_rate).to(memory_format=layout)
    if frozen is not None:
        freeze_norms(plain, frozen)
    efficient = with_engine(plain, "shared")
    assert_same_step(efficient, plain, _images(batch, size).to(memory_format=layout))
    assert_same_buffers(efficient, plain)


TRAINABLE = {
    "all but norms' weights": lambda name: not ("norm" in name and name.endswith("weight")),
    "all but norms' biases": lambda name: not ("norm" in name and name.endswith("bias")),
    "norms": lambda name: "norm" in name,
    "convolutions": lambda name: "conv" in name,
    "all but the classifier": lambda name: "classifier" not in name,
    "all but the last norm": lambda name: "norm5" not in name,
    "the last norm": lambda name: "norm5" in name,
    "the last block's last layer": lambda name: "block3.denselayer2" in name,
    "the classifier": lambda name: "classifier" in name,
    "transitions": lambda name: "transition" in name,
    "second layers": lambda name: "denselayer2" in name,
    "all but biases": lambda name: not name.endswith("bias"),
    "convolutions' biases": lambda name: "conv" in name and name.endswith("bias"),
    "all but convolutions' biases": lambda name: not ("conv" in name and name.endswith("bias")),
    "a transition's bias": lambda name: name.endswith("transition1.conv.bias"),
}


@pytest.mark.parametrize(
    *grid(
        lambda trainable, biases, **_: biases or "bias" not in trainable,
        family=["basic", "bc"],
        trainable=TRAINABLE,
        frozen=[None, "norm"],
        biases=[False, True],
    )
)
def test_partly_frozen_parameters(family, trainable, frozen, biases):
    plain = small_model(family, efficient=False, drop_rate=0.2)
    if biases:
        add_conv_biases(plain)
    freeze_parameters(plain, TRAINABLE[trainable])
    if frozen:
        freeze_norms(plain, frozen)
    efficient = with_engine(plain, "shared")
    for input_requires_grad in (False, True):
        grads = []
        for model in (efficient, plain):
            torch.manual_seed(3)
            x = _images(2, (9, 7)).requires_grad_(input_requires_grad)
            model(x).square().sum().backward()
            grads.append(x.grad)
        if input_requires_grad:
            assert_close(*grads)
        assert_same_gradients(efficient, plain)
    assert_same_buffers(efficient, plain)


@pytest.mark.parametrize(*grid(family=["basic", "bc"], one_trainable=[True, False], frozen=[False, True]))
def test_one_trainable_or_one_frozen_parameter(family, one_trainable, frozen):
    """With biases, whose gradients are not zero where norms are frozen."""
    plain = add_conv_biases(small_model(family, efficient=False, block_config=(2, 1)))
    if frozen:
        freeze_norms(plain)
    efficient = with_engine(plain, "shared")
    x = _images(2, (5, 6))
    for name, _ in plain.named_parameters():
        for model in (efficient, plain):
            model.zero_grad()
            for other, parameter in model.named_parameters():
                parameter.requires_grad_((other == name) is one_trainable)
            model(x).square().sum().backward()
        assert_same_gradients(efficient, plain)


@pytest.mark.parametrize("target", ["input", "features.denseblock1.denselayer2.conv1.weight", "features.norm5.bias"])
def test_gradients_of_one_tensor_only(target):
    plain = small_model("bc", efficient=False)
    x = _images(2, (9, 7)).requires_grad_()
    grads = []
    for model in (with_engine(plain, "shared"), plain):
        tensor = x if target == "input" else model.get_parameter(target)
        grads.append(torch.autograd.grad(model(x).square().sum(), tensor)[0])
        assert all(parameter.grad is None for parameter in model.parameters())
    assert_close(*grads)


def test_momentum_of_each_norm():
    plain = small_model("bc", efficient=False)
    norms = [module for module in plain.modules() if isinstance(module, nn.BatchNorm2d)]
    for i, norm in enumerate(norms):
        norm.momentum = (None, 0.0, 0.3, 1.0)[i % 4]
    efficient = with_engine(plain, "shared")
    for batch in (2, 7, 3):
        assert_same_step(efficient, plain, _images(batch, (9, 7)))
    assert_same_buffers(efficient, plain)


def test_norms_without_running_statistics():
    plain = small_model("bc", efficient=False)
    for layer in (plain.features.denseblock1.denselayer1, plain.features.denseblock2.denselayer1):
        layer.norm1 = nn.BatchNorm2d(layer.norm1.num_features, track_running_stats=False).double()
    efficient = with_engine(plain, "shared")
    assert_same_step(efficient, plain, _images(3, (9, 7)))
    assert_same_buffers(efficient, plain)


def test_gradient_accumulation_over_micro_batches_of_different_sizes():
    plain = small_model("bc", efficient=False, drop_rate=0.2)
    efficient = with_engine(plain, "shared")
    for model in (efficient, plain):
        torch.manual_seed(5)
        for batch in (4, 1, 3):
            (model(_images(batch, (9, 7))).square().sum() / 8).backward()
    assert_same_gradients(efficient, plain)
    assert_same_buffers(efficient, plain)


def test_tied_modules_and_a_model_called_twice_in_one_graph():
    plain = small_model("bc", efficient=False)
    block = plain.features.denseblock1
    block.denselayer2.norm2, block.denselayer2.conv2 = block.denselayer1.norm2, block.denselayer1.conv2
    efficient = with_engine(plain, "shared")
    x = _images(2, (9, 7))
    for model in (efficient, plain):
        output = model(x)
        model(x * output.mean() + 1).add(output).square().sum().backward()
    assert_same_gradients(efficient, plain)
    assert_same_buffers(efficient, plain)


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copy_after_a_step_matches_the_original(copier):
    model = small_model("bc", efficient="shared")
    backward(model, _images(3, (9, 7)))
    copied = copier(model)
    model.zero_grad(), copied.zero_grad()
    assert_same_step(copied, model, _images(2, (5, 6)), tolerance=0)
    assert_same_buffers(copied, model, tolerance=0)


def test_concurrent_training_steps_in_threads():
    """Each thread runs forward and backward of its own model and sizes."""
    plain_models = [small_model("bc", efficient=False) for _ in range(4)]
    models = [with_engine(plain, "shared") for plain in plain_models]
    inputs = [[_images(2 + i, (5 + i + step, 9 - i)) for step in range(8)] for i in range(4)]
    start, failures = threading.Barrier(4), []

    def train(i: int) -> None:
        try:
            start.wait()
            for x in inputs[i]:
                models[i](x).square().sum().backward()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=train, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for efficient, plain, batches in zip(models, plain_models, inputs, strict=True):
        for x in batches:
            plain(x).square().sum().backward()
        assert_same_gradients(efficient, plain)
        assert_same_buffers(efficient, plain)
