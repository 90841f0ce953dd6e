"""The shared engine's contract with autograd, for all that it runs as one node: arguments that are left alone, any
gradients, autograd's modes, changes in place, errors, and nothing that outlives the graph."""

import contextlib
import copy
import gc
import itertools
from collections.abc import Callable

import pytest
import torch
from grids import grid
from helpers import (
    MEMORY_EFFICIENT,
    add_conv_biases,
    assert_close,
    assert_same_buffers,
    assert_same_gradients,
    assert_same_step,
    backward,
    freeze_norms,
    live_tensors,
    random_images,
    small_model,
    with_engine,
)
from subjects import KINDS, Subject
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from efficient_densenet import kernels
from efficient_densenet.engine.stage import backward as stage_backward
from efficient_densenet.engine.stage import forward as stage_forward

MEMORY_FORMATS = [torch.contiguous_format, torch.channels_last]
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_norm_runs_as_a_module_and_then_in_a_stage_before_the_backward(momentum):
    """Autograd has saved its running statistics then, of which PyTorch's batch norm keeps the versions."""
    plain, x = small_model("bc", efficient=False), random_images("bc")
    for norm in (each for each in plain.modules() if isinstance(each, nn.BatchNorm2d)):
        norm.momentum = momentum
    efficient = with_engine(plain, "shared")
    for model in (efficient, plain):
        features = x
        for module in model.features.children():
            features = module(features)
        (features.square().sum() + model(x).square().sum()).backward()
    assert_same_gradients(efficient, plain)
    assert_same_buffers(efficient, plain)


@pytest.mark.parametrize(*grid(kind=KINDS, memory_format=MEMORY_FORMATS, frozen=[True, False]))
def test_arguments_are_neither_modified_nor_returned(kind, memory_format, frozen):
    """Neither in direct runs nor in replays."""
    subject = Subject(kind)
    if frozen:
        freeze_norms(subject)
    for _ in range(3):
        x = subject.input().to(memory_format=memory_format).requires_grad_()
        y = subject(x)
        grad = torch.randn_like(y)
        arguments, inputs = [x, grad, *subject.parameters()], [x, *subject.parameters()]
        originals = [tensor.detach().clone() for tensor in arguments]
        grads = torch.autograd.grad(y, inputs, grad, retain_graph=True)
        expected = [tensor.clone() for tensor in grads]
        assert all(map(torch.equal, arguments, originals))
        storages = [tensor.untyped_storage().data_ptr() for tensor in (*arguments, y, *grads)]
        assert len(set(storages)) == len(storages)
        for tensor in (*grads, grad, y.detach()):  # overwritten gradients must not affect a second backward
            tensor.fill_(torch.nan)
        assert all(map(torch.equal, torch.autograd.grad(y, inputs, originals[1]), expected))


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "expanded": lambda y: torch.randn(y.shape[1], *[1] * (y.dim() - 2), dtype=y.dtype).expand_as(y),
    "transposed": lambda y: torch.randn(y.transpose(0, -1).shape, dtype=y.dtype).transpose(0, -1),
    "narrowed": lambda y: torch.randn(*y.shape[:-1], 2 * y.shape[-1], dtype=y.dtype)[..., ::2],
}


@pytest.mark.parametrize(*grid(kind=KINDS, memory_format=MEMORY_FORMATS, grad=GRADIENTS))
def test_gradients_of_any_strides_and_the_strides_of_the_input_s(kind, memory_format, grad):
    subject, results = Subject(kind), []
    plain, x = subject.plain(), subject.input(3).to(memory_format=memory_format)
    for each in (subject, plain):
        torch.manual_seed(1)
        leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
        y = each(leaf)
        y.backward(GRADIENTS[grad](y))
        results += [y, leaf.grad]
        assert leaf.grad.stride() == leaf.stride()
    assert results[0].stride() == results[2].stride()
    assert_close(results[0], results[2])
    assert_close(results[1], results[3])
    assert_same_gradients(subject, plain)


@every_kind
def test_sides_of_one_pixel_and_expanded_inputs(kind):
    subject = Subject(kind)
    plain, smallest = subject.plain(), 2 if subject.kind in ("transition", "features too", "consumer", "apart") else 1
    for size in ((smallest, 7), (6, smallest)):
        for memory_format in MEMORY_FORMATS:
            assert_same_step(subject, plain, subject.input(1, size).to(memory_format=memory_format))
    assert_same_step(subject, plain, subject.input(1, (4, 1)).expand(3, -1, 4, 5))


