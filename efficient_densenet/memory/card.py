"""The largest batches whose training steps fit a card, by engine and precision, without running a step."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import nn

from ..engine.choose import EngineName
from .budget import batch_that_fits, image_shape, total_memory_of_step
from .sizes import format_bytes, parse_bytes
from .step import Loss, MetaModel, OptimizerLike, Precision

CONTEXT = 600 << 20
"""What CUDA's context and the kernels that PyTorch loads take, in bytes: a rule of thumb."""
GAPS = 0.05
"""The share of a card for memory between tensors, which PyTorch's allocator cannot use: a rule of thumb."""


class CardFit(NamedTuple):
    """The largest batch by an engine in a precision, 0 where not even one image fits.

    `sizes` are the bytes of some batches, among them the largest, or one image where none fits, and the batch that was
    asked about. An engine that cannot run the model has none, and `refused` says why.
    """

    engine: str
    precision: str
    largest_batch: int
    sizes: dict[int, int]
    refused: str = ""

    @property
    def peak(self) -> int:
        return self.sizes.get(max(self.largest_batch, 1), 0)


def what_fits(
    model: nn.Module,
    image_size: int | Sequence[int],
    card: int | str,
    *,
    engines: EngineName | Sequence[EngineName] = ("plain", "shared"),
    precisions: str | Sequence[Precision] = ("float32", "bf16"),
    batch_size: int | None = None,
    optimizer: OptimizerLike = "sgd",
    loss: Loss | None = None,
) -> Iterator[CardFit]:
    """Yield what each engine in each precision fits into the memory of a card, such as "8GB".

    The other arguments are those of `largest_batch`; `batch_size` is a batch to ask about.
    """
    from ..adapt.convert import convert  # imports the models, which import this package

    engines = [engines] if isinstance(engines, str) else engines
    precisions = [precisions] if isinstance(precisions, str) else precisions
    budget, shape = usable(card), ()
    for precision in precisions:
        traced = MetaModel(model, optimizer=optimizer, precision=precision, device="cuda", loss=loss)
        shape = shape or image_shape(traced, image_size)
        for engine in engines:
            convert(traced.model, engine)
            tried = dict[int, int]()
            try:
                largest = batch_that_fits(traced, shape, budget, tried=tried)
            except ValueError as error:
                yield CardFit(engine, str(precision), 0, {}, str(error))
                continue
            if batch_size not in (None, *tried):
                tried[batch_size] = total_memory_of_step(traced, (batch_size, *shape))
            yield CardFit(engine, str(precision), largest, tried)


def usable(card: int | str) -> int:
    """The bytes of a card that are left for training."""
    size = parse_bytes("card", card)
    return max(1, round((1 - GAPS) * size) - CONTEXT)


def describe_card(card: int | str) -> str:
    """What is left out of the card, in a sentence."""
    size = card if isinstance(card, str) else format_bytes(card)
    left, context = map(format_bytes, (usable(card), CONTEXT))
    return (
        f"of a card of {size}, {left} are for training:\n{context} are left to CUDA's context and kernels, {GAPS:.0%} "
        "to memory between tensors (rules of thumb).\nWhat cuDNN takes is in the numbers: 40 MiB, since it took up to "
        "37 MiB on an H100."
    )
