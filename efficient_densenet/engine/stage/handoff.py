"""What one node of an autograd graph hands on to another that runs later in the same backward."""

import weakref
from typing import Generic, TypeVar

from ..._torch_private import graph_task_id, queue_backward_callback

Value = TypeVar("Value")


class Handoff(Generic[Value]):
    """One value for each backward that runs through a graph; several may, one after another or in threads.

    The callback that autograd drops with a backward, finished or failed, owns the value: nothing outlives the backward.
    """

    def __init__(self) -> None:
        self._by_graph_task: weakref.WeakValueDictionary[int, _Entry[Value]] = weakref.WeakValueDictionary()

    def hand_on(self, value: Value) -> None:
        entry = _Entry(value)
        self._by_graph_task[graph_task_id()] = entry
        queue_backward_callback(entry.clear)

    def take(self) -> Value | None:
        """The value of the backward that runs now; None if there is none."""
        entry = self._by_graph_task.pop(graph_task_id(), None)
        if entry is None:
            return None
        value = entry.value
        entry.clear()
        return value


class _Entry(Generic[Value]):
    def __init__(self, value: Value) -> None:
        self.value: Value | None = value

    def clear(self) -> None:
        self.value = None
