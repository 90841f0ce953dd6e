"""DenseNets of other libraries run by our engines: the same numbers, nothing else changed, and reversible."""

import copy
import pickle

import pytest
import torch
from grids import grid
from helpers import assert_close, convert_and_report
from third_party_models import (
    GROWTH,
    MODELS,
    START,
    NewestFirst,
    assert_same_training,
    block_batch,
    build,
    features_block,
    image_batch,
    loss_of,
    plain_reference,
    train,
)
from torch import Tensor, nn

from efficient_densenet import DenseNet, convert_batchnorm, make_efficient, restore
from efficient_densenet.engine import choose
from efficient_densenet.memory import saved_bytes
from efficient_densenet.norms.batch_norm import UpdatesOnce


def in_second_tier(*values):
    return pytest.param(*values, marks=pytest.mark.exhaustive)


OTHERS = [
    *(("torchvision", "checkpoint"), ("timm", "official"), ("kuangliu", "official"), ("tiramisu", "checkpoint")),
    *(in_second_tier(name, "checkpoint") for name in ("timm", "monai", "kuangliu")),
    *(in_second_tier(name, "official") for name in ("torchvision", "monai")),
]


@pytest.mark.parametrize(("name", "engine"), [*((name, True) for name in MODELS), *OTHERS])
def test_training_matches_plain_and_restore_undoes_the_conversion(name, engine):
    model = build(name)
    plain, x = plain_reference(name, model), image_batch(name)
    classes, tensors = list(map(type, model.modules())), [id(t) for t in model.state_dict(keep_vars=True).values()]
    keys, text = list(model.state_dict()), repr(model)
    report = convert_and_report(model, engine)
    num_blocks = 4 if name == "smp" else 3
    assert [change.name for change in report.changed] == [f"features.denseblock{i + 1}" for i in range(num_blocks)]
    assert not report.unchanged
    assert len(report) == num_blocks
    assert {change.engine for change in report.changed} == {"shared" if engine is True else engine}
    assert list(model.state_dict()) == keys
    assert [id(tensor) for tensor in model.state_dict(keep_vars=True).values()] == tensors
    assert all(isinstance(module, cls) for module, cls in zip(model.modules(), classes, strict=True))
    assert [type(module).__qualname__ for module in model.modules()] == [cls.__qualname__ for cls in classes]
    assert repr(model) == text
    assert_same_training(model, plain, x)
    if engine is True:  # frozen norms
        assert_same_training(model.eval(), plain.eval(), x)
    assert restore(model) is model
    assert list(map(type, model.modules())) == classes
    assert all(
        set(vars(ours)) == set(vars(reference))
        for ours, reference in zip(model.modules(), plain.modules(), strict=True)
    )
    with torch.no_grad():
        outputs = model.eval()(x), plain.eval()(x)
    for actual, expected in zip(*([o] if isinstance(o, Tensor) else o for o in outputs), strict=True):
        assert_close(actual, expected)


@pytest.mark.parametrize("name", ["torchvision_efficient", in_second_tier("timm_efficient"), "gpleiss_efficient"])
def test_norms_that_update_twice_update_once_until_restored(name):
    model, counts = build(name), []
    layer = model.features.denseblock1.denselayer1
    for convert in (None, make_efficient, lambda model: make_efficient(model, "plain"), restore):
        if convert is not None:
            convert(model)
        before = int(layer.norm1.num_batches_tracked)
        loss_of(model(image_batch(name).requires_grad_())).backward()
        counts.append(int(layer.norm1.num_batches_tracked) - before)
    assert counts == [2, 1, 1, 2]


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
@pytest.mark.parametrize(
    "name", ["torchvision_efficient", in_second_tier("timm_efficient"), "monai", in_second_tier("gpleiss_efficient")]
)
def test_in_tracing_the_author_s_forward_runs_and_without_gradients_the_values_are_its_own(name):
    model = build(name).eval()
    x = image_batch(name)
    with torch.no_grad():
        expected = model(x)
        make_efficient(model)
        assert_close(model(x), expected)
        assert torch.equal(torch.jit.trace(model, x)(x), expected)
    exported = torch.export.export(model, (x,), strict=False)
    assert_close(exported.module()(x).detach(), expected)


