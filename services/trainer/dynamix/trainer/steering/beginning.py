"""How ranks begin to exchange gradients, before any decision. Pure: real and virtual ranks share it.

A decision takes effect in the third window, after a tenth to a third of a short run. So the ranks of a job under `rule`
time two exact steps themselves. Where communication is exposed, they begin with what the law would choose first, all at
one step, since all have the same numbers; decisions follow (`arbitrator/policies/exchange.py`).
"""

import math
from collections.abc import Sequence

from dynamix.schemas.messages.allocation import EXACT, Exchange
from dynamix.schemas.policies import DEFAULT_POLICY, FIRST_PERIOD
from dynamix.trainer.gradient.clock import StepTimes
from dynamix.trainer.job.options import JobOptions

LAST_TIMED, NUM_TIMED = 2, 2
"""Number of the last timed step, and how many are: connections are made in the first step, which is not."""

EXPOSED = 0.35
"""Share of an exact step at the script's batch that must be exposed communication."""


def is_timed(options: JobOptions, active: Exchange) -> bool:
    """Whether the ranks of a job time its first steps."""
    may_round = options.exchange != "exact" and options.supports_exchange and len(options.local_batch_sizes) > 1
    return may_round and active == EXACT and options.policy == DEFAULT_POLICY


def numbers_of(rank: int, world_size: int, times: Sequence[StepTimes], sizes: Sequence[int]) -> list[float]:
    """A rank's addend of what all know of the timed steps: of each, seconds per sample and of waiting, by rank."""
    numbers = [0.0] * (2 * world_size * len(times))
    for index, (step, size) in enumerate(zip(times, sizes, strict=True)):
        place = 2 * (world_size * index + rank)
        numbers[place : place + 2] = (step.compute_s / size if size else 0.0), step.sync_s
    return numbers


def begun_exchange(options: JobOptions, numbers: Sequence[float]) -> tuple[Exchange, float] | None:
    """The exchange to begin with, and the exposed time of an exact one; `None` where gradients stay exact.

    In each step that is the waiting of the rank that waits least, at the sizes of an equal compute time.
    """
    world_size = len(numbers) // (2 * NUM_TIMED)
    exposed_s = min(numbers[1::2])
    rates = [
        NUM_TIMED / total for rank in range(world_size) if (total := math.fsum(numbers[2 * rank :: 2 * world_size]))
    ]
    if not rates:
        return None
    compute_s = options.base_global_batch_size / math.fsum(rates)
    if not exposed_s > EXPOSED * (compute_s + exposed_s):
        return None
    is_local = options.exchange == "local" and options.optimizer_family == "sgd"
    return Exchange(codec="int8", every=FIRST_PERIOD if is_local else 1), exposed_s
