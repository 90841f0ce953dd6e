"""The memory of a step as it is predicted from sizes, beside the memory of the step itself."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from efficient_densenet import DenseNet, create_model, densenet121, fc_densenet56, kernels, make_efficient
from efficient_densenet._tensors import device_type, meta_stands_for
from efficient_densenet.engine import choose
from efficient_densenet.memory import __main__ as command
from efficient_densenet.memory import predict, tensor_peak
from efficient_densenet.memory.optimizer_state import OPTIMIZERS
from efficient_densenet.memory.step import MetaModel, autocast_dtype, default_loss

MIB = 2**20
ENGINES = ("plain", "checkpoint", "shared")


class Setting(NamedTuple):
    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    precision: str | None = None


def _keep(model: nn.Module, every: int = 1) -> nn.Module:
    for _, block in choose.engine_blocks(model):
        block.keep_bottlenecks(range(0, 64, every))
    return model


def _frozen(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    return model


def _converted(model: nn.Module, engine: bool | str = True) -> nn.Module:
    make_efficient(model, engine)
    return model


def _torchvision(engine: bool | str) -> nn.Module:
    import torchvision

    return _converted(torchvision.models.densenet121(), engine)


def _libraries(engine: str) -> Iterator[Setting]:
    """Those that are installed."""
    yield Setting(f"torchvision {engine}", partial(_torchvision, engine), (4, 3, 128, 128))
    yield Setting(f"torchvision frozen {engine}", lambda: _frozen(_torchvision(engine)), (4, 3, 128, 128))
    with contextlib.suppress(ImportError):
        import timm

        make: Any = partial(timm.create_model, "densenet121")
        yield Setting(f"timm {engine}", lambda: _converted(make(), engine), (4, 3, 128, 128))
    with contextlib.suppress(ImportError):
        from monai.networks.nets import DenseNet121

        volume: Any = partial(DenseNet121, spatial_dims=3, in_channels=1, out_channels=2)
        yield Setting(f"monai 3d {engine}", lambda: _converted(volume(), engine), (2, 1, 48, 48, 48))


def _by_engine(engine: str) -> Iterator[Setting]:
    cifar = partial(DenseNet, 12, (8, 8, 8), efficient=engine)
    yield Setting(f"fp16 {engine}", cifar, (16, 3, 32, 32), "fp16")
    for precision in (None, "bf16"):
        of = f"{engine} {precision}"
        yield Setting(f"bc {of}", cifar, (32, 3, 32, 32), precision)
        yield Setting(f"odd sizes {of}", partial(DenseNet, 24, (4, 5, 3), efficient=engine), (7, 3, 41, 39), precision)
        yield Setting(f"densenet121 {of}", partial(densenet121, efficient=engine), (2, 3, 160, 160), precision)
        yield Setting(f"no bottleneck {of}", partial(cifar, bn_size=0), (32, 3, 32, 32), precision)
        yield Setting(f"dropout {of}", partial(cifar, drop_rate=0.2), (16, 3, 32, 32), precision)
        small: Any = partial(DenseNet, 16, (4, 4, 4), efficient=engine)
        yield Setting(f"volumes {of}", partial(small, dims=3), (3, 3, 24, 24, 24), precision)
        yield Setting(f"signals {of}", partial(small, dims=1), (64, 3, 512), precision)
        yield Setting(f"labels of pixels {of}", partial(fc_densenet56, efficient=engine), (2, 3, 96, 96), precision)
        frozen: Any = partial(densenet121, efficient=engine)
        yield Setting(f"frozen {of}", lambda frozen=frozen: _frozen(frozen()), (4, 3, 128, 128), precision)
    channels_last: Any = partial(densenet121, efficient=engine)
    yield Setting(
        f"channels_last {engine}",
        lambda: channels_last().to(memory_format=torch.channels_last),
        (4, 3, 128, 128),
    )
    yield Setting(f"float64 {engine}", lambda: DenseNet(12, (4, 4, 4), efficient=engine).double(), (8, 3, 32, 32))
    stem: Any = partial(DenseNet, 16, (4, 4), dims=3, small_inputs=False, num_init_features=32)
    yield Setting(f"volumes with a stem {engine}", partial(stem, efficient=engine), (2, 3, 64, 64, 64))
    yield from _libraries(engine)


def _of_the_shared_engine() -> Iterator[Setting]:
    for precision in (None, "bf16"):
        yield Setting(f"kept {precision}", lambda: _keep(densenet121()), (4, 3, 128, 128), precision)
        yield Setting(f"every third kept {precision}", lambda: _keep(densenet121(), 3), (4, 3, 128, 128), precision)
        yield Setting(f"every second kept {precision}", lambda: _keep(DenseNet(), 2), (8, 3, 32, 32), precision)
    yield Setting("torchvision, every second kept", lambda: _keep(_torchvision(True), 2), (4, 3, 128, 128))
    yield Setting("torchvision bf16", partial(_torchvision, True), (4, 3, 128, 128), "bf16")
    yield Setting("feature maps", partial(DenseNet, 12, (6, 6, 6), features_only=True), (16, 3, 32, 32))
    yield Setting("dilated", partial(densenet121, output_stride=8), (2, 3, 128, 128))


SETTINGS = [setting for engine in ENGINES for setting in _by_engine(engine)] + [*_of_the_shared_engine()]
FIRST_TIER = {f"bc {engine} None" for engine in ENGINES} | {
    *("dropout shared bf16", "volumes shared None", "every third kept None", "feature maps"),
    *("channels_last shared", "labels of pixels shared bf16"),
}

LESS_EXACT = {"labels of pixels checkpoint bf16", "labels of pixels plain bf16"}


def _measured(setting: Setting, model: nn.Module) -> int:
    x, dtype = torch.randn(setting.shape).to(next(model.parameters()).dtype), autocast_dtype(setting.precision)

    def step() -> None:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = default_loss(model(x))
        loss.backward()

    step()
    return tensor_peak(step)


def _ratio(setting: Setting) -> float:
    model = setting.make()
    return MetaModel(model, precision=setting.precision).training_step(setting.shape).tensor_peak / _measured(
        setting, model
    )


@pytest.mark.parametrize("setting", [each for each in SETTINGS if each.name in FIRST_TIER], ids=lambda each: each.name)
def test_a_step_takes_what_was_predicted(setting):
    assert _ratio(setting) == pytest.approx(1, abs=0.01)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:falling back")
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda each: each.name)
def test_every_setting_is_predicted_to_three_percent(setting):
    """oneDNN decides by sizes what it reorders in bfloat16; of `shared` only the stem and the classifier use it."""
    tolerance = 0.01 if "plain" not in setting.name and "checkpoint" not in setting.name else 0.03
    assert _ratio(setting) == pytest.approx(1, abs=0.05 if setting.name in LESS_EXACT else tolerance)


def test_there_are_sixty_settings():
    names = {setting.name for setting in SETTINGS}
    assert len(SETTINGS) == len(names)
    assert names >= LESS_EXACT | FIRST_TIER
    assert len(names - LESS_EXACT) >= 60


def test_an_estimate_in_parts():
    model = DenseNet(12, (4, 4), num_classes=7)
    estimate = predict(model, (8, 3, 32, 32), optimizer="adam", device="cpu")
    parameters = 4 * sum(p.numel() for p in model.parameters())
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    held = estimate.persistent
    assert (held.parameters, held.buffers, held.gradients) == (parameters, buffers, parameters)
    assert held.optimizer_state == 2 * parameters  # the count of steps is on the CPU
    assert estimate.inputs == 4 * 8 * 3 * 32 * 32
    assert estimate.total == held.total + estimate.inputs + estimate.tensor_peak
    assert estimate.step.features + estimate.step.scratch == estimate.tensor_peak
    assert sum(stage.saved for stage in estimate.step.stages) == estimate.step.features
    assert max(stage.peak for stage in estimate.step.stages) == estimate.tensor_peak
    assert [stage.name for stage in estimate.step.stages] == [
        "features.conv0",
        "features.denseblock1 + transition1",
        "features.denseblock2 + norm5",
        "classifier",
    ]
    assert estimate.engine == "best"
    assert list(estimate.by_engine) == list(ENGINES)
    assert estimate.by_engine["shared"] == estimate.step
    assert estimate.by_engine["shared"].tensor_peak < estimate.by_engine["checkpoint"].tensor_peak
    assert estimate.inference < estimate.tensor_peak
    text = str(estimate)
    assert "training on 8×3×32×32, on cpu, engine best" in text
    assert "tensor peak by engine plain" in text


def test_inference_takes_what_was_predicted():
    model, x = DenseNet(12, (8, 8, 8)).eval(), torch.randn(16, 3, 32, 32)

    def forward() -> None:
        with torch.no_grad():
            model(x)

    forward()
    assert MetaModel(model).inference(x.shape) == pytest.approx(tensor_peak(forward), rel=0.01)


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "rmsprop"])
def test_the_state_of_an_optimizer(name):
    """By its name, by a function, and by an optimizer that trains already, whose state is not touched."""
    model = DenseNet(4, (2,))
    real = OPTIMIZERS[name](model.parameters())
    F.cross_entropy(model(torch.randn(2, 3, 8, 8)), torch.zeros(2, dtype=torch.long)).backward()
    real.step()
    state = [value.clone() for each in real.state.values() for value in each.values() if value is not None]
    expected = sum(value.nbytes for value in state if value.dim())
    for optimizer in (name, OPTIMIZERS[name], real):
        assert MetaModel(model, optimizer=optimizer).persistent.optimizer_state == expected
    after = [value for each in real.state.values() for value in each.values() if value is not None]
    assert all(map(torch.equal, after, state))
    assert MetaModel(model).persistent.optimizer_state == 0


def test_optimizers_whose_state_is_not_known():
    model = DenseNet(4, (2,))
    with pytest.raises(ValueError, match="found a LBFGS, whose state is not known before its first step"):
        MetaModel(model, optimizer=torch.optim.LBFGS)
    with pytest.raises(ValueError, match="found a SGD that trains no parameter of this model"):
        MetaModel(model, optimizer=torch.optim.SGD(DenseNet(4, (2,)).parameters(), lr=0.1))
    fused = torch.optim.Adam(model.parameters(), fused=True)
    assert MetaModel(model, optimizer=fused).persistent.optimizer_state == 8 * sum(
        p.numel() for p in model.parameters()
    )


def test_the_contexts_of_the_caller_do_nothing():
    model, shape = DenseNet(4, (2, 2)), (2, 3, 8, 8)
    expected = MetaModel(model).training_step(shape).tensor_peak

    def fail(tensor: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a hook of saved tensors was called")

    for context in (
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(fail, fail),
        meta_stands_for("cuda"),
    ):
        with context:
            assert MetaModel(model).training_step(shape).tensor_peak == expected


def test_a_forward_of_a_module_s_own_is_not_that_of_the_copy():
    """It is bound to the original, whose tensors have data."""
    model = DenseNet(4, (2, 2))
    expected, forward = predict(model, (2, 3, 8, 8), device="cpu"), model.forward
    model.forward = lambda x: forward(x)  # pyright: ignore[reportAttributeAccessIssue]
    assert predict(model, (2, 3, 8, 8), device="cpu") == expected
    model.forward = torch.autocast("cpu", torch.bfloat16)(forward)
    assert predict(model, (2, 3, 8, 8), device="cpu") == expected


def test_tensors_on_the_meta_device_beside_others_are_an_error():
    """And not a kernel that reads address 0."""
    model = DenseNet(4, (2,))
    if kernels.numba_supports(torch.empty(1)):
        features = model.features
        features.denseblock1.denselayer1.norm1.to("meta")
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 3, 8, 8))


def test_a_frozen_parameter_has_no_gradient():
    model = DenseNet(4, (2,))
    model.features.requires_grad_(False)
    assert MetaModel(model).persistent.gradients == 4 * sum(p.numel() for p in model.classifier.parameters())
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        MetaModel(model.requires_grad_(False)).training_step((2, 3, 8, 8))


def test_the_model_and_the_random_numbers_are_left_alone():
    """Hooks are not called, buffers do not change, and a warning that is due comes with the real step."""
    model = DenseNet(4, (2, 2), drop_rate=0.5)
    called: list[str] = []
    model.features.denseblock1.register_forward_hook(lambda *_: called.append("block"))
    model.features.denseblock2.denselayer1.register_forward_hook(lambda *_: called.append("layer"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predict(model, (2, 3, 8, 8), device="cpu")
    assert called == []
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    with pytest.warns(UserWarning, match="falling back from engine 'shared'"):
        model(torch.randn(2, 3, 8, 8))


def test_a_model_without_data():
    with torch.device("meta"):
        model = create_model("densenet201")
    peak = MetaModel(model, device="cpu").training_step((64, 3, 224, 224)).tensor_peak
    assert MetaModel(model, device="cuda").training_step((64, 3, 224, 224)).tensor_peak == pytest.approx(peak, rel=0.3)
    assert next(model.parameters()).is_meta


def test_a_step_on_an_h100():
    """What an H100 measured (benchmarks/results): 575.7 MiB in TF32, cuDNN's workspaces included."""
    pytest.importorskip("triton")
    with torch.device("meta"):
        model = create_model("densenet_bc_100_12")
    peak = MetaModel(model, device="cuda").training_step((256, 3, 32, 32)).tensor_peak
    assert peak / MIB == pytest.approx(575.7, rel=0.03)


