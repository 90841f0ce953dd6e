"""Changes of a model before and after its first forward, whose plans are kept: each next step is plain's."""

import contextlib
import copy
import gc
import pickle
import random
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
import torchvision
from grids import grid
from helpers import assert_close, assert_same_buffers, assert_same_gradients, backward, nodes_of, patched
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.parametrize import register_parametrization

from efficient_densenet import DenseBlock, DenseNet, make_efficient
from efficient_densenet.engine.network import run_sequence
from efficient_densenet.memory import saved_bytes
from efficient_densenet.models.layers import Transition

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


@pytest.fixture(scope="module", params=[_ours, _converted])
def models(request) -> tuple[nn.Module, nn.Module]:
    pair = request.param()
    for model in pair:
        torch.manual_seed(1)
        model.double()
        for parameter in model.parameters():
            if parameter.dim() == 1:
                nn.init.normal_(parameter, mean=0.5, std=0.3)
    return pair


@pytest.fixture
def pair(models) -> tuple[nn.Module, nn.Module]:
    """A model of this package or a converted one, and one that runs plain modules."""
    return copy.deepcopy(models)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(SIZE, dtype=torch.double)


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


def _doubled(module: nn.Module) -> None:
    """Give it a subclass of its class."""
    cls = type(module)
    module.__class__ = type("Doubled", (cls,), {"forward": lambda self, x: 2 * cls.forward(self, x)})


def _other_tensors(module: nn.Module) -> None:
    module._parameters = {name: nn.Parameter(each * 2) for name, each in module._parameters.items() if each is not None}


LAYER, TRANSITION = "denseblock1.denselayer2", "transition1"


def _forward_once(model: nn.Module) -> None:
    model(torch.ones(SIZE).double())


def _slope(path: str) -> Change:
    return _steps(_replace(path, lambda: nn.LeakyReLU(0.3)), _forward_once, _set(path, negative_slope=0.6))


def _swapped_relus(layer: nn.Module) -> None:
    """Exchange the names of two modules, which keep their order."""
    names = {"relu1": "relu2", "relu2": "relu1"}
    layer._modules = {names.get(name, name): module for name, module in layer._modules.items()}


def _halved_groups(conv: nn.Conv2d) -> None:
    conv.groups, conv.weight = 2, nn.Parameter(conv.weight[:, :4].detach().clone())


def _pruned(module: nn.Module, kept: list[int], dim: int = 0) -> None:
    """Give a norm or a convolution new tensors with some of the channels, as snippets that prune by hand do: the
    attributes, such as out_channels and num_features, stay."""
    for tensors in (module._parameters, module._buffers):
        for name, tensor in tensors.items():
            if tensor is not None and tensor.dim() > dim:
                value = tensor.detach().index_select(dim, torch.tensor(kept))
                tensors[name] = nn.Parameter(value) if tensors is module._parameters else value


def _pruned_bottleneck(layer: nn.Module) -> None:
    kept = [0, 2, 3, 5, 6]
    for module, dim in ((layer.conv1, 0), (layer.norm2, 0), (layer.conv2, 1)):
        _pruned(module, kept, dim)


def _pruned_features(features: nn.Module) -> None:
    """One of the stem's channels less, and one of each layer of the first block, which transition1 reads too."""
    first, second, transition = *features.denseblock1.children(), features.transition1
    for module in (features.conv0, features.norm0):
        _pruned(module, [0, 1, 2, 4, 5])
    for layer in (first, second):
        _pruned(layer.conv2, [0, 1, 3])
    kept = [0, 1, 2, 4, 5, 6, 7, 9, 10, 11, 13]
    for (norm, conv), channels in (
        ((first.norm1, first.conv1), 5),
        ((second.norm1, second.conv1), 8),
        ((transition.norm, transition.conv), 11),
    ):
        _pruned(norm, kept[:channels])
        _pruned(conv, kept[:channels], 1)


