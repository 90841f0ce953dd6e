"""The shared engine: results of plain, linear memory growth, and fallbacks for what it does not support."""

import copy
import statistics
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from grids import grid
from helpers import (
    FAMILIES,
    add_conv_biases,
    assert_all_close,
    assert_close,
    assert_same_buffers,
    assert_same_gradients,
    assert_same_step,
    freeze_norms,
    nodes_of,
    plan_stage,
    random_images,
    relative_error,
    results_of,
    small_model,
    use_kernels,
    with_engine,
)
from torch import Tensor, nn

from efficient_densenet import DenseBlock, DenseLayer, DenseNet, create_model
from efficient_densenet.engine import choose
from efficient_densenet.engine.parts import parts_of
from efficient_densenet.engine.refuse import joined_consumer
from efficient_densenet.kernels import row_tiles
from efficient_densenet.memory import saved_bytes, tensor_peak


@pytest.mark.parametrize("kernels", [("portable", 2000), ("compiled", 50)])
@pytest.mark.parametrize("widths", [(6, 3, 8), (2, 0, 5, 3), (0, 0, 4, 4)])
def test_bottleneck_widths_may_differ_within_a_block(widths, kernels, monkeypatch):
    use_kernels(monkeypatch, *kernels)
    plain = DenseBlock(0, 6, 3, efficient=False)
    for i, width in enumerate(widths):
        layer = DenseLayer(6 + 3 * i, 3, bn_size=1 if width else 0, drop_rate=0.0)
        if width:
            layer.conv1 = nn.Conv2d(6 + 3 * i, width, 1, bias=False)
            layer.norm2, layer.conv2 = nn.BatchNorm2d(width), nn.Conv2d(width, 3, 3, padding=1, bias=False)
        plain.add_module(f"denselayer{i + 1}", layer)
    efficient = copy.deepcopy(plain.double())
    efficient.engine = choose.parse("shared")
    x = torch.randn(4, 6, 9, 7, dtype=torch.double)
    if kernels[0] == "portable":
        assert len(list(row_tiles.tiles(x.movedim(1, -1).flatten(0, 2), x.dtype))) > 1
    assert_same_step(efficient, plain, x)
    assert_same_buffers(efficient, plain)


