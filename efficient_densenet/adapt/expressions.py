"""Expressions of tensors: each operation gets a number by what it computes of which expressions. Equal numbers mean
equal functions, whatever the values.

Concatenations, slices and sums have a normal form, so that ways of writing do not count. An operation that nothing is
known of is a node of its own, equal to the same operation on equal inputs.
"""

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from .errors import SideEffectError


class Expression(int):
    """The number of an expression."""


class Node(NamedTuple):
    """An operation, with expressions and texts of constants as arguments."""

    name: str
    args: tuple[Any, ...]


class Table:
    """All expressions, and the shape of each."""

    def __init__(self) -> None:
        self._numbers: dict[Node, Expression] = {}
        self.nodes: list[Node] = []
        self.shapes: list[tuple[int, ...]] = []
        self.outside: list[Tensor] = []
        """Tensors that no operation has made, kept so that no other gets the identity of one."""

    def number(self, name: str, args: tuple[Any, ...], shape: Sequence[int]) -> Expression:
        node = Node(name, args)
        if node not in self._numbers:
            self._numbers[node] = Expression(len(self.nodes))
            self.nodes.append(node)
            self.shapes.append(tuple(shape))
        return self._numbers[node]

    def cat(self, parts: Sequence[Expression], dim: int) -> Expression:
        """A concatenation: nested ones are one, and neighboring slices of one expression are one slice."""
        joined: list[Expression] = []
        flat = [each for whole in parts for each in self.parts(whole, dim) if 0 not in self.shapes[each]]
        for part in flat:
            name, args = self.nodes[part]
            before, args_before = self.nodes[joined[-1]] if joined else Node("", ())
            if name == before == "zeros" and args[0] == args_before[0]:
                joined[-1] = self.zeros(self._joined_shape([joined[-1], part], dim), args[0])
            elif (
                name == before == "slice" and args[:2] == (args_before[0], dim) and args_before[1:4:2] == (dim, args[2])
            ):
                joined[-1] = self.slice(args[0], dim, args_before[2], args[3])
            else:
                joined.append(part)
        if len(joined) <= 1:
            return joined[0] if joined else parts[0]
        return self.number("cat", (dim, *joined), self._joined_shape(joined, dim))

    def _joined_shape(self, parts: Sequence[Expression], dim: int) -> list[int]:
        shape = list(self.shapes[parts[0]])
        shape[dim] = sum(self.shapes[each][dim] for each in parts)
        return shape

    def parts(self, whole: Expression, dim: int) -> Sequence[Expression]:
        name, args = self.nodes[whole]
        return args[1:] if name == "cat" and args[0] == dim else [whole]

    def slice(self, whole: Expression, dim: int, start: int, end: int) -> Expression:
        shape = list(self.shapes[whole])
        if (start, end) == (0, shape[dim]):
            return whole
        shape[dim] = end - start
        name, args = self.nodes[whole]
        if name == "zeros":
            return self.zeros(shape, args[0])
        if name == "slice" and args[1] == dim:
            return self.slice(args[0], dim, args[2] + start, args[2] + end)
        if name == "sum":
            return self.sum([self.slice(each, dim, start, end) for each in args])
        if name == "cat" and args[0] == dim:
            pieces, at = list[Expression](), 0
            for part in args[1:]:
                width = self.shapes[part][dim]
                first, last = max(start - at, 0), min(end - at, width)
                pieces += [self.slice(part, dim, first, last)] if first < last else []
                at += width
            return self.cat(pieces, dim) if pieces else self.number("slice", (whole, dim, start, end), shape)
        return self.number("slice", (whole, dim, start, end), shape)

    def zeros(self, shape: Sequence[int], dtype: str) -> Expression:
        return self.number("zeros", (dtype, tuple(shape)), shape)

    def sum(self, terms: Sequence[Expression]) -> Expression:
        """A sum, whatever the order of its terms, without zeros."""
        flat: list[Expression] = []
        for term in terms:
            name, args = self.nodes[term]
            flat += args if name == "sum" else [] if name == "zeros" else [term]
        if len(flat) <= 1:
            return flat[0] if flat else terms[0]
        return self.number("sum", tuple(sorted(flat)), self.shapes[terms[0]])

    def operations(self, *roots: Any) -> set[str]:
        """The names of the operations in these expressions."""
        seen, queue = set[Expression](), list(roots)
        while queue:
            each = queue.pop()
            if isinstance(each, Expression) and each not in seen:
                seen.add(each)
                queue += self.nodes[each].args
            elif isinstance(each, tuple):
                queue += each
        return {self.nodes[each].name for each in seen} - _NO_OPERATIONS


