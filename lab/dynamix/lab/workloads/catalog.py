"""The workloads by name, and how published files become their data: what is trained on, steered by and tested on."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit
from torch import Tensor

from .datasets import MissingDataError, cifar10, read_text
from .datasets.fashion import FASHION_MNIST_MEAN, FASHION_MNIST_STD, fashion_mnist_bytes
from .language import Transformer, TransformerShape
from .vision import mlp, resnet, small_cnn, vgg11
from .workload import Data, Part, Workload

TEXT_SHAPE = TransformerShape(num_tokens=64, width=64, num_heads=4, num_layers=2)
"""137,216 parameters: a step of a few hundred sequences takes a CPU core well under a second."""
FASHION_14_STD = 0.3301
"""Standard deviation of all training pixels after pooling 2 x 2; the mean is that of the whole images."""
FASHION_VALIDATION = 10_000
"""The last of the 60,000 training images; the publisher's test images are the test part."""
CIFAR10_VALIDATION = 5_000
"""The last of the 50,000 training images."""
CIFAR10_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR10_STD = (0.2470, 0.2435, 0.2616)
"""Mean and standard deviation of the training pixels scaled to 0 ... 1: red, green, blue."""
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


def text(directory: Path | None, _: torch.dtype) -> Data:
    """A text cut into sequences that do not overlap; the label of a byte is the byte behind it.

    Raises:
        MissingDataError: when the text is too short for a sequence in every part.
    """
    content, num_tokens = read_text(directory), TEXT_SHAPE.num_tokens
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


_ALL = (
    Workload(name="fashion-14-mlp", dataset="fashion-mnist", make_model=partial(mlp, 14 * 14, 64), read=fashion_14),
    Workload(name="fashion-28-mlp", dataset="fashion-mnist", make_model=partial(mlp, 28 * 28, 128), read=fashion_28),
    Workload(name="fashion-14-cnn", dataset="fashion-mnist", make_model=small_cnn, read=fashion_14),
    Workload(name="cifar10-vgg11", dataset="cifar-10", make_model=vgg11, read=cifar10_32),
    Workload(name="cifar10-resnet20", dataset="cifar-10", make_model=partial(resnet, 20), read=cifar10_32),
    Workload(name="cifar10-resnet32", dataset="cifar-10", make_model=partial(resnet, 32), read=cifar10_32),
    Workload(name="text-transformer", dataset="text", make_model=partial(Transformer, TEXT_SHAPE), read=text),
)
WORKLOADS: Mapping[str, Workload] = MappingProxyType({workload.name: workload for workload in _ALL})


def workload_named(name: str) -> Workload:
    """The workload of that name.

    Raises:
        ValueError: when there is none; the text lists all.
    """
    if name not in WORKLOADS:
        raise ValueError(f"workload {name!r} is not known: use one of {', '.join(WORKLOADS)}")
    return WORKLOADS[name]
