"""The benchmark of the host's time launches what a step on a GPU launches, and changes nothing that stays."""

import re

import pytest
import torch
from gpu_counts import trace
from methods import Setting

pytest.importorskip("triton", reason="needs Triton")
gpu_host = pytest.importorskip("gpu_host")


def test_each_launch_of_a_step_is_made(capsys):
    get_device, remember = torch.Tensor.get_device, gpu_host.launch._remember
    gpu_host.measure("densenet_bc_10_4", batch_size=2, image_size=8, rounds=2)
    printed = capsys.readouterr().out
    setting = Setting("densenet_bc_10_4", 2, 8, "tf32", "contiguous", "cuda", 1)
    assert printed.startswith(
        f"densenet_bc_10_4, {trace(setting, 'shared').launches(is_triton=True)} launches of Triton"
    )
    assert re.search(r"\nplain \d+\.\d ms, shared \d+\.\d ms, \d\.\d\d \(\d\.\d\d-\d\.\d\d\) of plain's\n$", printed)
    assert (torch.Tensor.get_device, gpu_host.launch._remember) == (get_device, remember)
