"""Data sets in their publishers' own format, read from a directory and checked by hash. Nothing is downloaded."""

import gzip
import hashlib
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import TensorDataset

FASHION_MNIST_DIRECTORIES = (
    Path(".data/fashion-mnist"),
    Path("/usr/share/datasets/fashion-mnist"),
)
"""Where Fashion-MNIST is looked for: `make data`, Debian's package `dataset-fashion-mnist`."""

FASHION_MNIST_MEAN = 0.2860
FASHION_MNIST_STD = 0.3530
"""Of all training pixels scaled to 0 ... 1."""

_IDX_UBYTE = 0x08


class MissingDataError(FileNotFoundError):
    """A data set is not there; the text says which file, where it was looked for and how to get it."""


class CorruptDataError(ValueError):
    """A file is there and is not what its publisher made."""


class IdxFile(NamedTuple):
    """One file of a data set."""

    name: str
    md5: str
    """Of the unpacked file."""


FASHION_MNIST_FILES = {
    "train": (
        IdxFile("train-images-idx3-ubyte", "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
        IdxFile("train-labels-idx1-ubyte", "9018921c3c673c538a1fc5bad174d6f9"),
    ),
    "test": (
        IdxFile("t10k-images-idx3-ubyte", "8181f5470baa50b63fa0f6fddb340f0a"),
        IdxFile("t10k-labels-idx1-ubyte", "15d484375f8d13e6eb1aabb0c3f46965"),
    ),
}


def fashion_mnist(split: str, directory: str | Path | None = None) -> TensorDataset:
    """Fashion-MNIST (zalandoresearch): images float32 N x 1 x 28 x 28, standardised, and labels int64 N.

    Args:
        split: `train` (60,000) or `test` (10,000).
        directory: where the four files are, packed (.gz) or not; the usual places when not given.

    Raises:
        MissingDataError: when a file is not there.
        CorruptDataError: when a file's hash is not its publisher's.
    """
    if split not in FASHION_MNIST_FILES:
        raise ValueError(f"split={split!r}: Fashion-MNIST has 'train' and 'test'")
    images_file, labels_file = FASHION_MNIST_FILES[split]
    directories = FASHION_MNIST_DIRECTORIES if directory is None else (Path(directory),)
    images = read_idx(_unpacked(images_file, directories), images_file.name)
    labels = read_idx(_unpacked(labels_file, directories), labels_file.name)
    pixels = torch.from_numpy(images).float().div_(255).sub_(FASHION_MNIST_MEAN).div_(FASHION_MNIST_STD)
    return TensorDataset(pixels.unsqueeze(1), torch.from_numpy(labels).long())


def read_idx(content: bytes, name: str) -> npt.NDArray[np.uint8]:
    """The array in an idx file of unsigned bytes: 0, 0, type, number of dimensions, sizes (big-endian), values.

    Raises:
        CorruptDataError: when the header is another's, or the length does not fit it.
    """
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != _IDX_UBYTE:
        raise CorruptDataError(f"{name} is no idx file of unsigned bytes")
    num_dimensions = content[3]
    start = 4 + 4 * num_dimensions
    if len(content) < start:
        raise CorruptDataError(f"{name} ends in its header")
    shape = struct.unpack(f">{num_dimensions}I", content[4:start])
    if len(content) - start != int(np.prod(shape, dtype=np.int64)):
        raise CorruptDataError(f"{name} holds {len(content) - start} values, its header says {shape}")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape).copy()


def _unpacked(file: IdxFile, directories: Sequence[Path]) -> bytes:
    path = _find(file, directories)
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError) as error:
        raise CorruptDataError(f"{path} cannot be unpacked ({error}): fetch it again") from error
    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if digest != file.md5:
        raise CorruptDataError(f"{path} has md5 {digest} unpacked, its publisher's has {file.md5}: fetch it again")
    return content


def _find(file: IdxFile, directories: Iterable[Path]) -> Path:
    for directory in directories:
        for name in (f"{file.name}.gz", file.name):
            if (directory / name).is_file():
                return directory / name
    places = ", ".join(str(directory) for directory in directories)
    raise MissingDataError(
        f"Fashion-MNIST is missing: no {file.name}.gz in {places}. Get it with `make data`, or with "
        "`apt-get install dataset-fashion-mnist` (Debian), or its four .gz files from "
        "https://github.com/zalandoresearch/fashion-mnist into a directory of your own and name that."
    )
