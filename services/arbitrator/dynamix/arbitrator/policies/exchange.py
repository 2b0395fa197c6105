"""Chooses the exchange with the most progress per second, from measurements of each. Pure.

    J(B, k, h) = worth(B) * gain_k / (1 + drift cost * (h - 1)) / (rest + c(B) + exposed(k, h) + waiting * c(B))
    C_k = correction_k * (share_k * I + coding_k * gradient bytes)          the time of an exchange that nothing hides
    exposed(h = 1) = max(SYNC_FLOOR * C_k, C_k - overlap * c)               c: compute time of the slowest rank
    exposed(h > 1) = C_k / h                                                an averaging is hidden by nothing

Each codec k and sync period h has its own best B, and all are compared at theirs. I is the time of gradients without a
codec. share_k and coding_k are priors; the correction is measured when codec k takes effect. Steps with an exchange
each show only what computing does not hide, rounds of local steps all of it, so the overlap is known from the first
round on. Owners with shares (exact gradients, route `shares`) count as one more codec, whose share follows from the
rates of the ranks' links; these are measured only while a ring is in effect.

Estimates are noisy: another exchange must promise `MARGIN` more, and stays for `DWELL` windows at least. Local steps
end while the loss rises. Shares end when a ring would be faster, and every `LOOK_AGAIN` windows, to measure the links.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from dynamix.schemas.apportion import balanced_shares, ring_time, shared_time
from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import EXACT, Exchange, is_permitted

from .policy import Array32, Array64, column
from .step_time import SYNC_FLOOR, StepTime, StepTimeFit


class CodecPrior(NamedTuple):
    """Assumptions about a codec before it was tried."""

    share: float
    """Communication time over that of gradients as they are."""
    coding_s_per_byte: float
    gain: float = 1.0
    """Progress of a step over that of an exact one."""


PRIORS: Mapping[str, CodecPrior] = MappingProxyType(
    {
        "none": CodecPrior(1.0, 0.0),
        "rows": CodecPrior(0.3, 0.7e-9),
        "bf16": CodecPrior(0.5, 1.2e-9),
        "int8": CodecPrior(0.26, 1.6e-9, 0.99),
        "shares": CodecPrior(1.0, 0.0),
    }
)
"""Shares are those of the bytes, of `rows` those of a table's rows that some rank touched; coding as on one core.
`shares` is no codec: gradients as they are, over owners."""
WAYS = tuple(PRIORS)
OVER_OWNERS = "shares"
CODECS = tuple(way for way in WAYS if way != OVER_OWNERS)
RINGS = ("none", "rows")
"""Ways in which a rank sends to the next one only, so that its connections tell what links carry."""

DRIFT_POWER = 4 / 3
"""With R the squared distance of the ranks from their mean over that of its move (feature `local_drift`), h local steps
were worth h / (1 + scale * R^DRIFT_POWER (h - 1)) exact ones: a small MLP on virtual clusters of 4, 8 and 32 workers,
batches of 128 to 2048, periods of 2 to 20. One seed showed it within 10 to 20 %."""
DRIFT_SCALES: Mapping[str, float] = MappingProxyType({"sgd": 0.005, "adam": 0.03})
"""Scale of the drift by optimizer family; adaptive ones also make smaller steps where each rank sees more noise."""
FIRST_DRIFT = 0.5
"""R over the number of other ranks, before any was measured: about what it settles at, and more than it begins with."""
DRIFT_SMOOTHING, DRIFT_RELAXING = 0.3, 0.05
"""Weight of the newest R, and in windows without local steps of the first one: it is of other batches by then."""

DWELL = 3
"""Windows for which a decision stands at least."""
LOOK_AGAIN = 60
"""Windows after which shares end, to measure the links again: for `DWELL` windows, at a few percent of the gain."""
LAG = 2
"""Windows after which a decision takes effect."""
LEARNED_FROM = 3
"""Windows that a codec's correction is the mean of, each time it begins to rule."""
LINK_WINDOWS = 2
"""Windows that must have shown the links before shares are thought of."""
LEAST_CORRECTION, MOST_CORRECTION = 0.5, 4.0
"""Beyond it is the network that changed meanwhile."""
MOST_OVERLAP = 0.7
"""Largest assumed overlap, as a share of the compute time."""
LEAST_EXPOSED, MOST_HIDDEN = 0.05, 0.4
"""Shares of an exchange's time: exposed in any case, and exposed at most where all the rest may have been hidden."""
JUMP, SMOOTHING = 1.3, 0.5
"""A time that changed by more is adopted at once, otherwise averaged with this weight."""
LOSS_SMOOTHING, LOSS_RISE, BLOCKED = 0.3, 0.1, 20
"""A smoothed loss that is so much above its least since they began ends local steps, for so many windows."""


