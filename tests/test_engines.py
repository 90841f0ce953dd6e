"""Every engine matches plain; the dispatcher falls back or raises where an engine cannot run."""

import copy
import pickle
import threading
import warnings

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from grids import grid
from helpers import (
    FAMILIES,
    MEMORY_EFFICIENT,
    RECOMPUTING,
    assert_all_close,
    assert_close,
    assert_same_buffers,
    assert_same_gradients,
    assert_same_step,
    backward,
    plan_stage,
    random_images,
    small_model,
    with_engine,
)
from torch import nn

from efficient_densenet import DenseBlock, DenseNet
from efficient_densenet.engine import choose
from efficient_densenet.engine.stage.spec import decode
from efficient_densenet.memory import saved_bytes


@pytest.mark.parametrize(
    *grid(
        engine=MEMORY_EFFICIENT,
        channels=[1, 3],
        of_input=[torch.contiguous_format, torch.channels_last],
        of_weights=[torch.contiguous_format, torch.channels_last],
        bn_size=[0, 4],
        strength=3,
    )
)
def test_dropout_draws_plain_s_numbers_in_any_memory_format(engine, channels, of_input, of_weights, bn_size):
    """It draws them in the order of the elements in memory."""
    plain = DenseBlock(3, channels, 4, bn_size, drop_rate=0.3, efficient=False).double().to(memory_format=of_weights)
    efficient = copy.deepcopy(plain)
    efficient.engine = choose.Engine(engine)
    x = torch.randn(2, channels, 5, 6, dtype=torch.double).to(memory_format=of_input)
    assert_same_step(efficient, plain, x)


@pytest.mark.parametrize(
    *grid(
        engine=MEMORY_EFFICIENT,
        compression=[0.1, 0.7, 1.0],
        block_config=[(1,), (3,), (1, 1), (1, 2, 1, 1, 1)],
    )
)
def test_any_number_of_blocks_and_any_compression(engine, compression, block_config):
    plain = small_model("bc", block_config=block_config, compression=compression, num_init_features=10, efficient=False)
    assert_same_step(with_engine(plain, engine), plain, torch.randn(3, 3, 21, 18, dtype=torch.double))


@pytest.mark.parametrize("engine", MEMORY_EFFICIENT)
def test_frozen_stem_saves_less_and_computes_all_gradients(engine):
    plain = small_model("imagenet", efficient=False)
    plain.features.conv0.weight.requires_grad_(False)
    plain.features.norm0.requires_grad_(False)
    efficient = with_engine(plain, engine)
    x = random_images("imagenet")
    for model in (efficient, plain):
        model(x).square().sum().backward()
    assert_same_gradients(efficient, plain)
    assert saved_bytes(lambda: efficient(x)) < saved_bytes(lambda: plain(x))
    assert efficient.features.conv0.weight.grad is None


@pytest.mark.parametrize("engine", MEMORY_EFFICIENT)
def test_several_forwards_before_one_backward_and_retained_graphs(engine):
    plain = small_model("bc", efficient=False)
    efficient = with_engine(plain, engine)
    for model in (plain, efficient):
        losses = [model(random_images("bc") * 0 + value).square().sum() for value in torch.linspace(0.5, 1.5, 3)]
        torch.stack(losses).sum().backward(retain_graph=True)
        losses[0].backward(retain_graph=True)
        losses[0].backward()
    assert_same_gradients(efficient, plain)
    assert_same_buffers(efficient, plain)


@pytest.mark.parametrize("engine", RECOMPUTING)
def test_second_derivatives(engine):
    """A gradient penalty: the loss contains the norm of an input gradient."""
    plain = small_model("bc", efficient=False)
    efficient = with_engine(plain, engine)
    x = random_images("bc")
    for model in (plain, efficient):
        leaf = x.clone().requires_grad_()
        output = model(leaf)
        (grad,) = torch.autograd.grad(output.square().sum(), leaf, create_graph=True)
        (output.sum() + grad.square().sum()).backward()
    assert_same_gradients(efficient, plain, tolerance=1e-9)