def _pruned_transition(model: nn.Module) -> None:
    """Two of the channels between the blocks less, and two of the classes."""
    features, classifier = model.features, model.classifier
    first, second, norm5 = *features.denseblock2.children(), features.norm5
    _pruned(features.transition1.conv, [0, 1, 3, 5, 6])
    for norm, consumer, channels in (
        (first.norm1, first.conv1, 7),
        (second.norm1, second.conv1, 11),
        (norm5, classifier, 15),
    ):
        kept = [i for i in range(channels) if i not in (2, 4)]
        _pruned(norm, kept)
        _pruned(consumer, kept, 1)
    _pruned(classifier, [1, 3, 4])


def _kernel(shape: tuple[int, ...], **settings) -> Change:
    """A weight of another kernel size, with the settings that keep the size of the images."""

    def change(conv: nn.Conv2d) -> None:
        conv.weight = nn.Parameter(conv.weight.new_ones(*conv.weight.shape[:2], *shape))
        vars(conv).update(settings)

    return change


def _part_of_larger_memory(conv: nn.Conv2d) -> None:
    memory = conv.weight.new_zeros(conv.weight.numel() + 1)
    conv.weight.data = memory[1:].view_as(conv.weight).copy_(conv.weight.data)


CHANGES: dict[str, Change] = {
    "a pruned bottleneck": _of(LAYER, _pruned_bottleneck),
    "pruned features": _of("", _pruned_features),
    "a pruned transition and classifier": _pruned_transition,
    "a kernel of 5×5": _of(f"{LAYER}.conv2", _kernel((5, 5), padding=(2, 2))),
    "a kernel of 9×1": _of(f"{LAYER}.conv2", _kernel((9, 1), padding=(4, 0))),
    "a kernel of 1×9": _of(f"{LAYER}.conv2", _kernel((1, 9), padding="same")),
    "a kernel of 1×1": _of(f"{LAYER}.conv2", _kernel((1, 1), padding=(0, 0))),
    "a kernel of 3×3 before a norm": _of(f"{LAYER}.conv1", _kernel((3, 3), padding=(1, 1))),
    "a kernel of 3×3 in a transition": _of(f"{TRANSITION}.conv", _kernel((3, 3))),
    "a kernel of 5×5 in the stem": _of("conv0", _kernel((5, 5))),
    "eps of a norm inside": _set(f"{LAYER}.norm2", eps=0.2),
    "eps of a norm that shares statistics": _set(f"{LAYER}.norm1", eps=0.2),
    "momentum": _set(f"{LAYER}.norm2", momentum=0.7),
    "running statistics are not tracked": _set(f"{LAYER}.norm1", track_running_stats=False),
    "a running mean is removed": _set(f"{LAYER}.norm2", running_mean=None, running_var=None),
    "a norm inside is frozen": _of(f"{LAYER}.norm2", nn.Module.eval),
    "all norms are frozen": _norms(nn.Module.eval),
    "frozen statistics are others": _steps(
        _norms(nn.Module.eval), _forward_once, _set(f"{LAYER}.norm2", running_mean=torch.ones(8).double())
    ),
    "eval, and training again": _steps(nn.Module.eval, _forward_once, nn.Module.train),
    "nothing trains but a bias": _steps(
        lambda model: model.requires_grad_(False), _of(f"{LAYER}.norm2", lambda norm: norm.bias.requires_grad_())
    ),
    "another parameter": _of(f"{LAYER}.conv1", lambda conv: setattr(conv, "weight", nn.Parameter(conv.weight * 2))),
    "another dict of parameters": _of(f"{LAYER}.norm2", _other_tensors),
    "a bias is added": _of(f"{LAYER}.conv1", lambda conv: setattr(conv, "bias", nn.Parameter(torch.ones(8).double()))),
    "a dilated convolution": _replace(
        f"{LAYER}.conv2", lambda: nn.Conv2d(8, 4, 3, padding=2, dilation=2, bias=False).double()
    ),
    "dilation": _set(f"{LAYER}.conv2", dilation=(2, 2), padding=(2, 2)),
    "groups": _of(f"{LAYER}.conv2", _halved_groups),
    "another activation": _replace(f"{LAYER}.relu1", nn.SiLU),
    "another activation's class": _set(f"{LAYER}.relu2", __class__=nn.SiLU),
    "another norm's class": _set(f"{LAYER}.norm2", __class__=_Halved),
    "another pooling": _replace(f"{TRANSITION}.pool", lambda: nn.MaxPool2d(2)),
    "a setting of the stem's pooling": _set("pool0", ceil_mode=True),
    "another layer": _of("denseblock1", lambda block: setattr(block, "denselayer1", copy.deepcopy(block.denselayer1))),
    "a hook": _of(f"{LAYER}.conv1", lambda conv: conv.register_forward_hook(_double)),
    "a backward hook": _of(f"{LAYER}.conv1", lambda conv: conv.register_full_backward_hook(_double_gradient)),
    "a hook on a layer": _of(LAYER, lambda layer: layer.register_forward_hook(_double)),
    "a hook inside a transition": _of(f"{TRANSITION}.norm", lambda norm: norm.register_forward_hook(_double)),
    "a hook for a while": _of(f"{LAYER}.conv1", _hooked_for_a_while),
    "a new forward": _of(f"{LAYER}.conv1", _forward),
    "a new forward inside a transition": _of(f"{TRANSITION}.norm", _forward),
    "a parametrization": _of(f"{LAYER}.conv1", lambda conv: register_parametrization(conv, "weight", _Twice())),
    "a slope": _slope(f"{LAYER}.relu1"),
    "a slope of a transition": _slope(f"{TRANSITION}.relu"),
    "a slope of the stem": _slope("relu0"),
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
    "a pooling that rounds up": _set(f"{TRANSITION}.pool", ceil_mode=True),
    "an activation inside a norm": _of(f"{TRANSITION}.norm", lambda norm: norm.add_module("act", nn.ReLU())),
    "a module inside a norm": _of(f"{TRANSITION}.norm", lambda norm: norm.add_module("norm", nn.Identity())),
    "dropout after a transition": _of(TRANSITION, lambda module: module.add_module("dropout", nn.Dropout(0.5))),
    "another class of a transition": _of(TRANSITION, _doubled),
    "another class of a block": _of("denseblock1", _doubled),
    "an unnamed transition": _of("", lambda f: setattr(f, TRANSITION, nn.Sequential(*f.transition1.children()))),
    "a wrapped last norm": _of("", lambda features: setattr(features, "norm5", nn.Sequential(features.norm5))),
    "no last norm": _replace("norm5", nn.Sequential),
    "weights in channels_last": lambda model: model.to(memory_format=torch.channels_last),
}
"""Changes of a model; some of them are of converted models too."""


