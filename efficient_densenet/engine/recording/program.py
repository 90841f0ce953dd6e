"""A recorded run as a Python function, which does the same on other tensors.

Tensors have numbers: the externals, the memories that the run allocates, the slab, and views. They are local variables
of the function, and each run has its own list of memories for launches, so any number of threads may replay at once.
"""

from array import array
from collections.abc import Iterable, Sequence, Set
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from ...kernels.launches import Place, Run
from . import slab
from .recorder import Allocation, Launch, Operation, Recorder, mapped

WITHOUT_CACHE = {"cpu"}
"""The types of devices on which PyTorch keeps no freed memory for later allocations. On others a run has the slab
that `slab.choose` finds, if any."""

SMALL_RUN_BYTES, SMALL_RUN_MOST = 1 << 22, 1.5
"""The most that a run without such a cache holds if it allocates everything at first, temporaries as a slab, and frees
nothing before its end; and relative to what it holds else. In a larger run each memory lives from its first use to its
last: a slab would take new pages from the system each time, and raise the peak."""

_METHODS = {"addcmul_", "copy_", "mul_", "relu_", "rsqrt_", "zero_"}
_FUNCTIONS = {
    *("_foreach_copy_", "add", "addcmul", "batch_norm_update_stats", "cat", "convolution", "mean", "mm", "mul"),
    *("stack", "sub", "sum"),
}
"""Frequent operations, of which PyTorch's own bindings take the same arguments and a third of the time of an
operation's general call: methods of tensors, and functions."""


class LayoutChangedError(Exception):
    """An operation returned a tensor with other strides than in the recorded run."""


class Program:
    """What a run did, for externals of the same layout. `outputs` are what it returned, `source` is the function."""

    def __init__(self, recorder: Recorder, outputs: Sequence[Tensor]) -> None:
        self.overlaps = recorder.overlaps
        builder = _Builder(recorder, [recorder.place(each) for each in outputs])
        self.source, self._replay = builder.source, builder.function()
        self._no_values = [None] * (builder.num_memories - recorder.num_externals)
        self._no_addresses = [0] * (builder.num_memories - recorder.num_externals)

    def fits(self, addresses: Sequence[int]) -> bool:
        """Whether those externals that overlap lie as those of the recorded run, by the addresses of all."""
        return all(addresses[b] - addresses[a] == distance for a, b, distance in self.overlaps)

    def run(self, externals: Sequence[Tensor], addresses: Sequence[int]) -> list[Tensor]:
        run = Run([*externals, *self._no_values], array("q", [*addresses, *self._no_addresses]))
        return self._replay(run, externals, run.values, run.addresses)


