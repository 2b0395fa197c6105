"""Which way of exchanging gradients buys the most progress per second. Pure.

    exposed(k, 1) = max(SYNC_FLOOR * I_k, I_k + slope * c(B))       exposed(k, h) = I_k / h + waiting * c(B)
    J(B, k, h) = worth(B) * gain_k / (1 + drift * (h - 1)) / (rest + c(B) + exposed(k, h))
    I_k = share_k * correction_k * I + coding_k * gradient bytes

I is what communication would take that nothing hides, of gradients that travel as they are: the intercept of the
step-time model. share_k is the prior of codec k, its correction what was measured when it ruled. h local steps are
worth h / (1 + drift (h - 1)) exact ones, and ranks wait for each other only once in h; what their averaging takes is
hidden by nothing. Each (k, h) has its own best B.

A decision rules two windows later, and costs little; but estimates are noisy, so another way must promise `MARGIN`
more, and stays for `DWELL` windows at least. Local steps end while the loss rises.
"""

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import EXACT, Exchange, is_permitted

from .observation import Array32, Array64, column
from .step_time import StepTime


class CodecPrior(NamedTuple):
    """What is taken for granted of a codec before it was tried."""

    share: float
    """Communication time over that of gradients as they are."""
    coding_s_per_byte: float
    gain: float = 1.0
    """Progress of a step over that of an exact one."""


PRIORS: Mapping[str, CodecPrior] = MappingProxyType(
    {
        "none": CodecPrior(1.0, 0.0),
        "rows": CodecPrior(0.5, 0.7e-9),
        "bf16": CodecPrior(0.5, 1.2e-9),
        "int8": CodecPrior(0.26, 1.6e-9, 0.99),
    }
)
"""Shares are those of the bytes, but for `rows`, which may save nothing; coding as measured on one core."""
CODECS = tuple(PRIORS)
DRIFT, DRIFT_POWER, DRIFT_RANKS = 0.07, 0.7, 8
"""Progress that each further local step costs: with 8 ranks, and its growth with their number."""
MARGIN = 0.1
DWELL = 5
LAG = 2
"""Windows after which a decision rules."""
LEARNED_FROM = 3
"""Windows that a codec's correction is the mean of; what changes later is the network."""
LEAST_SHARE = 0.25
"""Share of a step that must be exposed communication before a codec is tried that may save nothing."""
LOSS_SMOOTHING, LOSS_RISE, BLOCKED = 0.3, 0.1, 20
"""A smoothed loss that is so much above its least ends local steps, for so many windows."""

_HEAD = struct.Struct("<3d2H")
_RULING = struct.Struct("<BH")
PACKED_BYTES = _HEAD.size + LAG * _RULING.size + 5 * len(CODECS)


@dataclass(frozen=True)
class ExchangeMemory:
    """What is known of the ways that ruled so far."""

    ruling: tuple[Exchange, ...] = (EXACT,) * LAG
    """What rules the window that closed, and the one after it: the newest decision."""
    exact_s: float = math.nan
    """I, in seconds per step."""
    corrections: Array64 = field(default_factory=lambda: np.zeros(len(CODECS)))
    """Logarithm, by codec."""
    num_seen: tuple[int, ...] = (0,) * len(CODECS)
    age: int = 0
    """Windows since another way was decided."""
    blocked: int = 0
    """Windows for which local steps are out of the question."""
    loss: float = math.nan
    least_loss: float = math.nan

    @property
    def newest(self) -> Exchange:
        """The newest decision."""
        return self.ruling[-1]

    def observe(self, intercept_s: float, exposed_s: float, loss: float) -> "ExchangeMemory":
        """The memory after one more window, in which the first of `ruling` ruled.

        `exposed_s` is what was exposed: of an averaging all of it, and of an exchange in each step what the intercept
        is fitted to.
        """
        aged = replace(self, age=min(self.age + 1, 0xFFFF), blocked=max(self.blocked - 1, 0))
        known = aged.with_loss(loss)
        ruled = self.ruling[0]
        taken_s = intercept_s if ruled.every == 1 else exposed_s * ruled.every
        if not 0.0 < taken_s < math.inf:
            return known
        if ruled.codec == EXACT.codec:
            return replace(known, exact_s=taken_s)
        if math.isnan(self.exact_s):  # the job began with this codec
            return replace(known, exact_s=taken_s / PRIORS[ruled.codec].share)
        index = CODECS.index(ruled.codec)
        off = math.log(taken_s / (PRIORS[ruled.codec].share * self.exact_s))
        number = self.num_seen[index]
        if number < LEARNED_FROM:
            corrections = self.corrections.copy()
            corrections[index] += (off - corrections[index]) / (number + 1)
            num_seen = (*self.num_seen[:index], number + 1, *self.num_seen[index + 1 :])
            return replace(known, corrections=corrections, num_seen=num_seen)
        return replace(known, exact_s=self.exact_s * math.exp(off - self.corrections[index]))

    def decided(self, exchange: Exchange) -> "ExchangeMemory":
        """The memory with one more decision."""
        age = self.age if exchange == self.newest else 0
        return replace(self, ruling=(*self.ruling[1:], exchange), age=age)

    def communication_s(self, exchange: Exchange, gradient_bytes: float) -> float:
        """I_k."""
        prior = PRIORS[exchange.codec]
        measured = math.exp(self.corrections[CODECS.index(exchange.codec)])
        coding_s = 0.0 if self.num_seen[CODECS.index(exchange.codec)] else prior.coding_s_per_byte * gradient_bytes
        return prior.share * measured * self.exact_s + coding_s

    def with_loss(self, loss: float) -> "ExchangeMemory":
        """The memory after a window of such a loss."""
        if not math.isfinite(loss):
            return self
        smoothed = loss if math.isnan(self.loss) else self.loss + LOSS_SMOOTHING * (loss - self.loss)
        least = smoothed if math.isnan(self.least_loss) else min(self.least_loss, smoothed)
        rises = smoothed > (1.0 + LOSS_RISE) * least and self.ruling[0].every > 1
        if rises:
            return replace(self, loss=smoothed, least_loss=smoothed, blocked=BLOCKED)
        return replace(self, loss=smoothed, least_loss=least)

    def pack(self) -> bytes:
        """Bytes for the carry."""
        head = _HEAD.pack(self.exact_s, self.loss, self.least_loss, self.age, self.blocked)
        ruling = b"".join(_RULING.pack(CODECS.index(each.codec), each.every) for each in self.ruling)
        return head + ruling + self.corrections.astype("<f4").tobytes() + bytes(self.num_seen)

    @classmethod
    def unpack(cls, packed: bytes, job: Job) -> "ExchangeMemory":
        """What `pack` gave; as a job begins from anything else."""
        if len(packed) != PACKED_BYTES:
            first = job.initial_exchange
            return cls((first,) * LAG) if first.codec in CODECS and not first.shares else cls()
        exact_s, loss, least_loss, age, blocked = _HEAD.unpack_from(packed)
        rest = packed[_HEAD.size :]
        ruling = tuple(
            Exchange(codec=CODECS[codec], every=every)
            for codec, every in _RULING.iter_unpack(rest[: LAG * _RULING.size])
        )
        rest = rest[LAG * _RULING.size :]
        corrections = np.frombuffer(rest[: 4 * len(CODECS)], dtype="<f4").astype(np.float64)
        num_seen = tuple(rest[4 * len(CODECS) :])
        return cls(ruling, exact_s, corrections, num_seen, age, blocked, loss, least_loss)


