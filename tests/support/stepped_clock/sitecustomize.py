"""Shifts the wall clock of a Python process by what a file says, while it runs: put this folder on PYTHONPATH.

The interpreter imports it before anything else. Only the wall clock: that the monotonic one, a loop's own,
never steps is the kernel's promise.
"""

import datetime as dt
import os
import time
from collections.abc import Callable
from pathlib import Path

_FILE = Path(os.environ["STEPPED_CLOCK"])
_time, _time_ns, _datetime = time.time, time.time_ns, dt.datetime


def offset_s() -> int:
    """What the file says now."""
    return int(_FILE.read_text() or "0")


class _Datetime(_datetime):
    @classmethod
    def now(cls, tz: dt.tzinfo | None = None) -> "_Datetime":
        return cls.fromtimestamp(time.time(), tz)


def _stepped(clock: Callable[[], float]) -> Callable[[], float]:
    return lambda: clock() + offset_s()


time.time = _stepped(_time)
time.time_ns = lambda: _time_ns() + offset_s() * 10**9
dt.datetime = _Datetime  # type: ignore[misc]
