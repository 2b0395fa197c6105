"""The optimizers' state, averaged over ranks: when local steps end, all ranks go on with the same.

Momentum and the like are averaged with the weights of the parameters; counts of steps, which hold one number, become
the largest. A rank that has no state yet where others have one takes part with zeros.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dynamix.trainer.communication.pipeline import Pipeline
from dynamix.trainer.exchange.collectives import Largest, Leg, Sum

_log = logging.getLogger("dynamix.trainer")

MOST_ELEMENTS = 1 << 22
"""Limit of one message: 16 MB in float32."""


class StatePlace(NamedTuple):
    """Where a tensor of an optimizer's state is, the same on all ranks."""

    optimizer: int
    parameter: int
    """Among those of all groups."""
    name: str
    shape: tuple[int, ...]
    dtype: str


def state_places(optimizers: Sequence[torch.optim.Optimizer]) -> list[StatePlace]:
    """What this rank has; optimizers that keep whole numbers, such as quantized ones, are left out as a whole."""
    found = []
    for number, optimizer in enumerate(optimizers):
        places = [
            StatePlace(number, index, name, tuple(value.shape), str(value.dtype).removeprefix("torch."))
            for index, parameter in enumerate(_parameters(optimizer))
            for name, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        ]
        if all(getattr(torch, place.dtype).is_floating_point or place.shape == () for place in places):
            found += places
        else:
            _log.warning("the state of %s cannot be averaged, each rank keeps its own", type(optimizer).__name__)
    return found


def average_states(
    optimizers: Sequence[torch.optim.Optimizer], places: Sequence[StatePlace], weight: float, pipeline: Pipeline
) -> None:
    """Average what `places` name, which any rank has, in the same order on all; a collective."""
    under_way = []
    parameters = [list(_parameters(optimizer)) for optimizer in optimizers]
    for chunk in _chunks(places):
        tensors = [_state(optimizers[each.optimizer], parameters[each.optimizer], each) for each in chunk]
        is_count = chunk[0].shape == ()
        flat = torch.cat([_wide(each.detach()).flatten() for each in tensors])
        if not is_count:
            flat = flat.mul_(weight) if weight else flat.zero_()
        under_way.append((tensors, flat, pipeline.send(_largest(flat) if is_count else _summed(flat))))
    for tensors, flat, sent in under_way:
        sent.wait()
        parts = torch.split(flat, [each.numel() for each in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


def _chunks(places: Sequence[StatePlace]) -> Iterator[list[StatePlace]]:
    """Places of one kind together, no more than a message holds."""
    chunk: list[StatePlace] = []
    size = 0
    for place in sorted(places, key=lambda place: (place.shape == (), place.dtype == "float64", place)):
        kind = place.shape == (), place.dtype == "float64"
        if chunk and (size >= MOST_ELEMENTS or kind != (chunk[0].shape == (), chunk[0].dtype == "float64")):
            yield chunk
            chunk, size = [], 0
        chunk.append(place)
        size += torch.Size(place.shape).numel()
    if chunk:
        yield chunk


def _state(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], place: StatePlace) -> Tensor:
    """The tensor in that place, zero where there was none."""
    parameter = parameters[place.parameter]
    state = optimizer.state[parameter]
    if not isinstance(state.get(place.name), Tensor):
        on_device = bool(place.shape) or any(
            group.get(flag) for group in optimizer.param_groups for flag in ("capturable", "fused")
        )
        device = parameter.device if on_device else torch.device("cpu")
        state[place.name] = torch.zeros(place.shape, dtype=getattr(torch, place.dtype), device=device)
    tensor: Tensor = state[place.name]
    return tensor


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _wide(tensor: Tensor) -> Tensor:
    """The tensor on the CPU, in float32 or float64."""
    return tensor.to("cpu", torch.float64 if tensor.dtype == torch.float64 else torch.float32)


def _summed(flat: Tensor) -> Leg:
    yield Sum(flat)


def _largest(flat: Tensor) -> Leg:
    yield Largest(flat)