def model_under(exchange: Exchange, model: StepTime, memory: ExchangeMemory, gradient_bytes: float) -> StepTime:
    """The step-time model with what this exchange exposes."""
    if exchange == memory.ruling[0] or math.isnan(memory.exact_s):
        return model
    communication_s = memory.communication_s(exchange, gradient_bytes)
    slope = model.sync_slope if exchange.every == 1 else max(model.sync_slope, 0.0)
    return replace(model, sync_intercept_s=communication_s / exchange.every, sync_slope=slope)


def sent_gradient_bytes(obs_WF: Array32) -> float:
    """Bytes of one gradient, by what a rank sends in a step of exact training by a ring; 0 where nothing is known."""
    sent = column(obs_WF, "tx_bytes_per_s") * column(obs_WF, "step_time_s")
    num_ranks = len(sent)
    known = sent[np.isfinite(sent)]
    return float(np.median(known)) * num_ranks / max(2 * (num_ranks - 1), 1) if known.size else 0.0


def drift(job: Job) -> float:
    """Progress that each further local step costs, over that of an exact one."""
    return float(DRIFT * (job.world_size / DRIFT_RANKS) ** DRIFT_POWER)


def choose(
    job: Job,
    model: StepTime,
    memory: ExchangeMemory,
    worth: Callable[[Array64], Array64],
    gradient_bytes: float,
    *,
    max_every: int = 1,
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
    batches = np.geomspace(max(model.smallest, 1.0), max(model.largest, 1.0), 33)
    slowest_s, worths = model.slowest_s(batches), worth(batches)
    exact_s = model_under(EXACT, model, memory, gradient_bytes).step_time_s(slowest_s)
    exposed = 1.0 - (slowest_s + model.rest_s) / exact_s

    def value(exchange: Exchange) -> float:
        times_s = model_under(exchange, model, memory, gradient_bytes).step_time_s(slowest_s)
        loss = 1.0 + drift(job) * (exchange.every - 1)
        return float((worths / times_s).max()) * PRIORS[exchange.codec].gain / loss

    at_best = float(exposed[int((worths / exact_s).argmax())])
    best = max(_candidates(job, memory, at_best, max_every), key=value)
    return best if value(best) > (1.0 + MARGIN) * value(newest) else newest


def _candidates(job: Job, memory: ExchangeMemory, exposed: float, max_every: int) -> Iterator[Exchange]:
    yield EXACT
    for codec, number in zip(CODECS, memory.num_seen, strict=True):
        is_sure = codec != "rows" or number > 0 or exposed > LEAST_SHARE
        for every in (period for period in range(1, max_every + 1) if job.window_steps % period == 0):
            exchange = Exchange(codec=codec, every=every)
            if is_sure and is_permitted(exchange, job.exchange) and not (every > 1 and memory.blocked):
                yield exchange
