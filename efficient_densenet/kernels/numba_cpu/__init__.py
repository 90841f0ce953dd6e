"""The kernels for CPUs, compiled by Numba."""