class Expressions(TorchDispatchMode):
    """Gives every tensor that an operation returns, or writes to, its expression.

    Attributes:
        asked: the tensors of which values were read, as by `item`, on which Python code may decide.
        num_computed: the number of operations with arithmetic.
        forwards_of_norms: the number of forwards of batch norms.
        depth_in_norms: above 0 while a norm's forward runs.
        profile: the function that profiles an author's code, if there is one.
        read: where tensors of less than two dimensions are, as statistics, that operations have read outside of norms.
    """

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.table = table
        self.asked = set[Expression]()
        self.num_computed = self.forwards_of_norms = self.depth_in_norms = 0
        self.read = set[tuple]()
        self.profile: Any = None
        self._by_place: dict[tuple, Expression] = {}
        self._of_storage: dict[int, list[tuple]] = {}
        self._outside = set[int]()
        self._kept: list[Tensor] = []  # no storage is freed, so that no place gets a second meaning

    def set(self, tensor: Tensor, expression: Expression) -> Expression:
        self._kept.append(tensor)
        place = place_of(tensor)
        if place not in self._by_place:
            self._of_storage.setdefault(place[0], []).append(place)
        self._by_place[place] = expression
        return expression

    def leaf(self, tensor: Tensor, *name: Any) -> Expression:
        return self.set(tensor, self.table.number("leaf", (*name, str(tensor.dtype)), tensor.shape))

    def of(self, value: Any) -> Any:
        """The expression of a tensor, and the text of another value, which tells 1, 1.0 and True apart; both inside
        lists and tuples too."""
        if not isinstance(value, Tensor):
            return _constant(value, self.of)
        if not value.numel():  # all such tensors are in one place
            return self.table.number("nothing", (str(value.dtype),), value.shape)
        place = place_of(value)
        if place in self._by_place:
            return self._by_place[place]
        in_memory = tuple(self._by_place[each] for each in self._of_storage.get(place[0], ()))
        if in_memory:  # another view, which is what the known views are
            return self.leaf(value, "view", place[1:], in_memory)
        if "copy_of" in vars(value):
            return self.set(value, self.of(vars(value)["copy_of"]))
        self.table.outside.append(value)
        self._outside.add(place[0])
        return self.leaf(value, "outside", id(value))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if self.profile is None:
            return self._dispatch(func, args, kwargs)
        sys.setprofile(None)  # it is for the code of authors
        try:
            return self._dispatch(func, args, kwargs)
        finally:
            sys.setprofile(self.profile)

    def _dispatch(self, func: Any, args: tuple, kwargs: dict | None) -> Any:
        kwargs, signature = kwargs or {}, _signature(func)
        name = signature.name
        passed = dict(zip(signature.defaults, args, strict=False)) | kwargs
        given = signature.defaults | passed
        if name.endswith("dropout") and not (given.get("p") and given.get("train", given.get("training"))):
            return func(*args, **kwargs)  # its input
        if name == "lift_fresh" and place_of(given["self"]) not in self._by_place and given["self"].numel() < _FEW:
            self.leaf(given["self"], "constant", *_values(given["self"]))
        first = given.get("self")
        is_floating = isinstance(first, Tensor) and first.is_floating_point()
        inputs = signature.texts | {
            key: self.of(float(value) if is_floating and key in signature.scalars and type(value) is int else value)
            for key, value in passed.items()
            if key not in _NOT_OF_VALUES
        }
        if not (self.depth_in_norms or "batch_norm" in name):
            self.read |= {place_of(each) for each in passed.values() if isinstance(each, Tensor) and each.dim() < 2}
        if given.get("stride") in ([], ()):  # of a pooling
            inputs["stride"] = inputs["kernel_size"]
        if signature.draws:
            if given.get("generator") not in (None, torch.default_generator):
                raise SideEffectError("draws random numbers from a Generator, which a recomputation would draw anew")
            # The seed stands for the state of the generator: each draw changes it, and a checkpoint restores it.
            inputs["draw"] = seed = torch.default_generator.initial_seed()
            torch.default_generator.manual_seed(seed + 1)
        self.asked |= {each for each in inputs.values() if signature.asks and isinstance(each, Expression)}
        self.num_computed += signature.computes
        self.forwards_of_norms += "batch_norm" in name and "backward" not in name
        if "batch_norm" in name and given.get("training", given.get("train", given.get("use_input_stats", True))):
            self._see_batch_norm(name, inputs, given)
        for key in signature.written & inputs.keys():
            written = given[key] if isinstance(given[key], (list, tuple)) else [given[key]]
            if any(isinstance(each, Tensor) and place_of(each)[0] in self._outside for each in written):
                raise SideEffectError(f"writes to a tensor that is not its own, by {name}")
        if self.profile is not None:  # an operation may be written in Python
            sys.setprofile(self.profile)
        outputs = func(*args, **kwargs)
        if self.profile is not None:
            sys.setprofile(None)
        flat = outputs if isinstance(outputs, (list, tuple)) else [outputs]
        for i, output in enumerate(flat):
            if isinstance(output, Tensor):
                if signature.written:
                    self._write(output, self._expression(name, inputs, given, i, output))
                elif place_of(output) not in self._by_place:  # a view of all is what it views
                    self.set(output, self._expression(name, inputs, given, i, output))
        for key in signature.written & inputs.keys():
            for i, each in enumerate(given[key] if isinstance(given[key], (list, tuple)) else [given[key]]):
                if isinstance(each, Tensor) and not any(each is output for output in flat):
                    self._write(each, self.table.number(name, (*inputs.values(), key, i), each.shape))
        return outputs

    def _see_batch_norm(self, name: str, inputs: dict[str, Any], given: dict[str, Any]) -> None:
        """What a batch norm computes in training does not depend on its running statistics, which it changes, whether
        its schema says so or not."""
        factor = inputs.pop("momentum", None) or inputs.pop("exponential_average_factor", None)
        for key in ("running_mean", "running_var"):
            before = inputs.pop(key, None)
            if isinstance(given.get(key), Tensor) and "backward" not in name:
                args = before, inputs["input"], factor
                self._write(given[key], self.table.number(key, args, given[key].shape))

    def _write(self, tensor: Tensor, expression: Expression) -> None:
        """Give a tensor another expression, and with it the other views of its memory."""
        place = place_of(tensor)
        for other in self._of_storage.get(place[0], ()):
            if other != place:
                args = self._by_place[other], expression, repr((other[1:], place[1:]))
                self._by_place[other] = self.table.number("written over", args, other[2])
        self.set(tensor, expression)

    def _expression(self, name: str, inputs: dict, given: dict, i: int, output: Tensor) -> Expression:
        """The expression of output number i, in its normal form."""
        table, shape, dtype, first = self.table, tuple(output.shape), str(output.dtype), cast(Tensor, given.get("self"))
        keeps_dtype = isinstance(first, Tensor) and first.dtype == output.dtype
        dim = given["dim"] % output.dim() if isinstance(given.get("dim"), int) and output.dim() else 0
        match name:
            case "detach" | "alias" | "clone" | "_to_copy" | "lift_fresh" | "contiguous" | "positive" if keeps_dtype:
                return inputs["self"]
            case "copy" if given["src"].dtype == output.dtype and given["src"].shape == output.shape:
                return inputs["src"]
            case "cat" if all(each.dim() == output.dim() and each.dtype == output.dtype for each in given["tensors"]):
                return table.cat(inputs["tensors"][1:], dim)
            case "slice" if given["step"] == 1:
                start = _start(given["start"] or 0, first.shape[dim])
                return table.slice(inputs["self"], dim, start, start + shape[dim])
            case "split" | "split_with_sizes" | "chunk" | "unsafe_split" | "unsafe_chunk":
                start = (output.storage_offset() - first.storage_offset()) // max(first.stride(dim), 1)
                return table.slice(inputs["self"], dim, cast(int, start), cast(int, start) + shape[dim])
            case "slice_backward" if given["step"] == 1:
                before, after = list(shape), list(shape)
                before[dim] = _start(given["start"], shape[dim])
                after[dim] = shape[dim] - before[dim] - given["grad_output"].shape[dim]
                return table.cat([table.zeros(before, dtype), inputs["grad_output"], table.zeros(after, dtype)], dim)
            case "add" if given.get("alpha", 1) == 1 and isinstance(given["other"], Tensor):
                terms = first, given["other"]
                if all(each.shape == output.shape and each.dtype == output.dtype for each in terms):
                    return table.sum([inputs["self"], inputs["other"]])
            case "relu6":  # is hardtanh wherever autograd is enabled
                return table.number("hardtanh", (inputs["self"], "float 0.0", "float 6.0", i, dtype), shape)
        return table.number(name, (*inputs.values(), i, dtype), shape)


