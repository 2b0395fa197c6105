"""From published files to parts: what is trained on, steered by and tested on, and how it is scaled."""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit
from torch import Tensor

from .datasets import MissingDataError, cifar10, read_text
from .datasets.fashion import FASHION_MNIST_MEAN, FASHION_MNIST_STD, fashion_mnist_bytes
from .workload import Data, Part

FASHION_14_STD = 0.3301
"""Of all training pixels after pooling 2 x 2; the mean is that of the whole images."""
FASHION_VALIDATION = 10_000
"""The last of the 60,000 training images; the publisher's test images are the test part."""
CIFAR10_VALIDATION = 5_000
"""The last of the 50,000 training images."""
CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR10_STD = (0.2470, 0.2435, 0.2616)
"""Of the training pixels scaled to 0 ... 1: red, green, blue."""
HELD_OUT_SHARE = 20
"""One twentieth of a text is the validation part, another the test part, in this order at its end."""


def fashion_14(directory: Path | None, dtype: torch.dtype) -> Data:
    """Fashion-MNIST, the mean of every 2 x 2 pixels: N x 1 x 14 x 14, 50,000 + 10,000 + 10,000."""

    def part(pixels: Tensor, labels: Tensor) -> Part:
        pooled = F.avg_pool2d(pixels.to(dtype).div_(255), 2)
        return Part(pooled.sub_(FASHION_MNIST_MEAN).div_(FASHION_14_STD), labels)

    train, test = (part(*fashion_mnist_bytes(split, directory)) for split in ("train", "test"))
    return Data(*_split(train, FASHION_VALIDATION), test)


def fashion_28(directory: Path | None, dtype: torch.dtype) -> Data:
    """Fashion-MNIST whole: N x 1 x 28 x 28, 50,000 + 10,000 + 10,000."""
    train, test = (
        _standardised(*fashion_mnist_bytes(split, directory), dtype, [FASHION_MNIST_MEAN], [FASHION_MNIST_STD])
        for split in ("train", "test")
    )
    return Data(*_split(train, FASHION_VALIDATION), test)


def cifar10_32(directory: Path | None, dtype: torch.dtype) -> Data:
    """CIFAR-10: N x 3 x 32 x 32, 45,000 + 5,000 + 10,000; 740 MB as float32."""
    train, test = (
        _standardised(*cifar10(split, directory), dtype, CIFAR10_MEAN, CIFAR10_STD) for split in ("train", "test")
    )
    return Data(*_split(train, CIFAR10_VALIDATION), test)


def text(num_tokens: int, directory: Path | None) -> Data:
    """A text cut into sequences that do not overlap; the label of a byte is the byte behind it.

    Raises:
        MissingDataError: when the text is too short for a sequence in every part.
    """
    content = read_text(directory)
    num_sequences = (len(content) - 1) // num_tokens
    num_held_out = num_sequences // HELD_OUT_SHARE
    if num_held_out == 0:
        raise MissingDataError(
            f"{len(content)} bytes of text are too few: {HELD_OUT_SHARE} sequences of {num_tokens} bytes, and one more "
            "byte, are the least; add files"
        )
    inputs = content[: num_sequences * num_tokens].view(num_sequences, num_tokens).long()
    labels = content[1 : num_sequences * num_tokens + 1].view(num_sequences, num_tokens).long()
    rest, test = _split(Part(inputs, labels), num_held_out)
    return Data(*_split(rest, num_held_out), test)


def _standardised(
    pixels: Tensor, labels: Tensor, dtype: torch.dtype, means: Sequence[float], stds: Sequence[float]
) -> Part:
    """Pixels 0 ... 255, N x channels x height x width, to mean 0 and standard deviation 1 in every channel."""
    images = pixels.to(dtype).div_(255)
    shape = (1, -1, 1, 1)
    images.sub_(torch.tensor(means, dtype=dtype).view(shape)).div_(torch.tensor(stds, dtype=dtype).view(shape))
    return Part(images, labels)


def _split(part: Part, num_last: int) -> tuple[Part, Part]:
    """The part without its last samples, and these."""
    first = len(part.labels) - num_last
    return Part(*(tensor[:first] for tensor in part)), Part(*(tensor[first:] for tensor in part))
