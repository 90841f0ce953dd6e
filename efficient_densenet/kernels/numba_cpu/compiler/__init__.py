"""Compiles kernels with Numba, or loads them from disk. Below the kernels and the host, of which it knows nothing."""
