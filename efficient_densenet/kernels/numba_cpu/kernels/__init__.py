"""The kernels for CPUs and the functions that are inlined into them: source that Numba compiles."""
