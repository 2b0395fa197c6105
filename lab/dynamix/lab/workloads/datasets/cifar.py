"""CIFAR-10 (Krizhevsky, 2009) in its binary version: 60,000 colour images of 32 x 32 pixels, ten kinds of things.

A file holds 10,000 records of 3,073 bytes: the label, then 1,024 bytes each of red, green and blue, row by row.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from .files import CorruptDataError, PublishedFile, places, read_published

CIFAR10_DIRECTORIES = (Path(".data/cifar-10"), Path(".data/cifar-10-batches-bin"))
"""Where CIFAR-10 is looked for: `make data-cifar`, and the publisher's archive unpacked beside it."""

CIFAR10_FILES = {
    "train": (
        PublishedFile("data_batch_1.bin", "5dd7e06a14cb22eb9f671a540d1b7c25"),
        PublishedFile("data_batch_2.bin", "5ea93a67294ea407fff1d09f752e9692"),
        PublishedFile("data_batch_3.bin", "942cd6a4bcdd0dd3c604fbe906cb4421"),
        PublishedFile("data_batch_4.bin", "ae636b3ba5c66a11e91e8cb52e771fcb"),
        PublishedFile("data_batch_5.bin", "53f37980c15c3d472c316c40844f3f0d"),
    ),
    "test": (PublishedFile("test_batch.bin", "803d5f7f4d78ea53de84dbe85f74fb6d"),),
}
HOW_TO_GET = (
    "Get it with `make data-cifar`, or unpack https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz into a directory "
    "of your own and name that."
)

SIDE = 32
RECORD_BYTES = 1 + 3 * SIDE * SIDE


def cifar10(split: str, directory: str | Path | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """CIFAR-10: pixels uint8 N x 3 x 32 x 32 as published, and labels int64 N.

    Args:
        split: `train` (50,000) or `test` (10,000).
        directory: where the files are, packed (.gz) or not, or the directory above; the usual places when not given.

    Raises:
        MissingDataError: when a file is not there.
        CorruptDataError: when a file's hash is not its publisher's.
    """
    if split not in CIFAR10_FILES:
        raise ValueError(f"split={split!r}: CIFAR-10 has 'train' and 'test'")
    directories = places(directory, CIFAR10_DIRECTORIES)
    parts = [
        read_records(read_published(file, directories, "CIFAR-10", HOW_TO_GET), file.name)
        for file in CIFAR10_FILES[split]
    ]
    pixels = torch.from_numpy(np.concatenate([part[0] for part in parts]))
    labels = torch.from_numpy(np.concatenate([part[1] for part in parts]))
    return pixels, labels.long()


def read_records(content: bytes, name: str) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
    """Pixels N x 3 x 32 x 32 and labels N of a binary file.

    Raises:
        CorruptDataError: when it is not made of whole records, or a label is none of the ten.
    """
    if not content or len(content) % RECORD_BYTES:
        raise CorruptDataError(f"{name} holds {len(content)} bytes, not records of {RECORD_BYTES}")
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, RECORD_BYTES)
    if records[:, 0].max() > 9:
        raise CorruptDataError(f"{name} has a label {records[:, 0].max()}: CIFAR-10 has 0 to 9")
    return records[:, 1:].reshape(-1, 3, SIDE, SIDE), records[:, 0]


def records_of(pixels: npt.NDArray[np.uint8], labels: npt.NDArray[np.uint8]) -> bytes:
    """The binary file of these pixels, N x 3 x 32 x 32, and labels, N: the inverse of `read_records`."""
    return np.concatenate([labels[:, None], pixels.reshape(len(labels), -1)], axis=1).tobytes()
