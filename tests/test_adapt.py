"""Other people's DenseNets with our engines: equal numbers, nothing else changed, and reversible."""

import copy
import pickle
import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from foreign import (
    GROWTH,
    MODELS,
    START,
    FeaturesBlock,
    NewestFirst,
    TakesFeatures,
    build,
    loss_of,
    pictures,
    plain_twin,
)
from helpers import assert_close, assert_same_buffers, assert_same_gradients
from test_distributed import ThreadedReplicas
from torch import Tensor, nn

from efficient_densenet import DenseNet, convert_batchnorm, make_efficient, register_block, restore
from efficient_densenet.adapt import BlockParts, LayerParts
from efficient_densenet.engines import dispatch as engines
from efficient_densenet.memory import saved_bytes
from efficient_densenet.norms.batch_norm import UpdatesOnce


def _steps(model: nn.Module, x: Tensor, number: int = 3) -> list[Tensor]:
    """Outputs of so many steps of training, and the last input's gradient; the last gradients stay."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    outputs = []
    for i in range(number):
        torch.manual_seed(i)
        optimizer.zero_grad()
        leaf = x.clone().requires_grad_()
        output = model(leaf)
        loss_of(output).backward()
        outputs += output if isinstance(output, list) else [output]
        if i < number - 1:
            optimizer.step()
    return [output.detach() for output in outputs] + [leaf.grad]


def _assert_same_training(ours: nn.Module, plain: nn.Module, x: Tensor) -> None:
    for found, expected in zip(_steps(ours, x), _steps(plain, x), strict=True):
        assert_close(found, expected)
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)


OTHERS = [
    (name, engine) for name in ("torchvision", "timm", "monai", "kuangliu") for engine in ("checkpoint", "official")
]


@pytest.mark.parametrize(("name", "engine"), [*((name, True) for name in MODELS), *OTHERS, ("tiramisu", "checkpoint")])
def test_three_steps_are_plain_s_and_can_be_taken_back(name, engine):
    model = build(name)
    plain, x = plain_twin(name, model), pictures(name)
    classes, tensors = list(map(type, model.modules())), [id(t) for t in model.state_dict(keep_vars=True).values()]
    keys, text = list(model.state_dict()), repr(model)
    report = make_efficient(model, engine)
    blocks = [f"features.denseblock{i + 1}" for i in range(4 if name == "smp" else 3)]
    assert [change.name for change in report.changed] == blocks, str(report)
    assert not report.unchanged
    assert len(report) == len(blocks)
    expected = "shared" if engine is True else engine
    assert [change.engine for change in report.changed] == [expected] * len(blocks)
    assert all(change.kept < change.kept_before for change in report.changed)
    assert report.joined == (["features"] if engine is True else [])
    assert list(model.state_dict()) == keys
    assert [id(tensor) for tensor in model.state_dict(keep_vars=True).values()] == tensors
    assert all(isinstance(module, cls) for module, cls in zip(model.modules(), classes, strict=True))
    assert [type(module).__qualname__ for module in model.modules()] == [cls.__qualname__ for cls in classes]
    assert repr(model) == text
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no falling back
        _assert_same_training(model, plain, x)
    assert restore(model) is model
    assert list(map(type, model.modules())) == classes
    assert all(
        set(vars(ours)) == set(vars(theirs)) for ours, theirs in zip(model.modules(), plain.modules(), strict=True)
    )
    _assert_same_evaluation(model, plain, x)


def _assert_same_evaluation(model: nn.Module, plain: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        outputs = model.eval()(x), plain.eval()(x)
    for found, expected in zip(*([o] if isinstance(o, Tensor) else o for o in outputs), strict=True):
        assert_close(found, expected)


@pytest.mark.parametrize("name", ["torchvision_efficient", "timm_efficient", "gpleiss_efficient"])
def test_double_updates_go_and_come_back(name):
    model, counts = build(name), []
    layer = model.features.denseblock1.denselayer1
    for convert in (None, make_efficient, restore):
        if convert is not None:
            convert(model)
        before = int(layer.norm1.num_batches_tracked)
        loss_of(model(pictures(name).requires_grad_())).backward()
        counts.append(int(layer.norm1.num_batches_tracked) - before)
    assert counts == [2, 1, 2]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
@pytest.mark.parametrize("name", ["torchvision_efficient", "timm_efficient", "monai", "gpleiss_efficient"])
def test_without_gradients_and_in_tracing_it_is_the_author_s_forward_to_the_bit(name):
    model = build(name).eval()
    x = pictures(name)
    with torch.no_grad():
        expected = model(x)
        make_efficient(model)
        assert torch.equal(model(x), expected)
        assert torch.equal(torch.jit.trace(model, x)(x), expected)
    exported = torch.export.export(model, (x,), strict=False)
    assert_close(exported.module()(x).detach(), expected)


@pytest.mark.parametrize("name", ["torchvision", "timm", "monai", "kuangliu"])
def test_frozen_norms(name):
    model = build(name)
    plain, x = plain_twin(name, model), pictures(name)
    make_efficient(model)
    _assert_same_training(model.eval(), plain.eval(), x)


# After its features timm writes into nothing, and so allows backward hooks on what makes them.
HOOKED = [(name, place) for name in ("torchvision", "timm", "monai") for place in ("denseblock1", "transition1")]


@pytest.mark.parametrize(("name", "place"), [*HOOKED, ("timm", "norm5"), ("timm", "")])
def test_hooks_from_before_and_after_fire_once_with_plain_s_values(name, place):
    model = build(name)
    plain, x, seen = plain_twin(name, model), pictures(name), []
    for each in (model, plain):
        calls: list[list[Tensor]] = []
        seen.append(calls)
        at = each.features.get_submodule(place)

        def note(module, given, got=None, calls=calls):
            calls.append(
                [
                    t.detach().clone()
                    for v in (given, got)
                    for t in (v if isinstance(v, tuple) else [v])
                    if t is not None
                ]
            )

        at.register_forward_hook(note)
        at.register_full_backward_hook(note)
        if each is model:
            make_efficient(model)
        at.register_forward_pre_hook(note)
    assert not any(seen)  # no trial has called them
    _assert_same_training(model, plain, x)
    assert [len(calls) for calls in seen] == [9, 9]
    for ours, theirs in zip(*seen, strict=True):
        for found, expected in zip(ours, theirs, strict=True):
            assert_close(found, expected)
    restore(model)
    assert len(model.features.get_submodule(place)._forward_hooks) == 1


@pytest.mark.parametrize("inside", ["", ".norm1", ".conv2"])
def test_a_hook_inside_a_layer_keeps_being_called(inside):
    model = build("torchvision")
    plain, counts = plain_twin("torchvision", model), [0, 0]
    make_efficient(model)
    for i, each in enumerate((model, plain)):

        def note(*_, i=i):
            counts[i] += 1

        each.get_submodule(f"features.denseblock2.denselayer2{inside}").register_forward_hook(note)
    engines._warned.clear()
    with pytest.warns(UserWarning, match="falling back from engine 'shared' to 'checkpoint': found a hook"):
        _assert_same_training(model, plain, pictures("torchvision"))
    assert counts == [3, 3]
    make_efficient(model, "shared")
    with pytest.raises(RuntimeError, match="engine 'shared' cannot run here: found a hook"):
        model(pictures("torchvision"))


class _Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(NewestFirst(START), NewestFirst(START + GROWTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize("first", [True, False])
def test_a_hook_between_a_block_and_its_layers(first):
    block, counts = _Around().double(), [0, 0]
    plain = copy.deepcopy(block)
    if first:
        assert [change.name for change in make_efficient(block).changed] == [""]
    for i, each in enumerate((block, plain)):

        def note(*_, i=i):
            counts[i] += 1

        each.layer.register_forward_hook(note)
    if not first:
        assert [change.engine[:10] for change in make_efficient(block).changed] == ["checkpoint"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _assert_same_training(block, plain, torch.randn(3, START, 6, 5, dtype=torch.double))
    assert counts == [3, 3]


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("name", ["torchvision", "timm", "csrhddlam"])
def test_a_copy_is_a_converted_model_of_its_own(name, how):
    model = build(name)
    plain = plain_twin(name, model)
    make_efficient(model)
    copied = how(model)
    assert list(map(type, copied.modules())) == list(map(type, model.modules()))
    _assert_same_training(copied, plain, pictures(name))
    assert all(parameter.grad is None for parameter in model.parameters())
    restore(copied)
    assert [type(module) for module in copied.modules()] == [type(module) for module in plain.modules()]
    assert [type(module) for module in copied.modules()] != [type(module) for module in model.modules()]


@pytest.mark.parametrize("name", ["torchvision", "timm", "monai"])
def test_replicas_in_threads(name):
    """As nn.DataParallel has them; each part has batch statistics of its own."""
    model = build(name)
    plain, x = plain_twin(name, model), pictures(name, batch=4)
    for each in (model, plain):
        for module in each.modules():
            module.drop_rate = 0.0  # whose masks depend on which thread is first
            if isinstance(module, nn.Dropout2d):
                module.p = 0.0
    make_efficient(model)
    loss_of(ThreadedReplicas(model, 2)(x)).backward()
    loss_of(torch.cat([plain(part) for part in x.tensor_split(2)])).backward()
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("wrap", [nn.DataParallel, nn.Sequential, torch.compile])
def test_a_wrapped_model_is_found_inside(wrap):
    model = build("torchvision")
    plain = plain_twin("torchvision", model)
    wrapped = wrap(model)
    report = make_efficient(wrapped)
    assert len(report) == 3
    assert [change.name.endswith(".features.denseblock1") for change in report.changed] == [True, False, False]
    if wrap is not torch.compile:
        _assert_same_training(wrapped, wrap(plain), pictures("torchvision"))
    restore(wrapped)
    assert list(map(type, model.modules())) == list(map(type, plain.modules()))


@pytest.mark.parametrize("first", [True, False])
def test_distributed_data_parallel(first):
    """With hooks on every parameter, as it has them."""
    model = build("timm_efficient")
    plain = plain_twin("timm_efficient", model)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        if first:
            make_efficient(model)
        wrapped = nn.parallel.DistributedDataParallel(model)
        if not first:
            assert make_efficient(wrapped).changed[0].name == "module.features.denseblock1"
        _assert_same_training(wrapped.module, plain, pictures("timm_efficient"))
        x = pictures("timm_efficient")
        for each in (wrapped, plain):
            each.zero_grad()
            loss_of(each(x)).backward()
        assert_same_gradients(model, plain)
    finally:
        torch.distributed.destroy_process_group()


def test_precision_device_and_weights_may_change_before_or_after():
    before, after = build("torchvision"), build("torchvision")
    make_efficient(before)
    states = before.state_dict()
    after.load_state_dict(states)
    before.float().load_state_dict(states)
    make_efficient(after.float())
    x = pictures("torchvision").float()
    for found, expected in zip(_steps(before, x), _steps(after, x), strict=True):
        assert torch.equal(found, expected)
    for model in (before, after):
        out = model.to(torch.bfloat16)(x.bfloat16())
        loss_of(out).backward()
        assert out.dtype == torch.bfloat16


def test_an_optimizer_made_before_goes_on():
    model = build("torchvision_efficient")
    plain = plain_twin("torchvision_efficient", model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-3, momentum=0.9) for each in (model, plain)]
    x = pictures("torchvision_efficient")
    for convert in (None, make_efficient, restore):
        if convert is not None:
            convert(model)
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(each.eval()(x)).backward()  # in evaluation mode nothing updates twice before and after
            optimizer.step()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert_close(found.detach(), expected.detach())


def test_ours_are_set_and_set_back():
    model = DenseNet(4, (2, 1), num_init_features=4, efficient="plain")
    report = make_efficient(nn.Sequential(model), "checkpoint")
    assert model.engine == "checkpoint"
    assert [change.name for change in report.changed] == ["0.features.denseblock1", "0.features.denseblock2"]
    make_efficient(model)
    assert model.engine == "best"
    restore(model)
    assert model.engine == "plain"
    assert "_engine_before" not in vars(model.features.denseblock1)


def test_called_again_it_changes_the_engine():
    model = build("torchvision")
    make_efficient(model)
    classes = list(map(type, model.modules()))
    assert [change.engine for change in make_efficient(model, "checkpoint").changed] == ["checkpoint"] * 3
    assert model.features.denseblock1.engine is engines.Engine.CHECKPOINT
    assert [change.engine for change in make_efficient(model, False).changed] == ["plain"] * 3
    assert list(map(type, model.modules())) == classes
    with pytest.raises(ValueError, match="unknown engine 'fast'"):
        make_efficient(model, "fast")


def test_altered_after_conversion():
    """What a layer has become is run, and told when asked again."""
    model = build("torchvision_efficient")
    plain = plain_twin("torchvision_efficient", model)
    make_efficient(model)
    for each in (model, plain):
        layer = each.features.denseblock2.denselayer1
        layer.conv2 = nn.Sequential(layer.conv2, nn.Tanh())
        del each.features.denseblock1.denselayer2
        each.features.transition1 = nn.Sequential(nn.Conv2d(START + GROWTH, 7, 1), nn.AvgPool2d(2)).double()
    plain.features.transition1.load_state_dict(model.features.transition1.state_dict())
    report = make_efficient(model)
    assert [(change.layers, change.engine[:16]) for change in report.changed] == [
        (1, "shared"),
        (3, "checkpoint since"),
        (1, "shared"),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _assert_same_training(model, plain, pictures("torchvision_efficient"))
    restore(model)
    assert list(map(type, model.modules())) == list(map(type, plain.modules()))


def test_nothing_to_convert():
    models = pytest.importorskip("torchvision.models")
    model = models.resnet18()
    classes = list(map(type, model.modules()))
    report = make_efficient(model)
    assert not report
    assert str(report) == "nothing to convert: found no dense block"
    assert list(map(type, model.modules())) == classes
    assert restore(model) is model


class _Strange(nn.Module):
    """A block of layers that are as a dense block's, whose forward is not."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        for i in range(3):
            self.add_module(f"layer{i}", TakesFeatures(START + i * GROWTH))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.children():
            made = layer(*(reversed(features) if self.how == "order" and len(features) == 2 else features))
            if self.how == "scaled":
                made = made * 0.9
            elif self.how == "detached":
                features[-1] = features[-1].detach() if len(features) == 3 else features[-1]
            elif self.how == "stochastic depth" and self.training:
                made = made * float(torch.rand(()) > 0.01)
            features.append(made)
        if self.how == "two outputs":
            return features[0], torch.cat(features, 1)
        if self.how == "fails":
            raise RuntimeError("no\nmore")
        return torch.cat(features[1:] if self.how == "new ones only" else features, 1)


