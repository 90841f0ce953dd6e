"""Training data: recognizing and reading data sets, decoding images, making augmented batches."""

from .images import Images, ImageSet, StreamedImages
from .published import DATASETS
from .sources import Dataset, load

__all__ = ["DATASETS", "Dataset", "ImageSet", "Images", "StreamedImages", "load"]
