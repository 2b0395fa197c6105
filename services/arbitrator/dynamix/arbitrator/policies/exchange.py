"""How gradients are exchanged: a law of measured times. Pure.

    x = e / (c_0 + e)                               exposed share of an exact step at the user's base batch
    h = sqrt(C / c * (1 / k - 1)),  k = 0.03 (N / 8)^0.7                     steps between two averagings

e is the communication that computing does not hide, C the time of one averaging, which nothing hides, c the compute
time of the slowest rank in a step of the last sizes, c_0 at the base batch. k is the share of progress that a local
step of N ranks loses: 0.03 of 8 ranks, the best of 0.03, 0.04 and 0.07 on train scenarios.

- **Rounding** to `int8` begins when x > 0.3 and ends when x < 0.2, in jobs that permit it; and with it local steps, in
  jobs that permit them and do not use Adam: with the period `FIRST_PERIOD`, and with h once C is measured.
- **Otherwise** the way of exchange that takes least, if that saves `WORTHWHILE` of an exact step at the base batch:
  gradients as they are, `rows` where the model has embedding tables, owners with shares where a link is slow, and
  `int8`. What a way takes is measured once it was active; before that it is a share of the exact time (`rows`: of the
  rows of a table that some rank touched; `shares`: by the rates of the ranks' links).

A time that changes while its way stays active shows a change of the network, which scales the times of all ways.
"""

import dataclasses
import math
from collections.abc import Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from dynamix.schemas.apportion import balanced_shares, ring_time, shared_time
from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import EXACT, Exchange, is_permitted

from .policy import Array32, Array64, column
from .step_time import StepTime, StepTimeFit

BEGIN, END = 0.3, 0.2
"""x from which on `int8` begins, and below which it ends."""
LOSS_OF_EIGHT, LOSS_POWER = 0.03, 0.7
"""k of 8 ranks, and how it grows with their number."""
FIRST_PERIOD = 4
MOST_FREE = 5
"""Longest period that need not divide a window."""
WORTHWHILE = 0.1
"""Share of an exact step that another way must save to begin; half of it to stay."""
DWELL = 3
"""Windows for which a decision stands at least."""
LAG = 2
"""Windows after which a decision takes effect."""
SMOOTHING, JUMP = 0.5, 1.3
"""Weight of the newest time; one that changed by more than a factor of `JUMP` is adopted at once."""

OVER_OWNERS = "shares"
PRIORS = {"none": 1.0, "rows": 0.3, "int8": 0.3, OVER_OWNERS: 1.0}
"""Time of each way over that of gradients as they are, before it was measured."""
RINGS = ("none", "rows")
"""Ways in which a rank sends to the next one only, so that its connections show what links carry."""
LINK_WINDOWS = 2
"""Windows that must have shown the links before shares are considered."""
LOOK_AGAIN = 60
"""Windows after which shares end, to measure the links again."""
LEAST_RANKS, MOST_RANKS = 3, 64
"""Two ranks have nothing to gain; a sum at owners sends N - 1 messages for each chunk, and more were never measured."""
PIPELINE = 1.2
"""Time of a sum at owners over what its bytes take, itself over that of a ring: four ranks, 1.92 MB in 8 chunks, one
link of four at a half to a fifth of the others, and all alike (1.21, 1.20, 1.23, 1.14)."""
PARTS = 1000
"""Shares are whole numbers of so many parts, and the same on all machines."""