class _Signature(NamedTuple):
    """An operation: its name without the underscore of in-place variants, its arguments with their defaults and the
    texts of these, those that are numbers and those that it writes to, and whether it has arithmetic, draws random
    numbers, or reads values."""

    name: str
    defaults: dict[str, Any]
    texts: dict[str, Any]
    scalars: set[str]
    written: set[str]
    computes: bool
    draws: bool
    asks: bool


@cache
def _signature(func: Any) -> _Signature:
    arguments, returns = func._schema.arguments, func._schema.returns
    name, aliases = func._schema.name.partition("::")[2].rstrip("_"), [each.alias_info for each in returns]
    is_view = bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)
    return _Signature(
        name,
        {each.name: each.default_value for each in arguments},
        {each.name: _constant(each.default_value) for each in arguments if each.name not in _NOT_OF_VALUES},
        {each.name for each in arguments if str(each.type) == "number"},
        {each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write},
        not (is_view or name in _WITHOUT_ARITHMETIC),
        torch.Tag.nondeterministic_seeded in func.tags,
        not _BY_VALUES.isdisjoint(func.tags),
    )


def _constant(value: Any, of: Callable[[Any], Any] | None = None) -> Any:
    """The text of a value that is no tensor, by which 1, 1.0 and True differ; of a list, that `of` its elements."""
    is_several = isinstance(value, (list, tuple))
    return (type(value).__name__, *map(of or _constant, value)) if is_several else f"{type(value).__name__} {value!r}"


def _values(tensor: Tensor) -> tuple:
    """All that tells a tensor's values."""
    return tuple(tensor.shape), tensor.dtype, bytes(tensor.detach().reshape(-1).view(torch.uint8).numpy())


def _start(start: int, size: int) -> int:
    return min(max(start + size if start < 0 else start, 0), size)


def place_of(tensor: Tensor) -> tuple:
    """Where a tensor is in memory."""
    return tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride()


_WITHOUT_ARITHMETIC = {
    "cat",
    "clone",
    "copy",
    "_to_copy",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
}
_WITHOUT_ARITHMETIC |= {"new_empty_strided", "_unsafe_view", "_reshape_copy"}
_NO_OPERATIONS = {"leaf", "cat", "slice", "zeros"}
_BY_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_NOT_OF_VALUES = {"device", "layout", "pin_memory", "memory_format", "non_blocking", "generator"}
_FEW = 1000