def test_the_meta_device_stands_for_another_in_a_context():
    x = torch.empty(8, 4, device="meta")
    assert device_type(x) == "meta"
    with meta_stands_for("cpu"):
        assert device_type(x) == "cpu"
        of_cpu = kernels.kernel_set_name(x)
        assert of_cpu == kernels.kernel_set_name(torch.empty(8, 4))
        assert device_type(torch.empty(1)) == "cpu"
    assert kernels.kernel_set_name(x) == "portable"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_shape": (3,)}, r"input_shape is \(3,\), but must be whole numbers such as \(64, 3, 224, 224\)"),
        ({"input_shape": (0, 3, 8, 8)}, "input_shape is"),
        ({"input_shape": (2, 4, 8, 8)}, r"found an input of shape \(2, 4, 8, 8\), but this model needs"),
        ({"precision": "int8"}, "precision is 'int8', but must be one of float32, tf32"),
        ({"optimizer": "lamb"}, "optimizer is 'lamb', but must be one of sgd"),
        ({"device": "xpu"}, "device is 'xpu', but memory is known on 'cpu' and 'cuda' only"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        predict(DenseNet(4, (2,)), **{"input_shape": (2, 3, 8, 8)} | arguments)


def test_models_whose_memory_is_not_known():
    class Counts(nn.Module):
        def forward(self, x):
            return x * x.sum().item()

    with pytest.raises(TypeError, match="memory needs a module"):
        predict("densenet121", (2, 3, 8, 8))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="so the memory of a step is not known"):
        predict(Counts(), (2, 3))
    with pytest.raises(ValueError, match="found parameters without a size: run the model once"):
        predict(nn.LazyLinear(3), (2, 3))


