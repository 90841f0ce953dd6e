"""The code that Triton compiles: the kernels for GPUs and the functions that are inlined into them."""
