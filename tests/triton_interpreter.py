"""Fixtures that mend Triton's interpreter where it does otherwise than a GPU, or fails."""

import importlib
from typing import Any

import pytest
import torch


@pytest.fixture
def mended_interpreter(monkeypatch):
    """An interpreter that multiplies bfloat16 as numbers and rounds to it: unpatched, it keeps the upper 16 bits of a
    float32, multiplies them as integers, and truncates. Up to Triton 3.6, it also takes `int` of arrays with one
    element, for which NumPy 2.4 raises."""
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

    def patch_tensor(tensor, *scope):
        patch_tensor_of_triton(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    patch_tensor_of_triton = interpreter._patch_lang_tensor
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch_tensor)
    monkeypatch.setattr(builder, "create_dot", create_dot)
    monkeypatch.setattr(builder, "create_fp_trunc", create_fp_trunc)


def language_attributes() -> list[tuple[Any, dict[str, Any]]]:
    """The parts of Triton's language that its interpreter replaces, with their attributes."""
    language = importlib.import_module("triton.language")
    core = language.core
    names = "tensor", "dtype", "condition", "tensor_descriptor_base"  # older versions of Triton lack the last
    owners = language, core, language.math, *(getattr(core, name) for name in names if hasattr(core, name))
    return [(owner, dict(vars(owner))) for owner in owners]


def restore_language(monkeypatch: pytest.MonkeyPatch, attributes: list[tuple[Any, dict[str, Any]]]) -> None:
    """Undo what the interpreter leaves behind after a kernel that calls another one, so that Triton can compile."""
    for owner, originals in attributes:
        for name, value in vars(owner).copy().items():
            if name not in originals:
                monkeypatch.delattr(owner, name)
            elif originals[name] is not value:
                monkeypatch.setattr(owner, name, originals[name])
