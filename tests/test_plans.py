"""Changes after the first forward, which must not use what was read then: each next step is plain's."""

import contextlib
import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torchvision
from helpers import assert_close, assert_same_buffers, assert_same_gradients, backward, nodes_of
from test_parts import Block, randomized
from test_parts import _block_parts as parts_of_block
from torch import Tensor, nn
from torch.nn.utils import spectral_norm
from torch.nn.utils.parametrize import register_parametrization

from efficient_densenet import DenseNet, make_efficient
from efficient_densenet.engine import choose, read
from efficient_densenet.engine.parts import BlockParts
from efficient_densenet.memory import saved_bytes

pytestmark = pytest.mark.filterwarnings("ignore:falling back:UserWarning", "ignore::FutureWarning")
SIZE = 3, 3, 33, 35
Change = Callable[[nn.Module], None]


def _ours() -> tuple[nn.Module, nn.Module]:
    model = DenseNet(4, (2, 2), 0.5, 6, 2, num_classes=5, small_inputs=False)
    return model, copy.deepcopy(model).set_engine(False)


def _converted() -> tuple[nn.Module, nn.Module]:
    plain = torchvision.models.DenseNet(4, (2, 2), 6, 2, num_classes=5)
    model = copy.deepcopy(plain)
    make_efficient(model)
    return model, plain


def _with_leaky_relus() -> tuple[nn.Module, nn.Module]:
    model = DenseNet(4, (2, 2), 0.5, 6, 2, num_classes=5, small_inputs=False, activation=lambda: nn.LeakyReLU(0.3))
    return model, copy.deepcopy(model).set_engine(False)


@pytest.fixture(scope="module")
def models() -> dict[Callable, tuple[nn.Module, nn.Module]]:
    made = {make: make() for make in (_ours, _converted, _with_leaky_relus)}
    for pair in made.values():
        for model in pair:
            torch.manual_seed(1)
            model.double()
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    nn.init.normal_(parameter, mean=0.5, std=0.3)
    return made


def _of(path: str, change: Change) -> Change:
    """A change of the submodule at `path` of the features."""
    return lambda model: change(model.get_submodule(f"features.{path}".rstrip(".")))


def _set(path: str, **attributes) -> Change:
    return _of(path, lambda module: [setattr(module, name, value) for name, value in attributes.items()])


def _replace(path: str, make: Callable[[], nn.Module]) -> Change:
    parent, _, name = path.rpartition(".")
    return _of(parent, lambda module: setattr(module, name, make()))


def _norms(change: Change) -> Change:
    return lambda model: [change(each) for each in model.modules() if isinstance(each, nn.BatchNorm2d)]


def _steps(*changes: Change) -> Change:
    return lambda model: [change(model) for change in changes]