def _assert_next_step_is_plain_s(ours: nn.Module, plain: nn.Module, change: Change, x: Tensor, first=False) -> None:
    for model in (ours, plain):
        first or backward(model, x)
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


@pytest.mark.parametrize(
    ("models", "first", "change"),
    [
        pytest.param(models, first, change, marks=pytest.mark.exhaustive if i % 2 == is_odd else ())
        for models, first, is_odd in ((_ours, False, None), (_ours, True, False), (_converted, False, True))
        for i, change in enumerate(CHANGES)
    ],
    indirect=["models"],
)
def test_a_change_before_or_after_the_first_step(change, first, pair, x):
    _assert_next_step_is_plain_s(*pair, CHANGES[change], x, first)


HISTORIES: dict[str, Change] = {
    **CHANGES,
    "other values": lambda model: [parameter.data.mul_(0.9) for parameter in model.parameters()],
    "assigned tensors": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
    "some weights are frozen": lambda model: [each.requires_grad_(random.random() < 0.7) for each in _leaves(model)],
    "torch's pruning": _of(f"{LAYER}.conv1", lambda conv: prune.l1_unstructured(conv, "weight", 0.3)),
    "torch's pruning ends": _of(f"{LAYER}.conv1", lambda conv: prune.remove(conv, "weight")),
    "weight norm": _of(f"{LAYER}.conv2", parametrizations.weight_norm),
    "a gradient's hook": lambda model: [each.register_hook(torch.neg) for each in _leaves(model) if each.requires_grad],
    "a part of a larger tensor": _of(f"{LAYER}.conv2", _part_of_larger_memory),
    "an optimizer's step": lambda model: torch.optim.SGD(model.parameters(), 0.01).step(),
}