class ExchangeMemory(msgspec.Struct, frozen=True, array_like=True):
    """The time of each way of exchange, the links, and what was decided last."""

    active: tuple[Exchange, ...] = (EXACT,) * LAG
    """The exchange of the window that closed, and of the one after it, which is the newest decision."""
    times_s: dict[str, float] = {}
    """Of one exchange of each measured way, as far as computing does not hide it; of `round`, an averaging."""
    observed: str = ""
    """The way of the newest observed window, also `round`."""
    age: int = DWELL
    """Windows since another way was decided."""
    rates: Array64 = msgspec.field(default_factory=lambda: np.zeros(0))
    """Bytes per second of each rank's link, smoothed; empty before they are known."""
    num_link_windows: int = 0
    """Windows that showed them, up to `LINK_WINDOWS`."""
    shares: tuple[float, ...] = ()
    """Shares of the newest decision for them; exchanges in `active` have none."""

    @classmethod
    def of(cls, job: Job) -> "ExchangeMemory":
        """Before the first window."""
        first = job.initial_exchange
        is_known = first.codec in PRIORS and (way_of(first) == OVER_OWNERS or not first.shares)
        return cls((replace(first, shares=()) if is_known else EXACT,) * LAG, shares=first.shares if is_known else ())

    @property
    def newest(self) -> Exchange:
        """The newest decision."""
        return self.active[-1]

    @property
    def newest_with_shares(self) -> Exchange:
        """The newest decision as an action has it."""
        return self.newest if way_of(self.newest) != OVER_OWNERS else replace(self.newest, shares=self.shares)

    def observe(self, exposed_s: float) -> "ExchangeMemory":
        """The memory after a window of the first of `active`, with so much exposed communication per step."""
        current, known = self.active[0], replace(self, age=self.age + 1)
        name, taken_s = _name(current), exposed_s * current.every
        are_ending = name == OVER_OWNERS and way_of(self.newest) != OVER_OWNERS  # their time is forgotten
        if are_ending or not 0.0 < exposed_s < math.inf:
            return known
        if name != self.observed:
            return replace(known, times_s={**self.times_s, name: taken_s}, observed=name)
        ratio = taken_s / self.times_s[name]
        if name == OVER_OWNERS and ratio > JUMP:  # another link may be slow now
            known = replace(known, age=LOOK_AGAIN)
        ratio = ratio**SMOOTHING if 1.0 / JUMP <= ratio <= JUMP else ratio
        return replace(known, times_s={way: time_s * ratio for way, time_s in self.times_s.items()})

    def decided(self, exchange: Exchange) -> "ExchangeMemory":
        """The memory with one more decision."""
        following = replace(self, active=(*self.active[1:], exchange))
        if _name(exchange) != _name(self.newest):
            if way_of(self.newest) == OVER_OWNERS and self.age >= LOOK_AGAIN:  # what was known of links may be wrong
                times_s = {name: time_s for name, time_s in self.times_s.items() if name != OVER_OWNERS}
                following = replace(following, times_s=times_s, observed="", rates=np.zeros(0), num_link_windows=0)
            following = replace(following, age=0)
            if way_of(exchange) == OVER_OWNERS:
                following = replace(following, shares=shares_of(self.rates.tolist()))
        return following

    def time_s(self, exchange: Exchange, table_share: float) -> float:
        """Time of one exchange, measured or assumed; NaN before any was measured."""
        name = _name(exchange)
        if name in self.times_s:
            return self.times_s[name]
        share = PRIORS[way_of(exchange)]
        if name == "rows":
            share = 1.0 - (1.0 - share) * table_share
        elif name == OVER_OWNERS and len(self.rates):
            share = PIPELINE * shared_time(self.rates.tolist(), shares_of(self.rates.tolist()))
            share /= ring_time(self.rates.tolist())
        return share * self.times_s.get(EXACT.codec, math.nan)

    def with_links(self, rates: Array64 | None) -> "ExchangeMemory":
        """The memory after a window with these link rates, if the links were being measured."""
        if rates is None or way_of(self.active[0]) not in RINGS:
            return self
        number = min(self.num_link_windows + 1, LINK_WINDOWS)
        if len(self.rates) != len(rates):
            return replace(self, rates=rates, num_link_windows=1)
        ratios = rates / self.rates  # a rank with a busy processor shows less than its link can, never more
        believed = np.where(ratios < 1.0, ratios**SMOOTHING, ratios)
        return replace(self, rates=self.rates * believed, num_link_windows=number)


def choose(job: Job, model: StepTime, memory: ExchangeMemory, current: float, *, max_every: int) -> Exchange:
    """The exchange that the next decision names; `current` is the global batch of the last one."""
    newest, exact_s = memory.newest, memory.time_s(EXACT, 0.0)
    if math.isnan(exact_s) or not is_permitted(newest, job.exchange):
        return EXACT
    if memory.age < DWELL:
        return newest
    compute_s, base_s = map(float, model.slowest_s(np.array([current, job.base_global_batch_size])))
    may_round = job.exchange != "exact" and exact_s / (base_s + exact_s) > (END if newest.codec == "int8" else BEGIN)
    if may_round and job.exchange == "local" and job.optimizer_family == "sgd" and max_every > 1:
        return Exchange(codec="int8", every=_period(job, memory.times_s.get("round"), compute_s, max_every))
    if way_of(newest) == OVER_OWNERS and memory.age >= LOOK_AGAIN:
        return EXACT
    ways = [EXACT]
    if job.table_share:
        ways.append(Exchange(codec="rows"))
    if can_share(job) and memory.num_link_windows >= LINK_WINDOWS:
        ways.append(Exchange(route=OVER_OWNERS))
    if may_round:
        ways.append(Exchange(codec="int8"))
    if newest not in ways:
        newest = EXACT
    times_s = {way: memory.time_s(way, job.table_share) for way in ways}
    worthwhile_s = WORTHWHILE * (base_s + exact_s)
    if exact_s - times_s[newest] < worthwhile_s / 2:
        newest = EXACT
    best = min(ways, key=times_s.__getitem__)
    return best if times_s[newest] - times_s[best] > worthwhile_s else newest


