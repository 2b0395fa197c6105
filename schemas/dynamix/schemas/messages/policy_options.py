"""Bounds of the options of our policies: the script's process refuses what the arbitrator would refuse too late.

A policy that is code has its options, with defaults and meanings, beside its formula; `tests/arbitrator` compares.
"""

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from .allocation import EXCHANGE_CODECS, ROUTES
from .fields import TOKEN_PATTERN
from .policies import STIGMERGY

MOST_STEPS = 1024
"""Steps between two averagings that an option can ask for, at most."""
VERSION = "version"
"""The option of every job that asks for one version of its policy instead of the newest."""


class Bounds(NamedTuple):
    """Values that an option takes: numbers within bounds, or names."""

    low: float = 0
    high: float = 0
    whole: bool = False
    """Only whole numbers; with bounds 0 and 1 a switch."""
    names: tuple[str, ...] = ()
    """Names of an option that takes no numbers. Where they are the core's codecs, an extension's name fits too."""

    def fault(self, value: float | str) -> str | None:
        """Why the option cannot have this value, or `None`."""
        if self.names:
            is_codec = self.names == EXCHANGE_CODECS and isinstance(value, str) and re.search(TOKEN_PATTERN, value)
            return None if is_codec or value in self.names else f"must be one of {', '.join(self.names)}"
        if isinstance(value, str) or not (math.isfinite(value) and self.low <= value <= self.high):
            return f"must be from {self.low:g} to {self.high:g}"
        return "must be a whole number" if self.whole and value != int(value) else None


def option_value(text: str) -> float | str:
    """The value of an option that a person wrote: a number, or else a name."""
    try:
        return float(text)
    except ValueError:
        return text


SHARE = Bounds(0, 1)
SWITCH = Bounds(0, 1, whole=True)
SMOOTHING = Bounds(0.01, 1)
FACTOR = Bounds(0.01, 100)
MAX_CHANGE = Bounds(1.01, 100)
CODEC = Bounds(names=EXCHANGE_CODECS)
INTERVAL = Bounds(1, 10_000, whole=True)
OUTER = {"outer_rate": Bounds(0.001, 10), "outer_momentum": Bounds(0, 0.999)}
TRACK = {"track": SWITCH}

OPTION_BOUNDS: Mapping[str, Mapping[str, Bounds]] = MappingProxyType(
    {
        "static": {
            "every": Bounds(1, MOST_STEPS, whole=True),
            "codec": CODEC,
            "route": Bounds(names=ROUTES),
            **OUTER,
            **TRACK,
        },
        "split": {"smoothing": SMOOTHING, "dead_band": SHARE, **TRACK},
        "random": TRACK,
        "proportional": {"smoothing": SMOOTHING, "dead_band": SHARE, **TRACK},
        "noise-scale": {"multiplier": FACTOR, "max_change": MAX_CHANGE, "proportional": SWITCH, **TRACK},
        "goodput": {
            "smoothing": SMOOTHING,
            "hysteresis": SHARE,
            "noise_multiplier": FACTOR,
            "proportional": SWITCH,
            **TRACK,
        },
        "doubling": {
            "every_samples": Bounds(0, 1e12),
            "patience_windows": Bounds(1, 1e6, whole=True),
            "min_improvement": SHARE,
            "max_doublings": Bounds(0, 30, whole=True),
            "proportional": SWITCH,
            **TRACK,
        },
        "rule": {
            "noise_multiplier": FACTOR,
            "rate_weight": SHARE,
            "max_change": MAX_CHANGE,
            "dead_band": SHARE,
            "max_every": Bounds(1, 16, whole=True),
            **TRACK,
        },
        STIGMERGY: {
            "evaporation": SMOOTHING,
            "diffusion": SHARE,
            "noise_multiplier": FACTOR,
            "rate_weight": SHARE,
            "max_change": MAX_CHANGE,
            "dead_band": SHARE,
            "learned": SWITCH,
        },
        "diloco": {"every": Bounds(2, MOST_STEPS, whole=True), "codec": CODEC, **OUTER, **TRACK},
        "qsr": {"alpha": Bounds(1e-6, 1e3), "h_min": Bounds(1, MOST_STEPS, whole=True), "codec": CODEC, **TRACK},
        "adacomm": {
            "tau_0": Bounds(1, MOST_STEPS, whole=True),
            "interval": INTERVAL,
            "decay": SMOOTHING,
            "codec": CODEC,
            **TRACK,
        },
        "accordion": {"eta": Bounds(0, 100), "interval": INTERVAL, "mild": CODEC, "hard": CODEC, **TRACK},
        "gravac": {
            "floor": SHARE,
            "trial": Bounds(3, 10_000, whole=True),
            "hold": Bounds(1, 1e6, whole=True),
            "smoothing": SMOOTHING,
            **TRACK,
        },
    }
)
"""By policy that is code; learned ones say theirs in their files."""