def _leaves(model: nn.Module) -> list[Tensor]:
    return [parameter for parameter in model.parameters() if parameter.is_leaf]


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(16))
def test_random_histories(seed, pair, x):
    """Changes one after another, with steps between them of which some are recorded and replayed. A history ends where
    plain modules raise, as for a pruning that does not fit the one before it."""
    ours, plain = pair
    rng = random.Random(seed)
    for change in rng.choices(list(HISTORIES), k=20):
        state = rng.random()
        try:
            for model in (plain, ours):
                random.seed(state)
                torch.manual_seed(seed)
                HISTORIES[change](model)
            backward(plain, x)
        except Exception:
            return
        plain.zero_grad()
        backward(ours, x)
        ours.zero_grad()
        for _ in range(rng.randrange(3)):
            _assert_next_step_is_plain_s(ours, plain, lambda model: None, INPUTS[rng.choice(list(INPUTS)[:3])](x), True)


@pytest.mark.parametrize("change", [change for change in CHANGES if "pruned" in change])
def test_pruned_channels_that_fit_one_another_are_shared(change, pair, x):
    model = pair[0]
    CHANGES[change](model)
    assert nodes_of(model(x)).count("SharedStage") == 2


def _data(path: str, value: Callable[[Tensor], Tensor], name: str = "weight") -> Change:
    """Other values, and another shape, in a tensor that stays the same object."""
    return _of(path, lambda module: setattr(getattr(module, name), "data", value(getattr(module, name).data).clone()))


REFUSED: dict[str, Change] = {
    "a transposed 1×1 weight": _data(f"{LAYER}.conv1", lambda weight: weight.transpose(0, 1)),
    "a transposed 3×3 weight": _data(f"{LAYER}.conv2", lambda weight: weight.transpose(0, 1)),
    "a transposed weight of a transition": _data(f"{TRANSITION}.conv", lambda weight: weight.transpose(0, 1)),
    "a transposed weight of the stem": _data("conv0", lambda weight: weight.transpose(0, 1)),
    "a kernel of 5×5": _data(f"{LAYER}.conv2", lambda weight: weight.new_ones(4, 8, 5, 5)),
    "a kernel of 1×1": _data(f"{LAYER}.conv2", lambda weight: weight[..., :1, :1]),
    "a kernel of 9×1": _data(f"{LAYER}.conv2", lambda weight: weight.reshape(4, 8, 9, 1)),
    "a kernel of 3×3 before a norm": _data(f"{LAYER}.conv1", lambda weight: weight.expand(-1, -1, 3, 3)),
    "signals' weight": _data(f"{LAYER}.conv2", lambda weight: weight[..., 1]),
    "a pruned 1×1 weight": _data(f"{LAYER}.conv1", lambda weight: weight[:6]),
    "a pruned 3×3 weight": _data(f"{LAYER}.conv2", lambda weight: weight[:3]),
    "a pruned norm": _of(f"{LAYER}.norm2", lambda norm: _pruned(norm, [0, 1])),
    "a pruned norm of the features": _of(f"{LAYER}.norm1", lambda norm: _pruned(norm, [0, 1])),
    "a pruned norm of a transition": _of(f"{TRANSITION}.norm", lambda norm: _pruned(norm, [0, 1])),
    "a pruned norm of the stem": _of("norm0", lambda norm: _pruned(norm, [0, 1])),
    "a pruned last norm": _of("norm5", lambda norm: _pruned(norm, [0, 1])),
    "a pruned stem": _of("conv0", lambda conv: _pruned(conv, [0, 1])),
    "a pruned transition": _of(f"{TRANSITION}.conv", lambda conv: _pruned(conv, [0, 1])),
    "a pruned bias of a norm": _data(f"{LAYER}.norm2", lambda bias: bias[:3], "bias"),
    "a pruned running mean": _data(f"{LAYER}.norm2", lambda mean: mean[:3], "running_mean"),
    "a pruned running variance of the stem": _data("norm0", lambda variance: variance[:3], "running_var"),
}
"""Changes of a model that plain refuses."""


