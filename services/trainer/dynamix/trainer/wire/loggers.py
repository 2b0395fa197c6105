"""Metric loggers: each window's metrics handed to the user's tools, in a thread of their own.

`attach(loggers=["name"])` finds a logger by the name that its package registers as an entry point of the group
`dynamix.loggers`; an object that fits the protocol serves as well. Loggers run in global rank 0 only. One that is slow
loses the oldest windows, one that raises is closed and logged once: training waits for neither.
"""

import contextlib
import logging
import math
import queue
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from dynamix.runtime.extensions import extension_names, load_extension
from dynamix.schemas.messages import JobTotals

QUEUED_WINDOWS = 64

_log = logging.getLogger("dynamix.trainer")


@runtime_checkable
class MetricLogger(Protocol):
    """What receives the metrics of every window."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Take a window's metrics; names carry their units. `step` counts optimizer steps of the whole run."""

    def close(self) -> None:
        """The job has ended: write what is buffered."""


def find_loggers(loggers: Sequence[str | MetricLogger], *, rank: int) -> list[MetricLogger]:
    """Loggers by their registered names, or the objects themselves; made in global rank 0, in others only looked up.

    Raises:
        ValueError: on all ranks alike when no installed package registers a name; in rank 0 when what is registered
            cannot be made or does not fit the protocol.
    """
    registered = extension_names("dynamix.loggers")
    for logger in loggers:
        if isinstance(logger, str) and logger not in registered:
            known = ", ".join(registered) or "none"
            raise ValueError(
                f"no installed package registers a logger {logger!r} (group dynamix.loggers): known are {known}"
            )
    return [_made(logger) for logger in loggers] if rank == 0 else []


def window_metrics(totals: JobTotals, held_out_accuracy: float | None) -> dict[str, float]:
    """The metrics of a window; what is not known is left out."""
    found: dict[str, float | None] = {
        "window": totals.window,
        "global_batch_size": totals.global_batch_size,
        "num_samples": totals.num_samples,
        "step_time_s": totals.time_s / max(totals.num_steps, 1),
        "samples_per_s": totals.num_samples / totals.time_s if totals.time_s > 0 else None,
        "held_out_accuracy": held_out_accuracy,
    }
    if totals.num_samples > 0:
        found["loss"] = None if totals.loss_sum is None else totals.loss_sum / totals.num_samples
        found["accuracy"] = None if totals.num_correct is None else totals.num_correct / totals.num_samples
    if totals.noise is not None and totals.noise.squared_norm > 0:
        found["noise_scale"] = totals.noise.trace / totals.noise.squared_norm
    return {name: value for name, value in found.items() if value is not None and math.isfinite(value)}


class Loggers:
    """Hands windows to several loggers, in one daemon thread that is started with the first window."""

    def __init__(self, loggers: Iterable[MetricLogger] = ()) -> None:
        self._loggers: Sequence[MetricLogger] = tuple(loggers)
        self._queue: queue.Queue[tuple[int, Mapping[str, float]] | None] = queue.Queue(QUEUED_WINDOWS)
        self._thread: threading.Thread | None = None

    def publish(self, step: int, totals: JobTotals, held_out_accuracy: float | None) -> None:
        """Queue a window's metrics; returns at once."""
        if self._loggers:
            self._put((step, window_metrics(totals, held_out_accuracy)))

    def close(self, timeout_s: float) -> None:
        """Close all loggers, once they took what is queued; waits at most `timeout_s`."""
        if self._thread is not None:
            self._put(None)
            self._thread.join(timeout_s)
            self._thread = None

    def _put(self, item: tuple[int, Mapping[str, float]] | None) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="dynamix loggers", daemon=True)
            self._thread.start()
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
            working = [logger for logger in working if _logged(logger, step, metrics)]
        for logger in working:
            _close(logger)


def _logged(logger: MetricLogger, step: int, metrics: Mapping[str, float]) -> bool:
    """Whether the logger took the metrics; one that raised is closed and not asked again."""
    try:
        logger.log(metrics, step=step)
    except Exception:  # noqa: BLE001 - whatever code of the user's raises, training goes on without it
        _log.exception("metric logger %s failed and gets no more metrics; training goes on", type(logger).__name__)
        _close(logger)
        return False
    return True


def _close(logger: MetricLogger) -> None:
    try:
        logger.close()
    except Exception:  # noqa: BLE001 - as above
        _log.exception("metric logger %s could not be closed", type(logger).__name__)


def _made(logger: str | MetricLogger) -> MetricLogger:
    if not isinstance(logger, str):
        return _checked(logger)
    found = load_extension("dynamix.loggers", logger, _checked)
    assert found is not None, "its name is registered"
    return found


def _checked(found: object) -> MetricLogger:
    if not isinstance(found, MetricLogger):
        raise TypeError(f"{type(found).__name__} is no metric logger: it needs log(metrics, *, step) and close()")
    return found