def test_an_engine_that_cannot_run_is_named():
    model = DenseNet(4, (2,), efficient="checkpoint")
    model.features.denseblock1.denselayer1.norm1 = nn.InstanceNorm2d(24)  # pyright: ignore[reportAttributeAccessIssue]
    estimate = predict(model, (2, 3, 8, 8), device="cpu")
    assert list(estimate.by_engine) == ["plain", "checkpoint"]
    assert "engine 'shared' cannot run here" in estimate.refused["shared"]
    assert "engine shared cannot run it" in str(estimate)


def test_the_command(capsys, tmp_path):
    words = ["densenet_bc_100_12", "--batch_size", "4", "--budget", "40MiB", "--device", "cpu", "--measure"]
    command.main([*words, "--picture", str(tmp_path / "step.png")])
    printed = capsys.readouterr().out
    assert "budget: " in printed
    assert "of 40.0 MiB" in printed
    assert float(printed.partition("tensor peak, measured")[2].split("×")[0].split()[-1]) == pytest.approx(1, abs=0.01)
    assert (tmp_path / "step.png").stat().st_size > 10_000
    with pytest.raises(SystemExit, match=r"error: found a memory budget of 1\.00 MiB, but a step of 4 images"):
        command.main([*words[:4], "1MiB", "--device", "cpu"])
    with pytest.raises(SystemExit, match="error: budget is '6 gigs', but must be a number of bytes above 0, such as"):
        command.main([*words[:4], "6 gigs", "--device", "cpu"])
