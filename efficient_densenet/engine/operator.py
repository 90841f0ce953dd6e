"""What a stage and a stem have in common: two PyTorch operators, forward and backward, and a node of autograd's graph.

Eager mode applies the node directly, with a specification that is an object, and its forward and backward run the
engine without any operator. Compilers, dispatch modes and tensor subclasses see the operators
`efficient_densenet::NAME` and `::NAME_backward`, which take the specification as a string: the operator's
implementation for autograd applies the same node, whose forward and backward call the operators below autograd. The
operators change none of their inputs: running statistics are updated outside, from the statistics that they return.

`torch.library.register_autograd` cannot register this formula. It differentiates a list of tensors only if the list
has no None, but convolutions may have no bias; and eager mode would call the operator twice and encode each
specification.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._compilers import skipped_by_compilers
from .._tensors import as_dtype, autocast_disabled
from .._torch_private import below_autograd, has_dispatch_mode, is_batched_gradient, leaves_not_to_save
from ..kernels import kernels_for
from .recording import programs

LIBRARY = torch.library.Library("efficient_densenet", "FRAGMENT")
USE_CHECKPOINT = (
    "use model.set_engine('checkpoint'), or make_efficient(model, 'checkpoint') for another library's model"
)


def implement(name: str, dispatch_key: str = "CompositeExplicitAutograd") -> Callable[[Callable], Callable]:
    """Register a function as an operator's implementation, which compilers skip."""

    def register(function: Callable) -> Callable:
        return torch.library.impl(LIBRARY, name, dispatch_key)(skipped_by_compilers(function))

    return register


class BackwardInputs(NamedTuple):
    """What a backward computes with.

    Attributes:
        grad_outputs: the gradients of the outputs; None for those that are not in the loss.
        shape: (N, *spatial) of x.
        saved: what the forward has saved.
        needs_grad: whether the gradients of x and of each parameter are needed.
    """

    grad_outputs: Sequence[Tensor | None]
    shape: torch.Size
    saved: Any
    needs_grad: Sequence[bool]