# Only timm has no in-place operation after its features, and so allows backward hooks on their last modules.
HOOKED = [
    ("torchvision", "denseblock1"),
    ("monai", "transition1"),
    ("timm", "norm5"),
    ("timm", ""),
    *(in_second_tier("timm", place) for place in ("denseblock1", "transition1")),
    in_second_tier("torchvision", "transition1"),
    in_second_tier("monai", "denseblock1"),
]


@pytest.mark.parametrize(("name", "place"), HOOKED)
def test_hooks_registered_before_and_after_conversion_fire_once_with_plain_s_values(name, place):
    model = build(name)
    plain, x, all_calls = plain_reference(name, model), image_batch(name), []
    for each in (model, plain):
        calls: list[list[Tensor]] = []
        all_calls.append(calls)
        hooked = each.features.get_submodule(place)

        def record(module, first, second=None, calls=calls):
            tensors = [t for value in (first, second) for t in (value if isinstance(value, tuple) else [value])]
            calls.append([t.detach().clone() for t in tensors if t is not None])

        hooked.register_forward_hook(record)
        hooked.register_full_backward_hook(record)
        if each is model:
            make_efficient(model)
        hooked.register_forward_pre_hook(record)
    assert not any(all_calls)  # the trace has called no hook
    assert_same_training(model, plain, x)
    assert [len(calls) for calls in all_calls] == [9, 9]
    for ours, reference in zip(*all_calls, strict=True):
        for actual, expected in zip(ours, reference, strict=True):
            assert_close(actual, expected)
    restore(model)
    assert len(model.features.get_submodule(place)._forward_hooks) == 1


def _counting(counts: list[int], i: int):
    def count(*_):
        counts[i] += 1

    return count


@pytest.mark.parametrize("inside", ["", ".norm1", ".conv2"])
def test_a_hook_inside_a_layer_is_called(inside):
    model = build("torchvision")
    plain, counts = plain_reference("torchvision", model), [0, 0]
    make_efficient(model)
    for i, each in enumerate((model, plain)):
        each.get_submodule(f"features.denseblock2.denselayer2{inside}").register_forward_hook(_counting(counts, i))
    choose._warned.clear()
    with pytest.warns(UserWarning, match="falling back from engine 'shared' to 'checkpoint': found a hook"):
        assert_same_training(model, plain, image_batch("torchvision"))
    assert counts == [3, 3]
    make_efficient(model, "shared")
    with pytest.raises(RuntimeError, match="engine 'shared' cannot run here: found a hook"):
        model(image_batch("torchvision"))