@contextlib.contextmanager
def _new_memory_is_nan():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES = {
    "anomaly mode": torch.autograd.detect_anomaly,
    "saved tensors moved": torch.autograd.graph.save_on_cpu,
    "saved tensors copied": lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone),
    "one thread": lambda: torch.autograd.set_multithreading_enabled(False),
    "mutation allowed": torch.autograd.graph.allow_mutation_on_saved_tensors,
    "new memory is NaN": _new_memory_is_nan,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize(*grid(mode=MODES, kind=KINDS))
def test_autograd_modes(mode, kind):
    if mode == "mutation allowed":
        if torch.__version__ < "2.7":
            pytest.skip("PyTorch 2.6 looks for the memory of every argument that an operator changes, and finds a list")
        if not kernels.numba_supports(torch.empty(1)):
            pytest.skip("torch looks for an output argument named out, but that of a pooling's gradient has another")
    subject = Subject(kind, drop_rate=0.1)
    plain = subject.plain()
    for frozen in (False, True):
        subject.train(not frozen), plain.train(not frozen)
        with MODES[mode]():
            assert_same_step(subject, plain, subject.input())


def _with_input_of_inference_mode(run: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        x = x.clone()
    return run(x)


WAYS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "input of inference mode": _with_input_of_inference_mode,
    "output changed in place": lambda run, x: run(x).mul_(2) + 1,
    "torch's checkpoint": lambda run, x: torch_checkpoint(run, x, use_reentrant=False),
    "torch's reentrant checkpoint": lambda run, x: torch_checkpoint(run, x, use_reentrant=True),
}


@pytest.mark.parametrize(
    *grid(
        # A stem or a transition alone saves its input, which cannot be one of inference mode.
        lambda kind, way: way != "input of inference mode" or kind not in ("stem", "consumer"),
        kind=KINDS,
        way=WAYS,
    )
)
def test_ways_to_call_it(kind, way):
    subject = Subject(kind, drop_rate=0.2)
    plain, x = subject.plain(), subject.input()
    for each in (subject, plain):
        torch.manual_seed(1)
        WAYS[way](each, x.clone().requires_grad_()).square().sum().backward()
    assert_same_gradients(subject, plain)
    assert_same_buffers(subject, plain)


@pytest.mark.parametrize(*grid(kind=KINDS, changed=["input", "first parameter", "last parameter", "buffers"]))
def test_what_changes_in_place_before_the_backward_is_not_read_or_raises(kind, changed):
    """Never does the backward compute with the new values."""
    subject = Subject(kind)
    plain, x = subject.plain(), subject.input()
    freeze_norms(subject), plain.load_state_dict(subject.state_dict()), plain.eval()
    plain(x).square().sum().backward()
    leaf = x.clone()
    loss = subject(leaf).square().sum()
    names = [name for name, _ in subject.named_parameters()]
    tensors = {"input": [leaf], "buffers": [each for each in subject.buffers() if each.is_floating_point()]}
    name = names[0 if changed == "first parameter" else -1]
    with torch.no_grad():
        for tensor in tensors.get(changed, [subject.get_parameter(name)]):
            tensor.mul_(1.5)
    try:
        loss.backward()
        error = ""
    except RuntimeError as raised:
        error = str(raised)
    if error:
        assert "modified by an inplace operation" in error
        assert changed != "buffers"
    else:
        assert_same_gradients(subject, plain)


@pytest.mark.parametrize(*grid(kind=KINDS, alone=[True, False], frozen=[False, True], bn_size=[0, 2]))
def test_each_parameter_alone_requires_a_gradient_or_is_alone_frozen(kind, alone, frozen, bn_size):
    """Convolutions have biases, whose gradients are not zero where norms are frozen."""
    subject = add_conv_biases(Subject(kind, bn_size=bn_size))
    if frozen:
        freeze_norms(subject)
    plain = subject.plain()
    for needs_grad_input in (False, True):
        x = subject.input().requires_grad_(needs_grad_input)
        for name, _ in subject.named_parameters():
            grads = []
            for each in (subject, plain):
                each.zero_grad()
                for other, parameter in each.named_parameters():
                    parameter.requires_grad_((other == name) is alone)
                loss = each(x).square().sum()
                grads += torch.autograd.grad(loss, x, retain_graph=True) if needs_grad_input else ()
                loss.backward()
            assert_same_gradients(subject, plain)
            if needs_grad_input:
                assert_close(*grads)


