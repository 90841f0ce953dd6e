"""Print what works with this PyTorch: a line for each feature, "ok" or what happens instead."""

import copy
import platform
import warnings
from collections.abc import Callable

import torch
import torchvision
from torch import Tensor, nn

from efficient_densenet import DenseNet, make_efficient
from efficient_densenet._compilers import CHECKPOINTS_UPDATE_ONCE, READS_CONVERTED_MODULES

ENGINES = ("plain", "official", "checkpoint", "shared")
X = torch.randn(3, 3, 12, 10, dtype=torch.double)


def network(engine: str | bool) -> nn.Module:
    torch.manual_seed(0)
    return DenseNet(3, (2, 1), num_init_features=4, efficient=engine).double()


def step(model: nn.Module, run: Callable[[Tensor], Tensor] | None = None) -> list[Tensor]:
    """The results of two steps: outputs, gradients, buffers."""
    results = []
    for _ in range(2):
        results.append((model if run is None else run)(X))
        results[-1].square().sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [*results, *gradients, *model.buffers()]


def compare(actual: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def eager() -> str:
    expected = step(network("plain"))
    for engine in ENGINES:
        compare(step(network(engine)), expected)
    return "ok"


def compiled(models: list[nn.Module], plain: nn.Module, fullgraph: bool) -> str:
    """Compare compiled models with `plain`; "ok", or the most graphs of one."""
    expected, most = step(plain), 0
    for model in models:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compare(step(model, torch.compile(model, backend="aot_eager", fullgraph=fullgraph)), expected)
        most = max(most, torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return "ok" if most == 1 else f"{most} graphs"


def compiled_ours(*engines: str | bool, fullgraph: bool = True) -> str:
    outcome = compiled(list(map(network, engines)), network("plain"), fullgraph)
    recomputes = CHECKPOINTS_UPDATE_ONCE or "checkpoint" not in engines
    return outcome if recomputes else f"{outcome}, all as `plain`"


def converted() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = torchvision.models.DenseNet(3, (2, 1), 4, num_classes=3).double()
    ours = copy.deepcopy(plain)
    make_efficient(ours)
    return ours, plain


def compiled_converted(fullgraph: bool) -> str:
    ours, plain = converted()
    outcome = compiled([ours], plain, fullgraph)
    return outcome if READS_CONVERTED_MODULES else f"{outcome}, the author's forward"


def exported() -> str:
    """torch.export with its defaults, in training mode and in eval mode."""
    for model in (network(True).eval(), network(True)):
        graph = torch.export.export(model, (X,)).module()
        torch.testing.assert_close(graph(X), copy.deepcopy(model)(X))
    return "ok"


def transformed() -> str:
    """Per-sample gradients by torch.func."""
    model = network(True).eval()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x[None],)).square().sum()

    grads = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, X)
    model(X).square().sum().backward()
    compare([each.sum(0) for each in grads.values()], [parameter.grad for parameter in model.parameters()])
    return "ok"


FEATURES = {
    "eager, every engine": eager,
    "`torch.compile(fullgraph=True)`, `shared`": lambda: compiled_ours("shared"),
    "`torch.compile`, default": lambda: compiled_ours(True, fullgraph=False),
    "`torch.compile(fullgraph=True)`, other engines": lambda: compiled_ours("checkpoint", "official", "plain"),
    "`torch.compile`, other engines": lambda: compiled_ours("checkpoint", "official", "plain", fullgraph=False),
    "`torch.compile(fullgraph=True)`, converted": lambda: compiled_converted(True),
    "`torch.compile`, converted": lambda: compiled_converted(False),
    "`torch.export`, default": exported,
    "`torch.func`": transformed,
}


def main() -> None:
    print(f"PyTorch {torch.__version__}, Python {platform.python_version()}")
    for name, feature in FEATURES.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                outcome = feature()
            except Exception as exc:
                lines = [line for line in str(exc).splitlines() if line.strip()]
                outcome = f"raises {type(exc).__name__}: {lines[0] if lines else ''}"[:200]
        print(f"{name}: {outcome}", flush=True)


if __name__ == "__main__":
    main()
