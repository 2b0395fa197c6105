"""The workloads by name."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch

from . import parts
from .language import Transformer, TransformerShape
from .vision import mlp, resnet, small_cnn, vgg11
from .workload import Data, Workload

TEXT_SHAPE = TransformerShape(num_tokens=64, width=64, num_heads=4, num_layers=2)
"""137,216 parameters: a step of a few hundred sequences takes a CPU core well under a second."""


def _text(directory: Path | None, dtype: torch.dtype) -> Data:  # noqa: ARG001 - tokens are whole numbers in any dtype
    return parts.text(TEXT_SHAPE.num_tokens, directory)


_ALL = (
    Workload(
        name="fashion-14-mlp", dataset="fashion-mnist", make_model=partial(mlp, 14 * 14, 64), read=parts.fashion_14
    ),
    Workload(
        name="fashion-28-mlp", dataset="fashion-mnist", make_model=partial(mlp, 28 * 28, 128), read=parts.fashion_28
    ),
    Workload(name="fashion-14-cnn", dataset="fashion-mnist", make_model=small_cnn, read=parts.fashion_14),
    Workload(name="cifar10-vgg11", dataset="cifar-10", make_model=vgg11, read=parts.cifar10_32),
    Workload(name="cifar10-resnet20", dataset="cifar-10", make_model=partial(resnet, 20), read=parts.cifar10_32),
    Workload(name="cifar10-resnet32", dataset="cifar-10", make_model=partial(resnet, 32), read=parts.cifar10_32),
    Workload(name="text-transformer", dataset="text", make_model=partial(Transformer, TEXT_SHAPE), read=_text),
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
