"""Forks of a process whose OpenMP threads have run: GNU OpenMP's do not exist in the child, for PyTorch as for us."""

import copy

import pytest
import torch
from children import Child, in_child
from helpers import assert_same_step, small_model, with_engine
from torch.nn import functional


@pytest.fixture(autouse=True)
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def compare():
    """Compares a training step of `shared` and of plain; it has run once, which starts the threads."""
    plain, x = small_model("bc", efficient=False), torch.randn(8, 3, 12, 12, dtype=torch.double)
    efficient = with_engine(plain, "shared")
    assert_same_step(copy.deepcopy(efficient), copy.deepcopy(plain), x)
    return lambda: assert_same_step(efficient, plain, x)


def test_a_child_with_one_thread_runs_the_engine(compare):
    assert in_child(compare) == 0
    assert torch.get_num_threads() == 2


@pytest.mark.exhaustive
def test_a_child_with_two_threads_ends_as_plain_pytorchs_does():
    """It waits for ever for threads that are not there. Once PyTorch's child ends, so must ours."""
    model, x = small_model("bc", efficient="shared"), torch.randn(8, 3, 12, 12, dtype=torch.double)
    images, weight = torch.randn(8, 16, 32, 32), torch.randn(16, 16, 3, 3)

    def ours():
        torch.set_num_threads(2)
        model(x).sum().backward()

    def plain():
        torch.set_num_threads(2)
        functional.conv2d(images, weight)

    for each in (ours, plain):
        each()
    ends = [Child(each, timeout=10).wait() for each in (ours, plain)]
    assert ends in ([0, 0], [-14, -14])
