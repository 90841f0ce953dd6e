"""Derivatives of gradients: create_graph=True with the shared engine gives plain's numbers."""

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from grids import grid
from helpers import (
    FAMILIES,
    add_conv_biases,
    assert_all_close,
    assert_close,
    assert_same_buffers,
    assert_same_gradients,
    freeze_norms,
    freeze_parameters,
    live_tensors,
    random_images,
    small_model,
    with_engine,
)
from third_party_models import assert_same_training, build, image_batch, plain_reference
from torch import Tensor, nn

from efficient_densenet import FCDenseNet, features, make_efficient
from efficient_densenet.engine import choose
from efficient_densenet.engine.parts import consumer_parts, parts_of
from efficient_densenet.engine.stage.run import StagePlan
from efficient_densenet.engine.stem import Stem, StemPlan
from efficient_densenet.norms.sync_batch_norm import synchronize_norms


def _sum_of_squares(outputs: Tensor | tuple[Tensor, ...]) -> Tensor:
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    return sum(output.square().sum() for output in outputs)


def _penalized(model: nn.Module, x: Tensor, seed: int = 1) -> list[Tensor]:
    """The loss, which contains outputs and the gradients of the input and of all parameters, and the input's gradient;
    the parameters' gradients stay on the model."""
    torch.manual_seed(seed)
    model.zero_grad()
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    value = _sum_of_squares(model(x))
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    grads = torch.autograd.grad(value, [x, *trainable], create_graph=True, allow_unused=True)
    loss = value.sin() + sum(grad.square().sum() for grad in grads if grad is not None)
    loss.backward()
    return [loss.detach(), x.grad]


def _assert_same_penalty(ours: nn.Module, plain: nn.Module, x: Tensor) -> None:
    assert_all_close(_penalized(ours, x), _penalized(plain, x))
    assert_same_gradients(ours, plain, 1e-9)  # large terms cancel
    assert_same_buffers(ours, plain)


@pytest.mark.parametrize(
    *grid(
        lambda family, frozen, **_: not (family == "basic" and frozen == "norm2"),
        family=FAMILIES,
        frozen=[None, "", "norm2"],
        drop_rate=[0.0, 0.3],
        biases=[False, True],
        keep_bottleneck=[False, True],
    )
)
def test_gradient_penalty(family, frozen, drop_rate, biases, keep_bottleneck):
    plain = small_model(family, efficient=False, drop_rate=drop_rate, keep_bottleneck=keep_bottleneck)
    if biases:
        add_conv_biases(plain)
    if frozen is not None:
        freeze_norms(plain, frozen)
    _assert_same_penalty(with_engine(plain, "shared"), plain, random_images(family, batch=3))


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "backbone": lambda: features(small_model("bc", efficient=False), maps="normalised_rectified"),
    "U-Net": lambda: FCDenseNet(3, (2, 1, 2), num_init_features=4, num_classes=2, efficient=False).double(),
    "channels_last": lambda: small_model("bc", efficient=False).to(memory_format=torch.channels_last),
    "signals": lambda: small_model("imagenet", efficient=False, dims=1, block_config=(2, 1)),
    "volumes": lambda: small_model("bc", efficient=False, dims=3, block_config=(2, 1)),
}


@pytest.mark.parametrize("case", OTHERS)
def test_gradient_penalty_of_other_networks(case):
    plain = OTHERS[case]()
    x = random_images("bc", batch=3)
    if case in ("signals", "volumes"):
        x = torch.randn(3, 3, *((33,) if case == "signals" else (5, 6, 4)), dtype=torch.double)
    if case == "channels_last":
        x = x.to(memory_format=torch.channels_last)
    _assert_same_penalty(with_engine(plain, "shared"), plain, x)


@pytest.mark.parametrize("trainable", ["norm", "conv1", "denseblock2.denselayer1", "classifier"])
def test_gradient_penalty_of_some_parameters(trainable):
    plain = small_model("imagenet", efficient=False)
    freeze_parameters(plain, lambda name: trainable in name)
    _assert_same_penalty(with_engine(plain, "shared"), plain, random_images("imagenet", batch=3))


@pytest.mark.parametrize("name", ["kuangliu", "gpleiss_efficient", "torchvision", "tiramisu"])
def test_gradient_penalty_of_converted_models(name):
    plain = build(name)
    ours, plain = copy.deepcopy(plain), plain_reference(name, plain)
    make_efficient(ours)
    _assert_same_penalty(ours, plain, image_batch(name, batch=2))


@pytest.mark.parametrize("family", ["bc", "imagenet"])
def test_third_derivatives(family):
    """With norms in eval mode: PyTorch 2.15 has none of batch statistics, and says so."""
    plain, x = small_model(family, efficient=False), random_images(family, batch=2)
    freeze_norms(plain)
    ours, results = with_engine(plain, "shared"), []
    for model in (ours, plain):
        results += _third_derivatives(model, x)
    half = len(results) // 2
    for actual, expected in zip(results[:half], results[half:], strict=True):
        largest = expected.abs().max()  # they are small
        assert largest > 0
        assert_close(actual / largest, expected / largest)


