"""What Triton's interpreter does otherwise than a GPU, mended: fixtures for tests of kernels."""

import importlib

import pytest
import torch


@pytest.fixture
def bfloat16_in_the_interpreter(monkeypatch):
    """The interpreter keeps bfloat16 as the upper 16 bits of a float32. Unpatched, it multiplies these as integers, and
    converts by truncation."""
    if torch.cuda.is_available():
        return
    language = importlib.import_module("triton.language")
    interpreter = importlib.import_module("triton.runtime.interpreter")
    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    multiply, narrow = builder.create_dot, builder.create_fp_trunc
    bfloat16, float32 = language.bfloat16, language.float32

    def create_dot(self, first, second, *rest):
        return multiply(self, widened(first), widened(second), *rest)

    def widened(value):
        if value.dtype.scalar != bfloat16:
            return value
        return handle((value.data.astype("uint32") << 16).view("float32"), float32)

    def create_fp_trunc(self, value, dtype):
        if (value.dtype.scalar, dtype.scalar) != (float32, bfloat16):
            return narrow(self, value, dtype)
        rounded = torch.from_numpy(value.data.copy()).bfloat16().view(torch.int16).numpy().view("uint16")
        return handle(rounded, bfloat16)

    monkeypatch.setattr(builder, "create_dot", create_dot)
    monkeypatch.setattr(builder, "create_fp_trunc", create_fp_trunc)
