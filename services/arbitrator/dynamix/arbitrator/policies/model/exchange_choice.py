"""Which way of exchanging gradients buys the most progress per second. Pure.

    J(B, k, h) = worth(B) * gain_k / (1 + drift cost * (h - 1)) / (rest + c(B) + exposed(k, h) + waiting * c(B))

`exchange_memory` has what is exposed under codec k and a period of h steps, and what h local steps cost in progress.
Each (k, h) has its own best B, so all are compared at theirs. A route is no third choice beside k and h: gradients as
they are over owners with shares are one more way, with a gradient in each step.

A decision rules two windows later, and costs little; but estimates are noisy, so another way must promise `MARGIN`
more, and stays for `DWELL` windows at least. Local steps end while the loss rises.

Owners with shares are compared where the rates of the links are known (`links`). Shares end as soon as a ring would be
faster, and now and then, to look at the links again: under them nothing tells.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from dynamix.schemas.messages import Job
from dynamix.schemas.messages.allocation import EXACT, Exchange, is_permitted

from .exchange_memory import (
    CODECS,
    DWELL,
    LOOK_AGAIN,
    OVER_OWNERS,
    PRIORS,
    ExchangeMemory,
    WindowExposure,
    way_of,
)
from .links import can_share
from .observation import Array32, Array64, column
from .step_time import StepTime
from .step_time_fit import StepTimeFit

MARGIN = 0.1
LEAST_EXPOSED: Mapping[str, tuple[float, float]] = MappingProxyType({"sgd": (0.35, 0.25), "adam": (0.7, 0.6)})
"""Shares of an exact step, at its best B, that must be exposed communication for local steps, to begin them and to stay
with them, by optimizer family: less is not worth what they may cost, which drift tells roughly."""


def is_decided(job: Job) -> bool:
    """Whether another way than that of exact training by all-reduces may be worth it: permitted, and of some use."""
    return job.exchange != "exact" or (job.supports_exchange and job.table_share > 0.0) or can_share(job)


def exposure_of(fit: StepTimeFit, model: StepTime | None, obs_WF: Array32) -> WindowExposure:
    """What the newest window shows, once it is in the fit."""
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
    return replace(model, sync_intercept_s=communication_s / exchange.every, sync_slope=slope)


def model_after(ruled: Exchange, chosen: Exchange, model: StepTime, memory: ExchangeMemory) -> StepTime:
    """The step-time model for the next decision, of one that was fitted to windows up to one that `ruled`.

    Steps in which all gradients travel as they are show all that B needs themselves, also what computing hides.
    """
    ways = way_of(ruled), way_of(chosen)
    if not (ruled.every == chosen.every == 1 and all(way in (EXACT.codec, OVER_OWNERS) for way in ways)):
        return model_under(chosen, model, memory)
    if ways[0] == ways[1] or math.isnan(memory.exact_s):
        return model
    factor = memory.communication_s(ways[1]) / memory.communication_s(ways[0])
    return replace(model, sync_intercept_s=factor * model.sync_intercept_s)


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
    to_begin, to_stay = LEAST_EXPOSED[job.optimizer_family]
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
    """What is compared: exact gradients by all-reduces, the same over owners with shares, each codec with each period.

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
