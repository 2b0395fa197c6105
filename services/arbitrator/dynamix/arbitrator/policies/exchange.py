"""How gradients are exchanged: a law of measured times. Pure.

    x = e / (c_0 + e)                               exposed share of an exact step at the user's base batch

e is the communication that computing does not hide, C the time of one averaging: the waiting of the rank that waits
least. c_0 is the compute time of the slowest rank in a step of the base batch. `rounded_exchange` has the law of local
steps: as k of 8 ranks 0.03 to 0.15 do as well on train scenarios, and 0.04 took 1.3 times as long behind one slow link.

- **Rounding** to `int8` begins when x > 0.3, in jobs that permit it; and with it local steps, in jobs that permit them,
  until x < 0.2 or h < 1.4. C is 0.3 e until it is measured.
- **Otherwise** the way of exchange that takes least, if that saves `WORTHWHILE` of an exact step at the base batch:
  gradients as they are, `rows` where the model has embedding tables, owners with shares where a link is slow, and
  `int8`. What a way takes is measured once it was active; before that it is a share of the exact time (`rows`: of the
  rows of a table that some rank touched; `shares`: by the rates of the ranks' links).

A time that changes while its way stays active shows a change of the network, which scales the times of all ways. Ranks
may have begun by themselves (`trainer/steering/beginning.py`): then the job's specification has e.
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
from dynamix.schemas.policies import ROUNDED, rounded_exchange

from .policy import Array32, Array64, column
from .step_time import StepTime

BEGIN, END = 0.3, 0.2
"""x above which `int8` begins, and below which local steps end."""
WORTHWHILE = 0.1
"""Share of an exact step that another way must save to begin; half of it to stay."""
LAG = 2
"""Windows after which a decision takes effect, and those for which it stands at least."""
SMOOTHING = 0.5
"""Weight of the newest time."""
JUMP = 1.3
"""Factor by which shares must take longer before the links are measured again."""

OVER_OWNERS = "shares"
PRIORS = {"none": 1.0, "rows": 0.3, "int8": ROUNDED, OVER_OWNERS: 1.0}
"""Time of each way over that of gradients as they are, before it was measured."""
RINGS = ("none", "rows")
"""Ways in which a rank sends to the next one only, so that its connections show what links carry."""
LOWER = 0.1
"""Weight of a rate below the one before: a rank with a busy processor shows less than its link carries, never more."""
BUSY = 0.07
"""Relative noise of compute times from which on processors are shared, and links cannot be told from them."""
LINK_WINDOWS = 4
"""Windows that must have shown the links before shares are considered."""
LOOK_AGAIN = 60
"""Windows after which shares end, to measure the links again."""
PIPELINE = 1.2
"""Time of a sum at owners over what its bytes take, itself over that of a ring: four ranks, 1.92 MB in 8 chunks, one
link of four at a half to a fifth of the others, and all alike (1.21, 1.20, 1.23, 1.14)."""


class ExchangeMemory(msgspec.Struct, frozen=True, array_like=True):
    """The time of each way of exchange, the links, and what was decided last."""

    active: tuple[Exchange, ...] = (EXACT,) * LAG
    """The exchange of the window that closed, and of the one after it, which is the newest decision."""
    times_s: dict[str, float] = {}
    """Time of one exchange of each measured way, as far as computing does not hide it; of `round`, an averaging."""
    observed: str = ""
    """The way of the newest observed window, also `round`."""
    age: int = LAG
    """Windows since another way was decided."""
    rates: Array64 = msgspec.field(default_factory=lambda: np.zeros(0))
    """Bytes per second of each rank's link, smoothed; empty before they are known."""
    num_link_windows: int = 0
    """Windows that showed them, up to `LINK_WINDOWS`."""

    @classmethod
    def of(cls, job: Job) -> "ExchangeMemory":
        """Before the first window."""
        first, exact_s = job.initial_exchange, job.exact_exposed_s
        active = (first if first.codec in PRIORS else EXACT,) * LAG
        return cls(active) if exact_s is None else cls(active, {EXACT.codec: exact_s}, EXACT.codec)

    @property
    def newest(self) -> Exchange:
        """The newest decision."""
        return self.active[-1]

    def observe(self, sync_s: float, num_steps: int) -> "ExchangeMemory":
        """The memory after a window of the first of `active`, in which no rank waited less per step."""
        current, known = self.active[0], replace(self, age=self.age + 1)
        name = _name(current)
        are_ending = name == OVER_OWNERS and way_of(self.newest) != OVER_OWNERS  # their time is forgotten
        if are_ending or not 0.0 < sync_s < math.inf:
            return known
        number, before_s = num_steps / current.every, self.times_s.get(name, 0.0)
        if before_s and current.every > 1:  # as many averagings as fit best
            number = min(max(round(sync_s * num_steps / before_s), math.floor(number)), math.ceil(number))
        taken_s = sync_s * num_steps / max(number, 1)
        if name != self.observed:
            return replace(known, times_s={**self.times_s, name: taken_s}, observed=name)
        ratio = taken_s / before_s
        if name == OVER_OWNERS and ratio > JUMP:  # another link may be slow now
            known = replace(known, age=LOOK_AGAIN)
        return replace(known, times_s={way: time_s * ratio**SMOOTHING for way, time_s in self.times_s.items()})

    def decided(self, exchange: Exchange) -> "ExchangeMemory":
        """The memory with one more decision."""
        following = replace(self, active=(*self.active[1:], exchange))
        if _name(exchange) != _name(self.newest):
            if way_of(self.newest) == OVER_OWNERS and self.age >= LOOK_AGAIN:  # what was known of links may be wrong
                times_s = {name: time_s for name, time_s in self.times_s.items() if name != OVER_OWNERS}
                following = replace(following, times_s=times_s, observed="", rates=np.zeros(0), num_link_windows=0)
            following = replace(following, age=0)
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
        ratios = rates / self.rates
        return replace(self, rates=self.rates * np.where(ratios < 1.0, ratios**LOWER, ratios), num_link_windows=number)


