"""Pictures to train on: what a directory holds, how it is read, and how batches are made of it."""

from .pictures import Pictures, Streamed
from .recognise import DATASETS, Source, load

__all__ = ["DATASETS", "Pictures", "Source", "Streamed", "load"]