def _third_derivatives(model: nn.Module, x: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(_sum_of_squares(model(leaf)).sin(), leaf, create_graph=True)
    (grad,) = torch.autograd.grad(grad.sin().sum(), leaf, create_graph=True)
    grads = torch.autograd.grad(grad.square().sum(), [leaf, *model.parameters()], allow_unused=True)
    return [grad for grad in grads if grad is not None and grad.any()]


# Tiny stages and the stem


@pytest.mark.parametrize(
    *grid(
        lambda consumer, return_features, **_: not (return_features and consumer is None),
        consumer=[None, "transition1"],
        return_features=[False, True],
        newest_first=[False, True],
        bn_size=[0, 1],
        frozen=[False, True],
    )
)
def test_gradgradcheck_of_a_stage(consumer, return_features, newest_first, bn_size, frozen):
    settings = {"growth_rate": 1, "num_init_features": 2, "block_config": (2, 1), "bn_size": bn_size}
    model = small_model("bc", **settings).train(not frozen).features
    block = replace(parts_of(model.denseblock1), newest_first=newest_first, new_features_only=consumer is None)
    x = torch.randn(2, 2, 2, 3, dtype=torch.double, requires_grad=True)
    after = None if consumer is None else consumer_parts(model.get_submodule(consumer))
    stage = StagePlan(block, after, x, return_features)
    tensors = [tensor for tensor in stage.tensors if tensor is not None]

    def apply(x: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        given = iter(values)
        return stage.apply(x, *(None if tensor is None else next(given) for tensor in stage.tensors))

    assert torch.autograd.gradgradcheck(apply, (x, *tensors))


@pytest.mark.parametrize("frozen", [False, True])
def test_gradgradcheck_of_the_stem(frozen):
    model = small_model("imagenet", block_config=(1,), num_init_features=2).train(not frozen)
    stem = Stem(*model.features[:4])
    x = torch.randn(2, 3, 5, 6, dtype=torch.double, requires_grad=True)
    plan = StemPlan(stem, x)
    tensors = [stem.norm.weight, stem.norm.bias, stem.conv.weight]
    assert torch.autograd.gradgradcheck(lambda x, *parameters: plan.apply(x, *parameters, None), (x, *tensors))


# Uses


def test_wgan_gp_step():
    """The critic's loss on real, generated and interpolated images, for two steps of an optimizer."""
    plain = small_model("bc", efficient=False, num_classes=1)
    ours = with_engine(plain, "shared")
    real, generated = random_images("bc", batch=4), random_images("bc", batch=4)
    for model in (ours, plain):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for step in range(2):
            optimizer.zero_grad()
            weight = torch.linspace(0, 1, 4, dtype=torch.double).view(-1, 1, 1, 1) + step
            between = torch.lerp(real, generated, weight).requires_grad_()
            (grad,) = torch.autograd.grad(model(between).sum(), between, create_graph=True)
            penalty = (grad.flatten(1).norm(dim=1) - 1).square().mean()
            (model(generated).mean() - model(real).mean() + 10 * penalty).backward()
            optimizer.step()
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)
    assert ours.features.norm5.num_batches_tracked == 6


def test_maml_s_inner_steps():
    """Two steps with functional_call, through which the gradients of the first parameters flow."""
    plain, x = small_model("bc", efficient=False), random_images("bc", batch=3)
    ours = with_engine(plain, "shared")
    for model in (ours, plain):
        parameters = dict(model.named_parameters())
        for _ in range(2):
            loss = _sum_of_squares(torch.func.functional_call(model, parameters, (x,)))
            grads = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
            parameters = {
                name: value - 1e-3 * grad for (name, value), grad in zip(parameters.items(), grads, strict=True)
            }
        _sum_of_squares(torch.func.functional_call(model, parameters, (x + 1,))).backward()
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)


def test_gradients_of_some_inputs_and_retained_graphs():
    plain, x = small_model("bc", efficient=False), random_images("bc", batch=3)
    ours, results = with_engine(plain, "shared"), []
    for model in (ours, plain):
        leaf = x.clone().requires_grad_()
        value = _sum_of_squares(model(leaf))
        weight = model.features.denseblock1.denselayer2.conv2.weight
        for inputs in ([weight], [leaf], [weight, leaf]):
            grads = torch.autograd.grad(value, inputs, create_graph=True)
            penalty = sum(grad.square().sum() for grad in grads)
            results += torch.autograd.grad(penalty, [leaf, weight], retain_graph=True)
            results += torch.autograd.grad(penalty, [weight], retain_graph=True)
        value.backward()
        results.append(leaf.grad)
    half = len(results) // 2
    assert_all_close(results[:half], results[half:])
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)