def choose(job: Job, model: StepTime, memory: ExchangeMemory, current: float) -> Exchange:
    """The exchange that the next decision names; `current` is the global batch of the last one."""
    newest, exact_s = memory.newest, memory.time_s(EXACT, 0.0)
    if math.isnan(exact_s) or not is_permitted(newest, job.exchange):
        return EXACT
    if memory.age < LAG:
        return newest
    compute_s, base_s = map(float, model.slowest_s(np.array([current, job.base_global_batch_size])))
    is_exposed = job.exchange != "exact" and exact_s > (END if newest.every > 1 else BEGIN) * (base_s + exact_s)
    if job.exchange == "local" and (is_exposed or newest.every > 1):
        round_s = memory.times_s.get("round", ROUNDED * exact_s)
        chosen = rounded_exchange(round_s, compute_s, job.num_exchanging)
        if chosen.every > 1 and is_exposed:
            return chosen
        if newest.every > 1:  # exact ones are measured again
            return EXACT
    if way_of(newest) == OVER_OWNERS and memory.age >= LOOK_AGAIN:
        return EXACT
    sees_links = model.noise < BUSY and memory.num_link_windows >= LINK_WINDOWS
    may_round = is_exposed or newest.codec == "int8"
    return _cheapest(job, memory, WORTHWHILE * (base_s + exact_s), may_round=may_round, sees_links=sees_links)


def _cheapest(job: Job, memory: ExchangeMemory, worthwhile_s: float, *, may_round: bool, sees_links: bool) -> Exchange:
    """The way that takes least, if it saves so much; half of it where it is the newest decision."""
    ways = [EXACT]
    if job.table_share:
        ways.append(Exchange(codec="rows"))
    if can_share(job) and sees_links:
        shares = shares_of(memory.rates.tolist())
        ways.append(
            memory.newest if way_of(memory.newest) == OVER_OWNERS else Exchange(route=OVER_OWNERS, shares=shares)
        )
    if may_round:
        ways.append(Exchange(codec="int8"))
    times_s = {way: memory.time_s(way, job.table_share) for way in ways}
    newest = memory.newest if memory.newest in ways else EXACT
    if times_s[EXACT] - times_s[newest] < worthwhile_s / 2:
        newest = EXACT
    best = min(ways, key=times_s.__getitem__)
    return best if times_s[newest] - times_s[best] > worthwhile_s else newest


def decided_exchange(
    job: Job, memory: ExchangeMemory, model: StepTime | None, current: float
) -> tuple[ExchangeMemory, StepTime | None]:
    """The memory with the next decision, and the step-time model for its steps."""
    if model is None:
        return memory.decided(memory.newest), None
    chosen = choose(job, model, memory, current)
    return memory.decided(chosen), model_after(chosen, model, memory, job.table_share)


def is_decided(job: Job) -> bool:
    """Whether another way than that of exact training by all-reduces may be worth it: permitted, and of some use."""
    return job.exchange != "exact" or (job.supports_exchange and job.table_share > 0.0) or can_share(job)


def model_after(chosen: Exchange, model: StepTime, memory: ExchangeMemory, table_share: float) -> StepTime:
    """The step-time model of windows of the first of `active`, for steps with the chosen exchange."""
    current = memory.active[0]
    if chosen.every == 1 and _name(chosen) == _name(current):
        return model
    time_s = memory.time_s(chosen, table_share)
    if math.isnan(time_s):
        return model
    return dataclasses.replace(model, sync_intercept_s=time_s / chosen.every, sync_slope=max(model.sync_slope, 0.0))


def can_share(job: Job) -> bool:
    """Whether owners with shares can be of use: two ranks gain nothing, and more than 64 were never measured."""
    return job.supports_exchange and 3 <= job.num_exchanging <= 64


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
    """The best shares for links of such rates, in whole thousandths: the same on all machines."""
    return tuple(float(round(1000 * share)) for share in balanced_shares(rates))


def way_of(exchange: Exchange) -> str:
    """The codec, or `shares` for uncompressed gradients over owners with shares."""
    return OVER_OWNERS if exchange.route == OVER_OWNERS and exchange.codec == EXACT.codec else exchange.codec


def _name(exchange: Exchange) -> str:
    """The way, or `round` for averagings of local steps, which take all their time visibly."""
    return "round" if exchange.every > 1 else way_of(exchange)