LEAST_RANKS, MOST_RANKS = 3, 64
"""Two ranks have nothing to gain; a sum at owners sends N - 1 messages for each chunk, and more were never measured."""
PIPELINE = 1.2
"""Time of a sum at owners over what its bytes take, itself over that of a ring: four ranks, 1.92 MB in 8 chunks, one
link of four at a half to a fifth of the others, and all alike (1.21, 1.20, 1.23, 1.14)."""
PARTS = 1000
"""Shares are whole numbers of so many parts, and the same on all machines."""


class WindowExposure(NamedTuple):
    """The communication that a window exposed, per step."""

    exposed_s: float
    """Until all ranks were in step, less the slowest one's compute time; NaN where it is not known."""
    compute_s: float
    """c"""
    sent_bytes: float = 0.0
    """Bytes sent by a rank; 0 if unknown."""


class ExchangeMemory(msgspec.Struct, frozen=True, array_like=True):
    """Costs and effects of the ways of exchange, learned from the windows so far."""

    active: tuple[Exchange, ...] = (EXACT,) * LAG
    """The exchange of the window that closed, and of the one after it, which is the newest decision."""
    exact_s: float = math.nan
    """I, in seconds per step."""
    overlap: float = 0.0
    exposed_s: float = math.nan
    hidden_s: float = math.nan
    """What was exposed of gradients as they are in the last window with an exchange in each step, and the compute time
    that could hide the rest."""
    gradient_bytes: float = 0.0
    """0 before it is known."""
    drift: float = math.nan
    """R, smoothed."""
    corrections: Array64 = msgspec.field(default_factory=lambda: np.zeros(len(WAYS)))
    """Logarithm, by way."""
    num_seen: tuple[int, ...] = (0,) * len(WAYS)
    age: int = DWELL
    """Windows since another way was decided."""
    blocked: int = 0
    """Windows for which local steps are out of the question."""
    loss: float = math.nan
    least_loss: float = math.nan
    table_share: float = 0.0
    """The job's: share of the gradient in embedding tables."""
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
        is_known = first.codec in CODECS and (way_of(first) == OVER_OWNERS or not first.shares)
        active = (replace(first, shares=()) if is_known else EXACT,) * LAG
        return cls(active, table_share=job.table_share, shares=first.shares if is_known else ())

    @property
    def newest(self) -> Exchange:
        """The newest decision."""
        return self.active[-1]

    @property
    def newest_with_shares(self) -> Exchange:
        """The newest decision as an action has it."""
        newest = self.newest
        return newest if way_of(newest) != OVER_OWNERS else replace(newest, shares=self.shares)

    def observe(self, seen: WindowExposure, loss: float, drift: float, num_ranks: int) -> "ExchangeMemory":
        """The memory after one more window, whose exchange was the first of `active`."""
        current, known = (
            self.active[0],
            replace(self, age=self.age + 1, blocked=max(self.blocked - 1, 0)).with_loss(loss),
        )
        if way_of(current) == EXACT.codec and seen.sent_bytes > 0.0 and num_ranks > 1:  # gradients as they are
            num_bytes = seen.sent_bytes * current.every * num_ranks / (2 * (num_ranks - 1))
            known = replace(known, gradient_bytes=num_bytes)
        known = known.with_drift(drift if current.every > 1 else math.nan, num_ranks)
        if current.every > 1 and math.isnan(known.drift) and known.age > LAG + DWELL:
            known = replace(known, blocked=BLOCKED)  # nothing says what local steps cost here
        if not (0.0 < seen.exposed_s < math.inf and 0.0 < seen.compute_s < math.inf):
            return known
        if current.every == 1:
            return known.with_step(seen)
        known = known.with_time(seen.exposed_s * current.every)
        hidden = (known.exact_s - known.exposed_s) / known.hidden_s  # by computing, of an exchange in each step
        if not 0.0 <= hidden <= MOST_OVERLAP:  # these links cannot have taken so long
            return known
        return replace(known, overlap=hidden, exposed_s=math.nan)

    def decided(self, exchange: Exchange) -> "ExchangeMemory":
        """The memory with one more decision."""
        following = replace(self, active=(*self.active[1:], exchange))
        if exchange != self.newest:
            following = replace(following, age=0)
            if way_of(exchange) == OVER_OWNERS:
                following = replace(following, shares=shares_of(self.rates.tolist()))
        if following.active[0] == self.active[0]:
            return following
        begins = way_of(following.active[0])
        index = WAYS.index(begins)  # another one begins to rule: its loss, and its time, are new
        num_seen = (*self.num_seen[:index], 0, *self.num_seen[index + 1 :])
        is_other = begins != way_of(self.active[0])
        return replace(following, loss=math.nan, least_loss=math.nan, num_seen=num_seen if is_other else self.num_seen)

    def communication_s(self, way: str) -> float:
        """C_k."""
        prior, measured = self.prior(way), math.exp(self.corrections[WAYS.index(way)])
        return float(measured * (prior.share * self.exact_s + prior.coding_s_per_byte * self.gradient_bytes))

    def prior(self, way: str) -> CodecPrior:
        """Assumptions about a way of exchange in this job; `rows` codes tables only."""
        prior = PRIORS[way]
        if way == "rows":
            return prior._replace(share=1.0 - (1.0 - prior.share) * self.table_share)
        if way != OVER_OWNERS or not len(self.rates):
            return prior
        # at owners: what bytes take becomes shorter, or longer, and waiting for each other stays
        share = share_of_ring_time(self.rates.tolist())
        if math.isnan(self.exact_s) or not self.gradient_bytes:
            return prior._replace(share=max(share, 1.0))
        carried = min(1.0, self.gradient_bytes * ring_time(self.rates.tolist()) / self.exact_s)
        return prior._replace(share=share if share >= 1.0 else 1.0 - carried * (1.0 - share))

    @property
    def knows_links(self) -> bool:
        """Whether the rates of all links are known well enough to decide by them."""
        return self.num_link_windows >= LINK_WINDOWS

    def drift_cost(self, job: Job) -> float:
        """Progress that each further local step costs, over that of an exact one."""
        drift = first_drift(job.world_size) if math.isnan(self.drift) else self.drift
        return float(DRIFT_SCALES[job.optimizer_family] * drift**DRIFT_POWER)

    def with_loss(self, loss: float) -> "ExchangeMemory":
        """The memory after a window of this loss, NaN without one."""
        if not math.isfinite(loss):
            return self
        smoothed = loss if math.isnan(self.loss) else self.loss + LOSS_SMOOTHING * (loss - self.loss)
        least = smoothed if math.isnan(self.least_loss) else min(self.least_loss, smoothed)
        rises = smoothed > (1.0 + LOSS_RISE) * least and self.active[0].every > 1
        if rises:
            return replace(self, loss=smoothed, least_loss=smoothed, blocked=BLOCKED)
        return replace(self, loss=smoothed, least_loss=least)

    def with_drift(self, drift: float, num_ranks: int) -> "ExchangeMemory":
        """The memory after a window of this R, NaN where there was none; of ranks without a common way it is N - 1."""
        if not 0.0 < drift < math.inf:
            if math.isnan(self.drift):
                return self
            return replace(self, drift=_between(self.drift, first_drift(num_ranks), DRIFT_RELAXING))
        newest = min(drift, max(num_ranks - 1.0, 1.0))
        return replace(self, drift=newest if math.isnan(self.drift) else _between(self.drift, newest, DRIFT_SMOOTHING))

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

    def with_step(self, seen: WindowExposure) -> "ExchangeMemory":
        """After a window with an exchange in each step."""
        current = way_of(self.active[0])
        expected_s = math.nan if math.isnan(self.exact_s) else self.communication_s(current)
        may_take_s = seen.exposed_s + self.overlap * seen.compute_s
        if expected_s <= may_take_s and seen.exposed_s <= MOST_HIDDEN * expected_s:  # how much is hidden cannot be seen
            may_take_s = min(expected_s, seen.exposed_s / LEAST_EXPOSED)
        known = self.with_time(may_take_s)
        if current != EXACT.codec:
            return known
        return replace(known, exposed_s=seen.exposed_s, hidden_s=seen.compute_s)

    def with_time(self, taken_s: float) -> "ExchangeMemory":
        """After a window in which an exchange took so long."""
        way = way_of(self.active[0])
        index, prior = WAYS.index(way), self.prior(way)
        coding_s = prior.coding_s_per_byte * self.gradient_bytes
        if way != EXACT.codec and self.num_seen[index] < LEARNED_FROM and math.isfinite(self.exact_s):
            off = math.log(taken_s / (prior.share * self.exact_s + coding_s))
            off = min(max(off, math.log(LEAST_CORRECTION)), math.log(MOST_CORRECTION))
            number, corrections = self.num_seen[index], self.corrections.copy()
            corrections[index] += (off - corrections[index]) / (number + 1)
            num_seen = (*self.num_seen[:index], number + 1, *self.num_seen[index + 1 :])
            return replace(self, corrections=corrections, num_seen=num_seen)
        plain_s = (taken_s / math.exp(self.corrections[index]) - coding_s) / prior.share
        plain_s = max(plain_s, SYNC_FLOOR * taken_s)  # coding may have got faster
        ratio = plain_s / self.exact_s
        if 1.0 / JUMP <= ratio <= JUMP:
            plain_s = self.exact_s * ratio**SMOOTHING
        elif way == OVER_OWNERS:
            return replace(self, exact_s=plain_s, age=max(self.age, LOOK_AGAIN))
        return replace(self, exact_s=plain_s)

    def begun_again(self, first: "ExchangeMemory") -> "ExchangeMemory":
        """The memory at the start of another run, which starts with the exchange `first`."""
        known = replace(self, active=first.active, shares=first.shares, table_share=first.table_share, age=DWELL)
        return replace(known, exposed_s=math.nan, blocked=0, loss=math.nan, least_loss=math.nan)


