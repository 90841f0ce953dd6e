"""`CheckpointFunction`: `checkpoint` for code that passes a function's parameters along with its inputs."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .call import checkpoint_call
from .parameters import function_name


class CheckpointFunction:
    """`CheckpointFunction.apply(function, n, *inputs, *parameters)` is `function(*inputs)`, recomputed in the backward.

    There are `n` inputs. The parameters are the other tensors that `function` uses: they get their gradients whether
    they are listed or not. `function` may return anything.
    """

    @staticmethod
    def apply(function: Callable, n: int, *args: Tensor) -> Any:
        form = "CheckpointFunction.apply(function, number_of_inputs, *inputs, *parameters)"
        if not isinstance(n, int):
            raise TypeError(f"found a {type(n).__name__} as the number of inputs of {function_name(function)}: {form}")
        if not 0 <= n <= len(args):
            raise ValueError(
                f"found {n} as the number of inputs of {function_name(function)}, followed by {len(args)} "
                f"tensor{'' if len(args) == 1 else 's'}: {form}"
            )
        wrong = [type(value).__name__ for value in args if not isinstance(value, Tensor)]
        if wrong:
            raise TypeError(
                f"found a {wrong[0]} among the inputs and parameters of {function_name(function)}, which "
                "must be tensors: bind it with functools.partial, or use checkpoint, which accepts arguments of any "
                "type"
            )
        return checkpoint_call(function, args[:n], {})