class Operator:
    """A computation of the engine as operators. `torch.ops.efficient_densenet` has them by its `name`.

    A subclass defines the computation. Its inputs are a named tuple of x, the parameters and further tensors without
    gradients; `saved` is a named tuple of what the backward reads, the parameters last. A field is a tensor or a
    list of tensors. A specification has the attributes `encoded`, `activations`, `num_outputs` and `has_count`.

    Attributes:
        decode: returns the specification whose `encoded` is a string.
        inputs_schema, saved_schema: the schema of the fields but x and the parameters, each ending with a comma.
        inputs_type, saved_type: the classes of the named tuples.
        node: a subclass of `EngineNode`, whose name autograd shows.
    """

    name: str
    decode: Callable[[str], Any]
    inputs_schema: str
    saved_schema: str
    inputs_type: Any
    saved_type: Any
    node: "type[EngineNode]"

    def compute(self, spec: Any, inputs: Any) -> list[Tensor]:
        """The outputs, then the other tensors that are computed for the backward."""
        raise NotImplementedError

    def written(self, spec: Any, inputs: Any) -> Sequence[Tensor]:
        """The inputs that `compute` changes, of ordinary tensors alone: the operators change none."""
        return ()

    def to_save(self, spec: Any, inputs: Any, computed: Sequence[Tensor]) -> Any:
        """What the backward reads; `computed` are the results of `compute` without the outputs."""
        raise NotImplementedError

    def gradients(self, spec: Any, inputs: BackwardInputs) -> Sequence[Tensor | None]:
        """The gradients of x and of each parameter, of which some are needed."""
        raise NotImplementedError

    def needed(self, spec: Any, inputs: BackwardInputs) -> Sequence[bool]:
        """Which gradients are needed, of those that autograd asks for: some outputs may have no gradient."""
        return inputs.needs_grad

    def input_values(self, spec: Any, shape: torch.Size, saved: Any) -> Tensor:
        """The values of x."""
        raise NotImplementedError

    def plain(self, spec: Any, saved: Any, x: Tensor, *parameters: Tensor | None) -> list[Tensor]:
        """The outputs, by functions that autograd can differentiate any number of times."""
        raise NotImplementedError

    def fake_results(self, spec: Any, inputs: Any) -> list[Tensor]:
        """Uninitialized tensors like the results of `compute`."""
        raise NotImplementedError

    def fake_grad_input(self, spec: Any, shape: Sequence[int], saved: Any) -> Tensor:
        """An uninitialized tensor like the gradient of x."""
        raise NotImplementedError

    def register(self) -> "Operator":
        """Define the operators in PyTorch's dispatcher; returns self."""
        name, parameters = self.name, "Tensor?[] parameters, "
        LIBRARY.define(f"{name}(Tensor x, {parameters}{self.inputs_schema} str spec) -> Tensor[]")
        LIBRARY.define(
            f"{name}_backward(Tensor?[] grad_outputs, SymInt[] shape, {self.saved_schema} {parameters}"
            "bool[] needs_grad, str spec) -> Tensor[]"
        )

        implement(name)(self.forward_implementation)
        implement(f"{name}_backward")(self.backward_implementation)
        implement(name, "Autograd")(lambda *arguments: self.apply(*self._decoded(*arguments)))
        torch.library.register_fake(
            f"efficient_densenet::{name}", lambda *arguments: self.fake_results(*self._decoded(*arguments)), lib=LIBRARY
        )
        torch.library.register_fake(f"efficient_densenet::{name}_backward", self._fake_backward, lib=LIBRARY)
        return self

    def forward_implementation(self, *arguments: Any) -> list[Tensor]:
        return self._run_forward(*self._decoded(*arguments))

    def backward_implementation(self, grad_outputs: Any, shape: Any, *arguments: Any) -> list[Tensor]:
        *saved, needs_grad, text = arguments
        inputs = BackwardInputs(grad_outputs, torch.Size(shape), self.saved_type(*saved), needs_grad)
        return self._run_backward(self.decode(text), inputs)

    def _fake_backward(self, grad_outputs: Any, shape: Any, *arguments: Any) -> list[Tensor]:
        *tensors, (needs_grad_input, *needs_grads), text = arguments
        saved = self.saved_type(*tensors)
        grads = [
            torch.empty_like(parameter, memory_format=torch.contiguous_format)
            for parameter, needed in zip(saved.parameters, needs_grads, strict=True)
            if needed and parameter is not None
        ]
        return [self.fake_grad_input(self.decode(text), shape, saved), *grads] if needs_grad_input else grads

    def _decoded(self, *arguments: Any) -> tuple[Any, Any]:
        """The specification and the inputs, from the arguments of the operator."""
        *inputs, text = arguments
        return self.decode(text), self.inputs_type(*inputs)

    @skipped_by_compilers
    def apply(self, spec: Any, inputs: Any) -> list[Tensor]:
        """The results of `compute`, of which autograd can differentiate the outputs."""
        x, parameters = inputs.x, inputs.parameters
        if not (torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in (x, *parameters))):
            return self.forward(spec, inputs)
        edge = Edge.apply(x) if x.requires_grad else None
        return list(self.node.apply(self, spec, inputs._replace(x=x.detach()), [edge], x, *parameters))

    def forward(self, spec: Any, inputs: Any) -> list[Tensor]:
        """The results of `compute`; autograd does not record them."""
        with below_autograd():
            if are_ordinary(inputs.x, *inputs.parameters):
                return self._run_forward(spec, inputs)
            return getattr(torch.ops.efficient_densenet, self.name).default(*inputs, spec.encoded)

    def backward(self, spec: Any, inputs: BackwardInputs) -> list[Tensor | None]:
        """The gradients of x and of each parameter, None where a gradient is not needed."""
        inputs = inputs._replace(needs_grad=self.needed(spec, inputs))
        grad_outputs, shape, saved, needs_grad = inputs
        if are_ordinary(*grad_outputs, saved[0], *saved.parameters):
            grads = iter(self._run_backward(spec, inputs))
        else:
            operator = getattr(torch.ops.efficient_densenet, f"{self.name}_backward").default
            grads = iter(operator(grad_outputs, shape, *saved, needs_grad, spec.encoded))
        return [next(grads) if needed else None for needed in needs_grad]

    def _run_forward(self, spec: Any, inputs: Any) -> list[Tensor]:
        inputs = inputs._replace(x=inputs.x.resolve_neg())  # kernels read memory, not a view that negates it
        compute = partial(self.compute, spec, inputs)
        return self._run(spec, inputs.x, (), _flat(inputs), compute, self.written(spec, inputs))

    def _run_backward(self, spec: Any, inputs: BackwardInputs) -> list[Tensor]:
        """The gradients that are needed, contiguous and in the dtype of the parameters."""
        grad_outputs, shape, saved, needs_grad = inputs
        grad_outputs = [grad if grad is None else grad.resolve_neg() for grad in grad_outputs]
        inputs, tensors = inputs._replace(grad_outputs=grad_outputs), [*grad_outputs, *_flat(saved)]

        def compute() -> list[Tensor]:
            grads = zip(self.gradients(spec, inputs), [None, *saved.parameters], needs_grad, strict=True)
            return [
                grad if parameter is None else as_dtype(grad, parameter.dtype).contiguous()
                for grad, parameter, needed in grads
                if needed and grad is not None
            ]

        return self._run(spec, saved[0], (*needs_grad, shape), tensors, compute)

    def _run(
        self,
        spec: Any,
        values: Tensor,
        settings: tuple,
        tensors: Sequence[Tensor | None],
        compute: Callable[[], list[Tensor]],
        written: Sequence[Tensor] = (),
    ) -> list[Tensor]:
        """What `compute` returns, which depends on the specification, the settings and the tensors; replayed where it
        has been recorded.

        A stage that communicates is never recorded.
        """
        with autocast_disabled(values):
            kernels = kernels_for(values, spec.activations)
            if spec.sync_group is not None:
                return compute()
            return programs.run(compute, (self.name, spec, kernels, *settings), tensors, written)


