"""Optimizers by name, with the settings that scenarios, examples and benchmarks share."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType

import torch

from dynamix.schemas.messages import OptimizerFamily

MOMENTUM = 0.9


OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = MappingProxyType(
    {"sgd": partial(torch.optim.SGD, momentum=MOMENTUM), "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
)
"""By name: SGD with momentum 0.9; Adam and AdamW with PyTorch's decay rates, 0.9 and 0.999."""

_FAMILIES: Mapping[str, OptimizerFamily] = MappingProxyType({"sgd": "sgd", "adam": "adam", "adamw": "adam"})


def make_optimizer(
    name: str,
    parameters: Iterable[torch.nn.Parameter],
    learning_rate: float,
    *,
    weight_decay: float = 0.0,
) -> torch.optim.Optimizer:
    """The optimizer of that name.

    Raises:
        ValueError: when the name is none of `OPTIMIZERS`.
    """
    return OPTIMIZERS[_checked(name)](parameters, lr=learning_rate, weight_decay=weight_decay)


def family_of_name(name: str) -> OptimizerFamily:
    """The reward's optimizer family. Raises as `make_optimizer`."""
    return _FAMILIES[_checked(name)]


def _checked(name: str) -> str:
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer {name!r} is not known: use one of {', '.join(OPTIMIZERS)}")
    return name
