import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton, which looks once


@pytest.fixture(autouse=True)
def _same_random_numbers():
    torch.manual_seed(0)
