"""How a session ends that its script neither closed nor kept."""

import sys
import weakref
from collections.abc import Callable
from typing import NamedTuple, ParamSpec

from .gradient.covered import CoveredModels
from .job.reporting import reason_after
from .loggers.history import MetricHistory
from .steering.steering import Steering
from .wire.transport import Transport

P = ParamSpec("P")


class ExitRules(NamedTuple):
    """How a session ends."""

    close_timeout_s: float
    """Longest wait for the last messages to leave."""
    may_restart: bool
    """Whether a launcher would start the job again after a failure."""


def call_while_alive(method: Callable[P, None]) -> Callable[P, None]:
    """Call it for as long as its owner lives: a session ends with its last name, not when cycles are looked for."""
    weak = weakref.WeakMethod(method)

    def call(*args: P.args, **kwargs: P.kwargs) -> None:
        alive = weak()
        if alive is None:
            raise RuntimeError("the session of this loader is gone: keep it, its step() ends each step")
        alive(*args, **kwargs)

    return call


def leave(
    steering: Steering, models: CoveredModels, transport: Transport, history: MetricHistory, rules: ExitRules
) -> None:
    """End a session that was not closed: when it is garbage-collected, or at the end of the process."""
    error = getattr(sys, "last_value", None)  # what ends the process, as far as the interpreter has noted one
    steering.end(reason_after(error, may_restart=rules.may_restart))
    models.remove()
    steering.collectives.close()
    history.close(rules.close_timeout_s)
    transport.close(rules.close_timeout_s)