STRANGE = {
    "scaled": "has other values in evaluation mode",
    "order": "has other values in evaluation mode",
    "detached": "has other values in evaluation mode",
    "stochastic depth": "has other random numbers or running statistics in training mode",
    "two outputs": "gives a tuple, where a dense block gives a tensor",
    "new ones only": r"gives \(12, 3, 3\) from a trial input, where a dense block with these layers gives \(18, 3, 3\)",
    "fails": "could not be run on a trial input: RuntimeError: no$",
}


@pytest.mark.parametrize("how", STRANGE)
def test_a_block_that_does_something_else_is_left_alone_and_reported(how):
    model = nn.Sequential(nn.Conv2d(3, START, 1), _Strange(how))
    good = FeaturesBlock([TakesFeatures(START)])
    model.add_module("good", good)
    random = torch.get_rng_state()
    state, classes = copy.deepcopy(model.state_dict()), list(map(type, model[1].modules()))
    report = make_efficient(model)
    assert torch.equal(torch.get_rng_state(), random)
    assert [change.name for change in report.changed] == ["good"]
    assert list(report.unchanged) == ["1"]
    with pytest.raises(AssertionError, match=STRANGE[how]):
        raise AssertionError(report.unchanged["1"])
    assert "not changed\n  1: " in str(report)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert list(map(type, model[1].modules())) == classes
    assert all(module.training for module in model.modules())


