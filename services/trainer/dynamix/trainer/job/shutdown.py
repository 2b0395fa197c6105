"""The reason of a job's end, as it is published."""

import sys

from torch.distributed.elastic.multiprocessing import SignalException

ASKED_TO_STOP = (KeyboardInterrupt, SignalException)
"""A user stopped the run: no launcher is meant to start it again, however many restarts are left."""

LEFT = "left"
"""The script ended, or let go of its session, without `close`."""


def reason_after(error: BaseException | None, *, may_restart: bool) -> str | None:
    """Why the job is over after an error, or none; `None` when a launcher starts it again."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return LEFT
    if may_restart and not isinstance(error, ASKED_TO_STOP):
        return None
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def error_of_script() -> BaseException | None:
    """The error that ends this process, as far as the interpreter has noted one; not for use before its end."""
    return getattr(sys, "last_value", None)
