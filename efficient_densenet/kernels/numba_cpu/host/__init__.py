"""What prepares, compiles, stores and calls the kernels for CPUs; nothing here is compiled by Numba."""
