"""The ranks of a job compared: which are slow, what all of them are like, and what a decision changes."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from dynamix.cli.formatting import signed_count

from .board import BoardRank

SHOWN_CHANGES = 16


class Spread(NamedTuple):
    """Least, median and greatest value over ranks."""

    low: float
    middle: float
    high: float


def spread(values: Sequence[float]) -> Spread | None:
    """Least, median and greatest of the values, `None` without any."""
    return Spread(min(values), median(values), max(values)) if values else None


def busy_time_s(row: BoardRank) -> float:
    """What tells slow ranks apart: their compute time, or the whole step where it is not known."""
    training = row.metrics.training
    return training.step_time_s if training.compute_time_s is None else training.compute_time_s


def total_time_s(row: BoardRank) -> float:
    """Seconds of a step: as measured, or the sum of its known parts where that is more."""
    training = row.metrics.training
    parts = (training.data_time_s, training.compute_time_s, training.sync_time_s, training.update_time_s)
    return max(training.step_time_s, sum(part for part in parts if part is not None))


def slowest(rows: Sequence[BoardRank], count: int) -> list[BoardRank]:
    """The `count` slowest ranks, in rank order."""
    return sorted(sorted(rows, key=busy_time_s, reverse=True)[: max(0, count)], key=lambda row: row.rank)


def changes_text(deltas: Sequence[int], most: int = SHOWN_CHANGES) -> str:
    """An action's changes: each where they are few, else how many ranks got more and less."""
    if not any(deltas):
        return "no change"
    if len(deltas) <= most:
        return " ".join(map(signed_count, deltas))
    more, less = sum(delta > 0 for delta in deltas), sum(delta < 0 for delta in deltas)
    return f"{more} ranks more, {less} less, {len(deltas) - more - less} the same"
