"""How ranks begin to exchange gradients, before any decision. Pure: real and virtual ranks share it.

A decision takes effect in the third window, after a tenth to a third of a short run. So in a job under `rule` rank 0
looks at the first two steps. Where communication is exposed, all ranks begin with what the law would choose
(`arbitrator/policies/exchange.py`) in the third one.
"""

import math
from collections.abc import Sequence

from dynamix.schemas.messages.allocation import EXACT, Allocation, Exchange
from dynamix.schemas.policies import DEFAULT_POLICY, ROUNDED, rounded_exchange
from dynamix.trainer.job.options import JobOptions

NUM_TIMED = 2
"""How many of a job's first steps are timed; the faster one counts, since connections may be made in the first."""

EXPOSED = 0.35
"""Share of an exact step at the script's batch that must be exposed communication."""


def is_timed(options: JobOptions, first: Allocation) -> bool:
    """Whether a job's first steps are timed, in which the ranks know each other's compute times."""
    may_round = options.exchange != "exact" and options.supports_exchange and len(first.local_batch_sizes) > 1
    return may_round and options.policy == DEFAULT_POLICY and first.split == "tracking" and first.exchange == EXACT


def begun_exchange(
    options: JobOptions, rates: Sequence[float] | None, exposed_s: Sequence[float], num_ranks: int
) -> tuple[Exchange, float] | None:
    """The exchange to begin with, and the exposed time of an exact one; `None` where gradients stay exact.

    `rates` are seconds per sample by rank, `exposed_s` what each timed step took beyond its slowest rank's computing,
    `num_ranks` how many exchange gradients.
    """
    if not rates or len(exposed_s) < NUM_TIMED:
        return None
    least_s = max(min(exposed_s), 0.0)
    compute_s = options.base_global_batch_size / math.fsum(1.0 / rate for rate in rates)  # once sizes are divided
    if least_s <= EXPOSED * (compute_s + least_s):
        return None
    if options.exchange != "local":
        return Exchange(codec="int8"), least_s
    return rounded_exchange(ROUNDED * least_s, compute_s, num_ranks), least_s