def _double(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
    return output * 2


def _double_convolution(module: nn.Module, args: tuple, output: Tensor) -> Tensor | None:
    return output * 2 if type(module) is nn.Conv2d else None


def _double_input(module: nn.Module, args: tuple[Tensor]) -> Tensor:
    return args[0] * 2


def _double_gradient(module: nn.Module, grad_input: tuple[Tensor], grad_output: tuple[Tensor]) -> tuple[Tensor]:
    return (grad_input[0] * 2,)


def _hooked_for_a_while(module: nn.Module) -> None:
    module.register_forward_hook(_double).remove()


def _forward(module: nn.Module) -> None:
    module.forward = lambda x: type(module).forward(module, x) * 3


def _forward_for_notes(layer: nn.Module) -> None:
    del layer.notes
    layer.forward = lambda *args: type(layer).forward(layer, *args) * 3


class _Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


class _Halved(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


def _other_tensors(module: nn.Module) -> None:
    module._parameters = {name: nn.Parameter(each * 2) for name, each in module._parameters.items() if each is not None}


LAYER, TRANSITION = "denseblock1.denselayer2", "transition1"


def _forward_once(model: nn.Module) -> None:
    model(torch.ones(SIZE).double())


def _swapped_relus(layer: nn.Module) -> None:
    """The same modules in the same order, under each other's names."""
    names = {"relu1": "relu2", "relu2": "relu1"}
    layer._modules = {names.get(name, name): module for name, module in layer._modules.items()}


def _halved_groups(conv: nn.Conv2d) -> None:
    conv.groups, conv.weight = 2, nn.Parameter(conv.weight[:, :4].detach().clone())


CHANGES: dict[str, Change] = {
    "eps of all norms": _norms(lambda norm: setattr(norm, "eps", 0.2)),
    "eps of a norm inside": _set(f"{LAYER}.norm2", eps=0.2),
    "eps of the stem": _set("norm0", eps=0.2),
    "eps of a norm that shares statistics": _set(f"{LAYER}.norm1", eps=0.2),
    "momentum": _set(f"{LAYER}.norm2", momentum=0.7),
    "cumulative averages": _set(f"{LAYER}.norm1", momentum=None),
    "running statistics are not tracked": _set(f"{LAYER}.norm1", track_running_stats=False),
    "a running mean is removed": _set(f"{LAYER}.norm2", running_mean=None, running_var=None),
    "a count is removed": _set(f"{LAYER}.norm2", num_batches_tracked=None),
    "a norm inside is frozen": _of(f"{LAYER}.norm2", nn.Module.eval),
    "the stem is frozen": _of("norm0", nn.Module.eval),
    "all norms are frozen": _norms(nn.Module.eval),
    "frozen statistics are others": _steps(
        _norms(nn.Module.eval), _forward_once, _set(f"{LAYER}.norm2", running_mean=torch.ones(8).double())
    ),
    "eval": nn.Module.eval,
    "eval, and training again": _steps(nn.Module.eval, _forward_once, nn.Module.train),
    "a convolution trains no more": _of(f"{LAYER}.conv1", lambda conv: conv.requires_grad_(False)),
    "nothing trains but a bias": _steps(
        lambda model: model.requires_grad_(False), _of(f"{LAYER}.norm2", lambda norm: norm.bias.requires_grad_())
    ),
    "another parameter": _of(f"{LAYER}.conv1", lambda conv: setattr(conv, "weight", nn.Parameter(conv.weight * 2))),
    "another parameter's data": _of(f"{LAYER}.conv1", lambda conv: setattr(conv.weight, "data", conv.weight.data * 2)),
    "another dict of parameters": _of(f"{LAYER}.norm2", _other_tensors),
    "a bias is added": _of(f"{LAYER}.conv1", lambda conv: setattr(conv, "bias", nn.Parameter(torch.ones(8).double()))),
    "weight and bias are removed": _set(f"{LAYER}.norm2", weight=None, bias=None),
    "another convolution": _replace(f"{LAYER}.conv1", lambda: nn.Conv2d(10, 8, 1, bias=False).double()),
    "a dilated convolution": _replace(
        f"{LAYER}.conv2", lambda: nn.Conv2d(8, 4, 3, padding=2, dilation=2, bias=False).double()
    ),
    "dilation": _set(f"{LAYER}.conv2", dilation=(2, 2), padding=(2, 2)),
    "groups": _of(f"{LAYER}.conv2", _halved_groups),
    "another activation": _replace(f"{LAYER}.relu1", nn.SiLU),
    "another activation's class": _set(f"{LAYER}.relu2", __class__=nn.SiLU),
    "another activation in the stem": _replace("relu0", nn.ELU),
    "another activation in a transition": _replace(f"{TRANSITION}.relu", nn.GELU),
    "another norm": _replace(f"{LAYER}.norm2", lambda: nn.GroupNorm(2, 8).double()),
    "another norm's class": _set(f"{LAYER}.norm2", __class__=_Halved),
    "another last norm": _replace("norm5", lambda: _Halved(15).double()),
    "another pooling": _replace(f"{TRANSITION}.pool", lambda: nn.MaxPool2d(2)),
    "another pooling in the stem": _replace("pool0", lambda: nn.MaxPool2d(2, ceil_mode=True)),
    "a setting of the stem's pooling": _set("pool0", ceil_mode=True),
    "a stride of the stem": _set("conv0", stride=(1, 2)),
    "another layer": _of("denseblock1", lambda block: setattr(block, "denselayer1", copy.deepcopy(block.denselayer1))),
    "a hook": _of(f"{LAYER}.conv1", lambda conv: conv.register_forward_hook(_double)),
    "a hook before a norm": _of(f"{LAYER}.norm1", lambda norm: norm.register_forward_pre_hook(_double_input)),
    "a backward hook": _of(f"{LAYER}.conv1", lambda conv: conv.register_full_backward_hook(_double_gradient)),
    "a hook on a layer": _of(LAYER, lambda layer: layer.register_forward_hook(_double)),
    "a hook on a block": _of("denseblock1", lambda block: block.register_forward_hook(_double)),
    "a hook on a transition": _of(TRANSITION, lambda module: module.register_forward_hook(_double)),
    "a hook inside a transition": _of(f"{TRANSITION}.norm", lambda norm: norm.register_forward_hook(_double)),
    "a hook in the stem": _of("norm0", lambda norm: norm.register_forward_hook(_double)),
    "a hook for a while": _of(f"{LAYER}.conv1", _hooked_for_a_while),
    "a new forward": _of(f"{LAYER}.conv1", _forward),
    "a new forward inside a transition": _of(f"{TRANSITION}.norm", _forward),
    "a new forward in the stem": _of("conv0", _forward),
    "a parametrization": _of(f"{LAYER}.conv1", lambda conv: register_parametrization(conv, "weight", _Twice())),
    "a spectral norm": _of(f"{LAYER}.conv1", spectral_norm),
    "dropout": _set(LAYER, drop_rate=0.5),
    "dropout of another rate": _steps(_set(LAYER, drop_rate=0.5), _forward_once, _set(LAYER, drop_rate=0.2)),
    "a tensor as eps changes in place": _steps(
        _of(f"{LAYER}.norm2", lambda norm: setattr(norm, "eps", torch.tensor(0.1))),
        _forward_once,
        _of(f"{LAYER}.norm2", lambda norm: setattr(norm, "eps", norm.eps.fill_(2.0))),
    ),
    "a list as padding changes in place": _steps(
        _of("conv0", lambda conv: vars(conv).update(stride=[2, 2], padding=[3, 3])),
        _forward_once,
        _of("conv0", lambda conv: conv.padding.__setitem__(0, 4)),
    ),
    "a new forward in the place of a list": _steps(
        _set(LAYER, notes=[1]), _forward_once, _of(LAYER, _forward_for_notes)
    ),
    "activations change places": _steps(_replace(f"{LAYER}.relu1", nn.SiLU), _forward_once, _of(LAYER, _swapped_relus)),
    "a wrapped convolution of a transition": _of(
        TRANSITION, lambda module: setattr(module, "conv", nn.Sequential(module.conv, nn.Dropout(0.0)))
    ),
    "weights in channels_last": lambda model: model.to(memory_format=torch.channels_last),
}
"""Changes of a model; some of them are of converted models too."""
OF_A_LEAKY_RELU: dict[str, Change] = {
    "a slope": _set(f"{LAYER}.relu1", negative_slope=0.6),
    "a slope of a transition": _set(f"{TRANSITION}.relu", negative_slope=0.6),
    "a slope of the stem": _set("relu0", negative_slope=0.6),
    "a slope that is a tensor": _steps(
        _set(f"{LAYER}.relu1", negative_slope=torch.tensor(0.6)),
        _forward_once,
        _set(f"{LAYER}.relu1", negative_slope=torch.tensor(0.8)),
    ),
}


def _assert_next_step_is_plain_s(ours: nn.Module, plain: nn.Module, change: Change, x: Tensor) -> None:
    for model in (ours, plain):
        backward(model, x)
        torch.manual_seed(2)
        change(model)
    ours.zero_grad()
    plain.zero_grad()
    results = []
    for model in (ours, plain):
        leaf = x.clone().requires_grad_()
        torch.manual_seed(3)
        output = model(leaf)
        if output.requires_grad:
            output.square().sum().backward()
        results.append((output.detach(), leaf.grad))
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected)
    assert_same_gradients(ours, plain)
    assert_same_buffers(ours, plain)


@pytest.mark.parametrize("make", [_ours, _converted])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_the_first_step(change, make, models):
    ours, plain = copy.deepcopy(models[make])
    _assert_next_step_is_plain_s(ours, plain, CHANGES[change], torch.randn(SIZE, dtype=torch.double))


@pytest.mark.parametrize("change", OF_A_LEAKY_RELU)
def test_a_change_of_an_activation_after_the_first_step(change, models):
    ours, plain = copy.deepcopy(models[_with_leaky_relus])
    _assert_next_step_is_plain_s(ours, plain, OF_A_LEAKY_RELU[change], torch.randn(SIZE, dtype=torch.double))


INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "another size": lambda x: x[..., 1:, 2:],
    "another batch": lambda x: x[:2],
    "a batch whose last features are a pixel": lambda x: x[..., :8, :8],
    "an empty batch": lambda x: x[:0],
}