class _Builder:
    """Turns events into the lines of a function that returns the outputs. Its variables are tensors, by their numbers.

    Attributes:
        slab: where temporaries lie.
        freed: the memories that are freed after an event, by its number.
        vectors: the numbers of the slab as a vector of each dtype.
        num_memories: how many of the tensors, the first ones, are memories.
        num_tensors: how many tensors there are.
        names: what the function calls, and constants that have no literals.
    """

    def __init__(self, recorder: Recorder, outputs: Sequence[Place]) -> None:
        self.num_externals, self.device = recorder.num_externals, recorder.device
        self.memories = dict(enumerate(recorder.memories))
        self.freed: dict[int, list[int]] = {}
        self.slab = self._plan(recorder, {place.memory for place in outputs})
        self.vectors = dict.fromkeys({self.memories[number].dtype for number in self.slab.offsets}, 0)
        for number, dtype in enumerate(self.vectors, len(recorder.memories)):
            self.vectors[dtype] = number
            self.freed.setdefault(self.slab.events.stop - 1, []).append(number)
        self.num_memories = self.num_tensors = len(recorder.memories) + len(self.vectors)
        self.has_launches = any(isinstance(event, Launch) for event in recorder.events)
        self.views: dict[Place, int] = {}
        self.names: dict[str, Any] = {}
        self._known_names: dict[Any, str] = {}
        externals = "".join(f"t{number}, " for number in range(self.num_externals))
        self.lines = ["def replay(run, externals, memories, addresses):", f"{externals}= externals"]
        self.launches: list[Launch] = []
        for i, event in enumerate(recorder.events):
            self._event(i, event)
        self._line(f"return [{', '.join(map(self._output, outputs))}]")

    @property
    def source(self) -> str:
        return "\n    ".join(self.lines)

    def function(self) -> Any:
        """The function, compiled."""
        exec(compile(self.source, "<recorded run>", "exec"), self.names)
        return self.names["replay"]

    def _plan(self, recorder: Recorder, outputs: Set[int]) -> slab.Slab:
        """The slab; and decide when memories are freed. `outputs` are the numbers of the memories of outputs."""
        new = {number: each for number, each in self.memories.items() if number >= self.num_externals}
        allocated = {event.memory for event in recorder.events if isinstance(event, Allocation)}
        temporaries, num_events = allocated - outputs, len(recorder.events)
        if self.device.type not in WITHOUT_CACHE:
            chosen = slab.choose(new, allocated, outputs, num_events)
        else:
            offsets, nbytes = slab.plan({number: new[number] for number in temporaries})
            held = nbytes + sum(each.nbytes for number, each in new.items() if number not in offsets)
            if held <= min(SMALL_RUN_BYTES, SMALL_RUN_MOST * slab.NO_SLAB.peak(new, num_events)):
                return slab.Slab(range(num_events), offsets, nbytes, outputs & allocated)
            chosen = slab.NO_SLAB
        for number in new.keys() - outputs - chosen.offsets.keys():
            self.freed.setdefault(new[number].last, []).append(number)
        return chosen

    def _event(self, number: int, event: Allocation | Operation | Launch) -> None:
        """Add the lines of the event of this number."""
        if self.slab.events and number == self.slab.events.start:
            self._allocate_slab()
        if isinstance(event, Launch):
            self.launches.append(event)
        elif isinstance(event, Operation):
            self._operation(event)
        elif event.memory not in self.slab.outputs and event.memory not in self.slab.offsets:
            self._allocate(event.memory)
        if number in self.freed:
            freed = self.freed[number]
            self._free([*freed, *(view for place, view in self.views.items() if place.memory in freed)])

    def _allocate(self, number: int) -> None:
        memory = self.memories[number]
        empty, dtype, device = map(self._name, (torch.empty_strided, memory.dtype, self.device))
        self._assign(number, f"{empty}({memory.size}, {memory.stride}, dtype={dtype}, device={device})")

    def _allocate_slab(self) -> None:
        """Allocate outputs, and the slab, as a vector of each dtype."""
        for number in sorted(self.slab.outputs):
            self._allocate(number)
        if self.vectors:
            empty, dtype, device = map(self._name, (torch.empty, torch.uint8, self.device))
            self._line(f"slab = {empty}({self.slab.nbytes}, dtype={dtype}, device={device})")
            for dtype, number in self.vectors.items():
                self._assign(number, f"slab.view({self._name(dtype)})")
            self._line("del slab")

    def _operation(self, event: Operation) -> None:
        name = event.function.overloadpacket.__name__
        owner = Tensor if name in _METHODS else torch if name in _FUNCTIONS else None
        function = self._name(getattr(owner, name, event.function))
        types = [str(parameter.type) for parameter in event.function._schema.arguments]
        arguments = [
            self._constant(event, each) if (type(each), expected) == (float, "Tensor") else self._argument(each)
            for each, expected in zip(event.args, types, strict=False)
        ]
        arguments += [f"{name}={self._argument(each)}" for name, each in event.kwargs.items()]
        call = f"{function}({', '.join(arguments)})"
        if not event.results:
            self._line(call)
        elif len(event.function._schema.returns) == 1 and str(event.function._schema.returns[0].type) == "Tensor":
            self._assign_result(event.results[0][1], call)
        else:
            self._line(f"results = {call}")
            for i, number in event.results:
                self._assign_result(number, f"results[{i}]")
            self._line("del results")

    def _argument(self, argument: Any) -> str:
        """An argument of an operation, as code."""
        if isinstance(argument, Place):
            return self._tensor(argument)
        if isinstance(argument, list):
            return f"[{', '.join(map(self._argument, argument))}]"
        return repr(argument) if argument is None or type(argument) in (bool, int) else self._name(argument)

    def _constant(self, event: Operation, value: float) -> str:
        """A number in the place of a tensor, as a tensor of its own, which PyTorch would make in each call."""
        dtypes = {each.dtype for each in _places([event])}
        if self.device.type != "cpu" or dtypes not in ({torch.float32}, {torch.float64}):
            return self._argument(value)
        (dtype,) = dtypes
        return self._name(torch.tensor(value, dtype=dtype, device="cpu"), key=(repr(value), dtype))

    def _tensor(self, place: Place) -> str:
        """The tensor at a place; a view is made where it is first needed."""
        if self._is_whole(place):
            return f"t{place.memory}"
        placed = self._placed(place)
        if placed not in self.views:
            self.views[placed], self.num_tensors = self.num_tensors, self.num_tensors + 1
            self._assign(self.views[placed], self._view(placed))
        return f"t{self.views[placed]}"

    def _view(self, placed: Place) -> str:
        base, offset = f"t{placed.memory}", str(placed.offset // placed.dtype.itemsize)
        if placed.memory < self.num_externals:  # which may begin anywhere in its storage
            offset += f" + {base}.storage_offset()"
        return f"{base}.as_strided({placed.size}, {placed.stride}, {offset})"

    def _output(self, place: Place) -> str:
        """An output; of a part of a memory a tensor of its own."""
        return f"t{place.memory}" if self._is_whole(place) else f"{self._view(self._placed(place))}.detach()"

    def _placed(self, place: Place) -> Place:
        """The place in the slab, for a temporary there."""
        if place.memory not in self.slab.offsets:
            return place
        number = self.vectors[self.memories[place.memory].dtype]
        return place._replace(memory=number, offset=self.slab.offsets[place.memory] + place.offset)

    def _is_whole(self, place: Place) -> bool:
        """Whether it is the first tensor in a memory of its own."""
        return place.memory not in self.slab.offsets and place == self.memories[place.memory].place(place.memory)

    def _name(self, value: Any, key: Any = None) -> str:
        """A name of a value in the function."""
        key = key or (type(value), repr(value), id(value) if callable(value) else 0)
        if key not in self._known_names:
            self._known_names[key] = f"name{len(self.names)}"
            self.names[self._known_names[key]] = value
        return self._known_names[key]

    def _assign(self, number: int, code: str) -> None:
        is_read_by_launches = self.has_launches and number < self.num_memories
        self._line(f"{f'memories[{number}] = ' if is_read_by_launches else ''}t{number} = {code}")
        if is_read_by_launches:
            self._line(f"addresses[{number}] = t{number}.data_ptr()")

    def _assign_result(self, number: int, code: str) -> None:
        """Assign a tensor that an operation has allocated. Its strides are the operation's choice, in which flags of
        PyTorch count, such as `torch.backends.mkldnn.enabled`."""
        self._assign(number, code)
        stride, changed = self.memories[number].stride, self._name(LayoutChangedError)
        self._line(f"if t{number}.stride() != {stride}: raise {changed}")

    def _free(self, numbers: Iterable[int]) -> None:
        memories = [f"memories[{number}] = " for number in numbers if self.has_launches and number < self.num_memories]
        self._line("".join([*(f"t{number} = " for number in numbers), *memories]) + "None")

    def _line(self, line: str) -> None:
        self._end_launches()
        self.lines.append(line)

    def _end_launches(self) -> None:
        """Add the launches since the last other event, one line for each run of one kind."""
        launches, self.launches = self.launches, []
        for kind, group in groupby(launches, lambda launch: launch.kind):
            made = kind([(each.kernel, mapped(each.arguments, Place, self._placed)) for each in group])
            self.lines.append(f"{self._name(made)}(run)")


def _places(events: Iterable[Allocation | Operation | Launch]) -> list[Place]:
    """The places that operations read and write."""
    places: list[Place] = []
    mapped([(event.args, event.kwargs) for event in events if isinstance(event, Operation)], Place, places.append)
    return places