def test_two_gradients_of_one_forward_in_one_loss():
    plain, x = small_model("bc", efficient=False), random_images("bc", batch=3)
    ours, results = with_engine(plain, "shared"), []
    for model in (ours, plain):
        leaf = x.clone().requires_grad_()
        output, penalty = model(leaf), torch.zeros((), dtype=torch.double)
        for power in (2, 3):
            (grad,) = torch.autograd.grad(output.pow(power).sum(), leaf, create_graph=True)
            penalty = penalty + grad.square().sum()
        penalty.backward()
        results.append(leaf.grad)
    assert_close(*results)
    assert_same_gradients(ours, plain)


def test_an_input_computed_from_the_block_s_own_parameters():
    plain, x = small_model("bc", efficient=False), torch.randn(3, 4, 5, 6, dtype=torch.double)
    ours = with_engine(plain, "shared")
    for model in (ours, plain):
        block = model.features.denseblock1
        value = _sum_of_squares(block(x * block.denselayer1.conv1.weight.sum()))
        grads = torch.autograd.grad(value, list(block.parameters()), create_graph=True)
        sum(grad.square().sum() for grad in grads).backward()
    assert_same_gradients(ours.features.denseblock1, plain.features.denseblock1)


def test_nothing_outlives_a_gradient_penalty():
    model = small_model("bc", efficient="shared")
    x = random_images("bc").requires_grad_()
    gc.collect()
    gc.disable()
    try:
        loss = _sum_of_squares(model(x))
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        nodes = [weakref.ref(tensor) for tensor in (loss, grad)]
        grad.square().sum().backward()
        before = live_tensors()
        del loss, grad
        assert all(node() is None for node in nodes)
        x.grad = None
        model.zero_grad()
        _penalized(model, x.detach())
        model.zero_grad()
        _penalized(model, x.detach())
        model.zero_grad()
        assert live_tensors() < before
    finally:
        gc.enable()


def test_buffers_are_updated_by_the_forward_alone():
    model = small_model("imagenet", efficient="shared")
    _penalized(model, random_images("imagenet", batch=2))
    counts = {int(buffer) for name, buffer in model.named_buffers() if name.endswith("num_batches_tracked")}
    assert counts == {1}


# What is refused, and torch.func


@pytest.mark.usefixtures("process_group_of_one")
@pytest.mark.parametrize("family", ["bc", "imagenet"])
def test_synchronized_norms_raise_a_sentence(family):
    model = small_model(family, efficient="shared", block_config=(1,))
    synchronize_norms(model, None)
    x = random_images(family).requires_grad_()
    with pytest.raises(RuntimeError, match=r"found create_graph=True with synchronized norms, .*: for a loss"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_an_earlier_gradient_and_penalty_leave_a_converted_model_training_alike():
    plain = build("kuangliu")
    ours = copy.deepcopy(plain)
    make_efficient(ours)
    x = image_batch("kuangliu", batch=2)
    _assert_same_penalty(ours, plain, x)
    assert_same_training(ours, plain, x)


def _quietly(run: Callable[[], Any]) -> tuple[Any, list[str]]:
    """The result, and the messages of the fallbacks."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = run()
    return result, [str(warning.message) for warning in caught if "falling back" in str(warning.message)]


@pytest.mark.parametrize("transform", ["grad", "vmap of grad"])
def test_torch_func_falls_back_with_one_warning(transform, monkeypatch):
    """With norms in eval mode: `vmap` of one that updates its statistics in place is PyTorch's error."""
    monkeypatch.setattr(choose, "_warned", set())
    plain = small_model("bc", efficient=False).eval()
    ours, x = with_engine(plain, True), random_images("bc", batch=3)

    def gradients(model: nn.Module) -> Any:
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

        def loss(parameters: dict[str, Tensor], image: Tensor) -> Tensor:
            return _sum_of_squares(torch.func.functional_call(model, parameters, (image,)))

        if transform == "grad":
            return torch.func.grad(loss)(parameters, x)
        return torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x.unsqueeze(1))

    actual, messages = _quietly(lambda: gradients(ours))
    expected, none = _quietly(lambda: gradients(plain))
    assert len(messages) == 1
    assert none == []
    for name, grad in actual.items():
        assert_close(grad, expected[name])


@pytest.mark.filterwarnings("ignore:.*falling back.*")
@pytest.mark.parametrize("engine", [False, True])
@pytest.mark.parametrize("family", ["bc", "imagenet"])
def test_vmap_over_the_parameters_of_an_ensemble(family, engine):
    models, x = [small_model(family, efficient=engine).eval() for _ in range(2)], random_images(family)
    state = torch.func.stack_module_state(models)
    outputs = torch.func.vmap(lambda *state: torch.func.functional_call(models[0], state, (x,)))(*state)
    for output, model in zip(outputs, models, strict=True):
        assert_close(output, model(x))


def test_functional_call_runs_the_shared_engine():
    model, x = small_model("bc", efficient="shared"), random_images("bc")
    swapped = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    output = torch.func.functional_call(model, swapped, (x,))
    _sum_of_squares(output).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    expected = with_engine(model, "plain")
    _sum_of_squares(expected(x)).backward()
    for name, parameter in expected.named_parameters():
        assert_close(swapped[name].grad, parameter.grad)
