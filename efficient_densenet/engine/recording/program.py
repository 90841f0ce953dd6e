"""A recorded run as a list of steps, which do the same on other tensors.

Tensors have numbers: the externals, the memories that the run allocates, the slab, and views. Each run has a list of
its tensors and an array of their addresses, so any number of threads may replay one program at once.
"""

import functools
import itertools
import operator
from array import array
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from . import slab
from .recorder import Allocation, Launch, Operation, Place, Recorder, mapped

WITHOUT_CACHE = {"cpu"}
"""The types of devices on which PyTorch keeps no freed memory for later allocations. On others a run has the slab
that `slab.choose` finds, if any."""

SMALL_RUN_BYTES = 1 << 22
"""The most that a run without such a cache holds if it allocates everything at first, temporaries as a slab, and frees
nothing before its end. In a larger run each memory lives from its first use to its last: a slab would take new pages
from the system each time, and raise the peak."""

Allocate = Callable[[], Tensor]
Step = Callable[[Any], None]
"""A step of a `Run`."""

_FUNCTIONS = {
    torch.ops.aten.cat.default: torch.cat,
    torch.ops.aten.convolution.default: torch.convolution,
    torch.ops.aten.copy_.default: Tensor.copy_,
    torch.ops.aten.mul_.Tensor: Tensor.mul_,
    torch.ops.aten.sub.out: torch.sub,
    torch.ops.aten.zero_.default: Tensor.zero_,
}
"""PyTorch's own bindings of frequent operations, which take half the time of an operation's general call, or less."""


