"""Each window's metrics for the user's tools and for notebooks; training never waits for a logger.

`window_metrics` makes a flat mapping of a window's rows. `MetricHistory` keeps the newest windows, and hands one to the
loggers when the next has ended, the last one with the job's summary. They run in a thread in global rank 0: one that is
slow loses the oldest windows, one that raises is closed and logged once.
"""

import contextlib
import logging
import math
import queue
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Protocol, runtime_checkable

import msgspec

from dynamix.runtime.extensions import extension_names, load_extension
from dynamix.schemas.messages import JobTotals, Summary
from dynamix.trainer.measurement.meter import Row, held_out_accuracy

QUEUED_WINDOWS = 64
KEPT_WINDOWS = 4096
"""With 16 ranks 23 MB, and 80,000 steps of the default window."""

Metrics = Mapping[str, float | str]
"""A window's metrics by name, with units in the names; texts are the job's id and the reason of a decision."""

_log = logging.getLogger("dynamix.trainer")


@runtime_checkable
class MetricLogger(Protocol):
    """The interface of a logger, which receives the metrics of every window."""

    def log(self, metrics: Metrics, *, step: int) -> None:
        """Take a window's metrics. `step` counts optimizer steps of the whole run."""

    def close(self) -> None:
        """The job has ended: write what is buffered."""


def find_loggers(loggers: str | Sequence[str | MetricLogger], *, rank: int) -> list[MetricLogger]:
    """Loggers, or one, by the names that packages register in the group `dynamix.loggers`, or the objects themselves.

    They are made in global rank 0, in others only looked up.

    Raises:
        ValueError: on all ranks alike when no logger has a name; in rank 0 when one cannot be made or does not fit.
    """
    registered = extension_names("dynamix.loggers")
    found = []
    for logger in [loggers] if isinstance(loggers, str) else loggers:
        if isinstance(logger, str) and logger not in registered:
            raise ValueError(
                f"no installed package registers a metric logger {logger!r} (group dynamix.loggers): known are "
                f"{', '.join(registered)}"
            )
        if not rank:
            made = load_extension("dynamix.loggers", logger, _checked) if isinstance(logger, str) else _checked(logger)
            assert made is not None, "its name is registered"
            found.append(made)
    return found


def _checked(found: object) -> MetricLogger:
    if not isinstance(found, MetricLogger):
        raise TypeError(f"{type(found).__name__} is not a metric logger: it needs log(metrics, *, step) and close()")
    return found


def _close(logger: MetricLogger) -> None:
    try:
        logger.close()
    except Exception:  # noqa: BLE001 - whatever a user's logger raises
        _log.exception("metric logger %s failed when it was closed", type(logger).__name__)