class _Activated(TakesFeatures):
    """The layer's ReLUs are there, but something else is called."""

    def expand(self, made: Tensor) -> Tensor:
        return self.conv2(F.relu6(self.norm2(made)))


def test_an_activation_that_differs_for_large_values_only_is_found():
    report = make_efficient(FeaturesBlock([_Activated(START), _Activated(START + GROWTH)]))
    assert not report
    assert report.unchanged[""].startswith("has other values in evaluation mode")
    assert str(report).startswith("nothing was converted\nnot changed\n  the model: ")


def test_a_layer_of_other_kinds_is_reported_by_its_kinds():
    block = FeaturesBlock([TakesFeatures(START), TakesFeatures(START + GROWTH)])
    block.denselayer2.extra = nn.PReLU()
    report = make_efficient(block)
    assert "BatchNorm2d, ReLU, Conv2d, BatchNorm2d, ReLU, Conv2d, PReLU" in report.unchanged[""]
    block.denselayer2.extra = nn.Identity()
    block.forward = block.forward
    assert make_efficient(block).unchanged[""] == "found a forward that is compiled or was set on the instance"


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_weights_that_are_computed():
    block = FeaturesBlock([TakesFeatures(START), TakesFeatures(START + GROWTH)]).double()
    torch.nn.utils.parametrizations.spectral_norm(block.denselayer1.conv1)
    state = copy.deepcopy(block.state_dict())
    assert make_efficient(block).changed[0].engine.startswith("checkpoint since found a parametrization")
    assert all(torch.equal(value, state[key]) for key, value in block.state_dict().items())
    old = FeaturesBlock([TakesFeatures(START), TakesFeatures(START + GROWTH)])
    torch.nn.utils.weight_norm(old.denselayer2.conv2)
    assert make_efficient(old).unchanged[""].startswith("holds weights that are no parameters")
    assert all(parameter.grad is None for parameter in old.parameters())