def can_share(job: Job) -> bool:
    """Whether owners with shares can be of use, once the rates of all links are known."""
    return job.supports_exchange and LEAST_RANKS <= job.world_size <= MOST_RANKS


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


def share_of_ring_time(rates: Sequence[float]) -> float:
    """Time of a sum at owners with the best shares over that of a ring."""
    return PIPELINE * shared_time(rates, shares_of(rates)) / ring_time(rates)


def slowest_in_words(rates: Sequence[float]) -> str:
    """Reason for choosing shares."""
    if not rates:
        return "gradients travel over owners, as before the start"
    slowest, fastest = min(rates), max(rates)
    return (
        f"the link of rank {rates.index(slowest)} carries {slowest / 1e6:.3g} MB/s, others up to {fastest / 1e6:.3g}: "
        "owners with shares relieve it"
    )


def way_of(exchange: Exchange) -> str:
    """The codec, or `shares` for uncompressed gradients over owners with shares."""
    return OVER_OWNERS if exchange.route == OVER_OWNERS and exchange.codec == EXACT.codec else exchange.codec


def first_drift(num_ranks: int) -> float:
    """R before any was measured."""
    return FIRST_DRIFT * max(num_ranks - 1, 1)


def _between(old: float, new: float, weight: float) -> float:
    """The mean of logarithms."""
    return float(old ** (1.0 - weight) * new**weight)


