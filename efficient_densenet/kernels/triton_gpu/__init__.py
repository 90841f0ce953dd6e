"""The Triton kernels for NVIDIA GPUs: `host/` launches what `device/` has, from `host/operations.py`."""
