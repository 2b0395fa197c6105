"""The energy of a rank's devices by window, for jobs with `objective="energy"`.

Counters are extensions of the entry-point group `dynamix.energy`, by the type of the rank's device (`cpu`, `cuda`).
Which counter is used follows from the device alone, so that runs stay comparable. Ranks that would read the same
counters, even in two containers of one machine, find out when they attach: only the lowest of them reads.
"""

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from dynamix.runtime.extensions import load_extension

_log = logging.getLogger("dynamix.trainer")


class EnergyError(Exception):
    """Energy cannot be read; the message has the reason and the fix."""


class EnergyCounter(Protocol):
    """Some counters of joules, read together."""

    source: str
    """Identity of the counters: equal in ranks that share them."""

    def take_j(self) -> float:
        """Joules since the last call, or since it was made.

        Raises:
            EnergyError: when that is not known.
        """


class EnergyOffer(NamedTuple):
    """A rank's offer to the others when they attach."""

    source: str
    """Name of its counters; empty if it has none."""
    fault: str = ""
    """Reason why it has none."""


class EnergyMeter:
    """The joules of one rank by window, once the ranks agreed on who reads which counter."""

    def __init__(self, counter: EnergyCounter | EnergyError) -> None:
        """Read a counter, or tell the other ranks why there is none."""
        self._counter: EnergyCounter | None = None if isinstance(counter, EnergyError) else counter
        self.offer = EnergyOffer("", str(counter)) if isinstance(counter, EnergyError) else EnergyOffer(counter.source)
        self._has_warned = False

    def agree(self, offers: Sequence[EnergyOffer], nodes: Sequence[str], rank: int) -> None:
        """Count only what no lower rank counts.

        Raises:
            ValueError: on all ranks alike, when one cannot count.
        """
        faulty = [other for other, offer in enumerate(offers) if offer.fault]
        if faulty:
            first = faulty[0]
            others = f" ({len(faulty)} of {len(offers)} ranks cannot)" if len(faulty) > 1 else ""
            raise ValueError(
                f"objective='energy': rank {first} on {nodes[first]} cannot read its energy{others}: "
                f"{offers[first].fault}. Or leave `objective` out, then runs are compared by time"
            )
        if any(offer.source == offers[rank].source for offer in offers[:rank]):
            self._counter = None

    def take_j(self) -> float:
        """Joules since the last call; 0 where another rank counts, NaN where they are unknown, with one warning."""
        if self._counter is None:
            return 0.0
        try:
            return self._counter.take_j()
        except EnergyError as error:
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "the energy of a window is unknown, and with what this run spends from here on nothing is "
                    "compared: %s",
                    error,
                )
            return math.nan


def energy_meter(device: torch.device, powercap: Path) -> EnergyMeter:
    """The meter of a rank that computes on a device; missing counters are reported when ranks agree."""
    make = load_extension("dynamix.energy", device.type, _counter)
    if make is None:
        return EnergyMeter(EnergyError(f"there is no energy counter for {device.type!r}: only NVIDIA GPUs and CPUs"))
    try:
        return EnergyMeter(make(device, powercap))
    except EnergyError as error:
        return EnergyMeter(error)


def _counter(found: Callable[[torch.device, Path], EnergyCounter]) -> Callable[[torch.device, Path], EnergyCounter]:
    return found
