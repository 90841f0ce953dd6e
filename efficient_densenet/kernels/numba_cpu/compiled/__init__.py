"""The code that Numba compiles: the kernels for CPUs and the functions that are inlined into them."""
