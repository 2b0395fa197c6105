"""Arms that are timed in rounds, and statistics over pairs of timings: the same round in two arms.

Each arm runs once per round, in random order, every second round mirrored.
"""

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from dynamix.cli.progress import ProgressLine

Values = npt.NDArray[np.float64]

PROGRESS_EVERY_S = 5.0
NUM_RESAMPLES = 10_000


class Timing(NamedTuple):
    """One run of one arm."""

    wall_s: float
    cpu_s: float
    """CPU time of all processes that did the work."""
    num_items: float = 1.0
    """Messages, steps, samples: what the run is counted in."""
    num_bytes: int = 0
    thread_s: float = 0.0
    """CPU time of the thread that timed it."""

    @property
    def per_s(self) -> float:
        """Items per second by the wall clock."""
        return self.num_items / self.wall_s

    @property
    def per_cpu_s(self) -> float:
        """Items per second of CPU time."""
        return self.num_items / self.cpu_s

    @property
    def cpu_us(self) -> float:
        """Microseconds of CPU time per item."""
        return 1e6 * self.cpu_s / self.num_items


class Timed:
    """Times the body of a `with` statement by the wall clock, and in CPU time of this process and of this thread."""

    def __init__(self, num_items: float = 1.0) -> None:
        self._num_items = num_items
        self.timing: Timing

    def __enter__(self) -> Self:
        self._began = time.perf_counter(), time.process_time(), time.thread_time()
        return self

    def __exit__(self, *_: object) -> None:
        ended = time.perf_counter(), time.process_time(), time.thread_time()
        wall_s, cpu_s, thread_s = (end - began for began, end in zip(self._began, ended, strict=True))
        self.timing = Timing(wall_s, cpu_s, self._num_items, thread_s=thread_s)


class Rounds:
    """Timings of several arms: `for arm in rounds: rounds.record(run(arm))`.

    A round runs every arm once, in random order; the next round runs them in the reverse order, so that a drift of the
    machine hits all arms alike. Equal seeds give equal orders, also in different processes.

    Args:
        arms: their names.
        num_rounds: those that are kept; `num_warm_up` more come first.
        after_round: called with the number of each round that is kept.
        is_quiet: whether progress is not shown.

    Attributes:
        timings: by arm, one timing per round.
    """

    def __init__(
        self,
        arms: Sequence[str],
        num_rounds: int,
        *,
        label: str,
        num_warm_up: int = 1,
        after_round: Callable[[int], None] = lambda _: None,
        is_quiet: bool = False,
    ) -> None:
        self.timings: dict[str, list[Timing]] = {arm: [] for arm in arms}
        self._numbers = range(-num_warm_up, num_rounds)
        self._label = label
        self._after_round = after_round
        self._is_quiet = is_quiet
        self._is_judged = False
        self._arm = ""

    def __iter__(self) -> Iterator[str]:
        generator, progress = random.Random(0), ProgressLine(PROGRESS_EVERY_S)
        order: list[str] = []
        for number in self._numbers:
            order = order[::-1] if order and number % 2 else generator.sample([*self.timings], len(self.timings))
            self._is_judged = number >= 0
            for self._arm in order:
                gc.collect()
                yield self._arm
            if number >= 0:
                self._after_round(number)
            if not self._is_quiet:
                progress.show(f"  {self._label}: {number + 1} of {self._numbers.stop} rounds")
        progress.finish()

    def record(self, timing: Timing) -> None:
        """Keep the timing of the arm that is being run."""
        if self._is_judged:
            self.timings[self._arm].append(timing)

    def medians(self, figure: str) -> dict[str, float]:
        """Median of a figure of `Timing`, such as `per_s`, by arm."""
        return {
            arm: statistics.median(getattr(timing, figure) for timing in timings)
            for arm, timings in self.timings.items()
        }

    def ratios(self, rate: str) -> dict[str, Any]:
        """Median and range of the rounds' ratios of a rate of the first arm to that of the second."""
        pairs = zip(*self.timings.values(), strict=True)
        found = [getattr(ours, rate) / getattr(theirs, rate) for ours, theirs in pairs]
        return {
            "num_pairs": len(found),
            "ratio": statistics.median(found),
            "ratio_min": min(found),
            "ratio_max": max(found),
        }


def difference(on: Values, off: Values) -> dict[str, Any]:
    """What `on` takes more than `off`, in percent of the mean of `off`; both in seconds, one value per pair.

    The 95 % interval of the mean is found by resampling pairs with a fixed seed.
    """
    from scipy.stats import bootstrap  # noqa: PLC0415 - a second, which each spawned process would pay, too

    percent = 100 * (on - off) / off.mean()
    resampled = bootstrap((percent,), np.mean, n_resamples=NUM_RESAMPLES, method="percentile", random_state=0)
    return {
        "on_ms": 1000 * float(on.mean()),
        "off_ms": 1000 * float(off.mean()),
        "ratio": float(on.mean() / off.mean()),
        "mean_percent": float(percent.mean()),
        "median_percent": float(np.median(percent)),
        "interval_percent": list(map(float, resampled.confidence_interval)),
    }


def median_of(values: Sequence[float | None]) -> float | None:
    """Median of the known values; `None` when no value is known."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None
