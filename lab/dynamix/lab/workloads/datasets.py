"""Data sets in their publishers' own format, read from a directory and checked by hash. Nothing is downloaded.

Fashion-MNIST (Zalando Research, MIT): 70,000 grey images of 28 x 28 pixels, ten kinds of clothing. CIFAR-10
(Krizhevsky, 2009) in its binary version: 60,000 colour images of 32 x 32 pixels, ten kinds of things; a file holds
10,000 records of 3,073 bytes: the label, then 1,024 bytes each of red, green and blue, row by row. Text: any will do.
"""

import gzip
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset


class MissingDataError(FileNotFoundError):
    """A data set is missing; the message has the file, the searched directories and how to get it."""


class CorruptDataError(ValueError):
    """A file is there and is not what its publisher made."""


class PublishedDataset(NamedTuple):
    """The files of a data set by split, and where they are looked for."""

    title: str
    directories: tuple[Path, ...]
    how_to_get: str
    files: dict[str, tuple[tuple[str, str], ...]]
    """Name of each file, and MD5 of it unpacked."""

    def read(self, split: str, directory: str | Path | None) -> list[bytes]:
        """The unpacked contents of a split's files.

        Args:
            split: `train` or `test`.
            directory: where the files are, packed (.gz) or not, or the directory above; the usual places when not
                given.

        Raises:
            MissingDataError: when a file is not there.
            CorruptDataError: when a file's hash is not its publisher's.
        """
        if split not in self.files:
            raise ValueError(f"split={split!r}: {self.title} has 'train' and 'test'")
        places, contents = _places(directory, self.directories), []
        for file, md5 in self.files[split]:
            paths = (place / name for place in places for name in (f"{file}.gz", file))
            path = next((path for path in paths if path.is_file()), None)
            if path is None:
                looked = ", ".join(map(str, places))
                raise MissingDataError(
                    f"{self.title} is missing: no {file} or {file}.gz in {looked}. {self.how_to_get}"
                )
            try:
                content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            except (gzip.BadGzipFile, EOFError) as error:
                raise CorruptDataError(f"{path} cannot be unpacked ({error}): fetch it again") from error
            found = hashlib.md5(content, usedforsecurity=False).hexdigest()
            if found != md5:
                raise CorruptDataError(f"{path} has md5 {found} unpacked, its publisher's has {md5}: fetch it again")
            contents.append(content)
        return contents


