"""The host code for CPUs: it prepares, compiles, stores and calls the kernels. Numba compiles none of it."""