@pytest.mark.parametrize("change", INPUTS)
@pytest.mark.parametrize("make", [_ours, _converted])
def test_another_input_after_the_first_step(change, make, models):
    """Outputs have plain's memory format too."""
    ours, plain = copy.deepcopy(models[make])
    x, outputs = torch.randn(SIZE, dtype=torch.double), []
    for model in (ours, plain):
        backward(model.features, x)
        outputs.append(model.features(INPUTS[change](x)))
    assert outputs[0].shape == outputs[1].shape
    if change == "channels_last":
        assert outputs[0].stride() == outputs[1].stride()
    if change != "an empty batch":
        _assert_next_step_is_plain_s(ours, plain, lambda model: None, INPUTS[change](x))


@pytest.mark.parametrize("make", [_ours, _converted])
def test_a_batch_of_a_single_pixel_after_the_first_step(make, models):
    """It has no variance, and plain raises too."""
    for model in copy.deepcopy(models[make]):
        backward(model, torch.randn(SIZE, dtype=torch.double))
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            model(torch.randn(1, 3, 8, 8, dtype=torch.double))


def test_other_outputs_after_the_first_step(models):
    """Of a backbone with the same modules."""
    ours, plain = copy.deepcopy(models[_ours])
    x = torch.randn(SIZE, dtype=torch.double)
    for _ in range(2):
        backward(ours, x), backward(plain, x)
        for actual, expected in zip(ours.as_backbone()(x), plain.as_backbone()(x), strict=True):
            assert_close(actual, expected)


