"""The host code for CPUs: it prepares and calls the kernels. Numba compiles none of it."""
