"""Loggers: each window's metrics for the user's own tools; training never waits for a logger, and none can stop it.

`attach(loggers=["name"])` finds a logger by our name for it, or by the name that its package registers in the
entry-point group `dynamix.loggers`; an object that fits `MetricLogger` serves as well.
"""

from collections.abc import Callable, Sequence

from dynamix.runtime.extensions import extension_names, load_extension

from .delivery import MetricLogger, Metrics
from .files import CsvLogger, JsonlLogger

__all__ = ["CsvLogger", "JsonlLogger", "MetricLogger", "Metrics", "find_loggers"]


def find_loggers(loggers: Sequence[str | MetricLogger], *, rank: int) -> list[MetricLogger]:
    """Loggers by their names, or the objects themselves; made in global rank 0, in others only looked up.

    Raises:
        ValueError: on all ranks alike when no logger has a name; in rank 0 when one cannot be made or does not fit.
    """
    ours: dict[str, Callable[[], MetricLogger]] = {"csv": CsvLogger, "jsonl": JsonlLogger}
    registered = extension_names("dynamix.loggers")
    for logger in loggers:
        if isinstance(logger, str) and logger not in ours and logger not in registered:
            raise ValueError(
                f"neither is {logger!r} a logger of DYNAMIX, nor does an installed package register it (group "
                f"dynamix.loggers): known are {', '.join(sorted({*ours, *registered}))}"
            )
    if rank:
        return []
    found = []
    for logger in loggers:
        if not isinstance(logger, str):
            made: MetricLogger | None = _checked(logger)
        else:
            made = ours[logger]() if logger in ours else load_extension("dynamix.loggers", logger, _checked)
        assert made is not None, "its name is registered"
        found.append(made)
    return found


def _checked(found: object) -> MetricLogger:
    if not isinstance(found, MetricLogger):
        raise TypeError(f"{type(found).__name__} is no metric logger: it needs log(metrics, *, step) and close()")
    return found
