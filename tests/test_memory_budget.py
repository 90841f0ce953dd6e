"""Plans for budgets of memory, beside the memory of the steps that follow them."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from efficient_densenet import DenseNet, make_efficient
from efficient_densenet.memory import largest_batch, predict, set_memory_budget, tensor_peak
from efficient_densenet.memory.budget import Planner, keep
from efficient_densenet.memory.sizes import at_least, format_bytes, parse_bytes
from efficient_densenet.memory.step import MetaModel, default_loss, dense_layers
from efficient_densenet.models.layers import DenseLayer

MIB = 2**20


def test_sizes():
    sizes = {"6GiB": 6 << 30, " 6 gib": 6 << 30, "6G": 6 << 30, "6GB": 6 * 10**9, "1.5MiB": 3 << 19, 7: 7, "7B": 7}
    assert {text: parse_bytes("budget", text) for text in sizes} == sizes
    written = {0: "0 B", 1023: "1023 B", 1024: "1.00 KiB", 3 << 19: "1.50 MiB", 123 << 30: "123 GiB"}
    assert {size: format_bytes(size) for size in written} == written
    assert (at_least(5 * MIB + 1), at_least(5 * MIB), at_least(3)) == ("6 MiB", "5 MiB", "1 KiB")
    for wrong in ("6 gigs", "", "GiB", 0, -5, "nan", None, 2.5, "3.5.1G", "-4GiB", True, f"{'9' * 400}GiB"):
        with pytest.raises(
            ValueError, match=r"^budget is .*, but must be a number above 0 with its unit, such as '6GiB'$"
        ):
            set_memory_budget(DenseNet(4, (2,)), wrong, (2, 3, 8, 8))
    with pytest.raises(ValueError, match=r"memory_budget is '8', but must be a number above 0 with its unit, .* '8GB'"):
        DenseNet(4, (2,), memory_budget="8")


class FlatLayer(nn.Sequential):
    """A dense layer in a flat network, where layers in a row run as one block."""

    def __init__(self, channels: int) -> None:
        norms = nn.BatchNorm2d(channels), nn.BatchNorm2d(48)
        convs = nn.Conv2d(channels, 48, 1, bias=False), nn.Conv2d(48, 12, 3, padding=1, bias=False)
        super().__init__(norms[0], nn.ReLU(), convs[0], norms[1], nn.ReLU(), convs[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, super().forward(x)], 1)


def _flat() -> nn.Module:
    layers = [FlatLayer(80 + 12 * i) for i in range(4)]
    model = nn.Sequential(nn.Conv2d(3, 80, 3, padding=1), *layers, nn.BatchNorm2d(128), nn.ReLU())
    make_efficient(model)
    return model


class Twice(nn.Module):
    """A network whose blocks run twice in a step, which save more than their part of the model shows."""

    def __init__(self) -> None:
        super().__init__()
        self.net = DenseNet(12, (6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) + self.net(x.flip(3))


MODELS = {
    "bc": (partial(DenseNet, 12, (6, 6, 6)), (16, 3, 32, 32)),
    "flat": (_flat, (8, 3, 32, 32)),
    "twice": (Twice, (8, 3, 32, 32)),
}


def _measured_peak(model: nn.Module, shape: tuple[int, ...]) -> int:
    x = torch.randn(shape)

    def step() -> None:
        default_loss(model(x)).backward()

    step()
    return tensor_peak(step)


@pytest.mark.parametrize(
    "name", ["bc", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MODELS if name != "bc")]
)
def test_budgets_are_kept(name):
    make, shape = MODELS[name]
    model = make()
    planner = Planner(MetaModel(model), shape)
    held = planner.traced.persistent.total + planner.traced.input_bytes(shape)
    largest = planner.plan(1 << 40).total
    budgets = [round(planner.smallest + share * (largest - planner.smallest)) for share in (0, 0.3, 0.6)]
    plans = [planner.plan(budget) for budget in [*budgets, 2 * largest]]
    for plan in plans:
        keep(model, plan.kept)
        measured = held + _measured_peak(model, shape)
        assert measured <= plan.total <= plan.budget
        assert plan.total == pytest.approx(measured, rel=0.02)
    for smaller, larger in pairwise(plans):
        assert larger.recomputed <= smaller.recomputed
        assert all(set(layers) <= set(larger.kept[block]) for block, layers in smaller.kept.items())
    assert plans[0].kept or name != "bc"  # what costs nothing, where there are several stages
    assert plans[-1].recomputed == 0
    assert sum(map(len, plans[-1].kept.values())) == plans[-1].num_layers > 0


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_predicted_is_the_smallest_budget(device):
    """One number for `predict`, `set_memory_budget` and `largest_batch`."""
    model, shape = DenseNet(12, (3, 3)), (16, 3, 32, 32)
    total = predict(model, shape, optimizer="sgd", device=device).total
    assert set_memory_budget(model, total, shape, optimizer="sgd", device=device).budget == total
    with pytest.raises(ValueError, match="found a memory budget of"):
        set_memory_budget(model, total - 1, shape, optimizer="sgd", device=device)
    keep(model, {})
    sizes = [largest_batch(model, 32, each, optimizer="sgd", device=device) for each in (total - 1, total)]
    assert sizes == [15, 16]


def test_the_largest_batch_has_the_channels_that_the_forward_takes():
    """Not those of the convolution that is registered first."""

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.of_volumes, self.head = nn.Conv3d(1, 2, 1), nn.Conv2d(12, 5, 1)
            self.stem = nn.Conv2d(4, 12, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.stem(x))

    model, budget = Network(), 100 * MIB
    found = largest_batch(model, (32, 16), budget)
    assert predict(model, (found, 4, 32, 16)).total <= budget < predict(model, (found + 1, 4, 32, 16)).total
    with pytest.raises(ValueError, match=r"here 1×1×1×1×1 \(.*\), so the memory of a step is not known"):
        largest_batch(model, 1, budget)


def _converted() -> nn.Module:
    import torchvision

    model = torchvision.models.DenseNet(24, (3, 3), 24)
    make_efficient(model)
    return model


@pytest.mark.parametrize("make", [partial(DenseNet, 24, (3, 3)), _converted])
def test_a_budget_changes_no_number_and_no_name(make):
    torch.manual_seed(0)
    model, x = make().double(), torch.randn(4, 3, 32, 32).double()
    keys = list(model.state_dict())
    model(x).sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    plan = set_memory_budget(model, "1GiB", x.shape)
    # The first block's layers read 24, 48 and 72 channels: it is faster to recompute than to save a product of few.
    assert plan.kept == {"features.denseblock1": (2,), "features.denseblock2": (1, 2)}
    kept = [layer.keep_bottleneck for _, _, layer in dense_layers(model)]
    assert kept == [False, False, True, False, True, True]
    model(x).sum().backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-10, atol=1e-12)
    assert list(model.state_dict()) == keys


def test_a_model_with_a_budget_plans_when_it_first_trains():
    model = DenseNet(12, (4, 4), memory_budget="40MiB")
    assert model.memory_budget is not None
    assert model.memory_budget.plan is None
    with torch.no_grad():
        model(torch.randn(8, 3, 32, 32))
    assert model.memory_budget.plan is None
    model(torch.randn(16, 3, 32, 32)).sum().backward()
    first = model.memory_budget.plan
    assert first is not None
    assert first.total <= 40 * MIB
    model(torch.randn(8, 3, 32, 32))
    assert model.memory_budget.plan is first  # good for a smaller batch
    with pytest.raises(
        ValueError, match=r"found a memory budget of 40\.0 MiB, but a step of 256 images of 3×32×32 needs"
    ):
        model(torch.randn(256, 3, 32, 32))
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(16, 3, 32, 32))
    second = model.memory_budget.plan
    assert second is not None
    assert second.recomputed <= first.recomputed
    assert second.total < first.total


def test_a_plan_is_for_what_is_trained_and_how():
    x = torch.randn(16, 3, 32, 32)
    plain = predict(DenseNet(12, (4, 4), efficient="plain"), x.shape, device="cpu").total
    model = DenseNet(12, (4, 4), memory_budget=plain - MIB)
    budget = model.memory_budget
    assert budget is not None
    model.features.requires_grad_(False)
    plans = []
    for change in (lambda: None, lambda: model.requires_grad_(True), lambda: model.features.eval()):
        change()
        model(x).sum().backward()
        assert budget.plan not in plans
        plans.append(budget.plan)
    with pytest.raises(ValueError, match="found a memory budget of"):
        model.set_engine("plain")(x)


def test_a_budget_where_a_forward_is_not_a_training_step():
    x = torch.randn(2, 3, 8, 8)
    for run in (
        lambda model: model.requires_grad_(False)(x),
        lambda model: model.eval()(x),
        lambda model: torch.compile(model, backend="eager")(x),
    ):
        model = DenseNet(4, (2, 2), memory_budget="1GiB")
        run(model)
        assert model.memory_budget is not None
        assert model.memory_budget.plan is None
    model = DenseNet(4, (2, 2), memory_budget="1GiB")
    torch_checkpoint(model, x, use_reentrant=False).sum().backward()
    model = DenseNet(4, (2, 2), memory_budget="1GiB")
    with torch.autograd.graph.save_on_cpu():
        model(x).sum().backward()


@pytest.mark.parametrize("precision", [None, pytest.param("bf16", marks=pytest.mark.exhaustive)])
def test_an_impossible_budget_says_what_is_possible(precision):
    model, shape = DenseNet(12, (4, 4)), (64, 3, 32, 32)
    smallest = Planner(MetaModel(model, precision=precision), shape).smallest
    with pytest.raises(ValueError, match="found a memory budget of") as caught:
        set_memory_budget(model, int(0.7 * smallest), shape, precision=precision)
    message = str(caught.value)
    assert all(layer.keep_bottleneck is None for layer in model.modules() if isinstance(layer, DenseLayer))
    assert ("precision='bf16'" in message) == (precision is None)
    needed = message.partition("give at least ")[2].partition(",")[0]
    assert set_memory_budget(model, needed, shape, precision=precision).total <= parse_bytes("needed", needed)
    images = int(message.partition("or at most ")[2].split()[0])
    set_memory_budget(model, int(0.7 * smallest), (images, 3, 32, 32), precision=precision)
    with pytest.raises(ValueError, match="found a memory budget of"):
        set_memory_budget(model, int(0.7 * smallest), (images + 1, 3, 32, 32), precision=precision)
    with pytest.raises(ValueError, match=r"give at least \d+ MiB(, or try precision='bf16')?$"):
        set_memory_budget(model, "1MiB", shape)


def test_mistakes_about_the_largest_batch_are_one_sentence():
    model = DenseNet(4, (2, 2))
    for image_size in ("16", 16.0, (16, 16, 16), 0, (16, -1)):
        with pytest.raises(ValueError, match=r"image_size is .*, but must be a whole number of at least 1, or 2 of"):
            largest_batch(model, image_size, "1GiB")
    for image_size in (32, 2):  # at 2 the last norm sees a single value of one image
        with pytest.raises(ValueError, match=r"but a step of one image needs \d+ .iB: give at least that much"):
            largest_batch(model, image_size, "1KiB")