class Run:
    """The tensors of one run by their numbers, among constant arguments of operations, and their addresses."""

    __slots__ = ("addresses", "values")

    def __init__(self, values: list[Any], addresses: Any) -> None:
        self.values, self.addresses = values, addresses

    def tensor(self, place: Place) -> Tensor:
        base = self.values[place.memory]
        return base.as_strided(place.size, place.stride, base.storage_offset() + place.offset // place.dtype.itemsize)

    def remember(self, number: int, tensor: Tensor) -> None:
        self.values[number] = tensor
        self.addresses[number] = tensor.data_ptr()


class Program:
    """What a run did, for externals of the same layout. `outputs` are what it returned."""

    def __init__(self, recorder: Recorder, outputs: Sequence[Tensor]) -> None:
        self.overlaps = recorder.overlaps
        builder = _Builder(recorder, [recorder.place(each) for each in outputs])
        self._steps, self._outputs = builder.steps, builder.outputs
        self._values = builder.values[recorder.num_externals :]
        self._no_addresses = [0] * (builder.num_memories - recorder.num_externals)

    def fits(self, addresses: Sequence[int]) -> bool:
        """Whether those externals that overlap lie as those of the recorded run, by the addresses of all."""
        return all(addresses[b] - addresses[a] == distance for a, b, distance in self.overlaps)

    def run(self, externals: Sequence[Tensor], addresses: Sequence[int]) -> list[Tensor]:
        values = [*externals, *self._values]
        run = Run(values, array("q", [*addresses, *self._no_addresses]))
        for step in self._steps:
            step(run)
        return [run.tensor(each).detach() if isinstance(each, Place) else values[each] for each in self._outputs]


class _Builder:
    """Turns events into steps.

    Attributes:
        slab: where temporaries lie.
        freed: the memories that are freed after an event, by its number.
        vectors: the numbers of the slab as a vector of each dtype.
        num_memories: how many of the values, the first ones, have addresses.
        values: what a run begins with: constants, and None for each tensor.
        outputs: the number of each output or, for a part of a memory, its place.
    """

    def __init__(self, recorder: Recorder, outputs: Sequence[Place]) -> None:
        self.num_externals, self.device = recorder.num_externals, recorder.device
        self.memories = dict(enumerate(recorder.memories))
        self.freed: dict[int, list[int]] = {}
        self.slab = self._plan(recorder, {place.memory for place in outputs})
        self.vectors = dict.fromkeys({self.memories[number].dtype for number in self.slab.offsets}, 0)
        self.values: list[Any] = [None] * (len(recorder.memories) + len(self.vectors))
        for number, dtype in enumerate(self.vectors, len(recorder.memories)):
            self.vectors[dtype] = number
            self.freed.setdefault(self.slab.events.stop - 1, []).append(number)
        self.num_memories = len(self.values)
        self.views: dict[Place, int] = {}
        self.constants: dict[tuple[type, str], int] = {}
        self.lists: list[int] = []
        self.steps: list[Step] = []
        self.launches: list[Launch] = []
        for i, event in enumerate(recorder.events):
            self._event(i, event)
        self._end_launches()
        self.outputs = [each.memory if self._is_whole(each) else each for each in outputs]

    def _plan(self, recorder: Recorder, outputs: Set[int]) -> slab.Slab:
        """The slab; and decide when memories are freed. `outputs` are the numbers of the memories of outputs."""
        new = {number: each for number, each in self.memories.items() if number >= self.num_externals}
        allocated = {event.memory for event in recorder.events if isinstance(event, Allocation)}
        temporaries, num_events = allocated - outputs, len(recorder.events)
        if self.device.type not in WITHOUT_CACHE:
            chosen = slab.choose(new, allocated, outputs, num_events)
        else:
            offsets, nbytes = slab.plan({number: new[number] for number in temporaries})
            if nbytes + sum(each.nbytes for number, each in new.items() if number not in offsets) <= SMALL_RUN_BYTES:
                return slab.Slab(range(num_events), offsets, nbytes, outputs & allocated)
            chosen = slab.NO_SLAB
        for number in new.keys() - outputs - chosen.offsets.keys():
            self.freed.setdefault(new[number].last, []).append(number)
        return chosen

    def _event(self, number: int, event: Allocation | Operation | Launch) -> None:
        """Add the steps of the event of this number."""
        if self.slab.events and number == self.slab.events.start:
            outputs = [(each, self._allocation(each)) for each in sorted(self.slab.outputs)]
            self._step(_AllocateSlab(outputs, self.slab.nbytes, self.device, self.vectors))
        if isinstance(event, Launch):
            self.launches.append(event)
        elif isinstance(event, Operation):
            self._operation(event)
        elif event.memory not in self.slab.outputs and event.memory not in self.slab.offsets:
            self._step(_Allocate(event.memory, self._allocation(event.memory)))
        if number in self.freed:
            freed = self.freed[number]
            views = [view for place, view in self.views.items() if place.memory in freed]
            self._step(_Free([*freed, *views]))

    def _allocation(self, number: int) -> Allocate:
        memory = self.memories[number]
        settings = {"dtype": memory.dtype, "device": self.device}
        return functools.partial(torch.empty_strided, memory.size, memory.stride, **settings)

    def _step(self, step: Step) -> None:
        self._end_launches()
        self.steps.append(step)

    def _end_launches(self) -> None:
        """Add the launches since the last other event as one step for each run of one kind."""
        for kind, group in itertools.groupby(self.launches, lambda launch: launch.kind):
            self.steps.append(kind([(each.kernel, mapped(each.arguments, Place, self._placed)) for each in group]))
        self.launches.clear()

    def _operation(self, event: Operation) -> None:
        args = [self._value(each) for each in event.args]
        kwargs = {name: self._value(each) for name, each in event.kwargs.items()}
        self._step(_Operate(_FUNCTIONS.get(event.function, event.function), args, kwargs, event.results))
        if self.lists:
            self._step(_Free(self.lists))
            self.lists = []

    def _value(self, argument: Any) -> int:
        """The number of an argument: of a constant, a tensor, or a list with tensors."""
        if isinstance(argument, Place):
            return self._tensor(argument)
        if isinstance(argument, list) and any(isinstance(each, Place) for each in argument):
            number = self._new_value()
            self._step(_Collect(number, [self._value(each) for each in argument]))
            self.lists.append(number)
            return number
        constant = type(argument), repr(argument)
        if constant not in self.constants:
            self.constants[constant] = self._new_value(argument)
        return self.constants[constant]

    def _tensor(self, place: Place) -> int:
        """The number of the tensor at a place; a view is made where it is first needed."""
        if self._is_whole(place):
            return place.memory
        placed = self._placed(place)
        if placed not in self.views:
            self.views[placed] = self._new_value()
            step = _ViewOfExternal if placed.memory < self.num_externals else _View
            self._step(step(self.views[placed], placed))
        return self.views[placed]

    def _new_value(self, value: Any = None) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def _placed(self, place: Place) -> Place:
        """The place in the slab, for a temporary there."""
        if place.memory not in self.slab.offsets:
            return place
        number = self.vectors[self.memories[place.memory].dtype]
        return place._replace(memory=number, offset=self.slab.offsets[place.memory] + place.offset)

    def _is_whole(self, place: Place) -> bool:
        """Whether it is the first tensor in a memory of its own."""
        return place.memory not in self.slab.offsets and place == self.memories[place.memory].place(place.memory)


class _Allocate:
    def __init__(self, number: int, allocate: Allocate) -> None:
        self.number, self.allocate = number, allocate

    def __call__(self, run: Run) -> None:
        run.remember(self.number, self.allocate())


class _AllocateSlab:
    """Allocates the slab, as a vector of each dtype, and outputs."""

    def __init__(
        self,
        outputs: Sequence[tuple[int, Allocate]],
        nbytes: int,
        device: torch.device,
        vectors: Mapping[torch.dtype, int],
    ) -> None:
        self.outputs, self.nbytes, self.device, self.vectors = outputs, nbytes, device, vectors

    def __call__(self, run: Run) -> None:
        for number, allocate in self.outputs:
            run.remember(number, allocate())
        if self.vectors:
            memory = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
            for dtype, number in self.vectors.items():
                run.remember(number, memory.view(dtype))


class _View:
    def __init__(self, number: int, place: Place) -> None:
        self.number, self.base = number, place.memory
        self.settings = place.size, place.stride, place.offset // place.dtype.itemsize

    def __call__(self, run: Run) -> None:
        run.values[self.number] = run.values[self.base].as_strided(*self.settings)


class _ViewOfExternal:
    """An external may begin anywhere in its storage."""

    def __init__(self, number: int, place: Place) -> None:
        self.number, self.place = number, place

    def __call__(self, run: Run) -> None:
        run.values[self.number] = run.tensor(self.place)


class _Collect:
    """Makes a list of tensors."""

    def __init__(self, number: int, numbers: Sequence[int]) -> None:
        self.number, self.numbers = number, numbers

    def __call__(self, run: Run) -> None:
        run.values[self.number] = [run.values[number] for number in self.numbers]


class _Operate:
    """Calls an operation, whose arguments are values."""

    def __init__(
        self, function: Any, args: Sequence[int], kwargs: Mapping[str, int], results: Sequence[tuple[int, int]]
    ) -> None:
        self.function, self.names, self.results = function, tuple(kwargs), results
        self.args, self.kwargs = _getter(args), _getter([*kwargs.values()])

    def __call__(self, run: Run) -> None:
        values = run.values
        if self.names:
            keywords = dict(zip(self.names, self.kwargs(values), strict=True))
            output = self.function(*self.args(values), **keywords)
        else:
            output = self.function(*self.args(values))
        for i, number in self.results:
            run.remember(number, output if isinstance(output, Tensor) else output[i])


def _getter(numbers: Sequence[int]) -> Callable[[list[Any]], Sequence[Any]]:
    """A function that returns these elements of a list."""
    if len(numbers) > 1:
        return operator.itemgetter(*numbers)
    return operator.itemgetter(slice(numbers[0], numbers[0] + 1) if numbers else slice(0))


class _Free:
    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = numbers

    def __call__(self, run: Run) -> None:
        for number in self.numbers:
            run.values[number] = None
