"""From what was published and what was decided to the figures: pure."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
from bench.scale.generator import SentWindow
from bench.scale.plan import WARM_UP_WINDOWS, ScalePlan

Decided = Mapping[tuple[str, int], int]
"""When the broker stored the action of a job's window, in nanoseconds since the Unix epoch."""


def latency_of(sent: Sequence[SentWindow], decided: Decided) -> dict[str, Any]:
    """Figures of `ScaleResult` over all judged windows that were decided; latencies are NaN when none was."""
    judged = [one for one in sent if one.window >= WARM_UP_WINDOWS and (one.job, one.window) in decided]
    times_ms = [(decided[one.job, one.window] - one.stored_ns) / 1e6 for one in judged]
    shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
    figures = {f"decision_latency_{name}_ms": percentile(times_ms, share) for name, share in shares.items()}
    return {**figures, "max_lag_windows": _max_lag(judged, decided)}


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank: the smallest value that at least this share of all do not exceed."""
    return float(np.quantile(values, share, method="inverted_cdf")) if values else math.nan


def achieved_rate(plan: ScalePlan, sent: Sequence[SentWindow]) -> float:
    """Windows per second of the slowest job, from the begins of its judged windows."""
    begun: dict[str, list[float]] = defaultdict(list)
    for one in sent:
        if one.window >= WARM_UP_WINDOWS:
            begun[one.job].append(one.begun_s)
    spans = [max(times) - min(times) for times in begun.values()]
    return plan.rate if plan.num_windows < 2 else (plan.num_windows - 1) / max(spans)


def lateness_ms(sent: Sequence[SentWindow]) -> float:
    """The longest that any judged window began after it was due."""
    return max(1e3 * (one.begun_s - one.due_s) for one in sent if one.window >= WARM_UP_WINDOWS)


def publishing_ms(sent: Sequence[SentWindow]) -> float:
    """Median time from a window's first message to the acknowledgement of its last state."""
    return median(1e3 * (one.acknowledged_s - one.begun_s) for one in sent if one.window >= WARM_UP_WINDOWS)


def kept_rate(plan: ScalePlan, sent: Sequence[SentWindow]) -> bool:
    """Whether the load was the one that was asked for: no window late by a whole one.

    Windows are due at fixed times: a generator that is too slow falls behind them more and more.
    """
    return lateness_ms(sent) < 1e3 * plan.interval_s


def _max_lag(sent: Sequence[SentWindow], decided: Decided) -> int:
    """Complete and undecided windows of one job, counted at each completion."""
    by_job: dict[str, list[SentWindow]] = defaultdict(list)
    for one in sorted(sent, key=lambda one: one.window):
        by_job[one.job].append(one)
    most = 0
    for windows in by_job.values():
        oldest = 0
        for newest, one in enumerate(windows):
            while oldest < newest and decided[one.job, windows[oldest].window] <= one.stored_ns:
                oldest += 1
            most = max(most, newest - oldest + 1)
    return most