def test_threads_that_run_one_model_alike_and_in_other_ways(models):
    ours, _ = copy.deepcopy(models[_ours])
    ours.eval()
    inputs = [INPUTS[name](torch.randn(SIZE, dtype=torch.double)) for name in ("channels_last", "another size")] * 8
    with ThreadPoolExecutor(4) as executor:
        outputs = list(executor.map(ours, inputs))
    for output, x in zip(outputs, inputs, strict=True):
        assert_close(output, ours(x), 0)


@pytest.mark.parametrize("make", [_ours, _converted])
def test_another_precision_after_the_first_step(make, models):
    ours, plain = copy.deepcopy(models[make])
    x = torch.randn(SIZE)
    for model in (ours, plain):
        backward(model, x.double())
        model.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert ours.features(x).dtype == plain.features(x).dtype
    assert_close(ours(x), plain(x), 1e-4)
    for model in (ours, plain):
        model.features.denseblock1.denselayer2.conv1.double()  # whose weight stays the same object
        with pytest.raises(RuntimeError, match="type"):
            model(x)


@contextlib.contextmanager
def _hook_on_all_modules() -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(_double_convolution)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _patched_class() -> Iterator[None]:
    before = nn.Conv2d._conv_forward
    nn.Conv2d._conv_forward = lambda *args: before(*args) * 2
    try:
        yield
    finally:
        nn.Conv2d._conv_forward = before


@contextlib.contextmanager
def _patched_class_of_an_author() -> Iterator[None]:
    layer_class = torchvision.models.densenet._DenseLayer
    before = layer_class.forward
    layer_class.forward = lambda *args: before(*args) * 2
    try:
        yield
    finally:
        layer_class.forward = before


@pytest.mark.parametrize("context", [_hook_on_all_modules, _patched_class, _patched_class_of_an_author])
@pytest.mark.parametrize("make", [_ours, _converted])
def test_a_change_of_all_modules_after_the_first_step(make, context, models):
    ours, plain = copy.deepcopy(models[make])
    x = torch.randn(SIZE, dtype=torch.double)
    backward(ours, x), backward(plain, x)
    with context():
        _assert_next_step_is_plain_s(ours, plain, lambda model: None, x)
    _assert_next_step_is_plain_s(ours, plain, lambda model: None, x)