@pytest.mark.parametrize(
    *grid(models=[_ours, _converted], change=REFUSED, steps=[0, 3], dtype=[torch.double, torch.float]),
    indirect=["models"],
)
def test_what_plain_refuses_raises(change, steps, dtype, pair, x):
    """Kernels would read and write other memory than the tensors have. The error is that of plain modules, but for
    running statistics that change later: a kept plan finds them when it updates them."""
    x, errors = x.to(dtype), []
    for model in pair:
        model.to(dtype)
        for _ in range(steps):
            backward(model, x)
        REFUSED[change](model)
        with pytest.raises((RuntimeError, ValueError)) as error:
            backward(model, x)
        errors.append(str(error.value))
    assert errors[0] == errors[1] or (steps and "running" in change)


@pytest.mark.parametrize("dtype", [torch.double, torch.float])
@pytest.mark.parametrize("path", [f"{LAYER}.conv2", f"{LAYER}.conv1", f"{TRANSITION}.norm"])
def test_another_shape_between_forward_and_backward_raises(path, dtype, pair, x):
    model = pair[0].to(dtype)
    output = model(x.to(dtype))
    _data(path, lambda weight: weight[:3])(model)
    with pytest.raises(RuntimeError, match=r"found a .*'s weight of shape"):
        output.sum().backward()


INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "another size": lambda x: x[..., 1:, 2:],
    "another batch": lambda x: x[:2],
    "a batch whose last features are a pixel": lambda x: x[..., :8, :8],
    "an empty batch": lambda x: x[:0],
}


@pytest.mark.parametrize("change", INPUTS)
def test_another_input_after_the_first_step(change, pair, x):
    """Outputs have plain's memory format too; a single pixel has no variance, and plain raises too."""
    outputs = []
    for model in pair:
        backward(model.features, x)
        outputs.append(model.features(INPUTS[change](x)))
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            model.features(x[:1, :, :8, :8])
    assert outputs[0].shape == outputs[1].shape
    if change == "channels_last":
        assert outputs[0].stride() == outputs[1].stride()
    if change != "an empty batch":
        _assert_next_step_is_plain_s(*pair, lambda model: None, INPUTS[change](x))


def test_other_outputs_and_threads_after_the_first_step(pair, x):
    """A backbone has the same modules; threads run a model on several inputs at once."""
    for _ in range(2 if isinstance(pair[0], DenseNet) else 0):
        backward(pair[0], x), backward(pair[1], x)
        for actual, expected in zip(*(model.as_backbone()(x) for model in pair), strict=True):
            assert_close(actual, expected)
    model = pair[0].eval()
    inputs = [INPUTS[name](x) for name in ("channels_last", "another size")] * 8
    with ThreadPoolExecutor(4) as executor:
        outputs = list(executor.map(model, inputs))
    for output, each in zip(outputs, inputs, strict=True):
        assert_close(output, model(each), 0)


def test_another_precision_after_the_first_step(pair, x):
    ours, plain = pair
    for model in pair:
        backward(model, x)
        model.float()
    with torch.autocast("cpu", torch.bfloat16):
        assert ours.features(x.float()).dtype == plain.features(x.float()).dtype
    assert_close(ours(x.float()), plain(x.float()), 1e-4)
    for model in pair:
        model.features.denseblock1.denselayer2.conv1.double()  # whose weight stays the same object
        with pytest.raises(RuntimeError, match="type"):
            model(x.float())


@contextlib.contextmanager
def _hook_on_all_modules() -> Iterator[None]:
    handle = nn.modules.module.register_module_forward_hook(_double_convolution)
    try:
        yield
    finally:
        handle.remove()


