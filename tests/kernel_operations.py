"""The shared engine's operations, as each set of kernels has them, on random numbers."""

import copy
import math

import torch

from efficient_densenet.engines.kernels import portable
from efficient_densenet.engines.kernels.portable import Into, Read, Settling, Squeeze


class Case:
    """What the operations take, all of it part of something wider; `truth` is the same in float64."""

    def __init__(self, shape, channels, width, dtype=torch.float32, first=False, device="cpu"):
        self.device = device
        self.first, self.dilation, self.learns = first, 1, True
        self.shape, self.dtype, num_rows = torch.Size(shape), dtype, math.prod(shape)
        self.values, self.pending = self._matrix(num_rows, channels), self._matrix(num_rows, channels)
        self.scale, self.shift, self.share = (torch.randn(channels, device=self.device) for _ in range(3))
        self.squeeze, self.pool = self._matrix(width, channels), self._matrix(channels // 2 + 1, channels)
        self.convolve = torch.randn(width, channels, *[3] * (len(shape) - 1), device=self.device).to(dtype)
        self.of_squeezed, self.of_values = self._matrix(num_rows, width), self._matrix(num_rows, channels)
        self.of_pooled = self._matrix(portable.halved(self.shape).numel(), len(self.pool))

    def _matrix(self, num_rows, channels):
        return torch.randn(num_rows, channels + 3, device=self.device).to(self.dtype)[:, :channels]

    def truth(self):
        case = copy.copy(self)
        vars(case).update({k: v.double() for k, v in vars(self).items() if isinstance(v, torch.Tensor)})
        return case

    @property
    def read(self):
        return Read(self.values, self.scale, self.shift)

    def settling(self, grad):
        """A gradient that is `grad`, and the values that it is of."""
        ones = torch.ones(grad.shape[1], device=self.device, dtype=self.scale.dtype)
        return Settling(Read(grad, 0.5 * ones, 0 * ones), Into(0.5 * ones, grad))

    def made(self, function):
        """What a 1×1 convolution makes, and what the function returns."""
        out = self.squeeze.new_empty(len(self.values), len(self.squeeze))
        return out, *(function(Squeeze(self.read, self.squeeze, out)) or ())

    def ahead(self, kernels, squeeze):
        into = Into(self.share, self.pending.clone())
        kernels.squeezed_gradients(self.settling(self.of_squeezed), self.read, self.squeeze, into, squeeze)

    def ahead_in_place(self, kernels):
        """As the engine does it: fewer channels, into the memory that the gradient's values lie in."""
        fewer, out = max(1, self.values.shape[1] - 2), self.of_squeezed.clone(memory_format=torch.contiguous_format)
        read = Read(self.values[:, :fewer], self.scale[:fewer], self.shift[:fewer])
        settling = Settling(Read(out, *self.settling(out).read[1:]), Into(*self.settling(self.of_squeezed).into[:2]))
        into = Into(self.share, self.pending.clone())
        squeeze = Squeeze(read, self.squeeze[:, :fewer], out)
        return *kernels.squeezed_gradients(settling, self.read, self.squeeze, into, squeeze), into.pending, out

    def gradients(self, function, grad, *rest):
        """Of an operation: also what is pending, the gradient's, which lies among other channels."""
        wide = torch.zeros(len(self.pending), self.pending.shape[1] + 5, device=self.device, dtype=self.pending.dtype)
        pending = wide[:, : self.pending.shape[1]].copy_(self.pending)
        found = function(grad, self.read, *rest[:1], Into(self.share, pending, self.first, self.learns), *rest[1:])
        assert not wide[:, self.pending.shape[1] :].any()
        if rest and not self.learns:
            assert found[0] is None
            found = found[1:]
        return *found, pending


OPERATIONS = {
    "statistics": lambda k, c: k.statistics(c.values),
    "affine": lambda k, c: [k.affine(c.read)],
    "affine_gradients": lambda k, c: c.gradients(k.affine_gradients, c.of_values),
    "squeezed": lambda k, c: c.made(k.squeezed)[:1],
    "squeezed_and_measured": lambda k, c: c.made(k.squeezed_and_measured),
    "squeezed_gradients": lambda k, c: c.gradients(k.squeezed_gradients, c.settling(c.of_squeezed), c.squeeze),
    "squeezed_ahead": lambda k, c: c.made(lambda squeeze: c.ahead(k, squeeze))[:1],
    "squeezed_ahead_in_place": lambda k, c: c.ahead_in_place(k),
    "convolved": lambda k, c: [k.convolved(c.read, c.convolve, c.shape, c.dilation)],
    "convolved_and_measured": lambda k, c: k.convolved_and_measured(c.read, c.convolve, c.shape, c.dilation),
    "convolved_gradients": lambda k, c: c.gradients(
        k.convolved_gradients, c.of_squeezed, c.convolve, c.shape, c.dilation
    ),
    "pooled": lambda k, c: [k.pooled(c.read, c.pool, c.shape)],
    "pooled_gradients": lambda k, c: c.gradients(k.pooled_gradients, c.of_pooled, c.pool, c.shape),
    "settled": lambda k, c: [k.settled(Settling(c.read, Into(c.share, c.pending)))],
}


def check(kernels, operation, case):
    """Errs at most twice as much as portable, both judged by float64."""
    expected = OPERATIONS[operation](portable, case.truth())
    theirs, ours = (OPERATIONS[operation](each, case) for each in (portable, kernels))
    assert len(ours) == len(theirs) == len(expected)
    for i, (found, portable_s, truth) in enumerate(zip(ours, theirs, expected, strict=True)):
        assert (found.dtype, found.shape) == (portable_s.dtype, portable_s.shape)
        slack = 4 * torch.finfo(found.dtype).eps * (truth.norm() + len(case.values) ** 0.5)
        if i == 0 and operation in (
            "convolved_gradients",
            "pooled_gradients",
        ):  # of the weight, as the library rounds it
            slack += 2 * torch.finfo(case.dtype).eps * truth.norm()
        assert (found - truth).norm() <= 2 * (portable_s - truth).norm() + slack
