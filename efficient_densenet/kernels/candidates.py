"""Variants of the Triton kernels that no GPU has measured yet. All are off: what was measured is the default until a
measurement beats it. Environment variables turn them on for benchmarks (`benchmarks/on_gpu.sh candidates`)."""

import os

COMBINED_BYTES = int(os.environ.get("EFFICIENT_DENSENET_COMBINED_BYTES", "0"))
"""The most bytes of tiles' statistics that the last program instance of a convolution combines, which saves a launch.
By estimate one multiprocessor takes 2 to 3 µs for 1 << 16 bytes, about as long as a launch in a CUDA graph."""

GRAD_INPUT_FINISHES = os.environ.get("EFFICIENT_DENSENET_GRAD_INPUT_FINISHES", "0") == "1"
"""Whether a 3×3 convolution after a bottleneck computes the gradient of its weight before that of its input, in whose
launch more program instances reduce the former, and the last ones the norm's: no launch of `finish_backward`. The
norm's sums must be zero before."""

NEXT_BOTTLENECK_FINISHES = os.environ.get("EFFICIENT_DENSENET_NEXT_BOTTLENECK_FINISHES", "0") == "1"
"""Whether the launch that computes the next bottleneck reduces the gradients of a 1×1 convolution's parameters, too."""

ROUNDED_WEIGHTS = os.environ.get("EFFICIENT_DENSENET_ROUNDED_WEIGHTS", "0") == "1"
"""Whether a stage's weights are rounded to TF32 once, in one copy, rather than in the loops of its products."""