MARGIN = 0.1
LEAST_EXPOSED_TO_ROUND: Mapping[str, tuple[float, float]] = MappingProxyType({"sgd": (0.35, 0.25), "adam": (0.7, 0.6)})
"""Shares of an exact step, at its best B, that must be exposed communication for local steps, to begin them and to stay
with them, by optimizer family: less is not worth what they may cost, which drift tells roughly."""


def is_decided(job: Job) -> bool:
    """Whether another way than that of exact training by all-reduces may be worth it: permitted, and of some use."""
    return job.exchange != "exact" or (job.supports_exchange and job.table_share > 0.0) or can_share(job)


def exposure_of(fit: StepTimeFit, model: StepTime | None, obs_WF: Array32) -> WindowExposure:
    """The exposed communication of the newest window, once it is in the fit."""
    measured = np.isfinite(fit.samples_W)
    if model is None or not measured.any():
        return WindowExposure(math.nan, math.nan)
    compute_s = float(model.compute_s(fit.samples_W)[measured].max())
    sent = column(obs_WF, "tx_bytes_per_s") * column(obs_WF, "step_time_s")
    known = sent[np.isfinite(sent)]
    return WindowExposure(
        fit.barrier_s + fit.sync_s - compute_s, compute_s, float(np.median(known)) if known.size else 0.0
    )


