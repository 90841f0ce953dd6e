"""The Triton kernels for NVIDIA GPUs: `operations` on the host, `kernels` and `statistics_kernels` on the device."""
