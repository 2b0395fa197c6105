"""Metric loggers: each window's metrics handed to the user's tools, in a thread of their own.

`attach(loggers=["name"])` finds a logger by our name for it, or by the name that its package registers as an entry
point of the group `dynamix.loggers`; an object that fits the protocol serves as well. Loggers run in global rank 0
only. One that is slow loses the oldest windows, one that raises is closed and logged once: training waits for neither.
"""

import contextlib
import logging
import queue
import threading
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple, Protocol, runtime_checkable

from dynamix.runtime.extensions import extension_names, load_extension

QUEUED_WINDOWS = 64

Metrics = Mapping[str, float | str]
"""A window's metrics by name, with units in the names; texts are the job's id and the reason of a decision."""

_log = logging.getLogger("dynamix.trainer")


@runtime_checkable
class MetricLogger(Protocol):
    """What receives the metrics of every window."""

    def log(self, metrics: Metrics, *, step: int) -> None:
        """Take a window's metrics. `step` counts optimizer steps of the whole run."""

    def close(self) -> None:
        """The job has ended: write what is buffered."""


class BuiltIn(NamedTuple):
    """A logger of ours."""

    module: str
    name: str
    package: str = ""
    """What it needs to be installed; empty when nothing is needed."""


BUILT_IN = {
    "csv": BuiltIn("files", "CsvLogger"),
    "jsonl": BuiltIn("files", "JsonlLogger"),
    "mlflow": BuiltIn("mlflow", "MlflowLogger", "mlflow"),
    "tensorboard": BuiltIn("tensorboard", "TensorBoardLogger", "tensorboard"),
    "wandb": BuiltIn("wandb", "WandbLogger", "wandb"),
}


def find_loggers(loggers: Sequence[str | MetricLogger], *, rank: int) -> list[MetricLogger]:
    """Loggers by their names, or the objects themselves; made in global rank 0, in others only looked up.

    Raises:
        ValueError: on all ranks alike when no logger has a name, or the package it needs is not installed; in rank 0
            when what is registered cannot be made or does not fit the protocol.
    """
    registered = extension_names("dynamix.loggers")
    for logger in loggers:
        if not isinstance(logger, str):
            continue
        if (found := BUILT_IN.get(logger)) is not None:
            if found.package and not _is_installed(found.package):
                raise ValueError(
                    f"logger {logger!r} needs the package {found.package}, which is not installed here: "
                    f"pip install 'dynamix-batch[{logger}]'"
                )
        elif logger not in registered:
            known = ", ".join(sorted({*BUILT_IN, *registered}))
            raise ValueError(
                f"neither is {logger!r} a logger of DYNAMIX, nor does an installed package register it (group "
                f"dynamix.loggers): known are {known}"
            )
    return [_made(logger) for logger in loggers] if rank == 0 else []


class Loggers:
    """Hands windows to several loggers, in one daemon thread that is started with the first window."""

    def __init__(self, loggers: Iterable[MetricLogger] = ()) -> None:
        self._loggers: Sequence[MetricLogger] = tuple(loggers)
        self._queue: queue.Queue[tuple[int, Metrics] | None] = queue.Queue(QUEUED_WINDOWS)
        self._thread: threading.Thread | None = None

    def publish(self, step: int, metrics: Metrics) -> None:
        """Queue a window's metrics; returns at once."""
        if self._loggers:
            self._put((step, metrics))

    def close(self, timeout_s: float) -> None:
        """Close all loggers, once they took what is queued; waits at most `timeout_s`."""
        if self._thread is not None:
            self._put(None)
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                _log.warning(
                    "the metric loggers are not done after %g s, their last windows may be missing: set "
                    "DYNAMIX_TRAINER_CLOSE_TIMEOUT_S to wait longer",
                    timeout_s,
                )
            self._thread = None

    def _put(self, item: tuple[int, Metrics] | None) -> None:
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


def _logged(logger: MetricLogger, step: int, metrics: Metrics) -> bool:
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
    if logger in BUILT_IN:
        ours = BUILT_IN[logger]
        return _checked(getattr(import_module(f".{ours.module}", __package__), ours.name)())
    found = load_extension("dynamix.loggers", logger, _checked)
    assert found is not None, "its name is registered"
    return found


def _is_installed(package: str) -> bool:
    """Whether it can be imported; a directory without code does not count: W&B makes one of its own name."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def _checked(found: object) -> MetricLogger:
    if not isinstance(found, MetricLogger):
        raise TypeError(f"{type(found).__name__} is no metric logger: it needs log(metrics, *, step) and close()")
    return found
