"""Training data: recognizing and reading data sets, decoding images, making augmented batches."""

<<<<<<< HEAD
from .images import Images, ImageSet, StreamedImages
=======
from .images import Images, ImageSet, StreamedImages, UndecodableImage
>>>>>>> main
from .published import DATASETS
from .sources import Dataset, load

__all__ = ["DATASETS", "Dataset", "ImageSet", "Images", "StreamedImages", "load"]