class _BlockWithContainer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(NewestFirst(START), NewestFirst(START + GROWTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.filterwarnings("ignore:falling back")
@pytest.mark.parametrize("first", [True, False])
def test_a_hook_on_a_container_around_the_layers_is_called(first):
    block, counts = _BlockWithContainer().double(), [0, 0]
    plain = copy.deepcopy(block)
    if first:
        assert [change.name for change in convert_and_report(block).changed] == [""]
    for i, each in enumerate((block, plain)):
        each.layer.register_forward_hook(_counting(counts, i))
    if not first:
        assert [change.engine[:10] for change in convert_and_report(block).changed] == ["checkpoint"]
    assert_same_training(block, plain, block_batch())
    assert counts == [3, 3]


def _pickled(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize(*grid(copier=[copy.deepcopy, _pickled], name=["torchvision", "timm", "monai"], strength=1))
def test_a_copy_is_converted_and_independent(name, copier):
    model = build(name)
    plain = plain_reference(name, model)
    make_efficient(model)
    copied = copier(model)
    assert list(map(type, copied.modules())) == list(map(type, model.modules()))
    assert_same_training(copied, plain, image_batch(name))
    assert all(parameter.grad is None for parameter in model.parameters())
    restore(copied)
    assert [type(module) for module in copied.modules()] == [type(module) for module in plain.modules()]
    assert [type(module) for module in copied.modules()] != [type(module) for module in model.modules()]


def test_dtype_and_weights_may_change_before_or_after_conversion():
    before, after = build("torchvision"), build("torchvision")
    make_efficient(before)
    states = before.state_dict()
    after.load_state_dict(states)
    before.float().load_state_dict(states)
    make_efficient(after.float())
    x = image_batch("torchvision").float()
    for actual, expected in zip(train(before, x), train(after, x), strict=True):
        assert torch.equal(actual, expected)
    for model in (before, after):
        out = model.to(torch.bfloat16)(x.bfloat16())
        loss_of(out).backward()
        assert out.dtype == torch.bfloat16


def test_blocks_of_this_package_are_set_and_restored():
    model = DenseNet(4, (2, 1), num_init_features=4, efficient="plain")
    report = convert_and_report(nn.Sequential(model), "checkpoint")
    assert model.engine == "checkpoint"
    assert [change.name for change in report.changed] == ["0.features.denseblock1", "0.features.denseblock2"]
    make_efficient(model)
    assert model.engine == "best"
    restore(model)
    assert model.engine == "plain"
    assert "_original_engine" not in vars(model.features.denseblock1)


def test_a_second_call_changes_the_engine():
    model = build("torchvision")
    make_efficient(model)
    classes = list(map(type, model.modules()))
    report = convert_and_report(model, "checkpoint")
    assert [change.engine for change in report.changed] == ["checkpoint"] * 3
    assert not report.transitions  # the shared engine alone runs them
    assert model.features.denseblock1.engine is choose.Engine.CHECKPOINT
    assert [change.engine for change in convert_and_report(model, False).changed] == ["plain"] * 3
    assert [change.engine for change in convert_and_report(model).changed] == ["shared"] * 3
    assert list(map(type, model.modules())) == classes
    with pytest.raises(ValueError, match="unknown engine 'fast'"):
        make_efficient(model, "fast")


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_mixed_precision_and_memory_format(layout):
    model = build("torchvision_efficient").float()
    plain = plain_reference("torchvision_efficient", model).float()
    make_efficient(model.to(memory_format=layout))
    x = image_batch("torchvision_efficient").float().contiguous(memory_format=layout)
    truth = loss_of(copy.deepcopy(plain).double()(x.double())).detach()
    errors = []
    for each in (model, plain):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(each(x))
        loss.backward()
        errors.append((loss.detach() - truth).abs())
    assert errors[0] <= 2 * errors[1] + 0.02 * truth.abs()


def test_frozen_parameters_and_a_saved_bottleneck():
    model = build("timm_efficient")
    plain = plain_reference("timm_efficient", model)
    make_efficient(model)
    x = image_batch("timm_efficient")
    recomputed = saved_bytes(lambda: copy.deepcopy(model)(x))
    model.features.denseblock2.denselayer1.keep_bottleneck = True
    assert saved_bytes(lambda: copy.deepcopy(model)(x)) > recomputed
    for each in (model, plain):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_("denseblock2" in name or "classifier" in name)
    assert_same_training(model, plain, x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:FutureWarning")
def test_scripting_raises_and_names_the_remedy():
    model = build("torchvision")
    make_efficient(model)
    with pytest.raises(NotImplementedError, match=r"restore\(model\) first"):
        torch.jit.script(model)


@pytest.mark.parametrize("engine", ["shared", "checkpoint"])
def test_norms_under_the_exactly_once_rule_stay_under_it(engine):
    block = convert_batchnorm(features_block())
    make_efficient(block, engine)
    loss_of(block(block_batch())).backward()
    restore(block)
    assert all(isinstance(m, UpdatesOnce) for m in block.modules() if isinstance(m, nn.BatchNorm2d))


def test_saved_memory_is_that_of_our_densenet():
    densenet = pytest.importorskip("torchvision.models.densenet")
    model, x = densenet.DenseNet(8, (6, 8, 6), 16).double(), torch.randn(2, 3, 64, 64, dtype=torch.double)
    plain = saved_bytes(lambda: model(x))
    make_efficient(model)
    ours = DenseNet(8, (6, 8, 6), num_init_features=16, num_classes=1000, small_inputs=False).double()
    assert saved_bytes(lambda: model(x)) <= 1.01 * saved_bytes(lambda: ours(x)) < 0.45 * plain
