"""Pictures to train on: what a directory holds, how it is read, and how batches are made of it."""

from .images import Pictures, Streamed
from .sources import DATASETS, Source, load

__all__ = ["DATASETS", "Pictures", "Source", "Streamed", "load"]
