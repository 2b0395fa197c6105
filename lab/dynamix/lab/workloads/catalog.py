"""Workloads and optimizers by name, and how published files become their data."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit
from torch import Tensor, nn

from . import models
from .datasets import (
    FASHION_MNIST_MEAN,
    FASHION_MNIST_STD,
    MissingDataError,
    cifar10,
    fashion_mnist_bytes,
    read_text,
    standardised,
)
from .generated import ChoiceShape, TextShape, choices, sequences

OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = MappingProxyType(
    {"sgd": partial(torch.optim.SGD, momentum=0.9), "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
)
"""SGD with momentum 0.9; Adam and AdamW with PyTorch's decay rates, 0.9 and 0.999."""
TEXT_TOKENS = 64
"""Bytes in a sequence of text."""
CHOICES = ChoiceShape(num_users=20_000, num_items=20_000, num_samples=400_000)
CHOICES_SMALL = ChoiceShape(num_users=2_000, num_items=2_000, num_samples=60_000)
ZIPF_TEXT = TextShape(num_words=32_000, num_classes=16, num_sequences=40_000)
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
"""One twentieth of a text, or of generated data, is the validation part, another the test part, in this order, last."""
Reduction = Literal["mean", "sum"]


class Part(NamedTuple):
    """All samples of one part of a data set, in memory; the first dimension counts samples."""

    inputs: Tensor
    labels: Tensor


class Data(NamedTuple):
    """The parts: one to train on, one to steer by, one that is used once, at the end."""

    train: Part
    validation: Part
    test: Part


def cross_entropy(outputs: Tensor, labels: Tensor, reduction: Reduction = "mean") -> Tensor:
    """The classes exclude each other; `sum` is that over samples of the mean over a sample's tokens."""
    loss = F.cross_entropy(outputs.flatten(0, -2), labels.flatten(), reduction=reduction)
    return loss / tokens_per_sample(labels) if reduction == "sum" else loss


def binary_cross_entropy(outputs: Tensor, labels: Tensor, reduction: Reduction = "mean") -> Tensor:
    """Each candidate is a separate yes or no: yes for the label's, no for the others; the mean over candidates."""
    wanted = F.one_hot(labels, outputs.shape[-1]).to(outputs.dtype)
    loss = F.binary_cross_entropy_with_logits(outputs, wanted, reduction=reduction)
    return loss / outputs.shape[-1] if reduction == "sum" else loss


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model with its data and loss.

    No model's outputs depend on the other samples of its batch, so that the gradients of N workers, weighted by their
    samples, are the gradient of one big batch exactly.
    """

    name: str
    model: Callable[[], nn.Module]
    """A new model, initialised from torch's global generator: seed that first."""
    load: Callable[[Path | None], Data]
    """The data in a directory or in the usual places: images standardised, in float32; tokens and labels int64.

    Generated data needs neither, and takes a second or two. Raises MissingDataError with the fix, and CorruptDataError
    when a file is not what its publisher made.
    """
    loss: Callable[..., Tensor] = cross_entropy
    """Loss of logits (N x classes, or N x tokens x vocabulary) and labels (N, or N x tokens): mean or sum over SAMPLES.

    `reduction="sum"` gives 0 for no sample, the default `mean` NaN; a text's sample counts as the mean of its tokens.
    """

    def num_correct(self, outputs: Tensor, labels: Tensor) -> float:
        """Number of correct samples; a text counts as its share of correct tokens."""
        right = (outputs.argmax(-1) == labels).sum()
        return float(right) / tokens_per_sample(labels)

    @cached_property
    def num_parameters(self) -> int:
        """Trained parameters of the model; no random number is drawn to count them."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.model().parameters() if parameter.requires_grad)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one gradient, in float32."""
        return 4 * self.num_parameters


def tokens_per_sample(labels: Tensor) -> int:
    """1 for classes, the length of the sequences for text."""
    return 1 if labels.dim() == 1 else labels.shape[1]


def images(
    read: Callable[[str, Path | None], tuple[Tensor, Tensor]],
    directory: Path | None,
    *,
    means: Sequence[float],
    stds: Sequence[float],
    num_validation: int,
    pool: int = 1,
) -> Data:
    """Images in float32, standardised per channel; the last of the training images are the validation part.

    Args:
        read: gives pixels 0 ... 255, N x channels x height x width, and labels of `train` and `test`.
        directory: of the files.
        means: of the channels, scaled to 0 ... 1.
        stds: of the channels, after pooling.
        num_validation: how many are the validation part.
        pool: each pixel is the mean of `pool` x `pool` published ones.
    """

    def part(split: str) -> Part:
        pixels, labels = read(split, directory)
        scaled = pixels.float().div_(255)
        return Part(standardised(F.avg_pool2d(scaled, pool) if pool > 1 else scaled, means, stds), labels)

    return Data(*_split(part("train"), num_validation), part("test"))


