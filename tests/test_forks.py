"""Forks of a process whose OpenMP threads have run: GNU OpenMP's do not exist in the child, for PyTorch as for us."""

import copy

import torch
from children import in_child
from helpers import assert_same_step, small_model, with_engine


def test_a_child_with_one_thread_runs_the_engine():
    plain, x = small_model("bc", efficient=False), torch.randn(8, 3, 12, 12, dtype=torch.double)
    efficient, threads = with_engine(plain, "shared"), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert_same_step(copy.deepcopy(efficient), copy.deepcopy(plain), x)  # starts the threads
        assert in_child(lambda: assert_same_step(efficient, plain, x)) == 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