def _period(job: Job, averaging_s: float | None, compute_s: float, max_every: int) -> int:
    """h; of long periods only one with equally many averagings in each window, so that windows can be compared."""
    if averaging_s is None:
        return min(FIRST_PERIOD, max_every)
    loss = min(LOSS_OF_EIGHT * (job.num_exchanging / 8) ** LOSS_POWER, 0.99)
    wanted = math.sqrt(averaging_s / compute_s * (1.0 / loss - 1.0))
    periods = [every for every in range(2, max_every + 1) if every <= MOST_FREE or job.window_steps % every == 0]
    return min(periods, key=lambda every: abs(math.log(every / wanted)))


def decided_exchange(
    job: Job, memory: ExchangeMemory, model: StepTime | None, current: float, *, max_every: int
) -> tuple[ExchangeMemory, StepTime | None]:
    """The memory with the next decision, and the step-time model for its steps."""
    if model is None:
        return memory.decided(memory.newest), None
    chosen = choose(job, model, memory, current, max_every=max_every)
    return memory.decided(chosen), model_after(chosen, model, memory, job.table_share)


def is_decided(job: Job) -> bool:
    """Whether another way than that of exact training by all-reduces may be worth it: permitted, and of some use."""
    return job.exchange != "exact" or (job.supports_exchange and job.table_share > 0.0) or can_share(job)


def exposed_time(fit: StepTimeFit, model: StepTime | None) -> float:
    """Communication of the newest window that computing did not hide, in seconds per step; NaN where unknown."""
    measured = np.isfinite(fit.samples_W)
    if model is None or not measured.any():
        return math.nan
    return float(fit.barrier_s + fit.sync_s - model.compute_s(fit.samples_W)[measured].max())


def model_after(chosen: Exchange, model: StepTime, memory: ExchangeMemory, table_share: float) -> StepTime:
    """The step-time model of windows of the first of `active`, for steps with the chosen exchange."""
    current = memory.active[0]
    if _name(chosen) == _name(current) and chosen.every == current.every:
        return model
    time_s = memory.time_s(chosen, table_share)
    if math.isnan(time_s):
        return model
    slope = model.sync_slope if chosen.every == 1 else max(model.sync_slope, 0.0)
    if chosen.every == 1 and current.every == 1 and (before_s := memory.time_s(current, table_share)) > 0.0:
        intercept_s = model.sync_intercept_s * time_s / before_s
    else:
        intercept_s = time_s / chosen.every
    return dataclasses.replace(model, sync_intercept_s=intercept_s, sync_slope=slope)


def can_share(job: Job) -> bool:
    """Whether owners with shares can be of use, once the rates of all links are known."""
    return job.supports_exchange and LEAST_RANKS <= job.num_exchanging <= MOST_RANKS


def link_rates(obs_WF: Array32) -> Array64 | None:
    """Bytes per second of each rank's link in a window; `None` if one is unknown.

    A rank that sends only to others of its own node knows none: each rank must have a node, and a link, of its own. A
    link is as fast as the fastest transfer of its rank, sent or received: around a ring a slow link is told from its
    neighbours', unless two slow ones have a single rank between them, which then counts as slow too.
    """
    sent, peers = column(obs_WF, "link_bytes_per_s"), column(obs_WF, "link_peer")
    known = np.isfinite(sent) & (sent > 0) & (peers >= 0) & (peers < len(sent))
    if not known.all():
        return None
    rates = sent.copy()
    np.maximum.at(rates, peers.astype(np.int64), sent)
    return rates


def shares_of(rates: Sequence[float]) -> tuple[float, ...]:
    """The best shares for links of such rates, in whole parts."""
    return tuple(float(round(PARTS * share)) for share in balanced_shares(rates))


def slowest_in_words(rates: Sequence[float]) -> str:
    """Reason for choosing shares."""
    if not rates:
        return "gradients are summed at owners, as before the start"
    slowest, fastest = min(rates), max(rates)
    return (
        f"the link of rank {rates.index(slowest)} carries {slowest / 1e6:.3g} MB/s, others up to {fastest / 1e6:.3g}: "
        "owners with shares relieve it"
    )


def way_of(exchange: Exchange) -> str:
    """The codec, or `shares` for uncompressed gradients over owners with shares."""
    return OVER_OWNERS if exchange.route == OVER_OWNERS and exchange.codec == EXACT.codec else exchange.codec


def _name(exchange: Exchange) -> str:
    """The way, or `round` for averagings of local steps, which take all their time visibly."""
    return "round" if exchange.every > 1 else way_of(exchange)
