"""The 1×1 convolutions of the Triton set: launches of `conv1x1_kernels`, with tiles from `tiles`.

A convolution of more output channels than a tile holds takes several launches, one for each slice of them: the backward
is linear in its grad_output, so that the slices' gradients add up.
"""