@pytest.mark.parametrize(
    *grid(
        lambda consumer, return_features, **_: not (return_features and consumer == "block"),
        consumer=["block", "transition", "norm"],
        bn_size=[0, 2],
        training=[True, False],
        return_features=[False, True],
        kernels=[("portable", 1 << 22), ("compiled", 7)],
        strength=1,
    )
)
def test_gradcheck(kernels, consumer, bn_size, training, return_features, monkeypatch):
    use_kernels(monkeypatch, *kernels)
    model = small_model("bc", bn_size=bn_size, growth_rate=2, num_init_features=2, block_config=(2, 2)).train(training)
    block = model.features.denseblock1
    after = {
        "block": None,
        "transition": model.features.transition1,
        "norm": model.features.denseblock1.denselayer1.norm1,
    }
    if consumer == "norm":
        block, after["norm"] = model.features.denseblock2, model.features.norm5
    channels = block.denselayer1.norm1.num_features
    x = torch.randn(2, channels, 3, 4, dtype=torch.double, requires_grad=True)
    stage = plan_stage(block, after[consumer], x, return_features=return_features)

    def function(x, *tensors):
        return stage.apply(x, *tensors)

    assert torch.autograd.gradcheck(function, (x, *stage.tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_eps_may_be_an_integer(dtype):
    plain = small_model("bc", efficient=False).to(dtype)
    for norm in (module for module in plain.modules() if isinstance(module, nn.BatchNorm2d)):
        norm.eps = 1
    x = random_images("bc").to(dtype)
    found, expected = (results_of(model, x) for model in (with_engine(plain, "shared"), plain))
    assert_all_close(found, expected, 1e-10 if dtype == torch.float64 else 1e-5)


def _outcome(model, x) -> str | torch.Tensor:
    try:
        return model(x).detach()
    except (ValueError, RuntimeError) as error:
        return str(error)


@pytest.mark.filterwarnings("ignore:falling back")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("eps", [0.0, -0.5])
@pytest.mark.parametrize("name", ["norm0", "denseblock1.denselayer1.norm2", "denseblock1", "norm5"])
def test_an_eps_with_which_batch_norm_raises_raises_as_in_plain(name, eps, training):
    model = DenseNet(4, (2, 2), num_init_features=4, small_inputs=False, efficient=False).train(training)
    changed = model.features.get_submodule(name)
    for norm in (each for each in changed.modules() if isinstance(each, torch.nn.BatchNorm2d)):
        norm.eps = eps
    x = torch.randn(2, 3, 32, 32)
    expected, found = _outcome(model, x), _outcome(copy.deepcopy(model).set_engine(True), x)
    assert type(found) is type(expected)
    assert found == expected if isinstance(expected, str) else torch.allclose(found, expected, atol=1e-5)


# Unsupported blocks


def _hook(layer):
    layer.conv1.register_forward_hook(lambda *_: None)


def _hook_on_the_layer(layer):
    layer.register_full_backward_hook(lambda *_: None)


def _parametrization(layer):
    nn.utils.parametrizations.weight_norm(layer.conv1)


def _uneven_dilation(layer):
    geometry = {"padding": (2, 1), "dilation": (2, 1)}
    layer.conv2 = nn.Conv2d(*layer.conv2.weight.shape[1::-1], 3, **geometry, bias=False).double()


class Doubled(DenseLayer):
    def first_half(self, *features):
        return 2 * super().first_half(*features)


def _other(name, module):
    return lambda layer: setattr(layer, name, module(layer.norm1.num_features).double())


UNSUPPORTED = {
    "dilation": (
        _uneven_dilation,
        r"found padding=\(2, 1\) in a Conv2d of a layer, where the shared engine takes \(2, 2\)",
    ),
    "subclass": (lambda layer: setattr(layer, "__class__", Doubled), "found a layer of class Doubled"),
    "group norm": (_other("norm1", lambda width: nn.GroupNorm(1, width)), "found a GroupNorm inside a layer"),
    "Tanh": (_other("relu1", lambda _: nn.Tanh()), "found a Tanh inside a layer, which is no activation"),
    "hook": (_hook, "found a hook on, or a new forward of, a Conv2d inside a layer"),
    "hook on the layer": (_hook_on_the_layer, "found a hook on, or a new forward of, a DenseLayer"),
    "parametrization": (_parametrization, "found a .*Conv2d inside a layer|found a parametrization"),
    "eps": (lambda layer: setattr(layer.norm1, "eps", 1e-3), "disagree about training mode, eps"),
    "mode": (lambda layer: layer.norm1.eval(), "disagree about training mode, eps"),
    "no affine": (
        _other("norm1", lambda width: nn.BatchNorm2d(width, affine=False)),
        "found a .*BatchNorm2d without weight and bias",
    ),
}


@pytest.mark.parametrize("change", UNSUPPORTED)
def test_unsupported_block_falls_back_with_a_warning_or_raises(change, monkeypatch):
    monkeypatch.setattr(choose, "_warned", set())
    (edit, found), plain = UNSUPPORTED[change], small_model("bc", efficient=False)
    for block in (plain.features.denseblock1, plain.features.denseblock3):
        edit(block.denselayer2)
    x = random_images("bc")
    efficient = with_engine(plain, True)
    with pytest.warns(UserWarning, match=found) as caught:
        efficient(x), efficient(x)
    assert len([w for w in caught if "falling back" in str(w.message)]) == 1
    plain(x), plain(x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert_same_step(efficient, plain, x)
    assert_same_buffers(efficient, plain)
    message = f"engine 'shared' cannot run here: .*({found}).*efficient=True"
    with pytest.raises(RuntimeError, match=message):
        with_engine(plain, "shared")(x)


@pytest.mark.parametrize(
    "change",
    [
        lambda transition: setattr(transition.pool, "ceil_mode", True),
        lambda transition: setattr(transition, "pool", nn.MaxPool2d(2)),
        lambda transition: setattr(transition.relu, "forward", torch.sigmoid),
    ],
    ids=["rounded up", "another pooling", "another forward"],
)
def test_unsupported_transition_runs_outside_the_stage(change):
    plain = small_model("bc", efficient=False)
    change(plain.features.transition1)
    assert_same_step(with_engine(plain, "shared"), plain, random_images("bc"))


@pytest.mark.parametrize("module_name", ["features.denseblock1", "features.transition1", "features.transition1.relu"])
def test_hooked_modules_run_outside_the_stage(module_name):
    plain = small_model("bc", efficient=False)
    efficient = with_engine(plain, "shared")
    seen = []
    for model in (efficient, plain):
        module = model.get_submodule(module_name)
        module.register_forward_hook(lambda _module, _args, output: seen.append(output.detach().clone()))
    assert_same_step(efficient, plain, random_images("bc"))
    assert len(seen) == 2
    assert_close(*seen)


def _results_and_statistics(model, x):
    return [*results_of(model, x), *(buffer for buffer in model.buffers() if buffer.is_floating_point())]


PRECISIONS = {
    "float32": (torch.float32, torch.float32, None),
    "autocast bfloat16": (torch.float32, torch.float32, torch.bfloat16),
    "autocast float16": (torch.float32, torch.float32, torch.float16),
    "bfloat16": (torch.bfloat16, torch.bfloat16, None),
    "bfloat16, norms float32": (torch.bfloat16, torch.float32, None),
}


@pytest.mark.parametrize(
    *grid(
        lambda precision, biases, **_: not biases or precision in ("float32", "bfloat16", "autocast bfloat16"),
        family=FAMILIES,
        precision=PRECISIONS,
        biases=[False, True],
        frozen=[False, True],
    )
)
def test_the_error_in_low_precision_is_at_most_twice_that_of_plain(family, precision, biases, frozen):
    """The median over several networks: in a single one, rounding may switch a ReLU on or off.

    The gradient of a bias before batch statistics is rounding error alone, which in other precisions is over twice
    plain's.
    """
    dtype, norm_dtype, autocast = PRECISIONS[precision]
    ratios = []
    for seed in range(7):
        torch.manual_seed(seed)
        float64_model = small_model(family, efficient=False)
        if biases:
            add_conv_biases(float64_model)
        if frozen:
            freeze_norms(float64_model)
        x = random_images(family, batch=8)
        expected = _results_and_statistics(float64_model, x)
        plain = copy.deepcopy(float64_model).to(dtype)
        for module in plain.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.to(norm_dtype)
        with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
            error, plain_error = (
                relative_error(_results_and_statistics(m, x.to(dtype)), expected)
                for m in (with_engine(plain, "shared"), plain)
            )
        ratios.append(error / plain_error)
    assert statistics.median(ratios) <= 2


def test_blocks_and_transitions_with_biases_are_one_node():
    model = add_conv_biases(small_model("bc", efficient="shared"))
    names = [name for name in nodes_of(model.features(random_images("bc"))) if "Accumulate" not in name]
    assert names == ["SharedStage"] * 3 + ["Convolution"]


def test_a_bias_of_another_dtype_is_refused():
    model = small_model("bc", efficient="shared")
    block, transition, x = model.features.denseblock1, model.features.transition1, torch.randn(2, 4, 5, 5).double()
    transition.conv.bias = nn.Parameter(torch.zeros(transition.conv.out_channels))
    assert joined_consumer(parts_of(block), transition) is None
    block.denselayer1.conv1.bias = nn.Parameter(torch.zeros(block.denselayer1.conv1.out_channels))
    assert "found float32, float64 in a Conv2d" in choose.why_not(choose.Engine.SHARED, block, x)


def test_unsupported_mixed_precision_falls_back_with_a_warning_or_raises(monkeypatch):
    monkeypatch.setattr(choose, "_warned", set())
    model = small_model("bc", efficient=True).float()
    model.features.denseblock2.denselayer1.norm1.double()
    x = torch.randn(2, 5, 3, 3)
    with pytest.warns(UserWarning, match="found float64 in a CpBatchNorm2d"), pytest.raises(RuntimeError):
        model.features.denseblock2(x)  # plain raises too
    with pytest.raises(RuntimeError, match="found float64 in a CpBatchNorm2d"):
        model.set_engine("shared").features.denseblock2(x)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("family", ["bc", "imagenet"])
def test_keep_bottleneck_does_not_change_results(family, frozen):
    plain = small_model(family, efficient=False, drop_rate=0.1).train(not frozen)
    efficient = with_engine(plain, "shared")
    for block in (m for m in efficient.modules() if isinstance(m, DenseBlock)):
        block.denselayer1.keep_bottleneck = True
    all_layers = small_model(family, efficient="shared", drop_rate=0.1, keep_bottleneck=True).train(not frozen)
    all_layers.load_state_dict(plain.state_dict())
    for model in (efficient, all_layers):
        assert_same_step(model, copy.deepcopy(plain), random_images(family))


def test_run_stage_with_features_returns_output_and_features():
    plain = small_model("bc", efficient=False)
    block, transition = plain.features.denseblock1, plain.features.transition1
    x, results = torch.randn(3, 4, 6, 5, dtype=torch.double), []
    for run in (choose.run_stage_with_features, lambda block, transition, x: (transition(y := block(x)), y)):
        for weights in ((1, 0), (0, 1), (2, 3)):
            plain.zero_grad()
            leaf = x.clone().requires_grad_()
            outputs = run(block, transition, leaf)
            sum(w * output.square().sum() for w, output in zip(weights, outputs, strict=True) if w).backward()
            grads = [p.grad for module in (block, transition) for p in module.parameters()]
            results.append([*outputs, leaf.grad, *(torch.zeros(()) if grad is None else grad for grad in grads)])
    for from_engine, from_modules in zip(results[:3], results[3:], strict=True):
        assert_all_close(from_engine, from_modules)


# Memory


def _peak(engine: str, **overrides) -> int:
    model = create_model("densenet_bc_100_12", efficient=engine, **overrides)
    x, labels = torch.randn(4, 3, 32, 32), torch.zeros(4, dtype=torch.long)

    def step():
        F.cross_entropy(model(x), labels).backward()

    step()
    return tensor_peak(step)


def test_memory_grows_linearly_with_depth(monkeypatch):
    """The peak is reached where the backward enters the stage.

    Four tensors as wide as the stage exist then: the features, the accumulator of their gradient, the output of the
    last norm's ReLU and the gradient of that output.
    """
    monkeypatch.setitem(row_tiles.TILE_BYTES, "cpu", 1 << 16)  # scratch has a constant size for this many rows
    peaks = [_peak("shared", block_config=(depth,)) for depth in (24, 32, 40)]
    channel_bytes, growth_rate = 4 * 32 * 32 * 4, 12
    assert peaks[2] - peaks[1] == pytest.approx(peaks[1] - peaks[0], rel=0.05)
    assert peaks[1] - peaks[0] == pytest.approx(4 * 8 * growth_rate * channel_bytes, rel=0.05)


def test_parameters_are_saved_for_backward_without_copies():
    """Saved-tensor hooks may recognize parameters by their class and leave them in place."""
    model, saved = small_model("bc", efficient="shared"), []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        model.features(random_images("bc"))
    parameter_addresses = {parameter.data_ptr() for parameter in model.features.parameters()}
    assert parameter_addresses <= {tensor.data_ptr() for tensor in saved}
    assert all(isinstance(tensor, nn.Parameter) for tensor in saved if tensor.data_ptr() in parameter_addresses)


def test_features_are_saved_once_as_counted_on_the_meta_device():
    model = create_model("densenet_bc_100_12", efficient="shared").to("meta")
    images, labels = torch.empty(256, 3, 32, 32, device="meta"), torch.empty(256, dtype=torch.long, device="meta")
    saved_total = saved_bytes(lambda: F.cross_entropy(model(images), labels))
    # The features of the three stages, which start with the transitions' outputs, and the output of the last ReLU.
    features = 256 * 4 * (216 * 32**2 + 300 * 16**2 + 342 * 8**2)
    assert saved_total == pytest.approx(features + 256 * 4 * 342 * 8**2, rel=0.05)


def _images(batch: int, size: tuple[int, int]) -> Tensor:
    return torch.randn(batch, 3, *size, dtype=torch.double)


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
