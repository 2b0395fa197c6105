"""Data sets in their publishers' own format, read from a directory and checked by hash. Nothing is downloaded."""

from .cifar import CIFAR10_DIRECTORIES, CIFAR10_FILES, cifar10
from .fashion import FASHION_MNIST_DIRECTORIES, FASHION_MNIST_FILES, fashion_mnist, read_idx
from .files import CorruptDataError, MissingDataError, PublishedFile
from .text import TEXT_DIRECTORIES, read_text

__all__ = [
    "CIFAR10_DIRECTORIES",
    "CIFAR10_FILES",
    "FASHION_MNIST_DIRECTORIES",
    "FASHION_MNIST_FILES",
    "TEXT_DIRECTORIES",
    "CorruptDataError",
    "MissingDataError",
    "PublishedFile",
    "cifar10",
    "fashion_mnist",
    "read_idx",
    "read_text",
]
