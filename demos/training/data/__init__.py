"""Training data: recognizing and reading data sets, decoding images, making augmented batches."""

from .decode import UndecodableImage, check_prefetched
from .folder import check_images
from .images import Images, ImageSet, StreamedImages
from .sources import DATASETS, Dataset, SplitDataset, check_options_of_folders, load

__all__ = [
    "DATASETS",
    "Dataset",
    "ImageSet",
    "Images",
    "SplitDataset",
    "StreamedImages",
    "UndecodableImage",
    "check_images",
    "check_options_of_folders",
    "check_prefetched",
    "load",
]
