"""The kernels for NVIDIA GPUs, in Triton."""