def text(directory: Path | None) -> Data:
    """A text cut into sequences that do not overlap; the label of a byte is the byte behind it.

    Raises:
        MissingDataError: when the text is too short for a sequence in every part.
    """
    content, num_tokens = read_text(directory), TEXT_TOKENS
    num_sequences = (len(content) - 1) // num_tokens
    num_held_out = num_sequences // HELD_OUT_SHARE
    if num_held_out == 0:
        raise MissingDataError(
            f"{len(content)} bytes of text are too few: {HELD_OUT_SHARE} sequences of {num_tokens} bytes, and one more "
            "byte, are the least; add files"
        )
    inputs = content[: num_sequences * num_tokens].view(num_sequences, num_tokens).long()
    labels = content[1 : num_sequences * num_tokens + 1].view(num_sequences, num_tokens).long()
    return _held_out(Part(inputs, labels), num_held_out)


def generated(make: Callable[[], tuple[Tensor, Tensor]], _: Path | None) -> Data:
    """Generated data."""
    part = Part(*make())
    return _held_out(part, len(part.labels) // HELD_OUT_SHARE)


def _held_out(part: Part, num_held_out: int) -> Data:
    """The parts of data in one piece; so many samples for each of the last two."""
    rest, test = _split(part, num_held_out)
    return Data(*_split(rest, num_held_out), test)


def _split(part: Part, num_last: int) -> tuple[Part, Part]:
    """The part without its last samples, and these."""
    first = len(part.labels) - num_last
    return Part(*(tensor[:first] for tensor in part)), Part(*(tensor[first:] for tensor in part))


_FASHION = partial(images, fashion_mnist_bytes, means=[FASHION_MNIST_MEAN], num_validation=FASHION_VALIDATION)
_FASHION_14 = partial(_FASHION, stds=[FASHION_14_STD], pool=2)
_FASHION_28 = partial(_FASHION, stds=[FASHION_MNIST_STD])
_CIFAR10 = partial(images, cifar10, means=CIFAR10_MEAN, stds=CIFAR10_STD, num_validation=CIFAR10_VALIDATION)
_ALL = (
    Workload(name="fashion-14-mlp", model=partial(models.mlp, 14 * 14, 64), load=_FASHION_14),
    Workload(name="fashion-28-mlp", model=partial(models.mlp, 28 * 28, 128), load=_FASHION_28),
    Workload(name="fashion-14-cnn", model=partial(models.small_cnn, 14, 8), load=_FASHION_14),
    Workload(name="fashion-28-cnn", model=partial(models.small_cnn, 28, 16), load=_FASHION_28),
    Workload(name="cifar10-vgg11", model=models.vgg11, load=_CIFAR10),
    Workload(name="cifar10-resnet20", model=models.resnet20, load=_CIFAR10),
    Workload(  # 137,216 parameters: a step of a few hundred sequences takes a CPU core well under a second
        name="text-transformer",
        model=partial(models.Transformer, TEXT_TOKENS, width=64, num_heads=4, num_layers=2),
        load=text,
    ),
    Workload(
        name="ncf",
        model=partial(models.NeuralCollaborativeFiltering, CHOICES.num_users, CHOICES.num_items, width=32, gain=24.0),
        load=partial(generated, partial(choices, CHOICES)),
        loss=binary_cross_entropy,
    ),
    Workload(
        name="ncf-small",
        model=partial(
            models.NeuralCollaborativeFiltering, CHOICES_SMALL.num_users, CHOICES_SMALL.num_items, width=8, gain=32.0
        ),
        load=partial(generated, partial(choices, CHOICES_SMALL)),
        loss=binary_cross_entropy,
    ),
    Workload(
        name="lstm-zipf",
        model=partial(
            models.RecurrentLanguageModel, ZIPF_TEXT.num_words, ZIPF_TEXT.num_tokens, width=32, num_hidden=96, gain=40.0
        ),
        load=partial(generated, partial(sequences, ZIPF_TEXT)),
    ),
)
WORKLOADS: Mapping[str, Workload] = MappingProxyType({workload.name: workload for workload in _ALL})


def workload_named(name: str) -> Workload:
    """The workload of that name. Raises ValueError when there is none; the text lists all."""
    if name not in WORKLOADS:
        raise ValueError(f"workload {name!r} is not known: use one of {', '.join(WORKLOADS)}")
    return WORKLOADS[name]


def make_optimizer(
    name: str, parameters: Iterable[torch.nn.Parameter], learning_rate: float, *, weight_decay: float = 0.0
) -> torch.optim.Optimizer:
    """The optimizer of that name. Raises ValueError when the name is none of `OPTIMIZERS`."""
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer {name!r} is not known: use one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name](parameters, lr=learning_rate, weight_decay=weight_decay)
