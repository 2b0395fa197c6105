"""Checks of numbers in a scenario: each error names key, value and limit."""

import math


def between(key: str, value: float, low: float, high: float = math.inf) -> None:
    """Raise ValueError when a number is not finite or outside [low, high]."""
    if not (math.isfinite(value) and low <= value <= high):
        limit = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise ValueError(f"{key} = {value:g}: it must be {limit}")


def positive(key: str, value: float) -> None:
    """Raise ValueError when a number is not finite or not above 0."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{key} = {value:g}: it must be above 0")
