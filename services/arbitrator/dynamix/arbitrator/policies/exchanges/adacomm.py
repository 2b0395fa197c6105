"""`adacomm`: local steps that become fewer as the loss falls (AdaComm: Wang and Joshi, arXiv 1810.08313).

    tau = ceil(tau_0 sqrt((lr_0 / lr) (F / F_0)))       but decay * the last tau, where that is not below the last one

F is the mean training loss of an interval, lr the learning rate at its end, F_0 and lr_0 those of the first one; tau is
decided once per interval (published: a minute) and grows only with a falling learning rate. The batch stays. It needs
`attach(exchange="local")`; elsewhere gradients are exchanged exactly.
"""

import math
import struct
from typing import ClassVar, NamedTuple

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

_PACKED = struct.Struct("<dddddHH")
MOST_WINDOWS = 10_000


class _Course(NamedTuple):
    """What the loss has done so far."""

    first_loss: float = math.nan
    first_rate: float = math.nan
    rate: float = math.nan
    """The learning rate that tau was decided at."""
    loss_sum: float = 0.0
    """Over the windows of this interval whose loss was known."""
    tau: float = math.nan
    """NaN before the first interval ended."""
    num_known: int = 0
    num_windows: int = 0


class AdaComm:
    """Sets the sync period by the loss."""

    name = "adacomm"
    version = 1
    options: ClassVar[Options] = {
        "tau_0": Option(10, 1, MOST_STEPS, "steps between two averagings at the beginning", whole=True),
        "interval": Option(10, 1, MOST_WINDOWS, "windows between two decisions", whole=True),
        "decay": Option(0.5, 0.01, 1, "factor on tau where the loss alone would not make it less"),
        "codec": named(EXCHANGE_CODECS, "how what moved is encoded"),
        "track": track(0),
    }

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """The period of the last interval that ended; `tau_0` before, and while no loss is known."""
        course = self._observe(job, _unpack(carry), job_value(global_F, "loss"), job_value(global_F, "learning_rate"))
        tau = option(self.options, job, "tau_0") if math.isnan(course.tau) else course.tau
        codec = name_of(self.options, job, "codec")
        exchange = Exchange(every=min(max(math.ceil(tau), 1), MOST_STEPS), codec=codec)
        allocation = allocation_of(self.options, job, job.initial_local_batch_sizes, exchange)
        by = (
            "before the loss is known" if math.isnan(course.first_loss) else f"by a loss that was {course.first_loss:g}"
        )
        reason = f"a period of {exchange.every} steps {by}"
        return Decision(allocation, carry=_PACKED.pack(*course), reason=reason)

    def _observe(self, job: Job, course: _Course, loss: float, rate: float) -> _Course:
        """The course after one more window."""
        if 0 < loss < math.inf:
            course = course._replace(loss_sum=course.loss_sum + loss, num_known=course.num_known + 1)
        course = course._replace(num_windows=course.num_windows + 1)
        if course.num_windows < option(self.options, job, "interval"):
            return course
        mean = course.loss_sum / course.num_known if course.num_known else math.nan
        course = course._replace(loss_sum=0.0, num_known=0, num_windows=0)
        if math.isnan(mean) or not mean < math.inf:
            return course
        rate = rate if 0 < rate < math.inf else course.rate
        if math.isnan(course.first_loss):
            tau_0 = option(self.options, job, "tau_0")
            return course._replace(first_loss=mean, first_rate=rate, rate=rate, tau=tau_0)
        return course._replace(rate=rate, tau=self._period(job, course, mean, rate))

    def _period(self, job: Job, course: _Course, loss: float, rate: float) -> float:
        ratio = course.first_rate / rate if course.first_rate > 0 and rate > 0 else 1.0
        asked = math.ceil(option(self.options, job, "tau_0") * math.sqrt(min(ratio * loss / course.first_loss, 1e9)))
        may_grow = rate < course.rate
        if asked < course.tau or may_grow:
            return float(min(max(asked, 1), MOST_STEPS))
        return max(1.0, math.ceil(option(self.options, job, "decay") * course.tau))


def _unpack(carry: bytes) -> _Course:
    if len(carry) != _PACKED.size:
        return _Course()
    course = _Course(*_PACKED.unpack(carry))
    known = (course.first_loss, course.first_rate, course.rate, course.tau)
    is_ours = all(math.isnan(each) or 0 < each < math.inf for each in known) and 0 <= course.loss_sum < math.inf
    return course if is_ours and course.num_known <= course.num_windows < MOST_WINDOWS else _Course()