class MetricHistory:
    """The newest windows of this generation; hands each once to the loggers, in a daemon thread."""

    def __init__(self, loggers: Iterable[MetricLogger]) -> None:
        self._loggers = list(loggers)
        self._queue: queue.Queue[tuple[int, Metrics] | None] = queue.Queue(QUEUED_WINDOWS)
        self._thread: threading.Thread | None = None
        """Started with the first window, if there are loggers."""
        self._windows: deque[tuple[int, dict[str, float | str]]] = deque(maxlen=KEPT_WINDOWS)
        """Optimizer steps by its end, and metrics."""
        self._is_newest_logged = True

    def add_window(self, step: int, metrics: Mapping[str, float | str]) -> None:
        """Add the window that ended with `step` optimizer steps done; the one before goes to the loggers."""
        self._log_newest()
        self._windows.append((step, dict(metrics)))
        self._is_newest_logged = False

    def add_summary(self, summary: Summary) -> None:
        """Add what the job gained to its last window, which the loggers do not have yet."""
        figures = {**msgspec.structs.asdict(summary), "gain": summary.gain}
        self._windows[-1][1].update((f"summary/{name}", value) for name, value in figures.items() if value is not None)

    def rows(self) -> list[dict[str, float | str]]:
        """The windows, oldest first, each with its `step`."""
        return [{"step": step, **metrics} for step, metrics in self._windows]

    def close(self, timeout_s: float) -> None:
        """Hand the last window over, and close the loggers once they took what is queued; waits at most `timeout_s`."""
        self._log_newest()
        if self._thread is not None:
            self._put(None)
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                _log.warning(
                    "the metric loggers are not done after %g s, their last windows may be missing: set "
                    "DYNAMIX_TRAINER_CLOSE_TIMEOUT_S to wait longer",
                    timeout_s,
                )
            self._thread, self._loggers = None, []

    def _log_newest(self) -> None:
        if not self._is_newest_logged and self._loggers:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="dynamix loggers", daemon=True)
                self._thread.start()
            step, metrics = self._windows[-1]
            self._put((step, dict(metrics)))
        self._is_newest_logged = True

    def _put(self, item: tuple[int, Metrics] | None) -> None:
        """Queue a window's metrics, or the end; returns at once."""
        while True:
            try:
                return self._queue.put_nowait(item)
            except queue.Full:
                with contextlib.suppress(queue.Empty):
                    self._queue.get_nowait()
                    _log.warning("a metric logger is slower than training: the metrics of a window were dropped")

    def _run(self) -> None:
        working = list(self._loggers)
        while (item := self._queue.get()) is not None:
            step, metrics = item
            for logger in tuple(working):
                try:
                    logger.log(metrics, step=step)
                except Exception:  # noqa: BLE001 - whatever a user's logger raises
                    _log.exception(
                        "metric logger %s failed and gets no more metrics; training goes on", type(logger).__name__
                    )
                    working.remove(logger)
                    _close(logger)
        for logger in working:
            _close(logger)


MAX_RANKS_APART = 16
"""Most ranks that are logged singly; larger jobs log minimum, mean and maximum."""

_TIMES = ("data_time_s", "compute_time_s", "sync_time_s", "update_time_s")
_NOT_SPLIT = ("compute_time_s", "sync_time_s")


def window_metrics(rows: Sequence[Row], totals: JobTotals, sizes: Sequence[int]) -> dict[str, float | str]:
    """Metrics of a window; making them takes 45 us for 2 ranks, 0.1 ms for 16, 2 ms of each rank for 1,000.

    Args:
        rows: of all ranks, in their order.
        totals: the sums over them.
        sizes: local batch sizes of the window's last step, by rank.
    """
    found: dict[str, float | None] = {
        "window": totals.window,
        "global_batch_size": totals.global_batch_size,
        "num_samples": totals.num_samples,
        "step_time_s": totals.time_s / max(totals.num_steps, 1),
        "samples_per_s": totals.num_samples / totals.time_s if totals.time_s > 0 else None,
        "held_out_accuracy": held_out_accuracy(rows),
    }
    if totals.num_samples > 0:
        found["loss"] = None if totals.loss_sum is None else totals.loss_sum / totals.num_samples
        found["accuracy"] = None if totals.num_correct is None else totals.num_correct / totals.num_samples
    if totals.noise is not None and totals.noise.squared_norm > 0:
        found["noise_scale"] = totals.noise.trace / totals.noise.squared_norm
    found.update(_by_rank("local_batch_size", sizes))
    for name in _TIMES:
        if name not in _NOT_SPLIT or all(row.rank.times_split for row in rows):
            found.update(_by_rank(name, [getattr(row.rank, name) / max(totals.num_steps, 1) for row in rows]))
    return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}


@cache  # of the names: of 16 ranks, they would be half of what a window takes in memory
def _names(name: str, num_ranks: int) -> tuple[str, ...]:
    """Names of a metric; `name` itself is not used, since MLflow keeps `a/b` in a directory `a`."""
    apart = range(num_ranks) if num_ranks <= MAX_RANKS_APART else ()
    return (f"{name}/min", f"{name}/mean", f"{name}/max", *(f"{name}/rank_{rank}" for rank in apart))


def _by_rank(name: str, values: Sequence[float]) -> Iterator[tuple[str, float]]:
    """A value that each rank has."""
    over_ranks = (min(values), sum(values) / len(values), max(values))
    return zip(_names(name, len(values)), (*over_ranks, *values[:MAX_RANKS_APART]), strict=False)