def _other_norm(channels: int) -> nn.Module:
    return nn.GroupNorm(2, channels)


@pytest.mark.parametrize("norm", [_other_norm, nn.InstanceNorm2d, nn.SyncBatchNorm])
def test_other_norms_run_through_the_checkpoint_engine(norm):
    block = FeaturesBlock([TakesFeatures(START, norm), TakesFeatures(START + GROWTH, norm)]).double()
    plain = copy.deepcopy(block)
    report = make_efficient(block)
    if norm is nn.SyncBatchNorm:  # which runs on accelerators only in training
        block.eval(), plain.eval()
    name = type(plain.denselayer1.norm1).__name__
    assert report.changed[0].engine.startswith(f"checkpoint since found a {name} inside a layer")
    engines._warned.clear()
    x = torch.randn(3, START, 6, 5, dtype=torch.double)
    with pytest.warns(UserWarning, match=f"to 'checkpoint': found a {name}"):
        _assert_same_training(block, plain, x)


def test_another_activation_runs_through_the_checkpoint_engine():
    model = pytest.importorskip("monai.networks.nets").DenseNet(
        2, 3, 5, init_features=START, growth_rate=GROWTH, block_config=(2, 1), act="prelu"
    )
    plain = copy.deepcopy(model.double())
    report = make_efficient(model)
    assert report.changed[0].engine.startswith("checkpoint since found a PReLU inside a layer")
    assert not report.joined
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _assert_same_training(model, plain, pictures("monai"))


