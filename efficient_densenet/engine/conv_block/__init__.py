"""Dense blocks without norms as one PyTorch operator: convolutions and activations on a growing concatenation.

Layer l computes y_l = f(conv(X[:, :c_l])) from all features X before it, and writes them after these, into the same
matrix (pixels, channels): nothing is concatenated. A last convolution may read all features, and be returned in their
place, as in residual dense blocks.

X is all that is saved for the backward. f'(z) is computed from y = f(z), which X has; where y does not determine it
(SiLU, GELU, Mish), z is saved too. The backward walks from the last convolution to the first. Each adds the
gradient of what it has read to one matrix G of the size of X, where y_l's is complete when all later layers are done.

The convolutions are the kernels of a stage, with neither a norm nor an activation before them.
"""

from .run import run

__all__ = ["run"]