def model_under(exchange: Exchange, model: StepTime, memory: ExchangeMemory) -> StepTime:
    """The step-time model with what this exchange exposes; as it is before any was measured."""
    if math.isnan(memory.exact_s):
        return model
    communication_s, waiting = memory.communication_s(way_of(exchange)), max(model.sync_slope, 0.0)
    slope = waiting if exchange.every > 1 else waiting - memory.overlap
    return dataclasses.replace(model, sync_intercept_s=communication_s / exchange.every, sync_slope=slope)


def model_after(current: Exchange, chosen: Exchange, model: StepTime, memory: ExchangeMemory) -> StepTime:
    """The step-time model for the next decision, from the model of windows up to `current`.

    Steps in which all gradients travel as they are show all that B needs themselves, also what computing hides.
    """
    ways = way_of(current), way_of(chosen)
    if not (current.every == chosen.every == 1 and all(way in (EXACT.codec, OVER_OWNERS) for way in ways)):
        return model_under(chosen, model, memory)
    if ways[0] == ways[1] or math.isnan(memory.exact_s):
        return model
    factor = memory.communication_s(ways[1]) / memory.communication_s(ways[0])
    return dataclasses.replace(model, sync_intercept_s=factor * model.sync_intercept_s)


def choose(
    job: Job, model: StepTime, memory: ExchangeMemory, worth: Callable[[Array64], Array64], *, max_every: int
) -> Exchange:
    """The way that the next decision should name; that of the last one where no other is clearly better.

    `worth` is that of an exact step of B samples, for some B. Periods divide a window, so that each window has as many
    averagings.
    """
    newest = memory.newest
    if math.isnan(memory.exact_s) or not is_permitted(newest, job.exchange):
        return EXACT
    if newest.every > 1 and memory.blocked:
        return EXACT
    if memory.age < DWELL:
        return newest
    if way_of(newest) == OVER_OWNERS and memory.age >= LOOK_AGAIN:
        return EXACT
    batches = np.geomspace(max(model.smallest, 1.0), max(model.largest, 1.0), 33)
    slowest_s, worths, cost = model.slowest_s(batches), worth(batches), memory.drift_cost(job)
    exact_s = model_under(EXACT, model, memory).step_time_s(slowest_s)
    at_best = int((worths / exact_s).argmax())
    exposed = 1.0 - (float(slowest_s[at_best]) + model.rest_s) / float(exact_s[at_best])
    to_begin, to_stay = LEAST_EXPOSED_TO_ROUND[job.optimizer_family]
    if exposed < (to_stay if newest.every > 1 else to_begin):
        max_every = 1
        newest = newest if newest.every == 1 else EXACT

    def value(exchange: Exchange) -> float:
        times_s = model_under(exchange, model, memory).step_time_s(slowest_s)
        return float((worths / times_s).max()) * PRIORS[way_of(exchange)].gain / (1.0 + cost * (exchange.every - 1))

    if way_of(newest) == OVER_OWNERS and value(EXACT) > value(newest):
        newest = EXACT
    best = max(_candidates(job, memory, max_every), key=value)
    return best if value(best) > (1.0 + MARGIN) * value(newest) else newest


def _candidates(job: Job, memory: ExchangeMemory, max_every: int) -> Iterator[Exchange]:
    """Candidates: exact gradients by all-reduces, the same over owners with shares, each codec with each period.

    Codecs and periods go by all-reduces only: shares are combined with neither.
    """
    yield EXACT
    if can_share(job) and memory.knows_links:
        yield Exchange(route=OVER_OWNERS)
    for codec in CODECS:
        if codec == "rows" and not job.table_share:
            continue
        most = max_every if codec != "rows" else 1  # momentum moves all rows
        for every in (period for period in range(1, most + 1) if job.window_steps % period == 0):
            exchange = Exchange(codec=codec, every=every)
            if is_permitted(exchange, job.exchange) and not (every > 1 and memory.blocked):
                yield exchange
