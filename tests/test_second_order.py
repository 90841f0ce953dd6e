"""Uses of derivatives of gradients and of torch.func with the shared engine, with plain's numbers. `test_matches_plain`
and `test_parts` have gradient penalties of every network, `test_shared_autograd` has gradgradcheck."""

import copy
from typing import Any

import pytest
import torch
from helpers import (
    assert_all_close,
    assert_close,
    assert_same_buffers,
    assert_same_gradients,
    freeze_norms,
    freeze_parameters,
    random_images,
    small_model,
    with_engine,
)
from third_party_models import assert_same_training, build, image_batch, plain_reference
from torch import Tensor, nn

from efficient_densenet import make_efficient
from efficient_densenet.norms.sync_batch_norm import synchronize_norms


def _squares(*tensors: Tensor) -> Tensor:
    return sum(tensor.square().sum() for tensor in tensors)


def _maml(model: nn.Module) -> list[Tensor]:
    """Two inner steps with functional_call, through which the gradients of the first parameters flow."""
    x, parameters = random_images("bc", batch=3), dict(model.named_parameters())
    for _ in range(2):
        loss = _squares(torch.func.functional_call(model, parameters, (x,)))
        grads = torch.autograd.grad(loss, list(parameters.values()), create_graph=True)
        pairs = zip(parameters.items(), grads, strict=True)
        parameters = {name: value - 1e-3 * grad for (name, value), grad in pairs}
    loss = _squares(torch.func.functional_call(model, parameters, (x + 1,)))
    loss.backward()
    return [loss]


def _some_inputs(model: nn.Module) -> list[Tensor]:
    """Gradients of some inputs, with retained graphs."""
    leaf, results = random_images("bc", batch=3).requires_grad_(), []
    value, weight = _squares(model(leaf)), model.features.denseblock1.denselayer2.conv2.weight
    for inputs in ([weight], [leaf], [weight, leaf]):
        penalty = _squares(*torch.autograd.grad(value, inputs, create_graph=True))
        results += torch.autograd.grad(penalty, [leaf, weight], retain_graph=True)
        results += torch.autograd.grad(penalty, [weight], retain_graph=True)
    value.backward()
    return [*results, leaf.grad]


def _own_parameters(model: nn.Module) -> list[Tensor]:
    """An input that is computed from the block's own parameters."""
    block = model.features.denseblock1
    value = _squares(block(torch.randn(3, 4, 5, 6, dtype=torch.double) * block.denselayer1.conv1.weight.sum()))
    grads = torch.autograd.grad(value, list(block.parameters()), create_graph=True)
    _squares(*grads).backward()
    return [value]


def _trained_after_the_features(model: nn.Module) -> list[Tensor]:
    """A map that needs no gradient, before the modules that alone are trained."""
    freeze_parameters(model, lambda name: name.startswith(("features.transition1", "classifier")))
    maps = model.as_backbone((1, 2), maps="raw")(random_images("bc", batch=3))
    trained = list(model.features.transition1.parameters())
    _squares(*torch.autograd.grad(_squares(*maps), trained, create_graph=True)).backward()
    return list(maps)


@pytest.mark.parametrize("use", [_maml, _some_inputs, _own_parameters, _trained_after_the_features])
def test_uses(use):
    plain, results = small_model("bc", efficient=False), []
    ours = with_engine(plain, "shared")
    for model in (ours, plain):
        torch.manual_seed(1)
        results.append([tensor.detach() for tensor in use(model)])
    assert_all_close(*results)
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)


@pytest.mark.parametrize("name", ["gpleiss_efficient", "torchvision"])
def test_gradient_penalty_of_converted_models_and_ordinary_steps_after_it(name):
    plain = build(name)
    ours, plain = copy.deepcopy(plain), plain_reference(name, plain)
    make_efficient(ours)
    x, results = image_batch(name, batch=2), []
    for model in (ours, plain):
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        value = _squares(model(leaf))
        grads = torch.autograd.grad(value, [leaf, *model.parameters()], create_graph=True)
        (value.sin() + _squares(*grads)).backward()
        results.append(leaf.grad)
    assert_close(*results)
    assert_same_gradients(ours, plain, 1e-9)  # large terms cancel
    assert_same_buffers(ours, plain)
    assert_same_training(ours, plain, x)


@pytest.mark.parametrize("family", ["bc", "imagenet"])
def test_third_derivatives(family):
    """Norms are in eval mode: PyTorch 2.15 raises for third derivatives of batch statistics."""
    plain, x = small_model(family, efficient=False), random_images(family, batch=2)
    freeze_norms(plain)
    results = []
    for model in (with_engine(plain, "shared"), plain):
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(_squares(model(leaf)).sin(), leaf, create_graph=True)
        (grad,) = torch.autograd.grad(grad.sin().sum(), leaf, create_graph=True)
        grads = torch.autograd.grad(grad.square().sum(), [leaf, *model.parameters()], allow_unused=True)
        results.append([grad for grad in grads if grad is not None and grad.any()])
    assert results[1]
    for actual, expected in zip(*results, strict=True):
        largest = expected.abs().max()  # they are small
        assert_close(actual / largest, expected / largest)


@pytest.mark.usefixtures("process_group_of_one")
@pytest.mark.parametrize("family", ["bc", "imagenet"])
def test_synchronized_norms_raise_a_sentence(family):
    model = small_model(family, efficient="shared", block_config=(1,))
    synchronize_norms(model, None)
    x = random_images(family).requires_grad_()
    with pytest.raises(RuntimeError, match=r"found create_graph=True with synchronized norms, .*: for a loss"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


# torch.func


@pytest.mark.parametrize("transform", ["grad", "vmap of grad"])
def test_transforms_fall_back_with_one_warning_or_raise(transform):
    """Norms are in eval mode: PyTorch's `vmap` raises where one updates its statistics in place."""
    plain = small_model("bc", efficient=False).eval()
    x = random_images("bc", batch=3)

    def gradients(model: nn.Module) -> Any:
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

        def loss(parameters: dict[str, Tensor], image: Tensor) -> Tensor:
            return _squares(torch.func.functional_call(model, parameters, (image,)))

        if transform == "grad":
            return torch.func.grad(loss)(parameters, x)
        return torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x.unsqueeze(1))

    with pytest.warns(UserWarning, match="falling back.*torch.func transform") as caught:
        actual = gradients(with_engine(plain, True))
    assert len(caught) == 1
    assert_all_close(actual.values(), gradients(plain).values())
    for engine in ("official", "checkpoint", "shared"):
        with pytest.raises(RuntimeError, match=f"engine '{engine}' cannot run here.*ordinary autograd.*use another"):
            gradients(with_engine(plain, engine))


@pytest.mark.parametrize("family", ["basic", "imagenet"])
@pytest.mark.parametrize("engine", ["checkpoint", "shared"])
def test_parameters_that_functional_call_swaps_get_gradients_or_raise(engine, family):
    """They are there during the forward only."""
    plain, x, grads = small_model(family, efficient=False).eval(), random_images(family), []
    for model in (plain, with_engine(plain, engine)):
        swapped = {name: (p.detach() * 1.3).requires_grad_() for name, p in model.named_parameters()}
        loss = _squares(torch.func.functional_call(model, swapped, (x,)))
        if model is not plain and engine == "checkpoint":
            with pytest.raises(RuntimeError, match="found other parameters of a"):
                loss.backward()
            return
        loss.backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        grads.append([p.grad for p in swapped.values()])
    assert_all_close(*grads)