@pytest.mark.parametrize("backward_inside", [False, True])
@pytest.mark.parametrize("engine", RECOMPUTING)
def test_autocast_matches_plain(engine, backward_inside):
    plain = small_model("bc", efficient=False).float()
    efficient = with_engine(plain, engine)
    x = random_images("bc").float()
    for model in (plain, efficient):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).square().sum()
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
    assert_same_gradients(efficient, plain, tolerance=0)


@pytest.mark.parametrize("engine", MEMORY_EFFICIENT)
def test_parameter_hooks_fire_once(engine):
    plain = small_model("bc", efficient=False)
    efficient = with_engine(plain, engine)
    for model in (plain, efficient):
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: grad * 3 + 1)
    assert_same_step(efficient, plain, random_images("bc"))
    assert all(p._backward_hooks for p in efficient.parameters())


@pytest.mark.parametrize("engine", choose.Engine)
def test_set_engine_does_not_change_the_state_dict(engine):
    model = small_model("bc")
    before = {name: (id(tensor), tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    model.set_engine(engine.value)
    after = model.state_dict(keep_vars=True)
    assert list(before) == list(after)
    assert all(before[name][0] == id(after[name]) for name in after)


@pytest.mark.parametrize(
    *grid(
        engine=[True, *choose.Engine],
        copier=[copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), "torch.save"],
        strength=1,
    )
)
def test_copies_compute_with_their_own_weights(engine, copier, tmp_path):
    model = small_model("bc").set_engine(engine)
    if copier == "torch.save":
        torch.save(model, tmp_path / "model.pt")
        copied = torch.load(tmp_path / "model.pt", weights_only=False)
    else:
        copied = copier(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    _, grad = backward(copied, random_images("bc"))
    assert grad.abs().max() > 0
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in copied.parameters())
    assert all(p.grad is None for p in model.parameters())
    assert copied.engine == model.engine


@pytest.mark.parametrize("engine", [True, *choose.Engine])
def test_no_grad_runs_plain_without_a_warning(engine):
    model = small_model("bc").set_engine(engine)
    x = random_images("bc")
    expected = with_engine(model, "plain")(x)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        assert_close(model(x), expected)


@pytest.mark.parametrize("engine", ["checkpoint", "shared"])
def test_data_parallel_replicas_in_threads(engine):
    """Replicas hold non-leaf tensors in place of parameters; gradients flow through them to the model's parameters."""
    plain = small_model("bc", efficient=False).eval()
    efficient = with_engine(plain, engine)
    x = random_images("bc", batch=4)
    replicas = [_replica(efficient) for _ in range(2)]
    outputs = [None, None]

    def forward(i: int) -> None:
        outputs[i] = replicas[i](x[2 * i : 2 * i + 2])

    threads = [threading.Thread(target=forward, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.cat(outputs).square().sum().backward()
    plain(x).square().sum().backward()
    assert_same_gradients(efficient, plain)


def _replica(model: nn.Module) -> nn.Module:
    """A shallow copy whose parameters are non-leaf tensors, as nn.parallel.replicate creates on one device."""
    replica = model._replicate_for_data_parallel()
    for name, child in model._modules.items():
        replica._modules[name] = None if child is None else _replica(child)
    replica._former_parameters = {}
    for name, parameter in model._parameters.items():
        tensor = None if parameter is None else parameter.view_as(parameter)
        object.__setattr__(replica, name, tensor)
        replica._former_parameters[name] = tensor
    return replica


def test_unknown_engine_raises_and_lists_the_engines():
    with pytest.raises(ValueError, match=r"unknown engine 'fast'.*'plain', .*'shared'.*True.*False"):
        DenseNet(efficient="fast")
    model = small_model("bc")
    with pytest.raises(ValueError, match="unknown engine 3"):
        model.set_engine(3)
    assert model.set_engine("plain").set_engine("best").engine == small_model("bc", efficient="best").engine == "best"


def test_best_falls_back_with_one_warning_per_reason(monkeypatch):
    monkeypatch.setattr(choose, "_warned", set())
    model = small_model("bc", efficient=True).eval()
    parameters = dict(model.named_parameters())

    def loss(p):
        return torch.func.functional_call(model, p, (random_images("bc") * 0 + 1,)).square().sum()

    with pytest.warns(UserWarning, match="falling back from .* to 'plain'.*torch.func transform") as caught:
        grads = torch.func.grad(loss)(parameters)
    assert [warning.filename for warning in caught] == [__file__]  # the line that calls the model
    expected = torch.autograd.grad(loss(parameters), list(parameters.values()))
    assert_all_close(grads.values(), expected)


@pytest.mark.parametrize("engine", MEMORY_EFFICIENT)
def test_named_engine_raises_where_it_cannot_run(engine):
    model = small_model("bc", efficient=engine).eval()

    def loss(p):
        return torch.func.functional_call(model, p, (random_images("bc"),)).sum()

    with pytest.raises(RuntimeError, match=f"engine '{engine}' cannot run here.*ordinary autograd.*use another engine"):
        torch.func.grad(loss)(dict(model.named_parameters()))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:FutureWarning")  # raised by torch on entering a dual level
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_forward_mode_falls_back(monkeypatch):
    monkeypatch.setattr(choose, "_warned", set())
    model = small_model("bc", efficient=True).eval()
    x = random_images("bc")
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.warns(UserWarning, match="forward-mode"):
            output = model(dual)
        tangent = torch.autograd.forward_ad.unpack_dual(output).tangent
    step = 1e-6
    with torch.no_grad():
        difference = (model(x + step) - model(x - step)) / (2 * step)
    assert_close(tangent, difference, 1e-6)


@pytest.mark.parametrize("replacement", [lambda c: nn.GroupNorm(1, c), lambda c: nn.InstanceNorm2d(c, affine=True)])
@pytest.mark.parametrize("engine", RECOMPUTING)
def test_replaced_norms_and_activations(engine, replacement):
    plain = small_model("bc", efficient=False)
    for layer in (m for m in plain.modules() if isinstance(m, type(plain.features.denseblock1.denselayer1))):
        layer.norm1 = replacement(layer.norm1.num_features).double()
        layer.relu1 = nn.PReLU().double()
    assert_same_step(with_engine(plain, engine), plain, random_images("bc"))


@pytest.mark.parametrize("engine", MEMORY_EFFICIENT)
def test_convert_sync_batchnorm_matches_plain(engine):
    """Distributed training replaces the model's norms by nn.SyncBatchNorm."""
    plain = nn.SyncBatchNorm.convert_sync_batchnorm(small_model("bc", efficient=False))
    efficient = with_engine(plain, engine if engine != "shared" else True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        assert_same_step(efficient, plain, random_images("bc"))
    assert_same_buffers(efficient, plain)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("engine", ["checkpoint", "shared"])
def test_swapped_parameters_get_gradients_or_raise(engine, family):
    """torch.func.functional_call swaps the parameters for other tensors during the forward only."""
    plain = small_model(family, efficient=False).eval()
    efficient = with_engine(plain, engine)
    x = random_images(family)
    grads = []
    for model in (plain, efficient):
        swapped = {name: (p.detach() * 1.3).requires_grad_() for name, p in model.named_parameters()}
        loss = torch.func.functional_call(model, swapped, (x,)).square().sum()
        if model is efficient and engine == "checkpoint":
            with pytest.raises(RuntimeError, match="recomputed with other parameters than in the forward"):
                loss.backward()
            return
        loss.backward()
        grads.append([p.grad for p in swapped.values()])
    assert_all_close(*grads)


@pytest.mark.parametrize("engine", ["checkpoint", "shared"])
def test_switching_to_eval_mode_before_the_backward(engine):
    plain = small_model("bc", efficient=False)
    efficient = with_engine(plain, engine)
    for model in (plain, efficient):
        loss = model(random_images("bc") * 0 + torch.linspace(0, 1, 63).view(9, 7)).square().sum()
        model.eval()
        loss.backward()
    assert_same_gradients(efficient, plain)


def test_forward_hooks_inside_a_layer_fire_once():
    plain = small_model("bc", efficient=False)
    efficient = with_engine(plain, "checkpoint")
    counts = [[], []]
    for model, seen in zip((plain, efficient), counts, strict=True):
        model.features.denseblock1.denselayer1.conv1.register_forward_hook(lambda *_, seen=seen: seen.append(1))
    assert_same_step(efficient, plain, random_images("bc"))
    assert counts == [[1], [1]]


def test_layer_subclass_with_its_own_parameter():
    plain = small_model("bc", efficient=False)

    class Scaled(type(plain.features.denseblock1.denselayer1)):
        def first_half(self, *features):
            return super().first_half(*features) * self.gain

    for model in (plain, efficient := with_engine(plain, "checkpoint")):
        layer = model.features.denseblock1.denselayer1
        layer.gain = nn.Parameter(torch.tensor(2.0, dtype=torch.double))
        layer.__class__ = Scaled
    assert_same_step(efficient, plain, random_images("bc"))


def test_spectral_norm_and_cached_parametrizations_raise_in_checkpoint():
    model = small_model("bc", efficient="checkpoint")
    nn.utils.parametrizations.spectral_norm(model.features.denseblock1.denselayer1.conv1)
    with pytest.raises(RuntimeError, match="changes its own state when it is run"):
        model(random_images("bc"))
    model = small_model("bc", efficient="checkpoint")
    nn.utils.parametrizations.weight_norm(model.features.denseblock1.denselayer1.conv1)
    with torch.nn.utils.parametrize.cached(), pytest.raises(RuntimeError, match="being cached"):
        model(random_images("bc"))


@pytest.mark.parametrize("engine", ["plain", *MEMORY_EFFICIENT])
def test_block_and_layer_without_a_model(engine):
    block = small_model("bc", efficient=engine).features.denseblock1
    x = torch.randn(2, 4, 5, 5, dtype=torch.double)
    features = [x]
    for layer in block.children():
        features.append(layer(features))
    assert_close(block(x), torch.cat(features, 1))
    assert_close(block.denselayer1(x), features[1])


@pytest.mark.parametrize("engine", ["shared", True])
@pytest.mark.parametrize("family", ["bc", "imagenet"])
def test_numpy_numbers_are_numbers(family, engine):
    """As in nn.Conv2d, and without an effect on other models of equal sizes, whether built before or after."""

    def build(kind, efficient):
        sizes = {"growth_rate": kind(5), "bn_size": kind(3), "num_init_features": kind(7)}
        model = small_model(family, drop_rate=np.float32(0.25), efficient=efficient, **sizes)
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                module.out_channels = kind(module.out_channels)
                module.stride, module.padding = (tuple(map(kind, pair)) for pair in (module.stride, module.padding))
        return model

    for kind in (np.int64, int):
        plain = build(kind, "plain")
        assert_same_step(with_engine(plain, engine), plain, random_images(family))
        block, channels = plain.features.denseblock1, plain.features.denseblock1.denselayer1.norm1.num_features
        spec = plan_stage(block, None, torch.randn(2, channels, 3, 3, dtype=torch.double)).spec
        assert decode(spec.encoded) == spec  # as compilers take it


def test_images_of_bytes_are_refused():
    with pytest.raises(TypeError, match=r"found an input of torch.uint8, .* as by x.float\(\) / 255"):
        small_model("bc")(torch.zeros(2, 3, 8, 8, dtype=torch.uint8))
