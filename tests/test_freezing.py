"""Training with frozen parts: their parameters and statistics stay, and the rest is trained as without an engine."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_buffers, assert_same_gradients
from samples import global_batch, tiny_trainer
from training.data.augment import generator_for
from training.distributed import DistributedContext
from training.freezing import freeze_parameters, set_training_modes
from training.memory_estimate import expected_peak
from training.options import parse

from efficient_densenet import DenseNet

TRAINED: dict[str | None, tuple[str, ...]] = {
    "features": ("classifier",),
    "2": ("classifier",),  # what follows the last block is frozen with it
    "1": ("features.denseblock2", "features.norm5", "classifier"),
    "0": ("features.denseblock", "features.transition1", "features.norm5", "classifier"),
    None: ("",),
}
"""Beginnings of the names of trained parameters, by the value of --freeze."""


@pytest.mark.parametrize("freeze", TRAINED)
@pytest.mark.parametrize("engine", ["plain", "shared", "checkpoint"])
def test_the_steps_are_those_of_a_plain_loop_on_the_trained_parts(engine, freeze):
    """The reference is SGD as a user would write it; frozen parameters and statistics stay bit for bit."""
    trainer = tiny_trainer(engine, DistributedContext(0, 1, torch.device("cpu")), freeze=freeze)
    reference = copy.deepcopy(trainer.model).set_engine("plain")
    before = copy.deepcopy(reference.state_dict())
    trained = [name for name, _ in reference.named_parameters() if name.startswith(TRAINED[freeze])]
    parameters = [reference.get_parameter(name) for name in trained]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    (images, labels), transform = global_batch(), trainer.transform
    for step in range(3):
        augmented = transform.augment(images, transform.sample_params(len(images), generator_for(0, 1, step)))
        for name, module in reference.named_modules():
            module.training = name.startswith(TRAINED[freeze])
        optimizer.zero_grad()
        F.cross_entropy(reference(transform.normalize(augmented, torch.float64)), labels).backward()
        optimizer.step()
        trainer.step(images, labels, len(images), 0.1, (0, 1, step))
    assert_same_gradients(trainer.model, reference, 1e-9)
    assert_same_buffers(trainer.model, reference, 1e-9)
    for name, tensor in trainer.model.state_dict().items():
        torch.testing.assert_close(tensor, reference.state_dict()[name], rtol=1e-9, atol=1e-9)
        assert torch.equal(tensor, before[name]) != name.startswith(TRAINED[freeze]), name
    assert [n for n, p in trainer.model.named_parameters() if p.grad is not None] == trained
    assert len(trainer.optimizer.state) == len(trained)


def test_frozen_parts_drop_nothing():
    model = DenseNet(4, (2, 1), num_init_features=6, drop_rate=0.5)
    x = torch.randn(3, 3, 8, 8)
    for freeze, same in (("features", True), ("1", False)):
        freeze_parameters(model, freeze)
        assert torch.equal(model(x), model(x)) == same
    set_training_modes(model, "features")
    assert torch.equal(model(x), model(x))


def test_frozen_parts_take_less_memory():
    """Frozen parameters have neither gradient nor momentum, and frozen features keep nothing for a backward."""
    estimates = {}
    for freeze in (None, "features"):
        model = DenseNet(8, (4, 4), num_init_features=16)
        freeze_parameters(model, freeze)
        options = parse({"freeze": freeze, "weights": "any", "engine": "plain"}, "best")
        estimates[freeze] = [expected_peak(model, 32, options, images) for images in (16, 32)]
    features = sum(p.numel() for p in model.features.parameters())
    assert estimates[None][0] - estimates["features"][0] > 4 * 2 * features
    of_features, of_all = (large - small for small, large in (estimates["features"], estimates[None]))
    assert of_features < 0.5 * of_all


@pytest.mark.parametrize("freeze", ["3", "17"])
def test_more_blocks_than_there_are(freeze):
    with pytest.raises(ValueError, match=rf"freeze is {freeze}, but the network has 2 dense blocks: give 0 to 2, or"):
        freeze_parameters(DenseNet(4, (2, 1)), freeze)