def run_operator(operator: Operator, spec: Any, inputs: Any) -> list[Tensor]:
    """The outputs of an operator, then the other tensors that it computes. A compiler records the operator."""
    if torch.compiler.is_compiling():
        return getattr(torch.ops.efficient_densenet, operator.name).default(*inputs, spec.encoded)
    return operator.apply(spec, inputs)


class EngineNode(torch.autograd.Function):
    """An operator in autograd's graph. Parameters are its inputs, so that replicas and gathered ones get their
    gradients.

    `edge` is a list of one `Edge` of x, or of None where x requires no gradient: a list, since it is no input.
    `ctx.leaves` are the parameters in whose place their values are saved.
    """

    @staticmethod
    def forward(
        ctx: Any, operator: Operator, spec: Any, inputs: Any, edge: list[Tensor | None], *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        results = operator.forward(spec, inputs)
        computed = results[spec.num_outputs :]
        saved = operator.to_save(spec, inputs, computed)
        ctx.operator, ctx.spec, (ctx.edge,), ctx.leaves = operator, spec, edge, leaves_not_to_save(saved.parameters)
        if ctx.leaves:
            parameters = [each.detach() if i in ctx.leaves else each for i, each in enumerate(saved.parameters)]
            saved = saved._replace(parameters=parameters)
        ctx.shape = torch.Size([inputs.x.shape[0], *inputs.x.shape[2:]])
        ctx.sizes = [None if field is None or isinstance(field, Tensor) else len(field) for field in saved]
        ctx.save_for_backward(*_flat(saved))
        ctx.mark_non_differentiable(*computed)
        ctx.set_materialize_grads(False)
        return tuple(results)

    @staticmethod
    @skipped_by_compilers
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        if any(map(is_batched_gradient, grad_outputs)):
            raise RuntimeError(
                "found a backward of several gradients at once (is_grads_batched=True, or vectorize=True), but the "
                f"shared engine takes one at a time: give them one by one, or {USE_CHECKPOINT}"
            )
        operator, spec, grad_outputs = ctx.operator, ctx.spec, grad_outputs[: ctx.spec.num_outputs]
        if all(grad is None for grad in grad_outputs):
            return (None,) * len(ctx.needs_input_grad)
        saved = operator.saved_type(*_fields(ctx.saved_tensors, ctx.sizes))
        if torch.is_grad_enabled():
            if spec.has_count:
                raise RuntimeError(
                    "found create_graph=True with synchronized norms, whose backward is not differentiable: for a loss "
                    "that contains a gradient, do not synchronize the norms"
                )
            x = operator.input_values(spec, ctx.shape, saved)
            x = x if ctx.edge is None else Connected.apply(ctx.edge, x)
            with autocast_disabled(x):
                parameters = [ctx.leaves.get(i, each) for i, each in enumerate(saved.parameters)]
                function, inputs = partial(operator.plain, spec, saved), [x, *parameters]
                grads = _differentiable_gradients(function, inputs, grad_outputs)
        else:
            grads = operator.backward(spec, BackwardInputs(grad_outputs, ctx.shape, saved, ctx.needs_input_grad[4:]))
        return None, None, None, None, *grads


def _flat(saved: Any) -> list[Tensor | None]:
    return [tensor for field in saved for tensor in ([field] if field is None or isinstance(field, Tensor) else field)]


def _fields(tensors: Sequence[Tensor | None], sizes: Sequence[int | None]) -> list[Any]:
    """The fields whose tensors `_flat` has listed."""
    rest = iter(tensors)
    return [next(rest) if size is None else [next(rest) for _ in range(size)] for size in sizes]


class Edge(torch.autograd.Function):
    """The place of x in autograd's graph, without the memory of x: an uninitialized scalar, expanded to the shape of x.

    A node that does not save x can so connect what it computes from other tensors to x (`Connected`).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_empty(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return grad_output


class Connected(torch.autograd.Function):
    """`values`, whose gradient is that of the tensor with this edge."""

    @staticmethod
    def forward(ctx: Any, edge: Tensor, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return grad_output, None


def _differentiable_gradients(
    function: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor | None], grad_outputs: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients of the inputs of `function` that require gradients, differentiable in inputs and `grad_outputs`."""
    # Views, since one input may have been computed from another: the path between them is not part of `function`.
    inputs = [each.view_as(each) if each is not None and each.requires_grad else each for each in inputs]
    outputs = function(*inputs)
    pairs = zip(outputs, grad_outputs, strict=True)
    # A block's features need no gradient where the parameters after them alone are trained.
    pairs = [(output, grad) for output, grad in pairs if grad is not None and output.requires_grad]
    needed = [each for each in inputs if each is not None and each.requires_grad]
    outputs, grad_outputs = ([pair[i] for pair in pairs] for i in range(2))
    grads = iter(torch.autograd.grad(outputs, needed, grad_outputs, create_graph=True, allow_unused=True))
    return [next(grads) if each is not None and each.requires_grad else None for each in inputs]


def are_ordinary(*tensors: Tensor | None) -> bool:
    """Whether no compiler, dispatch mode or tensor subclass has to see an operator on these tensors."""
    return programs.ORDINARY_TYPES.issuperset(map(type, tensors)) and not has_dispatch_mode()