FASHION_MNIST = PublishedDataset(
    "Fashion-MNIST",
    (Path(".data/fashion-mnist"), Path("/usr/share/datasets/fashion-mnist")),
    "Get it with `make data`, or with `apt-get install dataset-fashion-mnist` (Debian), or its four .gz files from "
    "https://github.com/zalandoresearch/fashion-mnist into a directory of your own and name that.",
    {
        "train": (
            ("train-images-idx3-ubyte", "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
            ("train-labels-idx1-ubyte", "9018921c3c673c538a1fc5bad174d6f9"),
        ),
        "test": (
            ("t10k-images-idx3-ubyte", "8181f5470baa50b63fa0f6fddb340f0a"),
            ("t10k-labels-idx1-ubyte", "15d484375f8d13e6eb1aabb0c3f46965"),
        ),
    },
)
"""Looked for where `make data` and Debian's package `dataset-fashion-mnist` put it."""
FASHION_MNIST_MEAN, FASHION_MNIST_STD = 0.2860, 0.3530
"""Mean and standard deviation of all training pixels scaled to 0 ... 1."""

CIFAR10 = PublishedDataset(
    "CIFAR-10",
    (Path(".data/cifar-10"), Path(".data/cifar-10-batches-bin")),
    "Get it with `make data-cifar`, or unpack https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz into a directory "
    "of your own and name that.",
    {
        "train": (
            ("data_batch_1.bin", "5dd7e06a14cb22eb9f671a540d1b7c25"),
            ("data_batch_2.bin", "5ea93a67294ea407fff1d09f752e9692"),
            ("data_batch_3.bin", "942cd6a4bcdd0dd3c604fbe906cb4421"),
            ("data_batch_4.bin", "ae636b3ba5c66a11e91e8cb52e771fcb"),
            ("data_batch_5.bin", "53f37980c15c3d472c316c40844f3f0d"),
        ),
        "test": (("test_batch.bin", "803d5f7f4d78ea53de84dbe85f74fb6d"),),
    },
)
"""Looked for where `make data-cifar` puts it, and where the publisher's archive is unpacked beside it."""
CIFAR10_SIDE = 32

TEXT_DIRECTORIES = (Path(".data/text"),)


def fashion_mnist(split: str, directory: str | Path | None = None) -> TensorDataset:
    """Images float32 N x 1 x 28 x 28, standardised, and labels int64 N: 60,000 `train` or 10,000 `test`.

    Arguments and errors are those of `PublishedDataset.read`.
    """
    pixels, labels = fashion_mnist_bytes(split, directory)
    return TensorDataset(standardised(pixels.float().div_(255), [FASHION_MNIST_MEAN], [FASHION_MNIST_STD]), labels)


def standardised(images: Tensor, means: Sequence[float], stds: Sequence[float]) -> Tensor:
    """Images N x channels x height x width, in place, to mean 0 and standard deviation 1 in every channel."""
    mean, std = (torch.tensor(values, dtype=images.dtype).view(1, -1, 1, 1) for values in (means, stds))
    return images.sub_(mean).div_(std)


def fashion_mnist_bytes(split: str, directory: str | Path | None = None) -> tuple[Tensor, Tensor]:
    """Pixels uint8 N x 1 x 28 x 28 as published, and labels int64 N. Raises as `fashion_mnist`."""
    images, labels = (np.frombuffer(content, np.uint8) for content in FASHION_MNIST.read(split, directory))
    height, width = images[8:16].view(">u4").tolist()  # idx files: 4 bytes, sizes, values
    pixels = torch.from_numpy(images[16:].reshape(-1, 1, height, width).copy())
    return pixels, torch.from_numpy(labels[8:].copy()).long()


def cifar10(split: str, directory: str | Path | None = None) -> tuple[Tensor, Tensor]:
    """Pixels uint8 N x 3 x 32 x 32 as published, and labels int64 N: 50,000 `train` or 10,000 `test`.

    Arguments and errors are those of `PublishedDataset.read`.
    """
    records = np.frombuffer(b"".join(CIFAR10.read(split, directory)), np.uint8).reshape(-1, 1 + 3 * CIFAR10_SIDE**2)
    pixels = records[:, 1:].reshape(-1, 3, CIFAR10_SIDE, CIFAR10_SIDE).copy()
    return torch.from_numpy(pixels), torch.from_numpy(records[:, 0].copy()).long()


def read_text(directory: str | Path | None = None) -> Tensor:
    """Bytes of all *.txt files of a directory, uint8, one after the other in the order of their names.

    Args:
        directory: where the files are, or the directory above; the usual place when not given.

    Raises:
        MissingDataError: when there is no such file.
        CorruptDataError: when a file is not UTF-8: it is no text then, or the encoding is one to convert from first.
    """
    directories = _places(directory, TEXT_DIRECTORIES)
    files = next((found for place in directories if (found := sorted(place.glob("*.txt")))), None)
    if files is None:
        raise MissingDataError(
            f"no text to learn from: no *.txt in {', '.join(map(str, directories))}. Put any UTF-8 text of a megabyte "
            "or more there, for example a novel from https://www.gutenberg.org, or name a directory that has one."
        )
    contents = []
    for file in files:
        contents.append(file.read_bytes())
        try:
            contents[-1].decode()
        except UnicodeDecodeError as error:
            raise CorruptDataError(f"{file} is not UTF-8 ({error}): convert it, for example with iconv") from error
    return torch.frombuffer(bytearray(b"".join(contents)), dtype=torch.uint8)


def _places(directory: str | Path | None, usual: Sequence[Path]) -> tuple[Path, ...]:
    """Directories to search: the usual ones, or the given one and those in it with the usual names."""
    if directory is None:
        return tuple(usual)
    return (Path(directory), *dict.fromkeys(Path(directory) / place.name for place in usual))