TINY = {"growth_rate": 1, "num_init_features": 2, "compression": 0.4}


@pytest.mark.parametrize(*grid(kind=KINDS, bn_size=[0, 1], frozen=[False, True], dims=[1, 2], strength=1))
def test_gradcheck_and_gradgradcheck(kind, bn_size, frozen, dims):
    subject = Subject(kind, bn_size=bn_size, dims=dims, **TINY).train(not frozen)
    names = [name for name, _ in subject.named_parameters()]

    def apply(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(subject, dict(zip(names, parameters, strict=True)), (x,))

    size = (5, 4)[:dims] if kind == "stem" else (2, 3)[:dims]
    arguments = (
        subject.input(3, size, requires_grad=True),
        *(each.detach().requires_grad_() for each in subject.parameters()),
    )
    assert torch.autograd.gradcheck(apply, arguments)
    assert torch.autograd.gradgradcheck(apply, arguments)


@every_kind
def test_several_gradients_at_once_are_refused(kind):
    subject = Subject(kind)
    x = subject.input(requires_grad=True)
    y = subject(x)
    with pytest.raises(RuntimeError, match=r"several gradients at once .*: give them one by one, or"):
        torch.autograd.grad(y, x, torch.stack([torch.ones_like(y)] * 2), is_grads_batched=True)


def _raise(*_) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("failing", ["forward", "backward"])
def test_exceptions_leave_no_state_behind(failing, monkeypatch):
    subject = Subject("transition")
    x = subject.input()
    expected = [tensor.clone() for tensor in backward(copy.deepcopy(subject), x)]
    broken = copy.deepcopy(subject)
    loss = broken(x).sum() if failing == "backward" else None
    with monkeypatch.context() as patch:
        for module in (stage_forward, stage_backward):
            patch.setattr(module, "ImageConv", _raise)
        with pytest.raises(ZeroDivisionError):
            broken(x) if loss is None else loss.backward()
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    assert all(map(torch.equal, backward(subject, x), expected))


def test_nothing_outlives_the_graph():
    """Tensors are counted without garbage collection, so that reference cycles are detected too."""
    models: list[nn.Module] = [*map(Subject, KINDS), *(small_model("bc", efficient=each) for each in MEMORY_EFFICIENT)]

    def run() -> int:
        for model, create_graph in itertools.product(models, (False, True)):
            parameters = list(model.parameters())
            for batch in (2, 3):
                x = model.input(batch) if isinstance(model, Subject) else random_images("bc", batch)
                loss = model(x.requires_grad_()).square().sum()
                if batch == 3:  # some forwards are never followed by a backward
                    grads = torch.autograd.grad(loss, parameters, create_graph=create_graph)
                    if create_graph:
                        torch.autograd.grad(sum(grad.square().sum() for grad in grads), parameters)
        del x, loss, grads
        return live_tensors()

    run()
    gc.collect()
    gc.disable()
    try:
        assert run() >= run()
    finally:
        gc.enable()


# Whole networks


@pytest.mark.parametrize(
    *grid(
        location=["input", "features.denseblock1.denselayer1.conv1.weight", "features.norm5.bias"],
        training=[True, False],
        value=[float("nan"), float("inf"), -float("inf")],
    )
)
def test_non_finite_values_propagate_as_in_plain(location, training, value):
    plain = small_model("bc", efficient=False)
    plain(random_images("bc"))
    plain.train(training)
    x = random_images("bc")
    with torch.no_grad():
        (x if location == "input" else plain.get_parameter(location)).view(-1)[0] = value
    results = []
    for model in (with_engine(plain, "shared"), plain):
        output, grad = backward(model, x)
        results.append([output, grad, *(each.grad for each in model.parameters()), *model.buffers()])
    for found, expected in zip(*results, strict=True):
        finite = found.isfinite()
        assert torch.equal(finite, expected.isfinite())
        assert_close(found[finite], expected[finite]) if finite.any() else None


@pytest.mark.parametrize("training", [True, False])
def test_empty_batch_matches_plain(training):
    plain = small_model("bc", efficient=False).train(training)
    efficient = with_engine(plain, "shared")
    for model in (efficient, plain):
        output = model(torch.empty(0, 3, 9, 7, dtype=torch.double))
        assert output.shape == (0, 5)
        output.sum().backward()
    assert_same_gradients(efficient, plain)
    assert_same_buffers(efficient, plain)
