"""`qsr`: local steps by the Quadratic Synchronization Rule (Gu et al., arXiv 2310.14423).

    h = max(h_min, floor((alpha / learning rate)^2))

The period grows as the learning rate of the steps falls. Published settings have h_min 2 or 4 and (alpha / peak)^2 =
4.8, which the default is at a rate of 0.1. The batch stays. It needs `attach(exchange="local")`; elsewhere gradients
are exchanged exactly.
"""

import math
import struct
from typing import ClassVar

from dynamix.arbitrator.policies.base.options import (
    MOST_STEPS,
    Option,
    Options,
    allocation_of,
    name_of,
    named,
    option,
    track,
)
from dynamix.arbitrator.policies.base.policy import Decision
from dynamix.arbitrator.policies.model.observation import Array32, job_value
from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import EXCHANGE_CODECS, Exchange

_PERIOD = struct.Struct("<H")
ROUNDING = 1e-6
"""States are in float32: a period that is a whole number may come out a little below it."""


class QSR:
    """Sets the sync period by the learning rate."""

    name = "qsr"
    version = 1
    options: ClassVar[Options] = {
        "alpha": Option(0.22, 1e-6, 1e3, "learning rate at which h is 1, without h_min"),
        "h_min": Option(4, 1, MOST_STEPS, "least steps between two averagings", whole=True),
        "codec": named(EXCHANGE_CODECS, "how what moved is encoded"),
        "track": track(0),
    }

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """The period of the newest learning rate that is known; `h_min` before the first."""
        every = self._period(job, job_value(global_F, "learning_rate"), _unpack(carry))
        codec = name_of(self.options, job, "codec")
        allocation = allocation_of(self.options, job, job.initial_local_batch_sizes, Exchange(every=every, codec=codec))
        rate = job_value(global_F, "learning_rate")
        at = f"at a learning rate of {rate:g}" if rate > 0 else "while no learning rate is known"
        reason = f"a period of {every} steps {at}"
        return Decision(allocation, carry=_PERIOD.pack(every), reason=reason)

    def _period(self, job: Job, learning_rate: float, last: int) -> int:
        least = int(option(self.options, job, "h_min"))
        if not 0 < learning_rate < math.inf:
            return max(last, least)
        period = (option(self.options, job, "alpha") / learning_rate) ** 2
        return max(least, min(math.floor(period * (1 + ROUNDING)), MOST_STEPS))


def _unpack(carry: bytes) -> int:
    return min(_PERIOD.unpack(carry)[0], MOST_STEPS) if len(carry) == _PERIOD.size else 0
