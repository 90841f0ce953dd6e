"""Why a module is not converted."""


class VerificationError(Exception):
    """Raised for a block that is not a dense block; the message says how it differs from a dense block."""


class NotRunError(VerificationError):
    """Raised for a block whose forward raises an error on our trace input, which says nothing against the block."""

    def __init__(self, sample: object, error: Exception) -> None:
        first_line = (str(error).strip().splitlines() or [""])[0]
        self.error = f"{type(error).__name__}: {first_line}"
        super().__init__(
            f"could not be tried: our trace calls it with {sample}, and its forward seems to take something else (it "
            f"raises {self.error})"
        )


class SideEffectError(VerificationError):
    """Raised for a block whose forward has side effects, so that it must not be recomputed either."""
