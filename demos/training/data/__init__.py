"""Training data: recognizing and reading data sets, decoding images, making augmented batches."""

from .decode import UndecodableImage
from .folder import check_images
from .images import Images, ImageSet, StreamedImages
from .prefetch import check_buffers
from .sources import DATASETS, Dataset, SplitDataset, check_options_of_folders, load

__all__ = [
    "DATASETS",
    "Dataset",
    "ImageSet",
    "Images",
    "SplitDataset",
    "StreamedImages",
    "UndecodableImage",
    "check_buffers",
    "check_images",
    "check_options_of_folders",
    "load",
]
