"""The calls of a forward: of modules, of functions, and of tensors by its author's code."""

import builtins
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, handle_torch_function

from .._torch_private import classes_of_function_modes
from .errors import SideEffectError
from .expressions import Expressions, Table
from .guard import LIBRARIES, is_of_authors


class Call(NamedTuple):
    """A call of a module inside a block, by name: its arguments and its output, with expressions for tensors."""

    name: str
    args: Any
    output: Any


class AsksOfInput(Tensor):
    """The input of a trace, which records what an author's code asks for that tensors do not have."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    def __getattr__(self, name: str) -> Any:
        if "asks" in vars(self) and _is_called_by_author(sys._getframe(1)):
            vars(self)["asks"].append(name)
        raise AttributeError(f"'Tensor' object has no attribute '{name}'")


class Calls(TorchFunctionMode):
    """Records the calls that are made in its context.

    Attributes:
        calls: the calls of modules inside the block, inner ones first.
        asks: how often an author's code has called a tensor without an operation with arithmetic, which the dispatcher
            does not see: to read its shape, dtype or strides, to split it, to hook its gradient. It may be a branch on
            a shape, which the parts of a layer do not describe.
        expressions: what the operations compute.
    """

    def __init__(self, names: Mapping[nn.Module, str], table: Table, ran: dict[int, CodeType] | None) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.asks: Counter[str] = Counter()
        self.expressions = Expressions(table)
        self._names, self._ran, self._args, self._stack = names, ran, list[Any](), ExitStack()
        # The code of function modes around is not the block's, such as of those in which trainers build a model.
        self._around = {getattr(cls.__torch_function__, "__code__", None) for cls in classes_of_function_modes()}

    def __enter__(self) -> "Calls":
        for handle in (register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._exit)):
            self._stack.callback(handle.remove)
        self._stack.enter_context(self.profile())
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        self._stack.close()

    def _enter(self, module: nn.Module, args: tuple) -> None:
        self._args.append(self._nested(args))
        self.expressions.depth_in_norms += isinstance(module, _NormBase)

    def _exit(self, module: nn.Module, args: tuple, output: Any) -> None:
        self.expressions.depth_in_norms -= isinstance(module, _NormBase)
        call = Call(self._names.get(module, ""), self._args.pop(), self._nested(output))
        if module in self._names:
            self.calls.append(call)

    def _nested(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.expressions.of(value)
        return type(value)(map(self._nested, value)) if type(value) in (list, tuple) else value

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        is_authors, before = _is_called_by_author(sys._getframe(1)), self.expressions.num_computed
        result = func(*args, **(kwargs or {}))
        if is_authors and self.expressions.num_computed == before:
            name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
            is_of_features = name == "requires_grad" and not isinstance(args[0], nn.Parameter)
            if not (
                name in _OF_DENSE_LAYERS or is_of_features or "dropout" in name or _is_of_channels(name, *args[1:])
            ):
                self.asks[name] += 1
        return result

    @contextmanager
    def profile(self) -> Iterator[None]:
        """Record the code of authors that runs; refuse imports and prints of theirs before they happen."""
        if self._ran is None:
            yield
            return
        profiler, import_ = cast(Any, sys.getprofile()), builtins.__import__

        def see_import(name: str, variables: Any = None, *args: Any) -> Any:
            is_authors = is_of_authors((variables or {}).get("__name__")) and not f"{name}.".startswith(LIBRARIES)
            if is_authors and not _is_importing(sys._getframe(1)):
                raise SideEffectError(f"imports {name} in its forward")
            return import_(name, variables, *args)

        if hasattr(profiler, "disable"):  # cProfile's
            profiler.disable()
        builtins.__import__ = see_import
        self.expressions.profile = self._see
        sys.setprofile(self._see)
        try:
            yield
        finally:
            self.expressions.profile = None
            sys.setprofile(None)
            builtins.__import__ = import_
            profiler.enable() if hasattr(profiler, "enable") else sys.setprofile(profiler)

    def _see(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "call" and is_of_authors(frame.f_globals.get("__name__")):
            ran, code = cast(dict, self._ran), frame.f_code
            if id(code) not in ran and code not in self._around and not _is_importing(frame):
                ran[id(code)] = code
        elif (
            event == "c_call"
            and called is print
            and is_of_authors(frame.f_globals.get("__name__"))
            and frame.f_code not in self._around
        ):
            raise SideEffectError("prints, which a recomputation would do again")


def _is_importing(frame: FrameType) -> bool:
    """Whether Python imports a module, which runs functions of finders and of that module."""
    each: FrameType | None = frame
    while each is not None and each.f_code.co_name != "_trace":
        if each.f_code.co_filename.startswith("<frozen importlib"):
            return True
        each = each.f_back
    return False


def _is_called_by_author(frame: FrameType) -> bool:
    """Whether the code that calls a function of torch is neither torch's nor ours; `frame` has called the mode."""
    if frame.f_code is handle_torch_function.__code__:  # skip the frame of a function written in Python
        frame = cast(FrameType, cast(FrameType, frame.f_back).f_back)
    return not frame.f_code.co_filename.startswith(_NOT_OF_AUTHORS)


def _is_of_channels(name: str, index: Any = None, *others: Any) -> bool:
    """Whether this call reads the number of channels, which a layer fixes, or selects channels: `x.size(1)`, `x[:,
    :4]`."""
    if name == "__getitem__" and isinstance(index, tuple) and len(index) > 1:
        return isinstance(index[1], slice) and all(each in (slice(None), ...) for each in (index[0], *index[2:]))
    return name in ("size", "narrow") and index == 1


_OF_DENSE_LAYERS = {"cat", "concat", "concatenate"}
"""Calls of a layer that are not counted, as a feature's requires_grad, which the modes vary."""
_NOT_OF_AUTHORS = tuple(f"{Path(file).parent}{os.sep}" for file in (torch.__file__, Path(__file__).parent))
