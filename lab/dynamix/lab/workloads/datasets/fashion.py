"""Fashion-MNIST (Zalando Research, MIT): 70,000 grey images of 28 x 28 pixels, ten kinds of clothing."""

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset

from .files import CorruptDataError, PublishedFile, places, read_published

FASHION_MNIST_DIRECTORIES = (
    Path(".data/fashion-mnist"),
    Path("/usr/share/datasets/fashion-mnist"),
)
"""Where Fashion-MNIST is looked for: `make data`, Debian's package `dataset-fashion-mnist`."""

FASHION_MNIST_MEAN = 0.2860
FASHION_MNIST_STD = 0.3530
"""Mean and standard deviation of all training pixels scaled to 0 ... 1."""

FASHION_MNIST_FILES = {
    "train": (
        PublishedFile("train-images-idx3-ubyte", "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
        PublishedFile("train-labels-idx1-ubyte", "9018921c3c673c538a1fc5bad174d6f9"),
    ),
    "test": (
        PublishedFile("t10k-images-idx3-ubyte", "8181f5470baa50b63fa0f6fddb340f0a"),
        PublishedFile("t10k-labels-idx1-ubyte", "15d484375f8d13e6eb1aabb0c3f46965"),
    ),
}
HOW_TO_GET = (
    "Get it with `make data`, or with `apt-get install dataset-fashion-mnist` (Debian), or its four .gz files from "
    "https://github.com/zalandoresearch/fashion-mnist into a directory of your own and name that."
)


def fashion_mnist(split: str, directory: str | Path | None = None) -> TensorDataset:
    """Fashion-MNIST: images float32 N x 1 x 28 x 28, standardised, and labels int64 N.

    Args:
        split: `train` (60,000) or `test` (10,000).
        directory: where the four files are, packed (.gz) or not, or the directory above; the usual places when not
            given.

    Raises:
        MissingDataError: when a file is not there.
        CorruptDataError: when a file's hash is not its publisher's.
    """
    pixels, labels = fashion_mnist_bytes(split, directory)
    images = pixels.float().div_(255).sub_(FASHION_MNIST_MEAN).div_(FASHION_MNIST_STD)
    return TensorDataset(images, labels)


def fashion_mnist_bytes(split: str, directory: str | Path | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels uint8 N x 1 x 28 x 28 as published, and labels int64 N. Raises as `fashion_mnist`."""
    if split not in FASHION_MNIST_FILES:
        raise ValueError(f"split={split!r}: Fashion-MNIST has 'train' and 'test'")
    directories = places(directory, FASHION_MNIST_DIRECTORIES)
    images, labels = (
        read_idx(read_published(file, directories, "Fashion-MNIST", HOW_TO_GET), file.name)
        for file in FASHION_MNIST_FILES[split]
    )
    return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels).long()


def read_idx(content: bytes, name: str) -> npt.NDArray[np.uint8]:
    """The array in an idx file of unsigned bytes: 0, 0, type, number of dimensions, sizes (big-endian), values.

    Raises:
        CorruptDataError: when the header is another's, or the length does not fit it.
    """
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != 0x08:
        raise CorruptDataError(f"{name} is no idx file of unsigned bytes")
    num_dimensions = content[3]
    start = 4 + 4 * num_dimensions
    if len(content) < start:
        raise CorruptDataError(f"{name} ends in its header")
    shape = struct.unpack(f">{num_dimensions}I", content[4:start])
    if len(content) - start != int(np.prod(shape, dtype=np.int64)):
        raise CorruptDataError(f"{name} holds {len(content) - start} values, its header says {shape}")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape).copy()
