"""Variation of the runs of one name: the time that each took to the held-out accuracy that all of them reached."""

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from .signatures import MIN_RUNS, variation_between

MAX_RUNS = 8
"""Ended runs of one name that are compared: the newest."""
MAX_POINTS = 512
"""Improvements of one run that are kept."""
MAX_NAMES = 100


class Improvement(NamedTuple):
    """A held-out accuracy that was the best so far, and the training time until it."""

    time_s: float
    accuracy: float


class RunKind(NamedTuple):
    """Runs that should take as long as each other."""

    name: str
    """The job's, without the id of the run."""
    policy: str


class RunTimes:
    """Compares ended runs by name and policy. A run that reports no held-out accuracy is not compared."""

    def __init__(self) -> None:
        self._running: dict[str, list[Improvement]] = {}
        self._time_s: dict[str, float] = {}
        self._ended: dict[RunKind, deque[list[Improvement]]] = {}

    def record_window(self, job: str, time_s: float, held_out_accuracy: float | None) -> None:
        """Add a window's training time, and the newest evaluation, to a run."""
        total_s = self._time_s[job] = self._time_s.pop(job, 0.0) + time_s
        curve = self._running.setdefault(job, [])
        is_better = held_out_accuracy is not None and (not curve or held_out_accuracy > curve[-1].accuracy)
        if held_out_accuracy is not None and is_better and len(curve) < MAX_POINTS:
            curve.append(Improvement(total_s, held_out_accuracy))
        while len(self._time_s) > MAX_NAMES:
            self.forget_run(next(iter(self._time_s)))

    def end_run(self, job: str, policy: str) -> None:
        """Compare a run from now on; it ended as it should. Windows that are still on their way are added later."""
        self._time_s.setdefault(job, 0.0)
        curve = self._running.setdefault(job, [])
        kind = RunKind(job.rpartition("-")[0], policy)
        runs = self._ended.pop(kind, deque(maxlen=MAX_RUNS))
        if not any(curve is known for known in runs):
            runs.append(curve)
        self._ended[kind] = runs  # the newest, which is dropped last
        while len(self._ended) > MAX_NAMES:
            del self._ended[next(iter(self._ended))]

    def forget_run(self, job: str) -> None:
        """Leave a run out: it failed, or was stopped."""
        self._running.pop(job, None)
        self._time_s.pop(job, None)

    def variations(self) -> Mapping[RunKind, float]:
        """The coefficient of variation between the times of each kind with enough runs."""
        found = {}
        for kind, ended in list(self._ended.items()):
            runs = [run for run in list(ended) if run]
            if len(runs) >= MIN_RUNS:
                found[kind] = variation_between(times_to_common_accuracy(runs))
        return found


def times_to_common_accuracy(runs: list[list[Improvement]]) -> list[float]:
    """Training time of each run to the best accuracy that all of them reached."""
    common = min(run[-1].accuracy for run in runs)
    return [next(point.time_s for point in run if point.accuracy >= common) for run in runs]
