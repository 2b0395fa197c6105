"""The family of a job: what its runs have in common, so that one can begin with what another one taught."""

import hashlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dynamix.schemas.subjects import is_token

AUTO = "auto"
MOST_LETTERS = 48
"""Most of the script's name in the family's."""
_NUMBERS = (bool, int, float, tuple)


def job_family(
    family: str | None,
    models: Sequence[torch.nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    dataset: object,
    *further: object,
) -> str:
    """The family by its given name, or under `auto` by the script's name and a fingerprint; empty for none.

    The fingerprint is of model (class and shapes), optimizer (class and settings), data set (class and length) and
    `further`. What a run can do at another size of the cluster is not part of it.

    Raises:
        ValueError: for a name that cannot be part of a subject.
    """
    if family is None or family == "":
        return ""
    if family != AUTO:
        if isinstance(family, str) and is_token(family):
            return family
        raise ValueError(f"family={family!r}: use {AUTO!r}, or 1 to 63 of the characters a-z, 0-9 and '-'")
    parts = (*map(_of_model, models), *map(_of_optimizer, optimizers), _of_data(dataset), *further)
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:8]
    script = re.sub("[^a-z0-9]+", "-", Path(sys.argv[0]).stem.lower()).strip("-")[:MOST_LETTERS]
    return f"{script or 'training'}-{digest}"


def _of_model(model: torch.nn.Module) -> tuple[object, ...]:
    inner = model.module if isinstance(getattr(model, "module", None), torch.nn.Module) else model
    assert isinstance(inner, torch.nn.Module), "a model is one"
    shapes = [tuple(parameter.shape) for parameter in inner.parameters() if parameter.requires_grad]
    return (type(inner).__qualname__, *shapes)


def _of_optimizer(optimizer: torch.optim.Optimizer) -> tuple[object, ...]:
    settings: dict[str, Any] = optimizer.defaults
    known = [(name, value) for name, value in sorted(settings.items()) if isinstance(value, _NUMBERS)]
    return (type(optimizer).__qualname__, *known)


def _of_data(dataset: object) -> tuple[object, ...]:
    length = len(dataset) if hasattr(dataset, "__len__") else None
    return (type(dataset).__qualname__, length)
