"""What a workload is: a model, its data, its loss, and what counts as correct."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own habit
from torch import Tensor, nn

GRADIENT_BYTES_PER_PARAMETER = 4
"""Gradients travel as float32."""


class Part(NamedTuple):
    """All samples of one part of a data set, in memory; the first dimension counts samples."""

    inputs: Tensor
    labels: Tensor


class Data(NamedTuple):
    """The parts: one to train on, one to steer by, one that is looked at once, at the end."""

    train: Part
    validation: Part
    test: Part


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model with its data and loss.

    No model's outputs depend on the other samples of its batch, so that the gradients of N workers, weighted by their
    samples, are the gradient of one big batch exactly.
    """

    name: str
    dataset: str
    make_model: Callable[[], nn.Module]
    read: Callable[[Path | None, torch.dtype], Data]

    def model(self) -> nn.Module:
        """A new model, initialised from torch's global generator: seed that first."""
        return self.make_model()

    def load(self, directory: Path | None = None, *, dtype: torch.dtype = torch.float32) -> Data:
        """The data: images standardised, in `dtype`; tokens and labels int64.

        Args:
            directory: where the data set is, or the directory above; the usual places when not given.
            dtype: of the images.

        Raises:
            MissingDataError: when it is not there; the text says how to get it.
            CorruptDataError: when a file is not what its publisher made.
        """
        return self.read(directory, dtype)

    def loss(self, outputs: Tensor, labels: Tensor, reduction: Literal["mean", "sum"] = "mean") -> Tensor:
        """Cross entropy, its mean or sum over SAMPLES; a text's is the mean over its tokens.

        Args:
            outputs: logits, N x classes, or N x tokens x vocabulary.
            labels: N, or N x tokens.
            reduction: `sum` gives 0 for no sample, `mean` gives NaN.
        """
        loss = F.cross_entropy(outputs.flatten(0, -2), labels.flatten(), reduction=reduction)
        return loss / tokens_per_sample(labels) if reduction == "sum" else loss

    def num_correct(self, outputs: Tensor, labels: Tensor) -> float:
        """How many samples are classified rightly; a text counts as its share of right tokens."""
        right = (outputs.argmax(-1) == labels).sum()
        return float(right) / tokens_per_sample(labels)

    @cached_property
    def num_parameters(self) -> int:
        """Trained parameters of the model; no random number is drawn to count them."""
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.make_model().parameters() if parameter.requires_grad)

    @property
    def gradient_bytes(self) -> int:
        """What every step sends over the network, once around."""
        return GRADIENT_BYTES_PER_PARAMETER * self.num_parameters


def tokens_per_sample(labels: Tensor) -> int:
    """1 for classes, the length of the sequences for text."""
    return 1 if labels.dim() == 1 else labels.shape[1]
