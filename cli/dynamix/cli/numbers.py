"""Numbers among the arguments: types for argparse that refuse what is out of bounds, before any work starts."""

import argparse
import math
from collections.abc import Callable

MAX_SEED = 2**31 - 1
"""What every generator of random numbers takes."""


def count(low: int = 1, high: int | None = None) -> Callable[[str], int]:
    """An argument's type: a whole number from `low` to `high` (`None`: without limit)."""

    def whole(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
        if value < low or (high is not None and value > high):
            limits = f"at least {low}" if high is None else f"{low} to {high}"
            raise argparse.ArgumentTypeError(f"{value}: it must be {limits}")
        return value

    return whole


def number(low: float, high: float = math.inf, *, above: bool = False) -> Callable[[str], float]:
    """An argument's type: a finite number from `low` (`above`: greater than it) to `high`."""

    def finite(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
        if not math.isfinite(value) or not low <= value <= high or (above and value == low):
            least = f"{'above' if above else 'at least'} {low:g}"
            limits = least if high == math.inf else f"{least} and at most {high:g}"
            raise argparse.ArgumentTypeError(f"{text}: it must be a number {limits}")
        return value

    return finite


def seed(text: str) -> int:
    """An argument's type: a seed of random numbers."""
    return count(0, MAX_SEED)(text)
