"""Parameters that a module swaps while it runs get plain's gradients wherever something is recomputed."""

import pytest
import torch
from checkpoint_outcomes import assert_same_tensors, tensor
from helpers import small_model
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm, weight_norm

ENGINES = ("official", "checkpoint", True)
ignore_fallback = pytest.mark.filterwarnings("ignore:falling back:UserWarning", "ignore::FutureWarning")


def _scaled_while_it_runs(conv: nn.Module) -> None:
    """Hooks as in libraries that run with a quantized or gathered copy of a weight and keep the original."""

    def before(conv, args):
        conv.original = conv._parameters.pop("weight")
        conv.weight = conv.original * 0.5

    def after(conv, args, output):
        del conv.weight
        conv.register_parameter("weight", conv.original)
        del conv.original

    conv.register_forward_pre_hook(before)
    conv.register_forward_hook(after)


def _train(change, engine: bool | str) -> list[Tensor]:
    """Losses and gradients of three steps."""
    torch.manual_seed(0)
    model = small_model("bc", efficient=engine)
    for module in [*model.features.denseblock1.modules()]:
        if isinstance(module, nn.Conv2d):
            change(module)
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    results = []
    for _ in range(3):
        loss = model(tensor(2, 3, 9, 7)).square().sum()
        loss.backward()
        results += [loss.detach(), *(parameter.grad.clone() for parameter in parameters)]
        optimizer.step()
        optimizer.zero_grad()
    return results


@ignore_fallback
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("change", [_scaled_while_it_runs, weight_norm])
def test_weights_that_hooks_swap_train_as_in_plain(change, engine):
    assert_same_tensors(_train(change, engine), _train(change, False))


@ignore_fallback
def test_no_plan_runs_a_parametrization():
    """A spectral norm's vectors change each time that the weight is read in training."""
    states = []
    for engine in (True, False):
        torch.manual_seed(0)
        model = small_model("bc", efficient=engine)
        parametrizations.spectral_norm(model.features.transition1.conv)
        for _ in range(3):
            model(tensor(2, 3, 9, 7)).square().sum().backward()
        states.append([*model.buffers(), *(parameter.grad for parameter in model.parameters())])
    assert_same_tensors(*states)


@ignore_fallback
def test_a_spectral_norm_whose_hook_changes_its_state_is_not_recomputed():
    assert_same_tensors(_train(spectral_norm, True), _train(spectral_norm, False))
    for engine in ("official", "checkpoint"):
        with pytest.raises(RuntimeError, match="found a spectral_norm of a Conv2d that changes its own state"):
            _train(spectral_norm, engine)