@pytest.mark.parametrize("copier", [copy.deepcopy, copy.copy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("make", [_ours, _converted])
def test_a_copy_after_the_first_step_has_its_own_values(make, copier, models):
    ours, plain = copy.deepcopy(models[make])
    x = torch.randn(SIZE, dtype=torch.double)
    backward(ours, x), backward(plain, x)
    copied = copier(ours)
    if copier is copy.copy:  # of a block: a copy with parameters of its own, as in a replica
        copied._modules = dict(copied._modules)
        copied.features = copy.copy(copied.features)
        copied.features._modules = dict(copied.features._modules)
        block = copied.features.denseblock1 = copy.copy(copied.features.denseblock1)
        block._modules = {name: copy.deepcopy(layer) for name, layer in block._modules.items()}
    with torch.no_grad():
        for model in (copied, plain):
            model.features.denseblock1.denselayer2.conv1.weight.mul_(2)
    before = [p.grad for p in ours.features.denseblock1.parameters()]
    _assert_next_step_is_plain_s(copied, plain, lambda model: None, x)
    assert all(p.grad is grad for p, grad in zip(ours.features.denseblock1.parameters(), before, strict=True))


@pytest.mark.parametrize("make", [_ours, _converted])
def test_another_engine_after_the_first_step(make, models):
    ours, plain = copy.deepcopy(models[make])
    x = torch.randn(SIZE, dtype=torch.double)

    def change(model: nn.Module) -> None:
        if model is ours:
            model.set_engine("checkpoint") if isinstance(model, DenseNet) else make_efficient(model, "checkpoint")

    _assert_next_step_is_plain_s(ours, plain, change, x)
    assert "SharedStage" not in nodes_of(ours(x))


@pytest.mark.parametrize("make", [_ours, _converted])
def test_saved_bottlenecks_after_the_first_step(make, models):
    ours, plain = copy.deepcopy(models[make])
    x = torch.randn(SIZE, dtype=torch.double)

    def change(model: nn.Module) -> None:
        if model is ours:
            model.features.denseblock1.keep_bottlenecks([0, 1])

    before, _ = saved_bytes(lambda: ours(x)), plain(x)
    _assert_next_step_is_plain_s(ours, plain, change, x)
    assert saved_bytes(lambda: ours(x)) - before == 2 * 8 * x.shape[0] * 9 * 9 * 8


class _ReadBlock(Block):
    """A block whose parts depend on an attribute that it may have."""

    engine, can_join_stage = choose.Engine.SHARED, True

    def forward(self, x: Tensor) -> Tensor:
        return choose.run_block(self, x, choose.plan_block(self, x))

    def run_layers(self, x: Tensor, run_first_half) -> Tensor:
        return super().forward(x)

    def dense_parts(self) -> BlockParts:
        read = parts_of_block(self)
        return BlockParts(read.layers, newest_first=getattr(self, "last_first", True))


def test_an_attribute_that_is_added_after_the_first_step():
    (block,) = randomized(_ReadBlock())
    x = torch.randn(2, 4, 5, 6, dtype=torch.double, requires_grad=True)
    newest_first = block(x)
    block.last_first = False
    assert_close(block(x)[:, :4], x)
    assert_close(newest_first[:, -4:], x)


@pytest.mark.parametrize("make", [_ours, _converted])
def test_a_second_forward_reads_no_module(make, models, monkeypatch):
    ours, _ = copy.deepcopy(models[make])
    x = torch.randn(SIZE, dtype=torch.double)
    for train in (True, False, True):
        ours.train(train)
        ours(x)
    for name in ("shared_parts", "joined_consumer", "stem_at_the_start"):
        monkeypatch.setattr(read, name, lambda *_: pytest.fail("read again"))
    assert "SharedStage" in nodes_of(ours(x))


@pytest.mark.parametrize("make", [_ours, _converted])
def test_a_model_is_freed_when_nothing_refers_to_it(make, models):
    """At once, without garbage collection."""
    ours, _ = copy.deepcopy(models[make])
    ours(torch.randn(SIZE, dtype=torch.double)).sum().backward()
    gc.collect()
    gc.disable()
    try:
        references = [weakref.ref(each) for each in (*ours.modules(), *ours.parameters())]
        del ours
        assert not [each() for each in references if each() is not None]
    finally:
        gc.enable()


HOLDERS: dict[str, Callable[[nn.Module, nn.Module], None]] = {
    "a hook": lambda model, conv: conv.register_forward_hook(lambda *_: model and None) and None,
    "a parameter's hook": lambda model, conv: conv.weight.register_hook(lambda grad: model and None) and None,
    "an attribute": lambda model, conv: conv.__dict__.update(owner=[model]),
}


@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("make", [_ours, _converted])
def test_a_model_that_its_own_modules_refer_to_is_collected(make, holder, models):
    ours, _ = copy.deepcopy(models[make])
    for _ in range(2):
        ours(torch.randn(SIZE, dtype=torch.double)).sum().backward()
        HOLDERS[holder](ours, ours.features.denseblock1.denselayer1.conv2)
    reference = weakref.ref(ours)
    del ours
    gc.collect()
    assert reference() is None


def test_copies_and_pickles_have_no_plans(models):
    ours, _ = models[_ours]
    ours(torch.randn(SIZE, dtype=torch.double)).sum().backward()
    block = ours.features.denseblock1
    assert vars(block)[read._Plans.ATTRIBUTE].by_key
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert vars(other)[read._Plans.ATTRIBUTE] == {}


def test_replaced_parameters_are_freed():
    model = DenseNet(4, (2,), num_init_features=6)
    x = torch.randn(2, 3, 8, 8)
    model(x)
    conv = model.features.denseblock1.denselayer1.conv1
    reference = weakref.ref(conv.weight)
    conv.weight = nn.Parameter(conv.weight.detach() * 2)
    assert reference() is None