def _twice(before: Callable, *args) -> Tensor:
    return before(*args) * 2


CONTEXTS = {
    "a hook on all modules": _hook_on_all_modules,
    "a class of PyTorch": partial(patched, nn.Conv2d, "_conv_forward", _twice),
    "a class of an author": partial(patched, torchvision.models.densenet._DenseLayer, "forward", _twice),
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_change_of_all_modules_after_the_first_step(context, pair, x):
    for model in pair:
        backward(model, x)
    with CONTEXTS[context]():
        _assert_next_step_is_plain_s(*pair, lambda model: None, x)
    _assert_next_step_is_plain_s(*pair, lambda model: None, x)


def _replica(model: nn.Module) -> nn.Module:
    """A shallow copy in which the first block's layers are others."""
    copied = copy.copy(model)
    copied._modules = dict(copied._modules)
    copied.features = copy.copy(copied.features)
    copied.features._modules = dict(copied.features._modules)
    block = copied.features.denseblock1 = copy.copy(copied.features.denseblock1)
    block._modules = {name: copy.deepcopy(layer) for name, layer in block._modules.items()}
    return copied


@pytest.mark.parametrize("copier", [copy.deepcopy, _replica, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_after_the_first_step_has_its_own_values(copier, pair, x):
    ours, plain = pair
    backward(ours, x), backward(plain, x)
    copied = copier(ours)
    with torch.no_grad():
        for model in (copied, plain):
            model.features.denseblock1.denselayer2.conv1.weight.mul_(2)
    before = [p.grad for p in ours.features.denseblock1.parameters()]
    _assert_next_step_is_plain_s(copied, plain, lambda model: None, x)
    assert all(p.grad is grad for p, grad in zip(ours.features.denseblock1.parameters(), before, strict=True))


def test_another_engine_and_saved_bottlenecks_after_the_first_step(pair, x):
    ours, plain = pair
    before = saved_bytes(lambda: ours(x))
    plain(x)
    keep = lambda model: model is ours and model.features.denseblock1.keep_bottlenecks([0, 1])  # noqa: E731
    _assert_next_step_is_plain_s(ours, plain, keep, x)
    assert saved_bytes(lambda: ours(x)) - before == 2 * 8 * x.shape[0] * 9 * 9 * 8
    plain(x)
    ours.set_engine("checkpoint") if isinstance(ours, DenseNet) else make_efficient(ours, "checkpoint")
    _assert_next_step_is_plain_s(ours, plain, lambda model: None, x)
    assert "SharedStage" not in nodes_of(ours(x))


@pytest.mark.parametrize("is_cyclic", [False, True])
def test_a_model_is_freed_when_nothing_refers_to_it(is_cyclic, models, x):
    """It is freed at once or, where its own modules refer to it, by garbage collection."""
    ours, _ = copy.deepcopy(models)
    for _ in range(2):
        ours(x).sum().backward()
        if is_cyclic:
            conv = ours.features.denseblock1.denselayer1.conv2
            conv.register_forward_hook(lambda *_, model=ours: model and None)
            conv.owner, conv = [ours], None
    gc.collect()
    gc.disable()
    try:
        references = [weakref.ref(each) for each in (*ours.modules(), *ours.parameters())]
        del ours
        gc.collect() if is_cyclic else None
        assert not [each() for each in references if each() is not None]
    finally:
        gc.enable()


def test_a_network_that_begins_with_another_of_its_modules_has_plans_of_its_own():
    block, transition = DenseBlock(2, 3, 4), Transition(11, 3)
    stem = [nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    x = torch.randn(2, 3, 16, 16, requires_grad=True)
    for modules in ([*stem, block, transition], [block, transition, *stem]):
        named = [(str(i), module) for i, module in enumerate(modules)]
        output, _ = run_sequence(named, x, lambda module: isinstance(module, DenseBlock))
        assert_close(output, nn.Sequential(*modules)(x), 1e-5)