class _Own(nn.Module):
    """A block in a form that cannot be told by structure: one module for all norms, one for all convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(START + i * GROWTH) for i in range(3))
        self.convolutions = nn.ModuleList(
            nn.Conv2d(START + i * GROWTH, GROWTH, 3, padding=1, bias=False) for i in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for norm, conv in zip(self.norms, self.convolutions, strict=True):
            x = torch.cat([x, conv(F.relu(norm(x)))], 1)
        return x


def _own_parts(block: _Own) -> BlockParts:
    pairs = zip(block.norms, block.convolutions, strict=True)
    return BlockParts(tuple(LayerParts(norm, norm, conv) for norm, conv in pairs))


def test_a_block_of_one_s_own_is_registered():
    assert not make_efficient(_Own())
    register_block(_Own, _own_parts)
    block = _Own().double()
    plain = copy.deepcopy(block)
    report = make_efficient(nn.Sequential(block))
    assert [change.engine for change in report.changed] == ["shared"]
    _assert_same_training(pickle.loads(pickle.dumps(block)), plain, torch.randn(3, START, 6, 5, dtype=torch.double))
    restore(block)
    assert type(block) is _Own


class _Lying(_Own):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def test_a_reader_is_not_believed_without_a_trial():
    register_block(_Own, _own_parts)
    report = make_efficient(_Lying())
    assert not report
    assert report.unchanged[""].startswith("has other values")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_modes_around_the_call(mode):
    model = build("gpleiss_efficient")
    plain = plain_twin("gpleiss_efficient", model)
    with mode():
        assert len(make_efficient(model)) == 3
    _assert_same_training(model, plain, pictures("gpleiss_efficient"))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_mixed_precision_and_layout(layout):
    model = build("torchvision_efficient").float()
    plain = plain_twin("torchvision_efficient", model).float()
    make_efficient(model.to(memory_format=layout))
    x = pictures("torchvision_efficient").float().contiguous(memory_format=layout)
    truth = loss_of(copy.deepcopy(plain).double()(x.double())).detach()
    errors = []
    for each in (model, plain):
        with torch.autocast("cpu", torch.bfloat16), warnings.catch_warnings():
            warnings.simplefilter("error")  # no falling back
            loss = loss_of(each(x))
        loss.backward()
        errors.append((loss.detach() - truth).abs())
    assert errors[0] <= 2 * errors[1] + 0.02 * truth.abs()


def test_some_parameters_frozen_and_bottlenecks_kept():
    model = build("timm_efficient")
    plain = plain_twin("timm_efficient", model)
    make_efficient(model)
    model.features.denseblock2.denselayer1.keep_bottleneck = True
    assert make_efficient(model).changed[1].kept == 2 * GROWTH + make_efficient(plain).changed[1].kept
    restore(plain)
    for each in (model, plain):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_("denseblock2" in name or "classifier" in name)
    _assert_same_training(model, plain, pictures("timm_efficient"))


def test_a_model_on_the_meta_device_is_tried_elsewhere():
    densenet = pytest.importorskip("torchvision.models.densenet")
    with torch.device("meta"):
        model = densenet.DenseNet(4, (2, 1), 6)
    assert len(make_efficient(model)) == 2
    assert all(parameter.is_meta for parameter in model.parameters())


def test_parts_of_a_sequence_can_be_taken_and_run():
    model = build("timm_deep")
    plain, x = plain_twin("timm_deep", model), pictures("timm_deep")
    make_efficient(model)
    _assert_same_training(
        model.features[7:10], plain.features[7:10], torch.randn(3, 2 * GROWTH, 8, 9, dtype=torch.double)
    )
    x, expected = x, x
    for ours, theirs in zip(model.features, plain.features, strict=True):
        x, expected = ours(x), theirs(expected)
    assert_close(x.detach(), expected.detach())


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
def test_scripting_says_what_to_do():
    model = build("torchvision")
    make_efficient(model)
    with pytest.raises(NotImplementedError, match=r"restore\(model\) first"):
        torch.jit.script(model)


@pytest.mark.parametrize("engine", ["shared", "checkpoint"])
def test_what_was_under_the_rule_stays_under_it(engine):
    model = build("torchvision")
    convert_batchnorm(model)
    make_efficient(model, engine)
    loss_of(model(pictures("torchvision"))).backward()
    restore(model)
    assert all(isinstance(m, UpdatesOnce) for m in model.modules() if isinstance(m, nn.BatchNorm2d))


def test_the_readme_s_example(capsys):
    pytest.importorskip("torchvision")
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    exec(re.search(r"<!-- adapt -->\n```python\n(.*?)```", readme, re.DOTALL)[1], {})
    assert capsys.readouterr().out.startswith(
        "4 dense blocks changed\n  features.denseblock1: 6 layers, shared, keeping "
    )


def test_memory_is_that_of_ours():
    densenet = pytest.importorskip("torchvision.models.densenet")
    model, x = densenet.DenseNet(8, (6, 8, 6), 16).double(), torch.randn(2, 3, 64, 64, dtype=torch.double)
    plain = saved_bytes(lambda: model(x))
    make_efficient(model)
    ours = DenseNet(8, (6, 8, 6), num_init_features=16, num_classes=1000, small_inputs=False).double()
    assert saved_bytes(lambda: model(x)) <= 1.01 * saved_bytes(lambda: ours(x)) < 0.45 * plain
