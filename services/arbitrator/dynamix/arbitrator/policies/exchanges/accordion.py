"""`accordion`: little compression while the gradient's norm changes fast (Agarwal et al., arXiv 2010.16248).

    critical, if |N_before - N| / N_before >= eta, or the learning rate fell: codec `mild`; else codec `hard`

N is the mean norm of a step's gradient over an interval; published with eta 0.5, ten epochs, and a norm per layer,
where we have one for all. It starts as critical. Our codecs lose far less than those that it was made for. The batch
stays. It needs `attach(exchange="lossy")`; elsewhere gradients are exchanged exactly.
"""

import math
import struct
from typing import ClassVar, NamedTuple

from dynamix.arbitrator.policies.base.options import Option, Options, allocation_of, name_of, named, option, track
from dynamix.arbitrator.policies.base.policy import Decision
from dynamix.arbitrator.policies.model.observation import Array32, job_value
from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import EXCHANGE_CODECS, Exchange

_PACKED = struct.Struct("<dddHH?")
MOST_WINDOWS = 10_000


class _Norms(NamedTuple):
    """What the norm has done so far."""

    before: float = math.nan
    """Mean of the interval before this one."""
    rate: float = math.nan
    """The learning rate at its end."""
    norm_sum: float = 0.0
    """Over the windows of this interval whose norm was known."""
    num_known: int = 0
    num_windows: int = 0
    is_critical: bool = True


class Accordion:
    """Chooses one of two codecs by the gradient's norm."""

    name = "accordion"
    version = 1
    options: ClassVar[Options] = {
        "eta": Option(0.5, 0, 100, "relative change of the norm from which on it is critical"),
        "interval": Option(10, 1, MOST_WINDOWS, "windows whose mean norms are compared", whole=True),
        "mild": named(EXCHANGE_CODECS, "codec while it is critical", "bf16"),
        "hard": named(EXCHANGE_CODECS, "codec elsewhere", "int8"),
        "track": track(0),
    }

    def decide(self, job: Job, window: int, obs_WF: Array32, global_F: Array32, carry: bytes) -> Decision:  # noqa: ARG002 - the protocol's arguments
        """The codec of the last interval that ended; the mild one before, and while no norm is known."""
        norms = self._observe(
            job, _unpack(carry), job_value(global_F, "gradient_norm"), job_value(global_F, "learning_rate")
        )
        exchange = Exchange(codec=name_of(self.options, job, "mild" if norms.is_critical else "hard"))
        allocation = allocation_of(self.options, job, job.initial_local_batch_sizes, exchange)
        state = "may change fast" if norms.is_critical else f"stays near {norms.before:g}"
        reason = f"codec {exchange.codec}: the gradient's norm {state}"
        return Decision(allocation, carry=_PACKED.pack(*norms), reason=reason)

    def _observe(self, job: Job, norms: _Norms, norm: float, rate: float) -> _Norms:
        """The norms after one more window."""
        if 0 < norm < math.inf:
            norms = norms._replace(norm_sum=norms.norm_sum + norm, num_known=norms.num_known + 1)
        norms = norms._replace(num_windows=norms.num_windows + 1)
        if norms.num_windows < option(self.options, job, "interval"):
            return norms
        mean = norms.norm_sum / norms.num_known if norms.num_known else math.nan
        known_rate = rate if 0 < rate < math.inf else norms.rate
        is_critical = norms.is_critical
        if not math.isnan(norms.before) and not math.isnan(mean):
            change = abs(norms.before - mean) / norms.before
            is_critical = change >= option(self.options, job, "eta") or known_rate < norms.rate
        before = norms.before if math.isnan(mean) else mean
        return _Norms(before, known_rate, is_critical=is_critical)


def _unpack(carry: bytes) -> _Norms:
    if len(carry) != _PACKED.size:
        return _Norms()
    norms = _Norms(*_PACKED.unpack(carry))
    is_ours = all(math.isnan(each) or 0 < each < math.inf for each in (norms.before, norms.rate))
    counts_are_ours = norms.num_known <= norms.num_windows < MOST_WINDOWS
    return norms if is_ours and counts_are_ours and 0 <= norms.norm_sum < math.inf else _Norms()
