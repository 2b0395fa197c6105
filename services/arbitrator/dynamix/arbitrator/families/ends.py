"""Classes of the reasons for which runs end. Pure."""

import re

COMPLETED, LEFT = "completed", "left"
STOPPED, TIMEOUT, ERROR = "stopped", "timeout", "error"
ENDS = (COMPLETED, LEFT, STOPPED, TIMEOUT, ERROR)
_STOPPED = ("KeyboardInterrupt", "SignalException")
_TIMED_OUT = re.compile(r"\btim(ed|e)[ -]?out\b", re.IGNORECASE)
"""gloo: `Timed out waiting 1800000ms for recv operation`; NCCL: `Watchdog caught collective operation timeout`."""


def class_of_end(reason: str) -> str:
    """The class in `ENDS` of a `Job.end_reason`."""
    if reason in {COMPLETED, LEFT}:
        return reason
    if reason.startswith(_STOPPED):
        return STOPPED
    return TIMEOUT if _TIMED_OUT.search(reason) else ERROR
